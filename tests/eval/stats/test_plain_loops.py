"""All statistics, compared with plain Python loops over entries.

The loops share no code with the code under test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from compare_q.eval.stats.row_statistics import (
    Average,
    RowStatistics,
    averages_of,
    statistics_of,
)
from compare_q.eval.stats.uncertainty import assign_blocks

# Windows overlap: most tokens are scored three or four times, and always belong to one block.
WINDOWS = 20
LENGTH = 100
STRIDE = 30
FIRST = 7
"""Windows of 100 tokens start every 30 tokens, from token 7 on."""
# One block per 100 tokens: 669 // 100.
BLOCKS = 6
SPAN = 669
"""Tokens from the first scored one, 8, to the last, 676; the blocks are sixths of them."""


def loop_mean(values: Sequence[float], block: Sequence[int]) -> tuple[float, float, float]:
    """Return (mean, clustered error, independent error) of the finite values."""
    finite = []
    values_by_block: dict[int, list[float]] = {}
    for value, group in zip(values, block, strict=True):
        if math.isfinite(value):
            finite.append(value)
            values_by_block.setdefault(group, []).append(value)
    n = len(finite)
    mean = math.fsum(finite) / n
    mean_square = math.fsum(value * value for value in finite) / n
    independent = math.sqrt((mean_square - mean**2) / (n - 1))
    deviations = []
    for group in sorted(values_by_block):
        deviations.append(math.fsum(value - mean for value in values_by_block[group]))
    # A text below 750,000 tokens has the minimum of 4 cosines.
    count = min(4, len(deviations) - 1)
    squares = 0.0
    for j in range(1, count + 1):
        parts = []
        for g, deviation in enumerate(deviations):
            parts.append(deviation * math.cos(math.pi * j * (g + 0.5) / len(deviations)))
        # 0.6 = 12,000 / 20,000
        squares += 2 * math.fsum(parts) ** 2 * (1 + 0.6 * j**2) / count
    return mean, math.sqrt(squares) / n, independent


def loop_percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile as llama.cpp's percentile() does."""
    ordered = sorted(values)
    at = percent / 100 * (len(ordered) - 1)
    i = int(at)
    following = ordered[min(i + 1, len(ordered) - 1)]
    return (1 - (at - i)) * ordered[i] + (at - i) * following


def loop_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of finite values."""
    mean_a = math.fsum(a) / len(a)
    mean_b = math.fsum(b) / len(b)
    products = []
    for x, y in zip(a, b, strict=True):
        products.append(((x - mean_a) ** 2, (y - mean_b) ** 2, (x - mean_a) * (y - mean_b)))
    squares_a, squares_b, mixed = (math.fsum(column) for column in zip(*products, strict=True))
    return mixed / math.sqrt(squares_a * squares_b)


def noisy_columns(n: int) -> dict[str, np.ndarray]:
    """Return scores of which 2 % are NaN or infinite."""
    draw = random.Random(0)
    reference = [-draw.expovariate(0.3) for _ in range(n)]
    values: dict[str, list[float]] = {
        # A log-probability is never above 0.
        "logprob": [min(b + draw.gauss(-0.05, 0.3), 0) for b in reference],
        "entropy": [draw.uniform(0, 8) for _ in range(n)],
        "ref_logprob": reference,
        "ref_top1_logprob": [-draw.expovariate(2) for _ in range(n)],
        "kld": [draw.lognormvariate(-3, 1.5) for _ in range(n)],
    }
    columns = {}
    for name, column in values.items():
        for i in range(n):
            if draw.random() < 0.02:
                column[i] = draw.choice([math.nan, math.inf, -math.inf])
        columns[name] = np.array(column, np.float32)
    for name, share in (("top1", 0.4), ("same_top", 0.9)):
        columns[name] = np.array([draw.random() < share for _ in range(n)])
    return columns


class Case:
    """A model's scores as lists, and their blocks.

    ``a``, ``b``: losses of the model and of its reference.
    """

    def __init__(self) -> None:
        self.index: list[int] = []
        self.position: list[int] = []
        for window in range(WINDOWS):
            for position in range(1, LENGTH):
                self.index.append(FIRST + STRIDE * window + position)
                self.position.append(position)
        self.columns = noisy_columns(len(self.index))
        self.block = [(i - FIRST - 1) * BLOCKS // SPAN for i in self.index]
        self.values = {name: column.tolist() for name, column in self.columns.items()}
        self.a = [-logprob for logprob in self.values["logprob"]]
        self.b = [-logprob for logprob in self.values["ref_logprob"]]

    def paired(self, function: Callable[[float, float], float]) -> list[float]:
        """Return a function of both losses; NaN where one is not finite."""
        values = []
        for x, y in zip(self.a, self.b, strict=True):
            value = math.nan
            if math.isfinite(x) and math.isfinite(y):
                value = function(x, y)
            values.append(value)
        return values

    def where_finite(self, name: str, *losses: list[float]) -> list[float]:
        """Return a score; NaN where one of the losses is not finite."""
        values = []
        for value, *others in zip(self.values[name], *losses, strict=True):
            if not all(math.isfinite(loss) for loss in others):
                value = math.nan
            values.append(float(value))
        return values

    def mean(self, values: list[float]) -> float:
        mean, _, _ = loop_mean(values, self.block)
        return mean

    def check(
        self, average: Average, values: list[float], value: float | None = None, slope: float = 1
    ) -> None:
        """Compare an average with the mean of these values.

        ``value``: of the function of the mean that it is; ``slope``: of this function.
        """
        mean, clustered, independent = loop_mean(values, self.block)
        if value is None:
            value = mean
        assert average.value == pytest.approx(value, rel=1e-9)
        assert average.stderr == pytest.approx(slope * clustered, rel=1e-7)
        assert average.stderr_independent == pytest.approx(slope * independent, rel=1e-7)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(scope="module")
def averages(case: Case) -> dict[str, Average]:
    return averages_of(case.columns, assign_blocks(np.array(case.index)))


@pytest.fixture(scope="module")
def row(case: Case) -> RowStatistics:
    assignment = assign_blocks(np.array(case.index))
    return statistics_of(case.columns, assignment, np.array(case.position, np.int32))


def test_averages_of_a_model_alone(case: Case, averages: dict[str, Average]) -> None:
    ppl = math.exp(case.mean(case.a))
    case.check(averages["ppl"], case.a, ppl, ppl)
    case.check(averages["top1"], case.where_finite("top1", case.a))
    case.check(averages["entropy"], case.values["entropy"])


def test_averages_against_the_reference(case: Case, averages: dict[str, Average]) -> None:
    q = math.exp(case.mean(case.paired(lambda x, y: x)))
    r = math.exp(case.mean(case.paired(lambda x, y: y)))
    log_ratio = case.paired(lambda x, y: x - y)
    case.check(averages["ref_ppl"], case.paired(lambda x, y: y), r, r)
    case.check(averages["ln_ppl_ratio"], log_ratio)
    case.check(averages["ppl_ratio"], log_ratio, q / r, q / r)
    case.check(averages["ppl_difference"], case.paired(lambda x, y: q * x - r * y), q - r)
    case.check(averages["kld"], case.values["kld"])
    case.check(averages["same_top"], case.where_finite("same_top", case.a, case.b))


def test_changes_of_the_probability(case: Case, averages: dict[str, Average]) -> None:
    case.check(averages["delta_p"], case.paired(lambda x, y: math.exp(-x) - math.exp(-y)))
    squares = case.paired(lambda x, y: (math.exp(-x) - math.exp(-y)) ** 2)
    root = math.sqrt(case.mean(squares))
    case.check(averages["delta_p_rms"], squares, root, 0.5 / root)


def test_correlation(case: Case, row: RowStatistics) -> None:
    a = []
    b = []
    for x, y in zip(case.a, case.b, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            a.append(x)
            b.append(y)
    assert row.correlation == pytest.approx(loop_correlation(a, b), rel=1e-9)


def test_percentiles(case: Case, row: RowStatistics) -> None:
    changes = case.paired(lambda x, y: math.exp(-x) - math.exp(-y))
    for percentiles, values in (
        (row.kld_percentiles, case.values["kld"]),
        (row.delta_p_percentiles, changes),
    ):
        finite = [value for value in values if math.isfinite(value)]
        assert percentiles
        for name, percentile in percentiles.items():
            percent = {"min": "0", "max": "100"}.get(name, name)
            expected = loop_percentile(finite, float(percent))
            assert percentile == pytest.approx(expected, rel=1e-9, abs=1e-15), name


def test_sums_by_block(case: Case, row: RowStatistics) -> None:
    assert row.blocks is not None
    for name, values in (
        ("nll", case.a),
        ("kld", case.values["kld"]),
        ("same_top", case.values["same_top"]),
    ):
        sums = [0.0] * BLOCKS
        for value, block in zip(values, case.block, strict=True):
            if math.isfinite(value):
                sums[block] += value
        assert getattr(row.blocks, name) == pytest.approx(sums)
    # Every score has some values that are not finite, so that no row could be paired with this one.
    assert row.blocks.whole == ()
