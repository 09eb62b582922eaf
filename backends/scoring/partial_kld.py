"""KL divergence from a few log-probabilities of the tested side.

The reference's distribution p over the vocabulary is known at every token, from its store.  Of the
tested distribution q only some entries are known: the log-probabilities of a set S of tokens, for
example of the tested side's 20 most probable ones.  With P and Q, the sums of p and q over S:

- **bound**: KLD >= sum over S of p ln(p / q) + (1 - P) ln((1 - P) / (1 - Q)), by the log-sum
  inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1).  It holds for every
  S, and is the KLD if S has all tokens but one.
- **estimate on sampled text**: if the target x was drawn from p, and S does not depend on x, then
  sum over S of p ln(p / q) + [x not in S] (ln(p(x) / q(x)) + q(x) / p(x) - 1) + Q - P
  has the expectation KLD.  The term q(x) / p(x) - 1 has an expectation that is known, and is nearly
  the negative of ln(p(x) / q(x)) where p and q are close: the sum varies little.
- **estimate by chosen tokens**: m tokens are drawn from p outside of S, by the reference's side,
  and q is known at these, too: (1 - P) times the average of the bracket above takes the place of
  the term of x.

The tested side may have tokens that the reference lacks: p = 0 there.  All formulas hold for them,
too, as long as q sums to 1 over the tokens of both sides.  A draw from p never meets them, so that
the expectation of an estimate is the KLD minus the probability of those that are not in S.

All arrays are float64, n is the number of tokens, k the number of known entries; logarithms are
natural.  Log-probabilities of minus infinity are allowed: a token with p > 0 and q = 0 makes every
value infinite, a token with p = 0 counts nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SUM_ERROR = 1e-12
"""Largest rounding error of a sum of probabilities in float64.

Without it, 1 - Q may be 0 where 1 - P is 1e-16, and the bound infinite.
"""


def bound(ref_logprobs: Array, logprobs: Array, rounding: float | Array) -> Array:
    """Return a lower bound [n] of the KLD of each token, in nats.

    ``ref_logprobs``, ``logprobs`` [n, k]: ln p and ln q of the known entries, each token once.
    ``rounding``: the largest error of an entry of ``logprobs``, in nats; of all, or of each [n, k].
    Each ln q, and the rest 1 - Q, are taken at the end of their range where the bound is smaller,
    so that no bound exceeds the KLD of the distribution before it was rounded.  A sum of
    probabilities that still exceeds 1 shows larger errors, which all entries may have.
    """
    smallest_sums = np.exp(logprobs - rounding).sum(axis=1)
    rounding = rounding + np.log(smallest_sums.max(initial=1.0))
    p = np.exp(ref_logprobs)
    # q is at most this: a larger q makes p ln(p / q) smaller.
    known = terms(ref_logprobs, logprobs + rounding).sum(axis=1)
    p_rest = np.clip(1.0 - p.sum(axis=1), 0.0, 1.0)
    # The rest is at most this.  A sum of rounded numbers may exceed 1.
    q_rest = np.clip(1.0 - np.exp(logprobs - rounding).sum(axis=1), 0.0, 1.0) + SUM_ERROR
    values: Array = np.maximum(known + relative_entropy(p_rest, q_rest), 0.0)
    return values


def estimate_on_samples(
    ref_logprobs: Array,
    logprobs: Array,
    ref_target: Array,
    target: Array,
    is_known: NDArray[np.bool_],
    weights: Array | None = None,
) -> Array:
    """Return values [n] whose expectation is the KLD, for targets that were drawn from p.

    ``ref_logprobs``, ``logprobs`` [n, k]: ln p and ln q of the known entries, which must not depend
    on the target.  ``ref_target``, ``target`` [n]: ln p and ln q of the targets; ``is_known`` [n]:
    the target is one of the known entries.  ``weights`` [n]: p(x) / s(x) if the target was drawn
    from another distribution s; default: 1.
    """
    p = np.exp(ref_logprobs)
    known = terms(ref_logprobs, logprobs).sum(axis=1)
    difference = np.exp(logprobs).sum(axis=1) - p.sum(axis=1)
    of_target: Array = np.where(is_known, 0.0, low_variance_ratio(ref_target, target))
    if weights is not None:
        of_target = weights * of_target
    values: Array = known + difference + of_target
    return values


def estimate_by_draws(
    ref_logprobs: Array, logprobs: Array, ref_drawn: Array, drawn: Array
) -> Array:
    """Return values [n] whose expectation is the KLD, from tokens that the reference's side drew.

    ``ref_logprobs``, ``logprobs`` [n, k]: as in ``estimate_on_samples``.  ``ref_drawn``, ``drawn``
    [n, m]: ln p and ln q of m tokens, drawn independently from p without the known entries.
    """
    p = np.exp(ref_logprobs)
    known = terms(ref_logprobs, logprobs).sum(axis=1)
    p_known = p.sum(axis=1)
    difference = np.exp(logprobs).sum(axis=1) - p_known
    p_rest = np.clip(1.0 - p_known, 0.0, 1.0)
    of_rest = low_variance_ratio(ref_drawn, drawn).mean(axis=1)
    # Without a rest, nothing can be drawn from it.
    values: Array = known + difference + np.where(p_rest > 0.0, p_rest * of_rest, 0.0)
    return values


def low_variance_ratio(ref_logprobs: Array, logprobs: Array) -> Array:
    """Return ln(p / q) + q / p - 1, which is never negative; of tokens with p > 0."""
    log_ratio = ref_logprobs - logprobs
    return np.asarray(log_ratio + np.expm1(-log_ratio), np.float64)


def terms(ref_logprobs: Array, logprobs: Array) -> Array:
    """Return p ln(p / q) of each entry; 0 where p is 0, also if q is 0."""
    with np.errstate(invalid="ignore"):
        ratios = ref_logprobs - logprobs
        return np.where(ref_logprobs > -np.inf, np.exp(ref_logprobs) * ratios, 0.0)


def relative_entropy(p: Array, q: Array) -> Array:
    """Return p ln(p / q); 0 where p is 0, infinite where only q is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0.0, p * (np.log(p) - np.log(q)), 0.0)
