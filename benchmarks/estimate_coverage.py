"""Measure how often 95 % intervals of estimated KLDs contain the exact KLD, and that bounds hold.

    PYTHONPATH=. python benchmarks/estimate_coverage.py -o results/estimate_coverage.json

The reference's distribution p and the tested distribution q are simulated at every token of a text,
over ``VOCABULARY`` tokens: q's logits are p's plus normal noise, whose size has a level for each
article, so that neighbouring tokens have similar KLDs.  ``peaked`` texts have one token with nearly
all of the probability at half of the positions.  In each of the draws, a new text is made, and

- ``sampled``: its tokens are drawn from p; q is known at its ``TOP`` most probable tokens and at
  the drawn token;
- ``drawn``: q is known at the ``TOP`` most probable tokens of p, and at ``DRAWN`` drawn from the
  rest;
- ``bound``: q is known at its ``TOP`` most probable tokens, rounded to four decimals.

Counted are the draws in which the interval of a row (its KLD, its error and Student's t) contains
the exact KLD of the same text, and the mean of the exact KLDs of all texts, to which the error of
a row refers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.scoring import partial_kld
from compare_q.eval.stats.uncertainty import assign_blocks, interval, mean_with_errors, n_waves

Array = NDArray[np.float64]
VOCABULARY = 256
TOKENS = 8192
ARTICLE = 1024
"""Tokens that share a level."""
TOP = 20
DRAWN = 4
DECIMALS = 4
NOISES = {"fine": 0.25, "coarse": 0.8}
"""Name -> standard deviation of the noise of q's logits."""


@dataclass(frozen=True)
class SimulatedText:
    """Log-probabilities [TOKENS, VOCABULARY] of both sides."""

    reference: Array
    tested: Array

    @property
    def kld(self) -> Array:
        """The exact KLD [TOKENS], nats."""
        terms: Array = partial_kld.terms(self.reference, self.tested)
        return np.asarray(terms.sum(axis=1))


def simulated(rng: np.random.Generator, noise: float, *, is_peaked: bool) -> SimulatedText:
    """Return a new text."""
    logits = 2.5 * rng.standard_normal((TOKENS, VOCABULARY))
    if is_peaked:
        logits[::2, 0] += 25.0
    levels = noise * rng.lognormal(0.0, 0.3, TOKENS // ARTICLE).repeat(ARTICLE)
    noises = levels[:, None] * rng.standard_normal((TOKENS, VOCABULARY))
    return SimulatedText(log_softmax(logits), log_softmax(logits + noises))


def log_softmax(logits: Array) -> Array:
    """Return the log-probabilities of logits [n, V]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def most_probable(logprobs: Array) -> NDArray[np.intp]:
    """Return the ``TOP`` most probable tokens [n, TOP]."""
    return np.argsort(-logprobs, axis=1)[:, :TOP]


def draws(rng: np.random.Generator, logprobs: Array, count: int) -> NDArray[np.intp]:
    """Return ``count`` tokens [n, count], drawn from each row of log-probabilities."""
    noise = rng.gumbel(size=(count, *logprobs.shape))
    return np.asarray((logprobs + noise).argmax(axis=2).T)


def by_sampling(rng: np.random.Generator, text: SimulatedText) -> Array:
    """Return the estimates [TOKENS] on tokens that were drawn from the reference."""
    known = most_probable(text.tested)
    targets = draws(rng, text.reference, 1)
    return partial_kld.estimate_on_samples(
        np.take_along_axis(text.reference, known, 1),
        np.take_along_axis(text.tested, known, 1),
        np.take_along_axis(text.reference, targets, 1)[:, 0],
        np.take_along_axis(text.tested, targets, 1)[:, 0],
        (known == targets).any(axis=1),
    )


def by_drawn_ids(rng: np.random.Generator, text: SimulatedText) -> Array:
    """Return the estimates [TOKENS] from ids that were chosen with the reference."""
    known = most_probable(text.reference)
    rest = text.reference.copy()
    np.put_along_axis(rest, known, -np.inf, 1)
    drawn = draws(rng, rest, DRAWN)
    return partial_kld.estimate_by_draws(
        np.take_along_axis(text.reference, known, 1),
        np.take_along_axis(text.tested, known, 1),
        np.take_along_axis(text.reference, drawn, 1),
        np.take_along_axis(text.tested, drawn, 1),
    )


def bounds(text: SimulatedText) -> Array:
    """Return the bounds [TOKENS] from rounded numbers."""
    known = most_probable(text.tested)
    sent = np.take_along_axis(text.tested, known, 1).round(DECIMALS)
    errors = np.full(sent.shape, 0.5 * 10.0**-DECIMALS)
    return partial_kld.bound(np.take_along_axis(text.reference, known, 1), sent, errors)


def interval_of(values: Array) -> tuple[float, float, float]:
    """Return (mean, lower end, upper end) of values, as a row has them."""
    assignment = assign_blocks(np.arange(TOKENS))
    mean = mean_with_errors(values, None, assignment)
    assert mean.value is not None
    assert mean.stderr is not None
    n_blocks = int(assignment.block.max()) + 1
    waves = n_waves(n_blocks, assignment.length)
    low, high = interval(mean.value, mean.stderr, waves)
    return mean.value, low, high


def measured(n_draws: int, noise: float, *, is_peaked: bool) -> dict[str, Any]:
    """Return the shares of intervals that hold, in ``n_draws`` texts."""
    rng = np.random.default_rng(0)
    exact: list[float] = []
    estimates: dict[str, list[tuple[float, float, float]]] = {"sampled": [], "drawn": []}
    shares_of_bounds: list[float] = []
    n_wrong = 0
    for _ in range(n_draws):
        text = simulated(rng, noise, is_peaked=is_peaked)
        kld = text.kld
        exact.append(float(kld.mean()))
        estimates["sampled"].append(interval_of(by_sampling(rng, text)))
        estimates["drawn"].append(interval_of(by_drawn_ids(rng, text)))
        lower = bounds(text)
        n_wrong += int((lower > kld + partial_kld.SUM_ERROR).sum())
        shares_of_bounds.append(float(lower.mean() / kld.mean()))
    results: dict[str, Any] = {
        "kld": float(np.mean(exact)),
        "bound": {"share": float(np.mean(shares_of_bounds)), "tokens_above_the_kld": n_wrong},
    }
    for name, rows in estimates.items():
        results[name] = shares(rows, exact)
    return results


def shares(rows: list[tuple[float, float, float]], exact: list[float]) -> dict[str, float]:
    """Return the bias of estimates, in its standard errors, and the shares of right intervals."""
    ratios = np.array([value for value, _, _ in rows]) - np.array(exact)
    population = float(np.mean(exact))
    n_of_text = 0
    n_of_population = 0
    for (_, low, high), of_text in zip(rows, exact, strict=True):
        n_of_text += low <= of_text <= high
        n_of_population += low <= population <= high
    bias = float(ratios.mean() / (ratios.std(ddof=1) / math.sqrt(len(ratios))))
    return {
        "mean": float(np.mean([value for value, _, _ in rows])),
        "bias_in_standard_errors": bias,
        "spread_around_the_exact": float(ratios.std(ddof=1)),
        "holds_for_the_text": n_of_text / len(rows),
        "holds_for_all_texts": n_of_population / len(rows),
    }


def cases() -> Iterator[tuple[str, float, bool]]:
    """Yield (name, noise, whether texts are peaked)."""
    for name, noise in NOISES.items():
        yield name, noise, False
        yield f"{name}, peaked", noise, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", "--draws", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, noise, is_peaked in cases():
        results[name] = measured(arguments.draws, noise, is_peaked=is_peaked)
        print(name, json.dumps(results[name], indent=1), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
