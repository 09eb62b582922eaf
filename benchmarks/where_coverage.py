"""Measure how often 95 % intervals of the shares of parts contain the true share.

    PYTHONPATH=. python benchmarks/where_coverage.py -o results/where_coverage.json

A quantized model is simulated at every token of windows that are spread over a text.  Each part
adds normal noise to ``DIRECTIONS`` numbers of the prediction, and the token's KLD is half the
square of the sum of all noises, as a small KLD is in the Fisher metric.  The noise has a level for
each article of the text (lognormal lengths with a mean of 4,870 tokens, as in WikiText-2), times a
level that drifts within the article (autocorrelation time 200 tokens), times one of the token: the
KLDs of tokens have heavy tails and are autocorrelated.  The shares of the parts differ by a factor
of up to 100, and some are 0.  In each draw, a new text is made, and its windows are scored in the
stages of ``eval/where/shares.py``, with and without early stop.

Counted are the intervals that contain the mean share of all texts, over all parts, over parts that
stopped, and over those that did not; and the trials that are scored with early stop.
``independent_windows`` are the intervals of Student's t over the means of windows, without early
stop, for comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.eval.stats.uncertainty import interval
from compare_q.eval.where import shares

Array = NDArray[np.float64]
DIRECTIONS = 2
"""Numbers of a token's prediction that a part changes: few, so that single tokens differ much."""
ARTICLE = (4870.0, 0.8)
"""Mean tokens of an article, standard deviation of the logarithm."""
DRIFT_TOKENS = 200.0
CELL = 32
"""Tokens that share a level of the drift."""


@dataclass(frozen=True)
class Case:
    """A simulated comparison.

    Attributes:
        windows: number of windows.
        length: scored tokens of a window.
        text: tokens of the text over which the windows are spread.
        fractions: variance of each part's noise, up to a factor.
        article, drift, token: standard deviations of the logarithms of the three levels.
    """

    windows: int
    length: int
    text: int
    fractions: tuple[float, ...]
    article: float = 0.4
    drift: float = 0.4
    token: float = 1.0


def geometric(count: int, ratio: float, zeros: int) -> tuple[float, ...]:
    """Return shares that fall from ``ratio`` to 1, and some of 0."""
    return (*np.geomspace(ratio, 1.0, count).tolist(), *[0.0] * zeros)


CASES = {
    "18 layers": Case(32, 1024, 300_000, geometric(15, 100.0, 3)),
    "7 kinds": Case(32, 1024, 300_000, geometric(7, 30.0, 0)),
    "heavier tails": Case(32, 1024, 300_000, geometric(8, 100.0, 2), token=1.5),
    "articles differ more": Case(32, 1024, 300_000, geometric(8, 100.0, 2), article=0.7),
    "16 short windows": Case(16, 512, 60_000, geometric(8, 100.0, 2)),
    "32 neighbouring windows": Case(32, 1024, 32 * 1024, geometric(8, 100.0, 2)),
    "64 short windows": Case(64, 512, 60_000, geometric(8, 100.0, 2)),
    "8 windows": Case(8, 1024, 300_000, geometric(8, 100.0, 2)),
}


def log_levels(rng: np.random.Generator, case: Case) -> Array:
    """Return the logarithms of the levels [windows, length] of a new text."""
    mean, deviation = ARTICLE
    n_articles = math.ceil(3 * case.text / mean) + 10
    lengths = rng.lognormal(math.log(mean) - deviation**2 / 2, deviation, n_articles)
    ends = np.cumsum(lengths)
    levels = case.article * rng.standard_normal(n_articles + 1)
    starts = np.linspace(0, case.text - case.length, case.windows)
    positions = starts[:, None] + np.arange(case.length)
    of_articles = levels[np.searchsorted(ends, positions)]
    return np.asarray(of_articles + case.drift * drift(rng, case) + token_levels(rng, case))


def drift(rng: np.random.Generator, case: Case) -> Array:
    """Return a normal process with variance 1 [windows, length], windows independent."""
    n_cells = math.ceil(case.length / CELL)
    memory = math.exp(-CELL / DRIFT_TOKENS)
    cells = np.empty((case.windows, n_cells))
    cells[:, 0] = rng.standard_normal(case.windows)
    for cell in range(1, n_cells):
        noise = math.sqrt(1 - memory**2) * rng.standard_normal(case.windows)
        cells[:, cell] = memory * cells[:, cell - 1] + noise
    return np.repeat(cells, CELL, axis=1)[:, : case.length]


def token_levels(rng: np.random.Generator, case: Case) -> Array:
    """Return the logarithms of the tokens' own levels [windows, length]."""
    return np.asarray(case.token * rng.standard_normal((case.windows, case.length)))


def mean_level(case: Case) -> float:
    """Return the expectation of the level."""
    return math.exp((case.article**2 + case.drift**2 + case.token**2) / 2)


def scored(rng: np.random.Generator, case: Case) -> tuple[Array, Array]:
    """Return (the sums of the share of each part in each window [parts, windows], of the KLD)."""
    roots = np.exp(log_levels(rng, case) / 2).astype(np.float32)
    noises = []
    for fraction in case.fractions:
        normal = rng.standard_normal((*roots.shape, DIRECTIONS), np.float32)
        noises.append(math.sqrt(fraction) * roots[..., None] * normal)
    total = sum(noises, np.zeros((*roots.shape, DIRECTIONS), np.float32))
    whole = kld_sums(total)
    of_parts = np.array([whole - kld_sums(total - noise) for noise in noises])
    return of_parts, whole


def kld_sums(noise: NDArray[np.float32]) -> Array:
    """Return the sums of the KLD over the tokens of each window [windows], from its noise."""
    return np.asarray(np.square(noise).sum(axis=(1, 2), dtype=np.float64) / 2)


@dataclass
class Counts:
    """Intervals that contain the true share, and all intervals."""

    right: int = 0
    all: int = 0

    def add(self, share: shares.Estimate, truth: float) -> None:
        """Count an interval."""
        assert share.low is not None
        assert share.high is not None
        self.right += share.low <= truth <= share.high
        self.all += 1

    @property
    def coverage(self) -> float | None:
        """The fraction of right intervals; None without intervals."""
        if not self.all:
            return None
        return self.right / self.all


@dataclass
class Tally:
    """The counts of all draws of a case."""

    without_stop: Counts = field(default_factory=Counts)
    with_stop: Counts = field(default_factory=Counts)
    independent: Counts = field(default_factory=Counts)
    stopped: Counts = field(default_factory=Counts)
    not_stopped: Counts = field(default_factory=Counts)
    trials: int = 0
    trials_without_stop: int = 0


def independent(values: Array, length: int) -> shares.Estimate:
    """Return the mean of a share, with an error as if windows [n] were independent."""
    means = values / length
    n = len(means)
    stderr = float(means.std(ddof=1)) / math.sqrt(n)
    low, high = interval(float(means.mean()), stderr, n - 1)
    return shares.Estimate(float(means.mean()), stderr, low, high)


def stopped_after(of_parts: Array, whole: Array, tokens: Array) -> dict[int, list[int]]:
    """Return part -> the windows in which it is scored, with early stop."""
    n_windows = of_parts.shape[1]
    running = list(range(len(of_parts)))
    windows: list[int] = []
    windows_of_part: dict[int, list[int]] = {}
    for stage in shares.stages(n_windows):
        windows = sorted([*windows, *stage])
        for part in running:
            windows_of_part[part] = windows
        sums = {str(part): of_parts[part, windows] for part in running}
        small = shares.small_parts(sums, whole[windows])
        running = [part for part in running if str(part) not in small]
    return windows_of_part


def measured(n_draws: int, case: Case) -> dict[str, Any]:
    """Return the coverages in ``n_draws`` texts."""
    rng = np.random.default_rng(0)
    tally = Tally()
    tokens = np.full(case.windows, float(case.length))
    truths = DIRECTIONS / 2 * mean_level(case) * np.array(case.fractions)
    for _ in range(n_draws):
        of_parts, whole = scored(rng, case)
        windows_of_part = stopped_after(of_parts, whole, tokens)
        for part, truth in enumerate(truths.tolist()):
            tally.without_stop.add(shares.estimate(of_parts[part], tokens, case.text), truth)
            tally.independent.add(independent(of_parts[part], case.length), truth)
            windows = windows_of_part[part]
            sums = of_parts[part, windows]
            share = shares.estimate(sums, tokens[windows], case.text)
            tally.with_stop.add(share, truth)
            if len(windows) < case.windows:
                tally.stopped.add(share, truth)
            else:
                tally.not_stopped.add(share, truth)
            tally.trials += len(windows)
            tally.trials_without_stop += case.windows
    return {
        "parts": len(case.fractions),
        "windows": case.windows,
        "without_stop": tally.without_stop.coverage,
        "independent_windows": tally.independent.coverage,
        "with_stop": tally.with_stop.coverage,
        "parts_that_stopped": tally.stopped.coverage,
        "other_parts": tally.not_stopped.coverage,
        "stopped": tally.stopped.all / tally.with_stop.all,
        "trials_scored": tally.trials / tally.trials_without_stop,
    }


def rows(n_draws: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, coverages) of each case."""
    for name, case in CASES.items():
        yield name, measured(n_draws, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", "--draws", type=int, default=400)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"draws": arguments.draws, "python": platform.python_version()}
    for name, row in rows(arguments.draws):
        results[name] = row
        print(name, json.dumps(row), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
