"""``--pairs`` and ``--pair``: the paired difference between two models, in words and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest, printable
from compare_q.eval.ranking import Difference, difference_or_reason, near_lossless
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


def neighbours(text: TextResult) -> list[Pair]:
    """Return each measured model with the next one."""
    return list(itertools.pairwise(model for model in text.models if not model.error))


def pairs_by_label(text: TextResult, labels: Sequence[Sequence[str]]) -> list[Pair]:
    """Return the models of each pair of labels."""
    models = {model.label: model for model in text.models}
    return [(models[first], models[second]) for first, second in labels]


def check_labels(labels: Sequence[Sequence[str]], known: Sequence[str]) -> None:
    """Raise InputError for a label of ``--pair`` that no model has."""
    for label in itertools.chain(*labels):
        if label not in known:
            raise InputError(
                f"--pair: no model is called {label!r}{nearest(label, known)}; there are: {printable(', '.join(known))}"
            )


def pair_lines(pairs: Sequence[Pair], text: TextResult) -> list[str]:
    """Return the lines of all pairs of a text's models, ``HEADING`` first."""
    measured = [found for pair in pairs for model in pair if (found := model.estimates)]
    cautions, near = short_text_cautions(measured, text.data.get("text_tokens")), near_lossless(text.models)
    lines = [*HEADING, *(f"Caution: {each}" for each in cautions)]
    for pair in pairs:
        lines += ["", f"{pair[0].label} against {pair[1].label}"]
        for title, score in (("PPL", "nll"), ("KLD", "kld")):
            ranked = score == "nll" or not {model.label for model in pair} <= near
            lines += score_lines(pair, title, score, ranked=ranked)
        lines += [*answer_lines(pair, "acc"), *answer_lines(pair, "acc_norm")]
    return list(map(printable, lines))


def score_lines(pair: Pair, title: str, score: str, *, ranked: bool) -> list[str]:
    """Return the verdict by one score, and a second line with its numbers; ``ranked``: if the score ranks the two."""
    found = difference_or_reason(*pair, score)
    if isinstance(found, str):
        return [f"  {title}: n/a: {found}"]
    better = pair[0] if found.value < 0 else pair[1]
    said, size = "no difference to be seen", number_with_error(found.value, found.stderr, "nats")
    if found.limits is None:
        said = "the text is too short to tell"
    elif found.is_seen:
        said, size = f"{better.label} is better", number_with_error(abs(found.value), found.stderr, "nats")
    digits = decimals_of_error(found.stderr) if found.stderr else 5
    numbers = f"{found.value:+.{digits}f}"
    if found.limits:
        numbers += f", 95 %: {' to '.join(f'{end:+.{digits}f}' for end in found.limits)}"
    numbers = f"ln(PPL ratio) {numbers}; PPL {percent_above(found)}" if score == "nll" else f"difference {numbers}"
    return [f"  {title}: {f'{said}: {size}' if ranked or not found.is_seen else UNRANKED}", f"       {numbers}"]


def answer_lines(pair: Pair, rule: str) -> list[str]:
    """Return the verdict by accuracy, and McNemar's exact test; nothing unless both models answered questions.

    ``rule``: "acc" or "acc_norm".
    """
    answers = [model.estimates.answers for model in pair if model.estimates and model.estimates.answers]
    if len(answers) < 2:
        return []
    first, second = (getattr(found, rule) for found in answers)
    if len(first.right) != len(second.right) or not first.right:
        return [f"  {rule}: n/a: {'not the same questions' if first.right and second.right else 'a model has none'}"]
    only, other = discordant(first.right, second.right)
    p = mcnemar_p(only, other)
    said = f"{pair[only <= other].label} is better" if p < LEVEL else "no difference to be seen"
    values = [100 * found.accuracy.value for found in (first, second)]
    return [
        f"  {rule}: {said}: {values[0]:.2f} % and {values[1]:.2f} %",
        f"       right only in the first: {only:,}, only in the second: {other:,}; McNemar's exact p = {p:.3g}",
    ]


def percent_above(found: Difference) -> str:
    """Return by how many percent the first perplexity is above the second."""
    if found.value > LARGEST_EXPONENT:
        return "n/a: the ratio is too large for a number"
    ratio = math.exp(found.value)
    stderr = None if found.stderr is None else 100 * ratio * found.stderr
    return number_with_error(100 * (ratio - 1), stderr, "%", sign=True)
