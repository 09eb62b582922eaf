"""Which rows differ.  ``compare`` decides it for two rows; ★, ``--pairs`` and the closing sentences
read its outcome.

Both models of a difference were scored on the same tokens: it is known far better than the means of
single rows.

KLD cannot rank rows that are nearly lossless: those whose KLD is within the noise floor's 95 %
interval, or within twice the noise floor's KLD; without a noise floor, those whose KLD roundings
alone can cost (``ROUNDINGS``).  Over all quantizations it goes with results of benchmarks (rank
correlations of -0.72 and -0.86 in arXiv 2606.19558), among nearly lossless ones it does not (+0.00
and -0.24).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from .results import ModelResult, noise_floor_of
from .stats.block_sums import paired_difference
from .stats.uncertainty import interval

SCORES = {"nll": "log-probability", "kld": "KL divergence", "same_top": "most probable token"}
"""The scores of tokens that can be compared, and their names in messages."""
LEVEL = 0.05
"""The probability of calling equal models different, in all comparisons with the best one together.
"""
LEAST_TOKENS = 2000
"""Tokens of text below which no model is called the best.  In simulated texts a KLD twice as large
as another is significantly different in 34 % of texts of 255 tokens, 53 % of 510 and 81 % of 2,000.
"""
LEAST_BLOCKS = 4
"""Blocks of the text with scores below which no model is called better, the best, or equal: from
two, an interval is 6.5 times as wide as from many (Student's t), so that a KLD 80 times as large
may be within it."""
TIMES_FLOOR = 2.0
"""Rows up to this many times the noise floor's KLD are nearly lossless."""
ROUNDINGS = 0.001
"""Nats: the KLD that roundings alone may cause, if no row is the noise floor.  Other roundings
cause a KLD of 0.0017 in SmolLM2-135M; another attention backend causes 0.0003 in an 8B model on an
H100 (docs/statistics.md)."""

TOO_SHORT = "the text is too short to tell"
Outcome = Literal["less", "more", "equal", "same", "unranked", "unknown"]


@dataclass(frozen=True)
class Difference:
    """One model's mean minus another's, and what may be said about it."""

    # "less" or "more" if the two differ; "equal" if no difference is seen; "same" if the scores of
    # all tokens are the
    # same; "unranked" if both are nearly lossless and KLD does not rank them; "unknown" for a
    # ``reason``.
    outcome: Outcome
    value: float | None = None  # None, as error and interval, where it is not known
    stderr: float | None = None
    limits: tuple[float, float] | None = None
    reason: str = ""


def compare(
    a: ModelResult, b: ModelResult, score: str, *, near: Collection[str] = (), comparisons: int = 1
) -> Difference:
    """Decide whether the mean of a model's ``score`` (one of ``SCORES``) differs from another's.

    ``near``: labels of rows that KLD does not rank; ``comparisons``: how many are made with one
    model; each has its share of the level (Bonferroni).
    """
    unranked, found = score == "kld" and a.label in near and b.label in near, None
    reason = missing(a, score) or missing(b, score) or "they were scored on different windows"
    if a.blocks and b.blocks:
        found = paired_difference(a.blocks, b.blocks, score)
    if (
        not a.blocks
        or not found
        or found.value is None
        or (score == "kld" and (a.reference or b.reference))
    ):
        return Difference("unranked" if unranked else "unknown", reason=reason)
    if a.scores_equal(b):
        return Difference("same", found.value, found.stderr)
    if found.stderr is None:
        return Difference("unknown", found.value, reason=TOO_SHORT)
    limits = interval(found.value, found.stderr, a.blocks.waves, LEVEL / max(comparisons, 2))
    if reason := too_short([a, b]):
        return Difference("unknown", found.value, found.stderr, limits, reason)
    outcome: Outcome = (
        "equal" if limits[0] <= 0 <= limits[1] else "less" if found.value < 0 else "more"
    )
    return Difference(
        "unranked" if unranked and outcome != "equal" else outcome,
        found.value,
        found.stderr,
        limits,
    )


def too_short(models: Sequence[ModelResult]) -> str:
    """Return why no model can be called better on the scored part of the text; empty if one can."""
    blocks = [model.blocks for model in models if model.blocks]
    held, length = (
        min(found, default=0)
        for found in ([b.held for b in blocks], [b.length or 0 for b in blocks])
    )
    if held >= LEAST_BLOCKS and length >= LEAST_TOKENS:
        return ""
    there = f"{held} of its blocks with scores, {length:,} tokens"
    return f"{TOO_SHORT} ({there}; at least {LEAST_BLOCKS} and {LEAST_TOKENS:,} are needed)"


def missing(model: ModelResult, score: str) -> str:
    """Return why a model cannot be compared with others by a score; empty if it can."""
    if model.blocks is None:
        return f"{model.label} failed"
    if score == "kld" and model.reference:
        return f"{model.label} is the reference, from which KLD is measured"
    if getattr(model.blocks, score) is None:
        return f"{model.label} has no {SCORES[score]}"
    left_out = score not in model.blocks.whole
    return f"{model.label} has positions without a finite {SCORES[score]}" if left_out else ""


@dataclass(frozen=True)
class Ranking:
    """Rows compared with the best one."""

    best: ModelResult
    same: Sequence[ModelResult] = ()  # with the same score at every token
    unranked: Sequence[ModelResult] = ()  # nearly lossless, as the best one is
    equal: Sequence[ModelResult] = ()
    worse: Sequence[ModelResult] = ()
    unknown: Sequence[ModelResult] = ()
    reason: str = ""  # why none can be compared with it


def ranking(rows: Sequence[ModelResult], score: str, near: Collection[str] = ()) -> Ranking:
    """Rank one or more measured rows by their means of ``score``.  ``near``: labels of rows that
    KLD does not rank.

    In at least 95 % of texts, the truly best model is the measured best one, or equal to it.  It is
    missing only if one of the other k - 1 models is measured significantly better, at the level
    0.05 / (k - 1): Bonferroni's bound, for comparisons with the best (Hsu, Annals of Statistics 9,
    1981).  For two models the level is 0.025, as for any pair.
    """
    blocks = {model.label: model.blocks for model in rows if model.blocks}

    def mean(model: ModelResult) -> float:
        own, left_out = (
            blocks[model.label],
            {"nll": math.log(model.ppl or math.inf), "kld": model.kld or 0.0},
        )
        found = (
            sum(getattr(own, score)) / sum(own.tokens)
            if score in own.whole
            else left_out.get(score, 0.0)
        )
        return -found if score == "same_top" else found

    first, *others = sorted(rows, key=mean)
    same = [model for model in others if model.scores_equal(first)]
    others = [model for model in others if model not in same]
    reason = too_short(rows) or missing(first, score)
    found: dict[str, list[ModelResult]] = {"unranked": [], "equal": [], "worse": [], "unknown": []}
    for model in others:
        outcome: str = compare(model, first, score, near=near, comparisons=len(others)).outcome
        if score == "kld" and model.label in near and first.label in near:
            outcome = "unranked"
        elif reason:
            outcome = "unknown"
        found[{"less": "worse", "more": "worse"}.get(outcome, outcome)].append(model)
    return Ranking(first, same, **found, reason=reason)


def candidates_for_best(models: Sequence[ModelResult], score: str) -> list[ModelResult]:
    """The models that may have the best ``score``: measured and quantized ones.

    The reference, noise floors and other unquantized models are not candidates: they show what
    roundings alone lose.
    """
    return [
        model
        for model in models
        if model.blocks
        and getattr(model.blocks, score) is not None
        and model.is_quantized
        and not (model.reference or model.noise_floor)
    ]


def best_labels(models: Sequence[ModelResult], score: str) -> frozenset[str]:
    """Labels of the candidate with the best ``score``, and of those that are equal to it.

    None for a single candidate, for a short text, and if the model with the best mean has
    non-finite scores: a mark on the next one would claim that no model is better.
    """
    rows = candidates_for_best(models, score)
    found = ranking(rows, score, near_lossless(models)) if len(rows) > 1 else None
    equal = (
        (found.best, *found.same, *found.unranked, *found.equal)
        if found and not found.reason
        else ()
    )
    return frozenset(model.label for model in equal)


def kld_limit(models: Sequence[ModelResult]) -> float | None:
    """The largest KLD of nearly lossless rows, nats; None without a noise floor that has a KLD."""
    floor = noise_floor_of(models)
    if floor is None or floor.kld is None or floor.blocks is None:
        return None
    error = floor.kld_stderr
    end = 0.0 if error is None else interval(floor.kld, error, floor.blocks.waves)[1]
    return max(TIMES_FLOOR * floor.kld, end, 0.0)


def why_unranked(models: Sequence[ModelResult]) -> str:
    """The reason why nearly lossless rows are not ranked, which follows their KLDs in a sentence."""
    limit, floor = kld_limit(models), noise_floor_of(models)
    if limit is None or floor is None:
        return (
            f"at most {ROUNDINGS:g}, which roundings alone can cost (no noise floor was measured)"
        )
    is_twice = limit <= TIMES_FLOOR * (floor.kld or 0.0)
    return (
        "at most twice the noise floor's"
        if is_twice
        else "at most the upper end of the noise floor's interval"
    )


def near_lossless(models: Sequence[ModelResult]) -> frozenset[str]:
    """Labels of the measured rows up to the limit, without the reference and the noise floors."""
    limit = ROUNDINGS if (known := kld_limit(models)) is None else known
    rows = [
        (m.label, m.kld) for m in models if m.kld is not None and not (m.reference or m.noise_floor)
    ]
    return frozenset(label for label, kld in rows if kld <= limit)
