"""How often the 95 % intervals of ``eval/uncertainty.py`` hold the true mean, on simulated texts.

    PYTHONPATH=. python benchmarks/coverage.py -o results/coverage.json

A text is a row of articles (lognormal lengths, 4,870 tokens in the mean, as WikiText-2's 62), each with a level of its
own, over which the level drifts with memories of 20, 200 and 1,000 tokens; the token's score is drawn around the level:

- ``loss``: exponential, as WikiText-2's losses are (mean 2.95, standard deviation 2.98);
- ``difference`` of two models' losses: Laplace, kurtosis 6 (a W4A16 checkpoint on Opticks: 7);
- ``kld``: lognormal, whose 99.9th percentile is 20 medians (a W8A8 checkpoint on Opticks: 20).

Tokens are scored in the windows of the methods, up to four times each, every time with noise of its own and with the
loss that short contexts add (measured).  ``GROWTH`` compares what the stretches' length does to the error of the
simulated loss and to that of the real one (SmolLM2-135M on WikiText-2's test text, 2048/512).  The errors compared:
``clustered`` by stretches, with Student's t; ``windows``, clustered by window, as if windows did not overlap; and
``independent``, llama.cpp's; both with 1.96.  A share near 95 % has a standard error of 0.5 % (2,000 texts) or 0.3 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval import uncertainty

BLOCK = 64  # tokens that share a level
ARTICLE, SPREAD = 4870, 0.8  # mean tokens, standard deviation of the logarithm
TEXTS = {16_000: 4000, 60_000: 4000, 120_000: 4000, 300_000: 4000, 1_000_000: 2000}
METHODS = {"2048/512": (2048, 512, 1), "2048/2048": (2048, 2048, 1), "llamacpp 512": (512, 512, 257)}
"""Window length, stride, first scored position."""
REAL = {64: 0.0091, 512: 0.0155, 2048: 0.0243, 4096: 0.0305, 8192: 0.0363, 16384: 0.0379}
"""Length of stretches -> clustered standard error of the real mean loss."""
CONTEXT = ((1, 7.38), (2, 3.98), (4, 3.13), (8, 2.24), (16, 1.43), (32, 0.89), (64, 0.58), (128, 0.34), (256, 0.2),
           (512, 0.08), (1024, 0.02), (2048, 0.0))  # fmt: skip
"""Position in the window -> real mean loss there, less that at 1,536 to 2,047."""


@dataclass(frozen=True)
class Score:
    """A score's true ``mean`` with full context, standard deviation of its ``article`` level and of its ``drift``s
    (memory in tokens -> one), of the ``noise`` of one entry, and what a short context adds to it (``context``, times
    ``CONTEXT``); ``draw`` makes tokens [blocks, BLOCK] from levels [blocks] around 0."""

    mean: float
    article: float
    drift: dict[int, float]
    noise: float
    context: float
    draw: Callable[[np.random.Generator, NDArray[np.float32]], NDArray[np.float32]]


def losses(rng: np.random.Generator, level: NDArray[np.float32]) -> NDArray[np.float32]:
    """Exponential around 2.95 + level."""
    return np.asarray(rng.standard_exponential((len(level), BLOCK), np.float32) * (2.95 + level)[:, None])


def differences(rng: np.random.Generator, level: NDArray[np.float32]) -> NDArray[np.float32]:
    """Laplace of standard deviation 0.9 around 0.276 + level."""
    pair = rng.standard_exponential((2, len(level), BLOCK), np.float32)
    return np.asarray(np.float32(0.636) * (pair[0] - pair[1]) + (0.276 + level)[:, None])


def divergences(rng: np.random.Generator, level: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lognormal, sigma 1, around 0.03 (1 + level): KLD of a W8A8 checkpoint."""
    return np.asarray(
        np.exp(rng.standard_normal((len(level), BLOCK), np.float32) - 0.5) * (0.03 * (1 + level))[:, None]
    )


SCORES = {
    "loss": Score(2.95, 0.27, {20: 0.447, 200: 0.283, 1000: 0.141}, 0.47, 1.0, losses),
    "difference": Score(0.276, 0.03, {20: 0.05, 200: 0.03, 1000: 0.015}, 0.1, 0.0, differences),
    "kld": Score(0.03, 0.12, {20: 0.25, 200: 0.12, 1000: 0.06}, 0.005, 0.01, divergences),
}


@dataclass(frozen=True)
class Windows:
    """The entries that a method scores in a text: for each token how often (``times`` [tokens]), for each stretch where
    it begins, its entries, and the context's excess (``starts``, ``entries``, ``excess`` [G]); the windows' first and
    last token + 1 (``first``, ``last`` [W]) and excess (``window_excess`` [W])."""

    times: NDArray[np.float32]
    starts: NDArray[np.int64]
    entries: NDArray[np.int64]
    excess: NDArray[Any]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    window_excess: float


def cut(tokens: int, method: str) -> Windows:
    """The windows of a method over a text, and its stretches."""
    length, stride, first = METHODS[method]
    begins = np.arange(0, tokens - length, stride)
    position = np.tile(np.arange(first, length), len(begins))
    index = np.repeat(begins, length - first) + position
    excess = np.interp(np.log(np.arange(first, length)), *np.array([(math.log(p), e) for p, e in CONTEXT]).T)
    stretch = uncertainty.stretch_of(index)
    starts = np.array([index[stretch == g].min() for g in range(stretch.max() + 1)])
    return Windows(
        times=np.bincount(index, minlength=tokens).astype(np.float32), starts=starts, entries=np.bincount(stretch),
        excess=np.bincount(stretch, np.tile(excess, len(begins))), first=begins + first, last=begins + length,
        window_excess=float(excess.sum()),
    )  # fmt: skip


def levels(rng: np.random.Generator, score: Score, texts: int, blocks: int) -> NDArray[np.float32]:
    """Levels [texts, blocks] of a score, around 0."""
    found = np.zeros((blocks, texts), np.float32)
    for memory, deviation in score.drift.items():
        ratio = memory / BLOCK
        keep = math.exp(-1 / ratio)
        # The mean over a block of what forgets within it varies less.
        deviation *= math.sqrt(2 * ratio * (1 - ratio * (1 - keep)))
        steps = rng.standard_normal((blocks, texts), np.float32) * np.float32(deviation)
        steps[1:] *= np.float32(math.sqrt(1 - keep**2))
        for before, now in itertools.pairwise(steps):
            now += np.float32(keep) * before
        found += steps
    found = np.ascontiguousarray(found.T)
    articles = 3 * blocks * BLOCK // ARTICLE + 50
    for text in found:
        lengths = rng.lognormal(math.log(ARTICLE / BLOCK) - SPREAD**2 / 2, SPREAD, articles).round().astype(int)
        level = rng.standard_normal(articles, np.float32) * np.float32(score.article)
        text += np.repeat(level, np.maximum(lengths, 1))[:blocks]
    return found


def simulate(name: str, tokens: int, texts: int, seed: int = 0) -> Iterator[NDArray[np.float32]]:
    """Texts' scores [tokens], each token's as it would be scored with the full context and without noise."""
    rng = np.random.default_rng([seed, tokens, list(SCORES).index(name)])
    blocks, at_once = -(-tokens // BLOCK), 250
    for done in range(0, texts, at_once):
        for level in levels(rng, SCORES[name], min(at_once, texts - done), blocks):
            yield SCORES[name].draw(rng, level).reshape(-1)[:tokens]


def estimate(
    scores: NDArray[np.float32], windows: Windows, score: Score, rng: np.random.Generator
) -> tuple[float, dict[str, float]]:
    """(error of a text's mean, half widths of its 95 % intervals)."""
    counted = scores * windows.times
    total = np.add.reduceat(counted, windows.starts, dtype=np.float64) + score.context * windows.excess
    total += rng.standard_normal(len(total)) * score.noise * np.sqrt(windows.entries)
    n = int(windows.entries.sum())
    mean = float(total.sum()) / n
    truth = score.mean + score.context * float(windows.excess.sum()) / n
    # What the context's excess adds to the variance of an entry is small beside the token's own, and left out.
    variance = float(counted @ scores) / n - (float(counted.sum(dtype=np.float64)) / n) ** 2 + score.noise**2
    sums = np.concatenate(([0.0], np.cumsum(scores, dtype=np.float64)))
    length = windows.last - windows.first
    by_window = sums[windows.last] - sums[windows.first] + score.context * windows.window_excess
    by_window += rng.standard_normal(len(length)) * score.noise * np.sqrt(length)
    half = {
        "windows": 1.96 * (uncertainty.clustered(by_window, length) or 0),
        "independent": 1.96 * (variance / n) ** 0.5,
    }
    error = uncertainty.clustered(total, windows.entries) or 0
    half["clustered"] = uncertainty.interval(0, error, len(total))[1]
    return mean - truth, half


def coverage(name: str, tokens: int, texts: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Method -> share (%) of texts whose interval holds the true mean by each error, the true error, the mean width."""
    score, geometry = SCORES[name], {method: cut(tokens, method) for method in METHODS}
    off: dict[str, list[float]] = {method: [] for method in METHODS}
    half: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    rng = np.random.default_rng([seed, 1])
    for scores in simulate(name, tokens, texts, seed):
        for method, windows in geometry.items():
            error, widths = estimate(scores, windows, score, rng)
            off[method].append(error)
            half[method].append(widths)
    found = {}
    for method in METHODS:
        errors = np.abs(off[method])
        found[method] = {"stretches": len(geometry[method].starts), "true_error": float(np.std(off[method]))}
        for kind in ("clustered", "windows", "independent"):
            reach = np.array([widths[kind] for widths in half[method]])
            found[method][kind] = round(100 * float(np.mean(errors <= reach)), 2)
        found[method]["half_width"] = float(np.mean([widths["clustered"] for widths in half[method]]))
    return found


def growth(tokens: int = 300_000, texts: int = 400) -> dict[int, float]:
    """Length of stretches -> clustered standard error (root mean square) of the simulated mean loss at 2048/512."""
    windows, lengths = cut(tokens, "2048/512"), list(REAL)
    squares = np.zeros(len(lengths))
    for scores in simulate("loss", tokens, texts, seed=1):
        counted = scores * windows.times
        for i, length in enumerate(lengths):
            starts = np.arange(0, tokens, length)
            error = uncertainty.clustered(
                np.add.reduceat(counted, starts, dtype=np.float64), np.add.reduceat(windows.times, starts)
            )
            squares[i] += (error or 0) ** 2
    return dict(zip(lengths, np.sqrt(squares / texts).round(4).tolist(), strict=True))


def markdown(found: dict[str, Any]) -> str:
    """The results as a page."""
    lines = [
        "# Coverage of 95 % intervals", "", "Share (%) of simulated texts whose interval holds the true mean "
        "(`benchmarks/coverage.py`).", "",
        "| score | tokens | windows | stretches | clustered | by window | independent |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in found["coverage"]:
        shown = " | ".join(f"{row[kind]:.1f}" for kind in ("clustered", "windows", "independent"))
        lines.append(f"| {row['score']} | {row['tokens']:,} | {row['method']} | {row['stretches']} | {shown} |")
    lines += ["", "Standard error of the mean loss, 300,000 tokens, by length of the stretches:", "",
              "| tokens | real | simulated |", "|---:|---:|---:|"]  # fmt: skip
    lines += [f"| {int(n):,} | {REAL[int(n)]:.4f} | {error:.4f} |" for n, error in found["growth"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON; a page with the same name and .md goes beside it")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the texts, for a quick look")
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    for name in SCORES:
        for tokens, full in TEXTS.items():
            texts = int(full * options.fraction)
            for method, cell in coverage(name, tokens, texts).items():
                rows.append({"score": name, "tokens": tokens, "method": method, "texts": texts, **cell})
                print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    found = {
        "versions": {"python": platform.python_version(), "numpy": np.__version__}, "seed": 0,
        "rule": {"fewest": uncertainty.FEWEST_STRETCHES, "most": uncertainty.MOST_STRETCHES, "unit": uncertainty.UNIT},
        "growth": growth(texts=int(400 * options.fraction)), "coverage": rows,
    }  # fmt: skip
    print(found["growth"])
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
