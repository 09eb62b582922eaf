"""``--pairs`` and ``--pair``: what can be said of the difference between two models, in words and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from backends.common.errors import InputError
from eval.results.differences import Difference, compared
from eval.results.digits import decimals, with_error
from eval.results.run_result import ModelResult, RunResult
from eval.stats.estimates import cautions

HEADING = (
    "Differences: first minus second, paired; ± one standard error; 95 % intervals",
    "Each is for one comparison: of 20 pairs that do not differ, one will seem to",
)
Pair = tuple[ModelResult, ModelResult]


def neighbours(run: RunResult) -> list[Pair]:
    """Every measured model with the next one."""
    return list(itertools.pairwise(model for model in run.models if not model.error))


def named(run: RunResult, labels: Sequence[Sequence[str]]) -> list[Pair]:
    """The models of each pair of labels."""
    models = {model.label: model for model in run.models}
    return [(models[first], models[second]) for first, second in labels]


def check_labels(labels: Sequence[Sequence[str]], known: Sequence[str]) -> None:
    """InputError for a label of ``--pair`` that no model has."""
    for label in itertools.chain(*labels):
        if label not in known:
            raise InputError(f"--pair: no model is called {label!r}; there are: {', '.join(known)}")


def text(pairs: Sequence[Pair], text_tokens: int | None = None) -> list[str]:
    """The lines of all pairs, ``HEADING`` first.  ``text_tokens``: of the whole text that the windows were cut from."""
    measured = [found for pair in pairs for model in pair if (found := model.estimates)]
    lines = [*HEADING, *(f"Caution: {each}" for each in cautions(measured, text_tokens))]
    for pair in pairs:
        lines += ["", f"{pair[0].label} against {pair[1].label}", *measure(pair, "PPL", "nll")]
        lines += measure(pair, "KLD", "kld")
    return lines


def measure(pair: Pair, title: str, name: str) -> list[str]:
    """The verdict by one measure, and its numbers in a second line."""
    found = compared(*pair, name)
    if isinstance(found, str):
        return [f"  {title}: n/a: {found}"]
    numbers = f"ln(PPL ratio) {reach(found)}; PPL {percent(found)}" if name == "nll" else f"difference {reach(found)}"
    return [f"  {title}: {verdict(pair, found)}", f"       {numbers}"]


def verdict(pair: Pair, found: Difference) -> str:
    """Which of the two is better, if the interval says so; less is better."""
    if found.limits is None:
        return f"the text is too short to tell: {with_error(found.value, None, 'nats')}"
    if not found.is_seen:
        return f"no difference to be seen: {with_error(found.value, found.stderr, 'nats')}"
    better = pair[0] if found.value < 0 else pair[1]
    return f"{better.label} is better: {with_error(abs(found.value), found.stderr, 'nats')}"


def reach(found: Difference) -> str:
    """The difference with its sign, and its interval."""
    digits = decimals(found.stderr) if found.stderr else 5
    value, *ends = (f"{number:+.{digits}f}" for number in (found.value, *(found.limits or ())))
    return f"{value}, 95 %: {ends[0]} to {ends[1]}" if ends else value


def percent(found: Difference) -> str:
    """By how many percent the first perplexity is above the second."""
    times = math.exp(found.value)
    return with_error(100 * (times - 1), None if found.stderr is None else 100 * times * found.stderr, "%", sign=True)
