"""Which rows are so near to the reference that KL divergence cannot rank them.

Over all quantizations KLD goes with results of benchmarks (rank correlations of -0.72 and -0.86 in arXiv 2606.19558);
among those that are nearly lossless it does not (+0.00 and -0.24).  Here a row is nearly lossless if its KLD is within
the noise floor's 95 % interval, or within twice the noise floor's KLD.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval.results.run_result import ModelResult, floor_of, several_references
from eval.stats.estimates import n_blocks
from eval.stats.uncertainty import interval_95, n_waves

TIMES = 2.0


def kld_limit(models: Sequence[ModelResult]) -> float | None:
    """The KLD in nats up to which rows are nearly lossless; None without a noise floor that has a KLD.

    None as well in merged runs with several references: each of these has a noise floor of its own.
    """
    floor = floor_of(models)
    if floor is None or floor.kld is None or floor.kld.value is None or floor.estimates is None:
        return None
    if several_references(models):
        return None
    limit = TIMES * floor.kld.value
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
