"""``--fail-if 'kld > 0.05'``: a row fails if a column of the table has such a value.

The number has the unit of the column: ``same_top < 99`` is in percent.  A row without a value fails
too, since it may be wrong.  So does a row whose KLD is a bound, if its KLD may meet the condition:
a bound above the limit of ``kld > 0.05`` decides, and below the limit nothing is known.  The
reference has no value in columns that compare with the reference, and cannot fail there; rollouts
cannot fail in any comparison.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ..results import ModelResult, RunResult
from ..stats.kld_kinds import Relation, relations_that_follow
from .columns import Column, column_of
from .memory_fit import memory_of
from .numbers import bound_text, number_text

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
CONDITION = re.compile(rf"\s*(.*\S)\s*({'|'.join(SIGNS)})\s*(\S+)\s*")
"""The last sign counts: a name of a slice may have one, too."""


class Condition(NamedTuple):
    """A column, a sign of ``SIGNS`` and a limit in the column's unit.

    A row that meets the condition fails.
    """

    column: Column
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.column.name} {self.sign} {self.limit:g}"

    def fault(self, model: ModelResult) -> str:
        """Return why a row fails; empty if it does not.

        A bound that does not decide the condition fails, too, as undecided.
        """
        # By definition, the reference does not differ from itself.
        if model.reference and self.column.of_reference is not None:
            return ""
        # Rollouts are what the others are compared with, and have no distribution.
        is_comparison = self.column.of_rollouts or self.column.of_reference is not None
        if model.is_rollouts and is_comparison and not model.error:
            return ""
        if model.error:
            return f"n/a: {model.error}"
        value = self.column.value(model)
        if value is None:
            if self.column.context:
                return f"n/a: {memory_of(model).missing}"
            return "n/a"
        number = self.column.times * value + self.column.plus
        digits = self.column.digits or 0
        is_met = SIGNS[self.sign](number, self.limit)
        if not (self.column.shows_kld and model.has_bound):
            if is_met:
                return number_text(number, digits)
            return ""
        if not self.follows(number, model):
            return f"undecided: only {bound_text(number, digits)} is known"
        if is_met:
            return bound_text(number, digits)
        return ""

    def follows(self, number: float, model: ModelResult) -> bool:
        """Return True if a row's KLD meets the condition, or not, as its ``number`` does."""
        relation: Relation = "less"
        if number > self.limit:
            relation = "more"
        elif number == self.limit:
            relation = "equal"
        return relation in relations_that_follow(model.kld_kind, "exact")


def parse(text: str) -> Condition:
    """Return the condition that a user wrote.

    InputError for another form, an unknown column, or a column of words.
    """
    name, sign, limit = parts_of_condition(text, "kld > 0.05")
    column = column_of(name)
    if column.digits is None:
        raise InputError(f"{name}: is a column of words; a condition needs a column of numbers")
    return Condition(column, sign, limit)


def parts_of_condition(text: str, example: str) -> tuple[str, str, float]:
    """Return (name, sign, limit) of a condition that a user wrote.

    InputError, with the ``example``, for another form.
    """
    match = CONDITION.fullmatch(text)
    limit = math.nan
    if match is not None:
        with suppress(ValueError):
            limit = float(match[3])
    if match is None or not math.isfinite(limit):
        form = "COLUMN SIGN NUMBER with <, <=, > or >="
        raise InputError(f"{printable(text)!r}: expected {form}, such as {example!r}")
    return match[1], match[2], limit


def faults(run: RunResult, conditions: Sequence[Condition]) -> Iterator[str]:
    """Yield a line for each row that fails by a condition: ``W4A16: kld > 0.05 (0.35637)``."""
    yield from faults_of(run.models, conditions)


def faults_of(models: Iterable[ModelResult], conditions: Sequence[Condition]) -> Iterator[str]:
    """Yield a line for each row that fails by a condition."""
    for model in models:
        for condition in conditions:
            fault = condition.fault(model)
            if fault:
                yield f"{model.label}: {condition} ({fault})"
