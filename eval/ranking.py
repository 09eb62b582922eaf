"""Which rows differ: paired differences, the best rows (★), nearly lossless rows, and how well spread windows stand for
the whole text.

Both models of a difference were scored on the same tokens, so an easy block of the text is easy for both.  Differences
are therefore known far better than the means of single rows.

Some rows are so near to the reference that KL divergence cannot rank them.  Over all quantizations KLD goes with
results of benchmarks (rank correlations of -0.72 and -0.86 in arXiv 2606.19558); among those that are nearly lossless
it does not (+0.00 and -0.24).  Here a row is nearly lossless if its KLD is within the noise floor's 95 % interval, or
within twice the noise floor's KLD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compare_q.eval.results import ModelResult, TextResult, noise_floor_of
from compare_q.eval.stats import estimates
from compare_q.eval.stats.estimates import BlockSums, n_blocks
from compare_q.eval.stats.uncertainty import interval_95, n_waves, student_t

SCORES = {"nll": "log-probability", "kld": "KL divergence", "same_top": "most probable token"}
"""The scores that can be compared, and their names in messages."""
LEAST_TOKENS = 2000
"""Tokens of text below which no model is called the best.  In simulated texts a KLD twice as large as another is
significantly different in 34 % of texts of 255 tokens, 53 % of 510 and 81 % of 2,000."""
TIMES_FLOOR = 2.0
"""Rows up to this many times the noise floor's KLD are nearly lossless."""
ROUNDINGS = 0.001
"""Nats: a KLD that need not be known better where no row is the noise floor.  Another order of roundings costs
SmolLM2-135M 0.0017 (docs/statistics.md)."""


@dataclass(frozen=True)
class Difference:
    """One model's mean minus another's; ``stderr`` and the 95 % ``limits`` are None where the text is too short."""

    value: float
    stderr: float | None
    limits: tuple[float, float] | None

    @property
    def is_seen(self) -> bool:
        """True if 0 is outside the interval."""
        return self.limits is not None and not self.limits[0] <= 0 <= self.limits[1]


def difference_or_reason(a: ModelResult, b: ModelResult, name: str) -> Difference | str:
    """Mean of ``name`` (of ``SCORES``) of model a minus the mean of model b, or why it is not known."""
    for model in (a, b):
        if model.estimates is None:
            return f"{model.label} failed"
        if name == "kld" and model.reference:
            return f"{model.label} is the reference, from which KLD is measured"
        if getattr(model.estimates.blocks, name) is None:
            return f"{model.label} has no {SCORES[name]}"
        if name not in model.estimates.blocks.whole:
            return f"{model.label} has positions without a finite {SCORES[name]}"
    assert a.estimates is not None
    assert b.estimates is not None
    blocks = a.estimates.blocks
    found = estimates.paired_difference(blocks, b.estimates.blocks, name)
    if found is None or found.value is None:
        return "they were scored on different windows"
    waves = n_waves(n_blocks(blocks), blocks.length)
    limits = None if found.stderr is None else interval_95(found.value, found.stderr, waves)
    return Difference(found.value, found.stderr, limits)


def candidates_for_best(models: Sequence[ModelResult], name: str) -> dict[str, BlockSums]:
    """Label -> sums of the models that may have the best ``name`` (of ``SCORES``): measured and quantized ones.

    The reference, noise floors and other unquantized models are not candidates: they show what roundings alone lose.
    """
    return {
        model.label: model.estimates.blocks
        for model in models
        if model.estimates and getattr(model.estimates.blocks, name) is not None
        and model.is_quantized and not (model.reference or model.noise_floor)
    }  # fmt: skip


def too_short_for_best(models: Sequence[ModelResult]) -> int | None:
    """Tokens of a text shorter than ``LEAST_TOKENS``; None for a longer text, and for fewer than two candidates."""
    found = candidates_for_best(models, "nll").values()
    length = min((each.length for each in found if each.length), default=LEAST_TOKENS)
    return length if len(found) > 1 and length < LEAST_TOKENS else None


def best_labels(models: Sequence[ModelResult], name: str) -> frozenset[str]:
    """Labels of the ``candidates_for_best`` with the best ``name``, and of those not significantly worse.

    By ``kld``, rows that are nearly lossless count as equal (``near_lossless``).  Empty if ``best_among`` is.
    """
    among = candidates_for_best(models, name)
    best, near = best_among(among, name), near_lossless(models) if name == "kld" else frozenset()
    return best | (near & among.keys() if best & near else frozenset())


def best_among(among: Mapping[str, BlockSums], name: str) -> frozenset[str]:
    """Labels of the model with the best measured mean of ``name``, and of those not significantly worse.

    The model that is best in truth is among them in 95 % of texts or more.  It is missing only where one of the other
    k - 1 is measured better by more than each of them would be in 0.05 / (k - 1) of the texts if it were not better:
    Bonferroni's bound, for comparisons with the best (Hsu, Annals of Statistics 9, 1981).  Of two models it is 0.025,
    as for any pair.

    No label if there is only one candidate, if the text is shorter than ``LEAST_TOKENS``, or if the model with the best
    mean left scores out.
    """
    if len(among) < 2 or any(n_blocks(found) < 2 or found.length < LEAST_TOKENS for found in among.values()):
        return frozenset()
    sign = -1 if name == "same_top" else 1
    means = {label: sign * sum(getattr(found, name)) / sum(found.tokens) for label, found in among.items()}
    first = among[min(means, key=lambda label: means[label])]
    # Nothing can be paired with a best model that left scores out: then no row is marked.
    reach = student_t(n_waves(n_blocks(first), first.length), 0.05 / max(len(among) - 1, 2))
    differences = {label: estimates.paired_difference(found, first, name) for label, found in among.items()}
    return frozenset(
        label for label, off in differences.items()
        if off and off.value is not None and (off.stderr is None or abs(off.value) <= reach * off.stderr)
    )  # fmt: skip


def kld_limit(models: Sequence[ModelResult]) -> float | None:
    """The KLD in nats up to which rows are nearly lossless; None without a noise floor that has a KLD."""
    floor = noise_floor_of(models)
    if floor is None or floor.kld is None or floor.estimates is None:
        return None
    limit, blocks = TIMES_FLOOR * floor.kld, floor.estimates.blocks
    if floor.kld_stderr is None:
        return limit
    return max(limit, interval_95(floor.kld, floor.kld_stderr, n_waves(n_blocks(blocks), blocks.length))[1])


def near_lossless(models: Sequence[ModelResult]) -> frozenset[str]:
    """Labels of the measured rows up to the limit, without the reference and the noise floors."""
    limit = kld_limit(models)
    if limit is None:
        return frozenset()
    rows = (model for model in models if model.kld is not None and not (model.reference or model.noise_floor))
    return frozenset(model.label for model in rows if model.kld is not None and model.kld <= limit)


class Worst(NamedTuple):
    """The largest relative standard error of the rows' means, and the label of its row."""

    error: float
    label: str


def sampled_from(text: TextResult) -> int | None:
    """The number of windows of the whole text; None where all of them were scored, or the first ones."""
    found: int | None = text.data.get("windows_of_the_text")
    return found


def rows_by_kld(text: TextResult) -> list[ModelResult]:
    """The rows whose KLD matters, the smallest first: the quantized models, or all but the reference without any."""
    rows = [model for model in text.models if model.kld is not None and not model.reference]
    quantized = [model for model in rows if model.is_quantized and not model.noise_floor]
    return sorted(quantized or rows, key=lambda model: model.kld or 0.0)


def worst_kld(text: TextResult) -> Worst | None:
    """The largest error of the KLDs of ``rows_by_kld`` as the whole text's, relative to the KLD or to the KLD of
    roundings.

    Infinite where an error is not known; None without KLDs.
    """
    rows, least, worst = rows_by_kld(text), kld_limit(text.models) or ROUNDINGS, []
    for model in rows:
        found = model.estimates.sampled if model.estimates else None
        error = math.inf if found is None or found.kld is None else found.kld
        worst.append(Worst(error / max(model.kld or 0.0, least), model.label))
    return max(worst, default=None)


def worst_ppl(text: TextResult) -> Worst | None:
    """The largest relative error of the perplexities as the whole text's; None where none is known."""
    found = [(model.estimates.sampled, model.label) for model in text.models if model.estimates]
    return max((Worst(each.nll, label) for each, label in found if each and each.nll is not None), default=None)


def kind_of_rows(text: TextResult) -> str:
    """The name of the rows of ``rows_by_kld`` in a sentence."""
    known = sum(model.kld is not None and not model.reference for model in text.models)
    return "quantized row" if len(rows_by_kld(text)) < known else "row"


def rest_in_words(text: TextResult) -> str:
    """The seconds that the other windows of the text would take, as the end of a sentence; empty where that is not
    known, or where nothing was left out."""
    left = (sampled_from(text) or 0) - text.data.get("windows", 0)
    seconds = sum(left * (model.score_seconds or 0.0) / model.windows for model in text.models if model.windows)
    return f"; the other {left:,} would take about {seconds:,.0f} s of scoring" if left > 0 < seconds else ""
