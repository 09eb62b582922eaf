"""Which rows differ: ``compare`` decides it for two rows, ``ranking`` for all and the best one.

★, ``--pairs`` and the closing sentences show their outcomes.

Both models of a difference were scored on the same tokens: it is known far better than the means of
single rows.

KLD cannot rank rows that are nearly lossless: those whose KLD is within the noise floor's 95 %
interval, or within twice the noise floor's KLD; without a noise floor, those whose KLD roundings
alone can cost (``ROUNDINGS``).  Over all quantizations it goes with results of benchmarks (rank
correlations of -0.72 and -0.86 in arXiv 2606.19558), among nearly lossless ones it does not (+0.00
and -0.24).

A row whose KLD is a bound loses at least as much.  It can be worse than another row, and is never
better or equal; two bounds are not compared (``stats/kld_kinds.py``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .results import ModelResult, noise_floor_of
from .stats.block_sums import paired_difference
from .stats.kld_kinds import ALL_RELATIONS, range_of, relations_that_follow
from .stats.uncertainty import interval

COMPARABLE_SCORES = {
    "nll": "log-probability",
    "kld": "KL divergence",
    "same_top": "most probable token",
}
"""The scores of tokens that can be compared, and their names in messages."""
COMPARISON_LEVEL = 0.05
"""The probability of calling equal models different, in all comparisons with the best one together.
"""
TOKENS_FOR_A_RANKING = 2000
"""Tokens of text below which no model is called the best.  In simulated texts a KLD twice as large
as another is significantly different in 34 % of texts of 255 tokens, 53 % of 510 and 81 % of 2,000.
"""
BLOCKS_FOR_A_RANKING = 4
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
    """One model's mean minus another's.

    ``outcome``: "less" or "more" if the two differ; "equal" if no difference is seen; "same" if the
    scores of all tokens are the same; "unranked" if both are nearly lossless and KLD does not rank
    them; "unknown" for a ``reason``.

    ``value``, ``stderr`` and ``limits`` are None where they are not known.  ``is_bound``: one of
    both KLDs is a bound, so that the difference is at least as large as ``value``, and the limit
    on this side is infinite.
    """

    outcome: Outcome
    value: float | None = None
    stderr: float | None = None
    limits: tuple[float, float] | None = None
    reason: str = ""
    is_bound: bool = False


def compare(
    a: ModelResult,
    b: ModelResult,
    score: str,
    *,
    lossless_labels: Collection[str] = (),
    comparisons: int = 1,
) -> Difference:
    """Decide whether the mean of a model's ``score`` differs from another's.

    ``score``: one of ``COMPARABLE_SCORES``; ``lossless_labels``: of rows that KLD does not rank;
    ``comparisons``: how many are made with one model; each has its share of the level (Bonferroni).
    """
    difference = difference_of_numbers(
        a, b, score, lossless_labels=lossless_labels, comparisons=comparisons
    )
    if score == "kld":
        return as_far_as_it_follows(difference, a, b)
    return difference


def difference_of_numbers(
    a: ModelResult,
    b: ModelResult,
    score: str,
    *,
    lossless_labels: Collection[str],
    comparisons: int,
) -> Difference:
    """Return ``compare`` of two rows' means of ``score``, as if all KLDs were exact."""
    is_unranked = score == "kld" and a.label in lossless_labels and b.label in lossless_labels
    has_reference = score == "kld" and (a.reference or b.reference)
    difference = None
    if a.blocks is not None and b.blocks is not None and not has_reference:
        difference = paired_difference(a.blocks, b.blocks, score)
    # Two conditions are for mypy: a difference needs ``a.blocks``, and has a value.
    if a.blocks is None or difference is None or difference.value is None:
        reason = why_not_comparable(a, score) or why_not_comparable(b, score)
        reason = reason or "they were scored on different windows"
        if is_unranked:
            return Difference("unranked", reason=reason)
        return Difference("unknown", reason=reason)
    # Before the checks of the text's length: equal scores are equal on any text.
    if a.scores_equal(b):
        return Difference("same", difference.value, difference.stderr)
    if difference.stderr is None:
        return Difference("unknown", difference.value, reason=TOO_SHORT)
    # A single comparison has half the level, too: ``--pairs`` and a run of two models then agree.
    level = COMPARISON_LEVEL / max(comparisons, 2)
    limits = interval(difference.value, difference.stderr, a.blocks.waves, level)
    reason = too_short([a, b])
    if reason:
        return Difference("unknown", difference.value, difference.stderr, limits, reason)
    outcome: Outcome
    if limits[0] <= 0 <= limits[1]:
        # Also if both are nearly lossless: no difference is seen.  (``ranking`` calls such rows
        # unranked all the same.)
        outcome = "equal"
    elif is_unranked:
        outcome = "unranked"
    elif difference.value < 0:
        outcome = "less"
    else:
        outcome = "more"
    return Difference(outcome, difference.value, difference.stderr, limits)


def as_far_as_it_follows(difference: Difference, a: ModelResult, b: ModelResult) -> Difference:
    """Return what the difference of two rows' numbers says about the difference of their KLDs.

    These are the same unless the number of a row is a bound.
    """
    relations = relations_that_follow(a.kld_kind, b.kld_kind)
    if relations == ALL_RELATIONS or difference.value is None:
        return difference
    reason = difference.reason or why_bounded(a, b)
    if difference.outcome == "same":
        return Difference("same", reason=reason)
    if difference.outcome not in relations or difference.limits is None:
        return Difference("unknown", reason=reason)
    low, high = difference.limits
    if difference.outcome == "more":
        limits = (low, math.inf)
    else:
        limits = (-math.inf, high)
    return replace(difference, limits=limits, is_bound=True)


def why_bounded(a: ModelResult, b: ModelResult) -> str:
    """Return which of two rows have no more than a bound of their KLD."""
    labels = [model.label for model in (a, b) if model.has_bound]
    if len(labels) == 1:
        return f"only a bound of the KLD of {labels[0]} is known"
    return "only bounds of both KLDs are known"


def too_short(models: Sequence[ModelResult]) -> str:
    """Return why no model can be called better on the scored part of the text; empty if one can."""
    blocks = [model.blocks for model in models if model.blocks]
    fewest_blocks = min((sums.held for sums in blocks), default=0)
    fewest_tokens = min((sums.length for sums in blocks), default=0)
    if fewest_blocks >= BLOCKS_FOR_A_RANKING and fewest_tokens >= TOKENS_FOR_A_RANKING:
        return ""
    available = f"{fewest_blocks} of its blocks with scores, {fewest_tokens:,} tokens"
    needed = f"at least {BLOCKS_FOR_A_RANKING} and {TOKENS_FOR_A_RANKING:,} are needed"
    return f"{TOO_SHORT} ({available}; {needed})"


def why_not_comparable(model: ModelResult, score: str) -> str:
    """Return why a model cannot be compared with others by a score; empty if it can."""
    if model.blocks is None:
        return f"{model.label} failed"
    if score == "kld" and model.reference:
        return f"{model.label} is the reference, from which KLD is measured"
    if getattr(model.blocks, score) is None:
        return f"{model.label} has no {COMPARABLE_SCORES[score]}"
    if score not in model.blocks.whole:
        return f"{model.label} has positions without a finite {COMPARABLE_SCORES[score]}"
    return ""


@dataclass(frozen=True)
class Ranking:
    """Rows compared with the best one.

    ``same``: those with the same score at every token; ``unranked``: nearly lossless, as the best
    one is; ``equal``: without a significant difference from it; ``unknown``: not comparable with
    it; ``undecided``: rows whose KLD is a bound, which may be better or worse;
    ``reason``: why none can be compared with the best one.
    """

    best: ModelResult
    same: Sequence[ModelResult] = ()
    unranked: Sequence[ModelResult] = ()
    equal: Sequence[ModelResult] = ()
    worse: Sequence[ModelResult] = ()
    unknown: Sequence[ModelResult] = ()
    undecided: Sequence[ModelResult] = ()
    reason: str = ""


def ranking(
    rows: Sequence[ModelResult], score: str, lossless_labels: Collection[str] = ()
) -> Ranking:
    """Rank one or more measured rows by their means of ``score``.

    ``lossless_labels``: of rows that KLD does not rank.

    In at least 95 % of texts, the truly best model is the measured best one, or equal to it.  It is
    missing only if one of the other k - 1 models is measured significantly better, at the level
    0.05 / (k - 1): Bonferroni's bound, for comparisons with the best (Hsu, Annals of Statistics 9,
    1981).  For two models the level is 0.025, as for any pair.  Rows whose KLD is a bound are never
    the best one, unless all are.
    """
    ordered = sorted(rows, key=lambda row: measured_loss(row, score))
    comparable = [row for row in ordered if not is_bounded(row, score)]
    best = next(iter([*comparable, *ordered]))
    same = []
    different = []
    for row in ordered:
        if row is best:
            continue
        if row.scores_equal(best):
            same.append(row)
        else:
            different.append(row)
    reason = too_short(rows) or why_not_comparable(best, score)
    rows_by_outcome: dict[str, list[ModelResult]] = {
        "unranked": [],
        "equal": [],
        "worse": [],
        "unknown": [],
        "undecided": [],
    }
    for row in different:
        outcome = compare(
            row, best, score, lossless_labels=lossless_labels, comparisons=len(different)
        ).outcome
        # KLD does not rank nearly lossless rows: they are not called equal either.
        if score == "kld" and row.label in lossless_labels and best.label in lossless_labels:
            rows_by_outcome["unranked"].append(row)
        elif is_bounded(row, score) and (reason or outcome != "more"):
            rows_by_outcome["undecided"].append(row)
        elif reason:
            rows_by_outcome["unknown"].append(row)
        elif outcome in ("less", "more"):
            # The best row has the best mean, so that a different one is worse.
            rows_by_outcome["worse"].append(row)
        else:
            rows_by_outcome[outcome].append(row)
    return Ranking(best, same, **rows_by_outcome, reason=reason)


def is_bounded(row: ModelResult, score: str) -> bool:
    """Return True if a row's mean of ``score`` is no more than a bound."""
    return score == "kld" and row.has_bound


def measured_loss(row: ModelResult, score: str) -> float:
    """Return a measured row's mean of ``score``, with a negative sign if more is better.

    If some scores are not finite, it is the mean of the finite ones, as the table shows it;
    ``same_top`` counts as 0 then.
    """
    blocks = row.blocks
    assert blocks is not None
    mean = 0.0
    if score in blocks.whole:
        mean = sum(getattr(blocks, score)) / sum(blocks.tokens)
    elif score == "nll":
        mean = math.log(row.ppl or math.inf)
    elif score == "kld":
        mean = row.kld or 0.0
    if score == "same_top":
        return -mean
    return mean


def candidates_for_best(models: Sequence[ModelResult], score: str) -> list[ModelResult]:
    """Return the models that may have the best ``score``: measured and quantized ones.

    The reference, noise floors and other unquantized models are not candidates: they show what
    roundings alone lose.
    """
    candidates = []
    for model in models:
        if model.reference or model.noise_floor:
            continue
        if model.blocks is None or getattr(model.blocks, score) is None:
            continue
        if model.is_quantized:
            candidates.append(model)
    return candidates


def best_labels(models: Sequence[ModelResult], score: str) -> frozenset[str]:
    """Return the labels of the candidate with the best ``score``, and of those not worse than it.

    Those have the same scores, no significant difference, or are nearly lossless, as the best one
    is (``same``, ``equal`` and ``unranked`` of ``Ranking``).

    The set is empty for a single candidate, for a short text, if the model with the best mean has
    non-finite scores, and if a model with a bound may be better: a mark on the next one would claim
    that no model is better.  Models with a bound have no mark in KLD.
    """
    candidates = candidates_for_best(models, score)
    if len(candidates) < 2:
        return frozenset()
    ranked = ranking(candidates, score, near_lossless(models))
    if ranked.reason or ranked.undecided:
        return frozenset()
    marked = set()
    for model in (ranked.best, *ranked.same, *ranked.unranked, *ranked.equal):
        if not is_bounded(model, score):
            marked.add(model.label)
    return frozenset(marked)


def kld_limit(models: Sequence[ModelResult]) -> float | None:
    """Return the largest KLD of nearly lossless rows, nats; None without a noise floor's KLD."""
    floor = noise_floor_of(models)
    if floor is None or floor.kld is None or floor.blocks is None:
        return None
    upper_end = 0.0
    if floor.kld_stderr is not None:
        _, upper_end = interval(floor.kld, floor.kld_stderr, floor.blocks.waves)
    return max(TIMES_FLOOR * floor.kld, upper_end, 0.0)


def why_unranked(models: Sequence[ModelResult]) -> str:
    """Return the reason why nearly lossless rows are not ranked.

    It follows their KLDs in a sentence.
    """
    limit = kld_limit(models)
    floor = noise_floor_of(models)
    if limit is None or floor is None:
        return (
            f"at most {ROUNDINGS:g}, which roundings alone can cost (no noise floor was measured)"
        )
    if limit <= TIMES_FLOOR * (floor.kld or 0.0):
        return "at most twice the noise floor's"
    return "at most the upper end of the noise floor's interval"


def kld_range(model: ModelResult) -> tuple[float, float]:
    """Return the smallest and the largest KLD that a row may have, by the kind of its KLD."""
    kld = model.kld or 0.0
    limits = None
    if model.kld_stderr is not None and model.blocks is not None and model.blocks.waves:
        limits = interval(kld, model.kld_stderr, model.blocks.waves)
    return range_of(kld, model.kld_kind, limits)


def near_lossless(models: Sequence[ModelResult]) -> frozenset[str]:
    """Return the labels of the rows up to the limit, except the reference and noise floors.

    Rows whose KLD is a bound, or an estimate with an interval beyond the limit, may lose more, and
    are not among them.
    """
    limit = kld_limit(models)
    if limit is None:
        limit = ROUNDINGS
    labels = set()
    for model in models:
        if model.reference or model.noise_floor or model.kld is None:
            continue
        _, largest = kld_range(model)
        if largest <= limit:
            labels.add(model.label)
    return frozenset(labels)
