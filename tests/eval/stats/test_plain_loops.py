"""All estimates, compared with plain Python loops over entries that share no code with the code
under test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compare_q.eval.stats.row_statistics import averages_of, statistics_of
from compare_q.eval.stats.uncertainty import assign_blocks


def loop_mean(values: list[float], block: list[int]) -> tuple[float, float, float]:
    """Return (mean, clustered error, independent error) of the finite values."""
    kept = [(v, g) for v, g in zip(values, block, strict=True) if math.isfinite(v)]
    n = len(kept)
    mean = math.fsum(v for v, _ in kept) / n
    independent = math.sqrt((math.fsum(v * v for v, _ in kept) / n - mean**2) / (n - 1))
    groups = sorted({g for _, g in kept})
    off = [math.fsum(v - mean for v, g in kept if g == group) for group in groups]
    count, squares = min(4, len(groups) - 1), 0.0
    for j in range(1, count + 1):
        part = math.fsum(
            o * math.cos(math.pi * j * (g + 0.5) / len(groups)) for g, o in enumerate(off)
        )
        squares += 2 * part**2 * (1 + 0.6 * j**2) / count  # 12,000 / 20,000
    return mean, math.sqrt(squares) / n, independent


def loop_percentile(values: list[float], percent: float) -> float:
    """llama.cpp's percentile()."""
    ordered = sorted(values)
    at = percent / 100 * (len(ordered) - 1)
    i = int(at)
    return (1 - (at - i)) * ordered[i] + (at - i) * ordered[min(i + 1, len(ordered) - 1)]


def noisy_columns(n: int) -> dict[str, np.ndarray]:
    """Return scores of which 2 % are NaN or infinite."""
    draw = random.Random(0)
    reference = [-draw.expovariate(0.3) for _ in range(n)]
    kld = [draw.lognormvariate(-3, 1.5) for _ in range(n)]
    values: dict[str, list[float]] = {
        "logprob": [min(b + draw.gauss(-0.05, 0.3), 0) for b in reference],
        "entropy": [draw.uniform(0, 8) for _ in range(n)],
        "ref_logprob": reference,
        "ref_top1_logprob": [-draw.expovariate(2) for _ in range(n)],
        "kld": kld,
    }
    for column in values.values():
        for i in range(n):
            if draw.random() < 0.02:
                column[i] = draw.choice([math.nan, math.inf, -math.inf])
    shares = {
        name: np.array([draw.random() < share for _ in range(n)])
        for name, share in (("top1", 0.4), ("same_top", 0.9))
    }
    return {name: np.array(column, np.float32) for name, column in values.items()} | shares


def test_everything_against_plain_loops() -> None:
    """20 windows of 100 tokens start every 30 tokens, from token 7 on; the blocks are sixths of 669
    tokens.
    """
    tokens = [(7 + 30 * row + p, p) for row in range(20) for p in range(1, 100)]
    n = len(tokens)
    columns = noisy_columns(n)
    index = np.array([i for i, _ in tokens])
    position = np.array([p for _, p in tokens], np.int32)
    averages = averages_of(columns, assign_blocks(index))
    row = statistics_of(columns, assign_blocks(index), position)
    block = [(i - 8) * 6 // 669 for i, _ in tokens]
    given = {name: [float(v) for v in column] for name, column in columns.items()}
    a, b = ([-v for v in given[name]] for name in ("logprob", "ref_logprob"))
    both = [math.isfinite(x) and math.isfinite(y) for x, y in zip(a, b, strict=True)]

    def paired(function: Callable[[float, float], float]) -> list[float]:
        return [function(x, y) if ok else math.nan for x, y, ok in zip(a, b, both, strict=True)]

    def same(
        estimate: Any,
        values: list[float],
        of: Callable[[float], float] = lambda m: m,
        slope: float = 1,
    ) -> None:
        mean, clustered, independent = loop_mean(values, block)
        assert estimate.value == pytest.approx(of(mean), rel=1e-9)
        assert estimate.stderr == pytest.approx(slope * clustered, rel=1e-7)
        assert estimate.stderr_independent == pytest.approx(slope * independent, rel=1e-7)

    ppl = math.exp(loop_mean(a, block)[0])
    same(averages["ppl"], a, math.exp, ppl)
    q, r = (
        math.exp(loop_mean(paired(pick), block)[0]) for pick in (lambda x, y: x, lambda x, y: y)
    )
    same(averages["ref_ppl"], paired(lambda x, y: y), math.exp, r)
    same(averages["ln_ppl_ratio"], paired(lambda x, y: x - y))
    same(averages["ppl_ratio"], paired(lambda x, y: x - y), math.exp, q / r)
    same(averages["ppl_difference"], paired(lambda x, y: q * x - r * y), lambda m: q - r)
    same(averages["kld"], given["kld"])
    same(averages["delta_p"], paired(lambda x, y: math.exp(-x) - math.exp(-y)))
    squares = paired(lambda x, y: (math.exp(-x) - math.exp(-y)) ** 2)
    same(averages["delta_p_rms"], squares, math.sqrt, 0.5 / math.sqrt(loop_mean(squares, block)[0]))
    same(
        averages["same_top"],
        [v if ok else math.nan for v, ok in zip(given["same_top"], both, strict=True)],
    )
    same(
        averages["top1"],
        [v if math.isfinite(x) else math.nan for v, x in zip(given["top1"], a, strict=True)],
    )
    same(averages["entropy"], given["entropy"])
    kept = [(x, y) for x, y, ok in zip(a, b, both, strict=True) if ok]
    ma, mb = (math.fsum(pair[i] for pair in kept) / len(kept) for i in (0, 1))
    vaa, vbb, vab = (
        math.fsum((x[i] - (ma, mb)[i]) * (x[j] - (ma, mb)[j]) for x in kept)
        for i, j in ((0, 0), (1, 1), (0, 1))
    )
    assert row.correlation == pytest.approx(vab / math.sqrt(vaa * vbb), rel=1e-9)
    for percents, values in (
        (row.kld_percentiles, [v for v in given["kld"] if math.isfinite(v)]),
        (
            row.delta_p_percentiles,
            [v for v in paired(lambda x, y: math.exp(-x) - math.exp(-y)) if v == v],
        ),
    ):
        for name, percentile in percents.items():
            percent = (
                {"min": 0.0, "max": 100.0}.get(name) if name in ("min", "max") else float(name)
            )
            assert percentile == pytest.approx(
                loop_percentile(values, percent), rel=1e-9, abs=1e-15
            ), name
    for name, values in (("nll", a), ("kld", given["kld"]), ("same_top", given["same_top"])):
        sums = [
            math.fsum(v for v, g in zip(values, block, strict=True) if g == i and math.isfinite(v))
            for i in range(6)
        ]
        assert getattr(row.blocks, name) == pytest.approx(sums)
    assert row.blocks.whole == ()
