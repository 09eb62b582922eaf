"""Differences between two models of a text, with their errors, which are far smaller than the errors of single rows.

Both models were scored on the same tokens, so an easy block of the text is easy for both, and leaves the difference.

Some rows are so near to the reference that KL divergence cannot rank them.  Over all quantizations KLD goes with
results of benchmarks (rank correlations of -0.72 and -0.86 in arXiv 2606.19558); among those that are nearly lossless
it does not (+0.00 and -0.24).  Here a row is nearly lossless if its KLD is within the noise floor's 95 % interval, or
within twice the noise floor's KLD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compare_q.eval.results.run_result import ModelResult, floor_of
from compare_q.eval.stats import estimates
from compare_q.eval.stats.estimates import BlockSums, n_blocks
from compare_q.eval.stats.uncertainty import interval_95, n_waves, student_t

SCORES = {"nll": "log-probability", "kld": "KL divergence", "same_top": "most probable token"}
"""The scores that can be compared, and their names in messages."""
LEAST_TOKENS = 2000
"""Tokens of text below which no model is called the best.  In simulated texts a KLD twice as large as another is told
apart in 34 % of texts of 255 tokens, 53 % of 510 and 81 % of 2,000 (``benchmarks/told_apart.py``): where two models are
not told apart, ★ stands at both."""


TIMES_FLOOR = 2.0
"""Up to so many times the noise floor's KLD a row is nearly lossless."""
ROUNDINGS = 0.001
"""Nats: a KLD below which nothing is asked where no row is the noise floor.  Another order of roundings costs
SmolLM2-135M 0.0017 (docs/statistics.md)."""


@dataclass(frozen=True)
class Difference:
    """One model's mean minus another's; ``stderr`` and the 95 % ``limits`` are None where the text is too short."""

    value: float
    stderr: float | None
    limits: tuple[float, float] | None

    @property
    def is_seen(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.limits is not None and not self.limits[0] <= 0 <= self.limits[1]


def difference_with_interval(a: BlockSums, b: BlockSums, name: str) -> Difference | None:
    """Mean of ``name`` (of ``SCORES``) of model a minus the mean of model b; None if they cannot be compared."""
    found = estimates.paired_difference(a, b, name)
    if found is None or found.value is None:
        return None
    limits = None if found.stderr is None else interval_95(found.value, found.stderr, n_waves(n_blocks(a), a.length))
    return Difference(found.value, found.stderr, limits)


def difference_or_reason(a: ModelResult, b: ModelResult, name: str) -> Difference | str:
    """The difference of two models, or why it is not known."""
    for model in (a, b):
        if model.estimates is None:
            return f"{model.label} failed"
        if name == "kld" and model.is_reference:
            return f"{model.label} is the reference, from which KLD is measured"
        if getattr(model.estimates.blocks, name) is None:
            return f"{model.label} has no {SCORES[name]}"
        if name not in model.estimates.blocks.whole:
            return f"{model.label} has positions without a finite {SCORES[name]}"
    found = (
        difference_with_interval(a.estimates.blocks, b.estimates.blocks, name) if a.estimates and b.estimates else None
    )
    return "they were scored on different windows" if found is None else found


def candidates_for_best(models: Sequence[ModelResult], name: str) -> dict[str, BlockSums]:
    """Label -> sums of the models that may have the best ``name`` (of ``SCORES``): measured and quantized ones.

    The reference and noise floors are no candidates, nor are other unquantized models: these show what roundings
    alone lose.
    """
    return {
        model.label: model.estimates.blocks
        for model in models
        if model.estimates and getattr(model.estimates.blocks, name) is not None
        and model.is_quantized and not (model.is_reference or model.is_noise_floor)
    }  # fmt: skip


def too_short_for_best(models: Sequence[ModelResult]) -> int | None:
    """Tokens of a text shorter than ``LEAST_TOKENS``; None for a longer text, and for fewer than two candidates."""
    found = candidates_for_best(models, "nll").values()
    length = min((each.length for each in found if each.length), default=LEAST_TOKENS)
    return length if len(found) > 1 and length < LEAST_TOKENS else None


def best_labels(models: Sequence[ModelResult], name: str) -> frozenset[str]:
    """Labels of the ``candidates_for_best`` with the best ``name``, and of the models not told apart from the best.

    By ``kld``, rows that are nearly lossless are not told apart (``near_lossless``).
    No label where ``best_among`` has none.
    """
    among = candidates_for_best(models, name)
    best, near = best_among(among, name), near_lossless(models) if name == "kld" else frozenset()
    return best | (near & among.keys() if best & near else frozenset())


def best_among(among: Mapping[str, BlockSums], name: str) -> frozenset[str]:
    """Labels of the model with the best measured mean of ``name``, and of those not told apart from it.

    The model that is best in truth is among them in 95 % of texts or more.  It is missing only where one of the other
    k - 1 is measured better by more than each of them would be in 0.05 / (k - 1) of the texts if it were no better:
    Bonferroni's bound, for comparisons with the best (Hsu, Annals of Statistics 9, 1981).  Of two models it is 0.025,
    so that they are told apart as any pair is.

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
    floor = floor_of(models)
    if floor is None or floor.kld is None or floor.kld.value is None or floor.estimates is None:
        return None
    limit = TIMES_FLOOR * floor.kld.value
    if floor.kld.stderr is None:
        return limit
    blocks = floor.estimates.blocks
    return max(limit, interval_95(floor.kld.value, floor.kld.stderr, n_waves(n_blocks(blocks), blocks.length))[1])


def near_lossless(models: Sequence[ModelResult]) -> frozenset[str]:
    """Labels of the measured rows up to the limit, but for the reference and the noise floors themselves."""
    limit = kld_limit(models)
    if limit is None:
        return frozenset()
    rows = ((model, model.mean_kld) for model in models if not (model.is_reference or model.is_noise_floor))
    return frozenset(model.label for model, kld in rows if kld is not None and kld <= limit)
