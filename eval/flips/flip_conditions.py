"""``--fail-if`` of ``compare-q flips``: ``accuracy < 60``, ``lost > 5``, ``not_equivalent``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest
from ..table import conditions
from .comparing import OUTCOMES, Comparison, FlipReport

NOT_EQUIVALENT = "not_equivalent"
"""The condition that equivalence within the margin is not shown; it has no sign and no number."""
NAMES = ("accuracy", "difference", "lost", "gained", NOT_EQUIVALENT)


@dataclass(frozen=True)
class Condition:
    """A row fails if its value of ``name`` has this relation to ``limit``, in percent or answers."""

    name: str
    sign: str = ""
    limit: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.limit:g}" if self.sign else self.name

    def fault(self, row: Comparison) -> str:
        """Return why a row fails; empty if it does not."""
        if self.name == NOT_EQUIVALENT:
            outcome = row.equivalence.outcome if row.equivalence else "undecided"
            return "" if outcome == "equivalent" else OUTCOMES[outcome]
        value = {
            "accuracy": 100 * row.accuracy.value,
            "difference": 100 * row.flips.difference,
            "lost": row.flips.lost,
            "gained": row.flips.gained,
        }[self.name]
        return f"{value:g}" if conditions.SIGNS[self.sign](value, self.limit) else ""


def parse(given: str) -> Condition:
    """Return the condition in words; InputError for another form or an unknown name."""
    if given.strip() == NOT_EQUIVALENT:
        return Condition(NOT_EQUIVALENT)
    name, sign, limit = conditions.read(given, "lost > 5")
    if name not in NAMES:
        raise InputError(
            f"{name!r} is no condition{nearest(name, NAMES)}; there are: {', '.join(NAMES)}"
        )
    if name == NOT_EQUIVALENT:
        raise InputError(
            f"{NOT_EQUIVALENT}: takes no sign and no number; --margin says within which margin"
        )
    return Condition(name, sign, limit)


def faults(report: FlipReport, given: Sequence[Condition]) -> Iterator[str]:
    """Yield a line for each row that fails by a condition; a task without samples fails by each of
    them.
    """
    for row in report.comparisons:
        for condition in given:
            if fault := condition.fault(row):
                yield f"{row.label}, {row.task}, {row.metric_and_filter}: {condition} ({fault})"
    for label, task in report.absent:
        for condition in given:
            yield f"{label}, {task}: {condition} (n/a)"
