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
from .numbers import decimals_of_error, number_with_error

HEADING = (
    "Differences: first minus second, paired; ± one standard error; 95 % intervals",
    "Each interval is for one pair: of 20 equal pairs, one will seem to differ; "
    "★ and the last line compare all rows at once, and find fewer differences",
)
SAID = {
    "equal": "no difference to be seen",
    "same": "the same score at every token",
}
"""The words for an outcome of ``ranking.compare`` without a better row."""
Pair = tuple[ModelResult, ModelResult]


def neighbours(run: RunResult) -> list[Pair]:
    """Return each measured model with the next one."""
    return list(itertools.pairwise(model for model in run.models if not model.error))


def check_labels(labels: Sequence[Sequence[str]], known: Sequence[str]) -> None:
    """Raise InputError for a label of ``--pair`` that no model has."""
    for label in itertools.chain(*labels):
        if label not in known:
            raise InputError(
                f"--pair: no model is called {label!r}{nearest(label, known)}; there are: {printable(', '.join(known))}"
            )


def pair_lines(pairs: Sequence[Pair], run: RunResult) -> list[str]:
    """Return the lines of all pairs of a run's models, ``HEADING`` first."""
    measured = [model.blocks for pair in pairs for model in pair if model.blocks]
    cautions = short_text_cautions(measured, run.text_tokens)
    near = near_lossless(run.models)
    lines = [*HEADING, *(f"Caution: {each}" for each in cautions)]
    for one, other in pairs:
        lines += ["", f"{one.label} against {other.label}"]
        lines += score_lines(compare(one, other, "nll"), one.label, other.label, "PPL")
        kld = compare(one, other, "kld", lossless_labels=near)
        if kld.outcome == "unranked" and kld.value is not None:
            kld = replace(kld, reason=f"not ranked: both are {why_unranked(run.models)}")
        lines += score_lines(kld, one.label, other.label, "KLD")
    return list(map(printable, lines))


def score_lines(found: Difference, first: str, second: str, title: str) -> list[str]:
    """Return the verdict by "PPL" or "KLD" on two models of these labels, and a second line with
    its numbers.
    """
    if found.value is None:
        return [f"  {title}: n/a: {found.reason}"]
    is_better = found.outcome in ("less", "more")
    said = found.reason or SAID.get(
        found.outcome, f"{first if found.value < 0 else second} is better"
    )
    if found.outcome != "unranked":
        value = abs(found.value) if is_better else found.value
        said += f": {number_with_error(value, found.stderr, 'nats')}"
    digits = decimals_of_error(found.stderr) if found.stderr else 5
    numbers = f"{found.value:+.{digits}f}"
    if found.limits:
        numbers += f", 95 %: {' to '.join(f'{end:+.{digits}f}' for end in found.limits)}"
    if title == "KLD":
        return [f"  KLD: {said}", f"       difference {numbers}"]
    above = "n/a: the ratio is too large for a number"
    if found.value <= LARGEST_EXPONENT:
        ratio = math.exp(found.value)
        stderr = None if found.stderr is None else 100 * ratio * found.stderr
        above = number_with_error(100 * (ratio - 1), stderr, "%", sign=True)
    return [f"  PPL: {said}", f"       ln(PPL ratio) {numbers}; PPL {above}"]


def pairs_by_label(run: RunResult, labels: Sequence[Sequence[str]]) -> list[Pair]:
    """Return the models of each pair of labels."""
    models = {model.label: model for model in run.models}
    return [(models[first], models[second]) for first, second in labels]
