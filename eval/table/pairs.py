"""``--pairs`` and ``--pair``: the difference between two models, in words and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from backends.common.errors import InputError
from backends.common.messages import printable
from eval.results.differences import Difference, difference_or_reason
from eval.results.digits import decimals_of_error, number_with_error
from eval.results.run_result import ModelResult, RunResult
from eval.stats.estimates import short_text_cautions
from eval.stats.uncertainty import LARGEST_EXPONENT

HEADING = (
    "Differences: first minus second, paired; ± one standard error; 95 % intervals",
    "Each interval is for one pair: of 20 pairs that do not differ, one will seem to",
)
UNRANKED = "not ranked: both are within twice the noise floor's"
Pair = tuple[ModelResult, ModelResult]


def neighbours(run: RunResult) -> list[Pair]:
    """Every measured model with the next one."""
    return list(itertools.pairwise(model for model in run.models if not model.error))


def pairs_by_label(run: RunResult, labels: Sequence[Sequence[str]]) -> list[Pair]:
    """The models of each pair of labels."""
    models = {model.label: model for model in run.models}
    return [(models[first], models[second]) for first, second in labels]


def check_labels(labels: Sequence[Sequence[str]], known: Sequence[str]) -> None:
    """InputError for a label of ``--pair`` that no model has."""
    for label in itertools.chain(*labels):
        if label not in known:
            raise InputError(f"--pair: no model is called {label!r}; there are: {printable(', '.join(known))}")


def pair_lines(pairs: Sequence[Pair], text_tokens: int | None = None, near: frozenset[str] = frozenset()) -> list[str]:
    """The lines of all pairs, ``HEADING`` first.  ``text_tokens``: of the whole text that the windows were cut from;
    ``near``: labels of the rows that are nearly lossless, of which KLD ranks no two."""
    measured = [found for pair in pairs for model in pair if (found := model.estimates)]
    lines = [*HEADING, *(f"Caution: {each}" for each in short_text_cautions(measured, text_tokens))]
    for pair in pairs:
        lines += ["", f"{pair[0].label} against {pair[1].label}", *measure_lines(pair, "PPL", "nll", ranked=True)]
        lines += measure_lines(pair, "KLD", "kld", ranked=not {model.label for model in pair} <= near)
    return list(map(printable, lines))


def measure_lines(pair: Pair, title: str, name: str, *, ranked: bool) -> list[str]:
    """The verdict by one measure, and its numbers in a second line; ``ranked``: whether the measure ranks the two."""
    found = difference_or_reason(*pair, name)
    if isinstance(found, str):
        return [f"  {title}: n/a: {found}"]
    numbers = (
        f"ln(PPL ratio) {difference_with_limits(found)}; PPL {percent_above(found)}"
        if name == "nll"
        else f"difference {difference_with_limits(found)}"
    )
    said = verdict(pair, found) if ranked or not found.is_seen else UNRANKED
    return [f"  {title}: {said}", f"       {numbers}"]


def verdict(pair: Pair, found: Difference) -> str:
    """Which of the two is better, if the interval says so; less is better."""
    if found.limits is None:
        return f"the text is too short to tell: {number_with_error(found.value, None, 'nats')}"
    if not found.is_seen:
        return f"no difference to be seen: {number_with_error(found.value, found.stderr, 'nats')}"
    better = pair[0] if found.value < 0 else pair[1]
    return f"{better.label} is better: {number_with_error(abs(found.value), found.stderr, 'nats')}"


def difference_with_limits(found: Difference) -> str:
    """The difference with its sign, and its interval."""
    digits = decimals_of_error(found.stderr) if found.stderr else 5
    value, *ends = (f"{number:+.{digits}f}" for number in (found.value, *(found.limits or ())))
    return f"{value}, 95 %: {ends[0]} to {ends[1]}" if ends else value


def percent_above(found: Difference) -> str:
    """By how many percent the first perplexity is above the second."""
    if found.value > LARGEST_EXPONENT:
        return "n/a: the ratio is too large for a number"
    times = math.exp(found.value)
    return number_with_error(
        100 * (times - 1), None if found.stderr is None else 100 * times * found.stderr, "%", sign=True
    )
