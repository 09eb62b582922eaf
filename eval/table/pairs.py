"""``--pairs`` and ``--pair``: the difference between two models, in words and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest, printable
from compare_q.eval.ranking import Difference, difference_or_reason
from compare_q.eval.results import ModelResult, TextResult
from compare_q.eval.stats.answers import discordant, mcnemar_p
from compare_q.eval.stats.estimates import short_text_cautions
from compare_q.eval.stats.uncertainty import LARGEST_EXPONENT
from compare_q.eval.table.numbers import decimals_of_error, number_with_error

HEADING = (
    "Differences: first minus second, paired; ± one standard error; 95 % intervals",
    "Each interval is for one pair: of 20 equal pairs, one will seem to differ",
)
UNRANKED = "not ranked: both are at most about twice the noise floor's"
LEVEL = 0.05
"""McNemar's p below which one of two models is called better."""
Pair = tuple[ModelResult, ModelResult]


def neighbours(run: TextResult) -> list[Pair]:
    """Every measured model with the next one."""
    return list(itertools.pairwise(model for model in run.models if not model.error))


def pairs_by_label(run: TextResult, labels: Sequence[Sequence[str]]) -> list[Pair]:
    """The models of each pair of labels."""
    models = {model.label: model for model in run.models}
    return [(models[first], models[second]) for first, second in labels]


def check_labels(labels: Sequence[Sequence[str]], known: Sequence[str]) -> None:
    """InputError for a label of ``--pair`` that no model has."""
    for label in itertools.chain(*labels):
        if label not in known:
            raise InputError(
                f"--pair: no model is called {label!r}{nearest(label, known)}; there are: {printable(', '.join(known))}"
            )


def pair_lines(pairs: Sequence[Pair], text_tokens: int | None = None, near: frozenset[str] = frozenset()) -> list[str]:
    """The lines of all pairs, ``HEADING`` first.  ``text_tokens``: of the whole text that the windows were cut from;
    ``near``: labels of the rows that are nearly lossless, of which KLD ranks no two."""
    measured = [found for pair in pairs for model in pair if (found := model.estimates)]
    lines = [*HEADING, *(f"Caution: {each}" for each in short_text_cautions(measured, text_tokens))]
    for pair in pairs:
        lines += ["", f"{pair[0].label} against {pair[1].label}", *measure_lines(pair, "PPL", "nll", ranked=True)]
        lines += measure_lines(pair, "KLD", "kld", ranked=not {model.label for model in pair} <= near)
        lines += [*answer_lines(pair, "acc"), *answer_lines(pair, "acc_norm")]
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


def answer_lines(pair: Pair, name: str) -> list[str]:
    """The verdict by accuracy (``name``: acc, acc_norm), and McNemar's exact test; none unless answers were scored."""
    answers = [model.estimates.answers for model in pair if model.estimates and model.estimates.answers]
    if len(answers) < 2:
        return []
    first, second = (getattr(found, name) for found in answers)
    if len(first.right) != len(second.right) or not first.right:
        return [f"  {name}: n/a: {'not the same questions' if first.right and second.right else 'a model has none'}"]
    only, other = discordant(first.right, second.right)
    p = mcnemar_p(only, other)
    better = pair[0] if only > other else pair[1]
    said = f"{better.label} is better" if p < LEVEL else "no difference to be seen"
    values = [100 * found.accuracy.value for found in (first, second)]
    return [
        f"  {name}: {said}: {values[0]:.2f} % and {values[1]:.2f} %",
        f"       right only in the first: {only:,}, only in the second: {other:,}; McNemar's exact p = {p:.3g}",
    ]


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
    interval = interval_text(found)
    return f"{found.value:+.{digits}f}" + (f", 95 %: {interval}" if interval else "")


def interval_text(found: Difference, times: int = 1) -> str:
    """The 95 % interval of so many times the difference, with the decimals of its error; "" where it is not known."""
    digits = decimals_of_error(times * found.stderr) if found.stderr else 5
    return " to ".join(f"{times * end:+.{digits}f}" for end in found.limits or ())


def percent_above(found: Difference) -> str:
    """By how many percent the first perplexity is above the second."""
    if found.value > LARGEST_EXPONENT:
        return "n/a: the ratio is too large for a number"
    times = math.exp(found.value)
    return number_with_error(
        100 * (times - 1), None if found.stderr is None else 100 * times * found.stderr, "%", sign=True
    )
