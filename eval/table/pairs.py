"""``--pairs`` and ``--pair``: the paired difference between two models, in words and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest, printable
from ..ranking import Difference, compare, near_lossless, why_unranked
from ..results import ModelResult, RunResult
from ..stats.block_sums import short_text_cautions
from ..stats.uncertainty import LARGEST_EXPONENT
from .measured_rows import blocks_of
from .numbers import DIGITS_WITHOUT_ERROR, decimals_of_error, number_with_error

HEADING = (
    "Differences: first minus second, paired; ± one standard error; 95 % intervals",
    "Each interval is for one pair: of 20 equal pairs, one will seem to differ; "
    "★ and the last line compare all rows at once, and find fewer differences",
)
OUTCOME_WORDS = {
    "equal": "no difference to be seen",
    "same": "the same score at every token",
}
"""The words for an outcome of ``ranking.compare`` without a better row."""
Pair = tuple[ModelResult, ModelResult]


def neighbours(run: RunResult) -> list[Pair]:
    """Return each measured model with the next one."""
    measured = [model for model in run.models if not model.error]
    return list(itertools.pairwise(measured))


def check_labels(pairs: Sequence[Sequence[str]], labels: Sequence[str]) -> None:
    """Raise InputError for a label in the pairs of ``--pair`` that no model has."""
    for label in itertools.chain(*pairs):
        if label not in labels:
            choices = printable(", ".join(labels))
            hint = nearest(label, labels)
            raise InputError(f"--pair: no model is called {label!r}{hint}; there are: {choices}")


def pairs_by_label(run: RunResult, pairs: Sequence[Sequence[str]]) -> list[Pair]:
    """Return the models of each pair of labels."""
    models = {model.label: model for model in run.models}
    return [(models[first], models[second]) for first, second in pairs]


def pair_lines(pairs: Sequence[Pair], run: RunResult) -> list[str]:
    """Return the lines of all pairs of a run's models, ``HEADING`` first."""
    blocks = blocks_of(itertools.chain(*pairs))
    lossless_labels = near_lossless(run.models)
    lines = list(HEADING)
    for caution in short_text_cautions(blocks, run.text_tokens):
        lines.append(f"Caution: {caution}")
    for first, second in pairs:
        ppl = compare(first, second, "nll")
        kld = compare(first, second, "kld", lossless_labels=lossless_labels)
        if kld.outcome == "unranked" and kld.value is not None:
            kld = replace(kld, reason=f"not ranked: both are {why_unranked(run.models)}")
        lines += ["", f"{first.label} against {second.label}"]
        lines += ppl_lines(ppl, first.label, second.label)
        lines += kld_lines(kld, first.label, second.label)
    return [printable(line) for line in lines]


def ppl_lines(difference: Difference, first: str, second: str) -> list[str]:
    """Return the verdict by PPL on two models of these labels, and a line with its numbers."""
    if difference.value is None:
        return [f"  PPL: n/a: {difference.reason}"]
    verdict = verdict_of(difference, difference.value, first, second)
    numbers = value_and_limits(difference, difference.value)
    ratio = ratio_text(difference.value, difference.stderr)
    return [f"  PPL: {verdict}", f"       ln(PPL ratio) {numbers}; PPL {ratio}"]


def kld_lines(difference: Difference, first: str, second: str) -> list[str]:
    """Return the verdict by KLD on two models of these labels, and a line with its numbers."""
    if difference.value is None:
        outcome = OUTCOME_WORDS.get(difference.outcome, "n/a")
        return [f"  KLD: {outcome}: {difference.reason}"]
    verdict = verdict_of(difference, difference.value, first, second)
    numbers = value_and_limits(difference, difference.value)
    return [f"  KLD: {verdict}", f"       difference {numbers}"]


def verdict_of(difference: Difference, value: float, first: str, second: str) -> str:
    """Return which of two models is better, or why none is called better, with the difference.

    ``value``: the difference, in nats.
    """
    verdict = difference.reason
    if not verdict:
        better = second
        if value < 0:
            better = first
        verdict = OUTCOME_WORDS.get(difference.outcome, f"{better} is better")
    if difference.outcome == "unranked":
        return verdict
    # "is better" names the sign already.
    if difference.outcome in ("less", "more"):
        value = abs(value)
    number = number_with_error(value, difference.stderr, "nats", bound=difference.is_bound)
    return f"{verdict}: {number}"


def value_and_limits(difference: Difference, value: float) -> str:
    """Return the ``value`` of a difference with its sign, and its 95 % interval, in nats.

    The interval of a bound has one end.
    """
    digits = DIGITS_WITHOUT_ERROR
    if difference.stderr:
        digits = decimals_of_error(difference.stderr)
    text = f"{value:+.{digits}f}"
    if not difference.limits:
        return text
    low, high = difference.limits
    if high == math.inf:
        return f"{text} or more, 95 %: {low:+.{digits}f} or more"
    if low == -math.inf:
        return f"{text} or less, 95 %: {high:+.{digits}f} or less"
    return f"{text}, 95 %: {low:+.{digits}f} to {high:+.{digits}f}"


def ratio_text(log_ratio: float, stderr: float | None) -> str:
    """Return by how many percent the first PPL is above the second one, with its error."""
    if log_ratio > LARGEST_EXPONENT:
        return "n/a: the ratio is too large for a number"
    ratio = math.exp(log_ratio)
    if stderr is not None:
        stderr = 100 * ratio * stderr
    return number_with_error(100 * (ratio - 1), stderr, "%", sign=True)
