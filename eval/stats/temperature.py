"""Fit the temperature at which the scores of one model are closest to those of another model.

A model's log-probabilities at temperature T are ``x / T - log Z(1 / T)``, where x are those at
temperature 1, and ``Z(b)`` is the sum of ``p ** b`` over the vocabulary.  ``Z`` is not stored; it
is estimated from the entropy and the highest probability of each position, as if all other tokens
were equally probable (``log_normalizer``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .uncertainty import Array, Columns

MOST_FITTED_TOKENS = 50_000
"""Number of tokens, spread over all, that a fit uses."""
FEWEST_FITTED_TOKENS = 200
INVERSE_TEMPERATURES = np.geomspace(1 / 4, 4, 241)
"""Those that are tried, 1.2 % apart."""
CLEAR = 0.5
"""Smallest explained share of a temperature that a note reports.

Measured with six windows of 256 tokens of SmolLM2-135M, in float32 as the reference.  Its logits
divided by 0.7 give 0.69, which explains 0.98; divided by 1.5 they give 1.55, which explains 0.83.
For its quantizations in ``vllm serve``, the best temperature explains 0.05 (W8A8) and 0.03 (W4A16),
for bfloat16 nothing.
"""
SMALLEST_DISTANCE = 0.04
"""Smallest distance from 1 of a temperature that a note reports: below it, the estimate's own error
is as large."""
NEEDS = ("logprob", "entropy", "top1_logprob")


class Fit(NamedTuple):
    """The best temperature.

    ``explained``: share of the squared differences that it takes away, 0 to 1.
    """

    temperature: float
    explained: float


def fit(reference: Columns, logprob: Array) -> Fit | None:
    """Return the temperature at which the reference's scores are closest to the log-probabilities
    of the same tokens.

    None if the reference lacks ``NEEDS``, or if too few tokens have finite scores in both.
    """
    if any(name not in reference for name in NEEDS) or len(reference["logprob"]) != len(logprob):
        return None
    scores = [np.asarray(reference[name], np.float64) for name in NEEDS]
    scores.append(np.asarray(logprob, np.float64))
    usable = np.flatnonzero(np.isfinite(scores).all(axis=0))
    if len(usable) < FEWEST_FITTED_TOKENS:
        return None
    step = -(-len(usable) // MOST_FITTED_TOKENS)  # rounded up
    used_values = [column[usable[::step]] for column in scores]
    x, entropy, top, y = used_values
    errors = []
    for inverse in INVERSE_TEMPERATURES:
        errors.append(np.square(y - inverse * x + log_normalizer(inverse, entropy, top)).sum())
    unscaled = np.square(y - x).sum()
    # Equal scores: there is nothing to explain.
    if not unscaled:
        return Fit(1.0, 0.0)
    best = int(np.argmin(errors))
    return Fit(float(1 / INVERSE_TEMPERATURES[best]), float(1 - errors[best] / unscaled))


def scale_note(reference: Columns, logprob: Array) -> str:
    """Return a note if log-probabilities look like the reference's at another temperature.

    "" if they do not.
    """
    best_fit = fit(reference, logprob)
    if best_fit is None or best_fit.explained < CLEAR:
        return ""
    if abs(best_fit.temperature - 1) < SMALLEST_DISTANCE:
        return ""
    return (
        "its log-probabilities look like the reference's at a temperature of about "
        f"{best_fit.temperature:.2g}, which explains {best_fit.explained:.0%} of the squared "
        "differences: its numbers are then not the model's"
    )


def log_normalizer(inverse: float, entropy: Array, top: Array) -> Array:
    """Return an estimate of log of the sum of ``p ** inverse`` over the vocabulary.

    The tokens except the most probable one have the probability ``others`` together, and are ``n``
    equally probable ones; ``n`` follows from the entropy.
    """
    highest = np.exp(top)
    # Not 0, which has no logarithm.
    others = np.maximum(-np.expm1(top), 1e-12)
    log_n = np.maximum((entropy + highest * top) / others + np.log(others), 0.0)
    log_sum: Array = np.logaddexp(inverse * top, log_n + inverse * (np.log(others) - log_n))
    return log_sum
