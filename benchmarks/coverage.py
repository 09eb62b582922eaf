"""Measure how often 95 % intervals of ``eval/stats/uncertainty.py`` contain the true mean.

The texts are simulated.

    PYTHONPATH=. python benchmarks/coverage.py -o results/coverage.json

A text consists of articles with lognormal lengths (``ARTICLES``: a mean of 4,870 tokens, as in
WikiText-2, longer articles, and heavier tails).  Each article has its own level.  Within the
article the level drifts, with autocorrelation times of 20, 200 and 1,000 tokens.  The token's score
is drawn around the level:

- ``loss``: exponential, as WikiText-2's losses are (mean 2.95, standard deviation 2.98);
- ``difference`` of two models' losses: Laplace, kurtosis 6 (a W4A16 checkpoint on Opticks: 7);
- ``kld``: lognormal, whose 99.9th percentile is 20 medians (a W8A8 checkpoint on Opticks: 20).

Tokens are scored in the windows of the methods, up to four times each.  Every score has its own
noise, plus the loss that short contexts add (measured).  Three errors are compared: ``blocks`` is
compare_q's error with Student's t; ``windows`` is clustered by window, as if windows did not
overlap; ``independent`` is llama.cpp's.  The last two use 1.96.  A share near 95 % has a standard
error of 0.5 % (2,000 texts) or 0.7 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import told_apart
from compare_q.eval.stats import uncertainty

CELL = 64
"""Tokens that share a level."""
ARTICLES = ((4870, 0.8), (4600, 1.5), (13_800, 0.8), (13_800, 1.5), (20_000, 0.8))
"""Mean tokens, standard deviation of the logarithm."""
WIKITEXT2 = ARTICLES[0]
TEXTS = {4000: 2000, 16_000: 2000, 60_000: 2000, 120_000: 2000, 300_000: 2000, 1_000_000: 1000}
METHODS = {
    "2048/512": (2048, 512, 1),
    "2048/2048": (2048, 2048, 1),
    # llama-perplexity scores only the second half of a window.
    "llamacpp 512": (512, 512, 257),
}
"""Window length, stride, first scored position."""
RULE = {
    "fewest_blocks": uncertainty.FEWEST_BLOCKS,
    "most_blocks": uncertainty.MOST_BLOCKS,
    "least_block": uncertainty.SMALLEST_BLOCK,
    "fewest_waves": uncertainty.FEWEST_WAVES,
    "most_waves": uncertainty.MOST_WAVES,
    "unit": uncertainty.TOKENS_PER_SQUARED_WAVE,
    "memory": uncertainty.AUTOCORRELATION_TOKENS,
    "short": uncertainty.SHORT,
}
"""The constants of the errors that the results are of."""
TEXTS_AT_ONCE = 250
KINDS = ("blocks", "windows", "independent")
CONTEXT = (
    (1, 7.38),
    (2, 3.98),
    (4, 3.13),
    (8, 2.24),
    (16, 1.43),
    (32, 0.89),
    (64, 0.58),
    (128, 0.34),
    (256, 0.2),
    (512, 0.08),
    (1024, 0.02),
    (2048, 0.0),
)
"""Position in the window -> real mean loss there, minus the mean loss at 1,536 to 2,047."""


@dataclass(frozen=True)
class Score:
    """A score of tokens, as it is simulated.

    ``mean``: the true one, with full context.  ``article``, ``drift`` (autocorrelation time in
    tokens -> deviation), ``noise``: standard deviations of the article's level, of its drifts, and
    of one entry's noise.  ``context``: a short context adds this times ``CONTEXT``.  ``draw`` makes
    tokens [cells, CELL] from levels [cells] around 0.
    """

    mean: float
    article: float
    drift: dict[int, float]
    noise: float
    context: float
    draw: Callable[[np.random.Generator, NDArray[np.float32]], NDArray[np.float32]]


def losses(rng: np.random.Generator, level: NDArray[np.float32]) -> NDArray[np.float32]:
    """Draw exponential scores around 2.95 + level."""
    draws = rng.standard_exponential((len(level), CELL), np.float32)
    return np.asarray(draws * (2.95 + level)[:, None])


def differences(rng: np.random.Generator, level: NDArray[np.float32]) -> NDArray[np.float32]:
    """Draw Laplace scores of standard deviation 0.9 around 0.276 + level."""
    pair = rng.standard_exponential((2, len(level), CELL), np.float32)
    # A Laplace's standard deviation is sqrt(2) times its scale: 0.9 = 1.414 * 0.636.
    return np.asarray(np.float32(0.636) * (pair[0] - pair[1]) + (0.276 + level)[:, None])


def divergences(rng: np.random.Generator, level: NDArray[np.float32]) -> NDArray[np.float32]:
    """Draw lognormal scores, sigma 1, around 0.03 (1 + level): KLD of a W8A8 checkpoint."""
    draws = rng.standard_normal((len(level), CELL), np.float32)
    # exp(draws - 0.5) has a mean of 1.
    return np.asarray(np.exp(draws - 0.5) * (0.03 * (1 + level))[:, None])


SCORES = {
    "loss": Score(2.95, 0.27, {20: 0.447, 200: 0.283, 1000: 0.141}, 0.47, 1.0, losses),
    "difference": Score(0.276, 0.03, {20: 0.05, 200: 0.03, 1000: 0.015}, 0.1, 0.0, differences),
    "kld": Score(0.03, 0.12, {20: 0.25, 200: 0.12, 1000: 0.06}, 0.005, 0.01, divergences),
}


@dataclass(frozen=True)
class Windows:
    """The entries that a method scores in a text.

    ``times`` [tokens]: how often each token is scored.  ``starts``, ``entries``, ``excess`` [G]:
    beginning, entries, and excess by short contexts of each block.  ``first``, ``last``,
    ``window_excess`` [W]: first token, last token + 1, and excess of each window.  ``span``: tokens
    from first to last.
    """

    times: NDArray[np.float32]
    starts: NDArray[np.int64]
    entries: NDArray[np.int64]
    excess: NDArray[Any]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    window_excess: float
    span: int


def windows_of_method(tokens: int, method: str) -> Windows:
    """Return the windows of a method over a text, and its blocks."""
    length, stride, first = METHODS[method]
    begins = np.arange(0, tokens - length, stride)
    position = np.tile(np.arange(first, length), len(begins))
    index = np.repeat(begins, length - first) + position
    log_positions = []
    added_losses = []
    for context, added_loss in CONTEXT:
        log_positions.append(math.log(context))
        added_losses.append(added_loss)
    excess = np.interp(np.log(np.arange(first, length)), log_positions, added_losses)
    assignment = uncertainty.assign_blocks(index)
    # Numbered without the blocks that have no entries.
    _, block = np.unique(assignment.block, return_inverse=True)
    starts = [index[block == number].min() for number in range(block.max() + 1)]
    return Windows(
        times=np.bincount(index, minlength=tokens).astype(np.float32),
        starts=np.array(starts),
        entries=np.bincount(block),
        excess=np.bincount(block, np.tile(excess, len(begins))),
        first=begins + first,
        last=begins + length,
        window_excess=float(excess.sum()),
        span=assignment.length,
    )


def levels(
    rng: np.random.Generator, score: Score, texts: int, cells: int, articles: tuple[float, float]
) -> NDArray[np.float32]:
    """Return levels [texts, cells] of a score, around 0; ``articles``: one of ``ARTICLES``."""
    drifts = np.zeros((cells, texts), np.float32)
    for memory, deviation in score.drift.items():
        ratio = memory / CELL
        keep = math.exp(-1 / ratio)
        # If the autocorrelation time is shorter than a cell, the mean over the cell varies less.
        deviation *= math.sqrt(2 * ratio * (1 - ratio * (1 - keep)))
        steps = rng.standard_normal((cells, texts), np.float32) * np.float32(deviation)
        # The variance is then the same in every cell.
        steps[1:] *= np.float32(math.sqrt(1 - keep**2))
        for before, now in itertools.pairwise(steps):
            now += np.float32(keep) * before
        drifts += steps
    levels_of_texts = np.ascontiguousarray(drifts.T)
    mean, spread = articles
    # Three times as many articles as fill the text on average.
    count = 3 * cells * CELL // int(mean) + 200
    for text in levels_of_texts:
        # A lognormal with this mu has the mean ``mean / CELL``.
        mu = math.log(mean / CELL) - spread**2 / 2
        lengths = rng.lognormal(mu, spread, count).round().astype(int)
        level = rng.standard_normal(count, np.float32) * np.float32(score.article)
        text += np.repeat(level, np.maximum(lengths, 1))[:cells]
    return levels_of_texts


def simulate(
    name: str, tokens: int, texts: int, seed: int = 0, articles: tuple[float, float] = WIKITEXT2
) -> Iterator[NDArray[np.float32]]:
    """Yield each text's scores [tokens], with the full context for each token and without noise."""
    mean, spread = articles
    # A row's texts do not depend on which other rows run.
    seeds = [seed, tokens, list(SCORES).index(name), int(10 * mean), int(10 * spread)]
    rng = np.random.default_rng(seeds)
    cells = -(-tokens // CELL)
    for done in range(0, texts, TEXTS_AT_ONCE):
        for level in levels(rng, SCORES[name], min(TEXTS_AT_ONCE, texts - done), cells, articles):
            yield SCORES[name].draw(rng, level).reshape(-1)[:tokens]


def by_cluster(total: NDArray[Any], tokens: NDArray[Any]) -> float | None:
    """Return the clustered error of Liang and Zeger of sum(total) / sum(tokens).

    For independent clusters [G]; None for a single one.
    """
    deviations = total - total.sum() / tokens.sum() * tokens
    groups = len(deviations)
    if groups < 2:
        return None
    square = groups / (groups - 1) * float(deviations @ deviations)
    return math.sqrt(square) / float(tokens.sum())


def errors_of_text(
    scores: NDArray[np.float32], windows: Windows, score: Score, rng: np.random.Generator
) -> tuple[float, dict[str, float]]:
    """Return (error of a text's mean, half widths of its 95 % intervals)."""
    counted = scores * windows.times
    total = np.add.reduceat(counted, windows.starts, dtype=np.float64)
    total = total + score.context * windows.excess
    total += rng.standard_normal(len(total)) * score.noise * np.sqrt(windows.entries)
    n = int(windows.entries.sum())
    mean = float(total.sum()) / n
    truth = score.mean + score.context * float(windows.excess.sum()) / n
    # The excess of short contexts is left out: compared with the token's own variance, it adds
    # little to an entry's.
    mean_square = float(counted @ scores) / n
    squared_mean = (float(counted.sum(dtype=np.float64)) / n) ** 2
    variance = mean_square - squared_mean + score.noise**2
    sums = np.concatenate(([0.0], np.cumsum(scores, dtype=np.float64)))
    length = windows.last - windows.first
    by_window = sums[windows.last] - sums[windows.first] + score.context * windows.window_excess
    by_window += rng.standard_normal(len(length)) * score.noise * np.sqrt(length)
    error = uncertainty.low_frequency_error(total, windows.entries, windows.span) or 0
    freedom = uncertainty.n_waves(len(total), windows.span)
    _, half_width = uncertainty.interval(0, error, freedom)
    half_widths = {
        "windows": 1.96 * (by_cluster(by_window, length) or 0),
        "independent": 1.96 * (variance / n) ** 0.5,
        "blocks": half_width,
    }
    return mean - truth, half_widths


def coverage(
    name: str,
    tokens: int,
    texts: int,
    seed: int = 0,
    articles: tuple[float, float] = WIKITEXT2,
    methods: Sequence[str] = tuple(METHODS),
) -> dict[str, dict[str, float]]:
    """Return by method the share (%) of texts whose interval holds the true mean by each error.

    With the true error and the mean half width of the intervals from blocks.
    """
    score = SCORES[name]
    windows_of_methods = {method: windows_of_method(tokens, method) for method in methods}
    errors: dict[str, list[float]] = {method: [] for method in methods}
    half_widths: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    # Not the generator of the texts, which stay the same for any list of methods.
    rng = np.random.default_rng([seed, 1])
    for scores in simulate(name, tokens, texts, seed, articles):
        for method, windows in windows_of_methods.items():
            error, half_widths_of_text = errors_of_text(scores, windows, score, rng)
            errors[method].append(error)
            half_widths[method].append(half_widths_of_text)
    results = {}
    for method in methods:
        distances = np.abs(errors[method])
        result = {"true_error": float(np.std(errors[method]))}
        for kind in KINDS:
            reach = np.array([widths[kind] for widths in half_widths[method]])
            result[kind] = round(100 * float(np.mean(distances <= reach)), 2)
        result["half_width"] = float(np.mean([widths["blocks"] for widths in half_widths[method]]))
        results[method] = result
    return results


def coverage_rows(fraction: float) -> Iterator[dict[str, Any]]:
    """Yield every row of the results.

    WikiText-2's articles by all methods, longer articles by the first method.
    """
    for articles, name in itertools.product(ARTICLES, SCORES):
        methods = list(METHODS)
        lengths = list(TEXTS)
        if articles != WIKITEXT2:
            methods = methods[:1]
            lengths = [tokens for tokens in lengths if tokens >= 60_000]
        mean, spread = articles
        # The mean length of the article that a token is in.
        weighted = mean * math.exp(spread**2)
        for tokens in lengths:
            texts = int(TEXTS[tokens] * fraction)
            results = coverage(name, tokens, texts, articles=articles, methods=methods)
            for method, result in results.items():
                yield {
                    "articles": articles,
                    "score": name,
                    "tokens": tokens,
                    "method": method,
                    "texts": texts,
                    "within_the_note": uncertainty.longest_documents(tokens) >= weighted,
                    **result,
                }


def results_page(results: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    coverages = []
    for row in results["coverage"]:
        line = {
            "articles": "{:,}, {}".format(*row["articles"]),
            "score": row["score"],
            "tokens": f"{row['tokens']:,}",
            "windows": row["method"],
        }
        for kind in KINDS:
            line[kind] = f"{row[kind]:.1f}"
        line["said"] = "yes"
        if row["within_the_note"]:
            line["said"] = ""
        coverages.append(line)
    differences = []
    for tokens, shares in results["told_apart"].items():
        line = {"tokens": f"{int(tokens):,}"}
        for times, share in zip(told_apart.KLD_RATIOS, shares, strict=True):
            line[str(times)] = share
        differences.append(line)
    stars = []
    for models, share in results["starred"].items():
        stars.append({"models": models, "starred": share})
    parts = [
        "# Coverage of 95 % intervals",
        "Share (%) of simulated texts whose interval holds the true mean "
        "(`benchmarks/coverage.py`): from blocks of the text as the tables do it, by window, and "
        "with independent tokens.  Articles: mean tokens, standard deviation of the logarithm.  "
        "Said: the footnote says that the errors are for shorter documents.",
        table(coverages),
        "Share (%) of simulated texts in which a KLD that is so many times another is told apart "
        "from it (`benchmarks/told_apart.py`):",
        table(differences),
        f"Share (%) of simulated texts of {told_apart.STARRED_OF:,} tokens in which a model that "
        "is as good as all others of the table has a star:",
        table(stars),
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows that have the same keys as a Markdown table."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([str(value) for value in row.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="JSON; a .md page of the same name is put next to it"
    )
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="of the texts, for a quick look"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    rows = []
    for row in coverage_rows(options.fraction):
        rows.append(row)
        print(row, f"{time.perf_counter() - began:.0f} s", flush=True)
    starred = {}
    for models in told_apart.MODELS:
        texts = int(1000 * options.fraction)
        starred[models] = told_apart.share_starred(models, told_apart.STARRED_OF, texts)
    differences = {}
    for tokens in told_apart.LENGTHS:
        differences[tokens] = told_apart.shares_told_apart(tokens, int(2000 * options.fraction))
    results = {
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "seed": 0,
        "rule": RULE,
        "coverage": rows,
        "starred": starred,
        "told_apart": differences,
    }
    print(differences)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(results_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
