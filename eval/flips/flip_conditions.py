"""``--fail-if`` of ``compare-q flips``: ``accuracy < 60``, ``lost > 5``, ``not_equivalent``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest
from ..table.conditions import SIGNS, parts_of_condition
from .comparing import OUTCOMES, Comparison, FlipReport

NOT_EQUIVALENT = "not_equivalent"
"""The condition that equivalence within the margin is not shown; it has no sign and no number."""
NAMES = ("accuracy", "difference", "lost", "gained", NOT_EQUIVALENT)


@dataclass(frozen=True)
class Condition:
    """A row fails if its value of ``name`` has this relation to ``limit``.

    Units are percent, or numbers of answers.
    """

    name: str
    sign: str = ""
    limit: float = 0.0

    def __str__(self) -> str:
        if self.sign:
            return f"{self.name} {self.sign} {self.limit:g}"
        return self.name

    def fault(self, row: Comparison) -> str:
        """Return why a row fails; empty if it does not."""
        if self.name == NOT_EQUIVALENT:
            return self.fault_of_equivalence(row)
        value = {
            "accuracy": 100 * row.accuracy.value,
            "difference": 100 * row.flips.difference,
            "lost": row.flips.lost,
            "gained": row.flips.gained,
        }[self.name]
        if SIGNS[self.sign](value, self.limit):
            return f"{value:g}"
        return ""

    def fault_of_equivalence(self, row: Comparison) -> str:
        """Return the outcome of a row whose equivalence is not shown; empty if it is."""
        if row.equivalence is None:
            return OUTCOMES["undecided"]
        if row.equivalence.outcome == "equivalent":
            return ""
        return OUTCOMES[row.equivalence.outcome]


def parse(text: str) -> Condition:
    """Return the condition that a user wrote; InputError for another form or an unknown name."""
    if text.strip() == NOT_EQUIVALENT:
        return Condition(NOT_EQUIVALENT)
    name, sign, limit = parts_of_condition(text, "lost > 5")
    if name not in NAMES:
        hint = nearest(name, NAMES)
        raise InputError(f"{name!r} is no condition{hint}; there are: {', '.join(NAMES)}")
    if name == NOT_EQUIVALENT:
        raise InputError(
            f"{NOT_EQUIVALENT}: takes no sign and no number; --margin says within which margin"
        )
    return Condition(name, sign, limit)


def faults(report: FlipReport, conditions: Sequence[Condition]) -> Iterator[str]:
    """Yield a line for each row that fails by a condition; a task without samples fails by each of
    them.
    """
    for row in report.comparisons:
        for condition in conditions:
            fault = condition.fault(row)
            if fault:
                yield f"{row.label}, {row.task}, {row.metric_and_filter}: {condition} ({fault})"
    for label, task in report.absent:
        for condition in conditions:
            yield f"{label}, {task}: {condition} (n/a)"
