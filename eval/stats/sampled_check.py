"""Do sampled tokens follow the distribution of the model that scores them?

If each token x is drawn from p, given all tokens before it, ln p(x) + H(p) and [x is the most
probable token] - max p have the expectation 0.  The tokens were drawn from the sampler's
distribution s, which differs from p by rounding: each value is weighted by p(x) / s(x).  The values
of different tokens are uncorrelated, so that their mean over its standard error is about normal
with variance 1.  Another temperature, masked tokens, or tokens of another model change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LARGEST_SCORE = 5.0
"""Mean over its standard error above which the tokens were not drawn from the distribution.

A normal variable exceeds it once in two million cases.
"""
LEAST_TOKENS = 100
"""Number of sampled tokens below which the mean is not about normal."""


class StandardScores(NamedTuple):
    """Means over their standard errors, which are about 0 +- 1 if the tokens were drawn from p.

    ``surprise``: of ln p(x) + H(p); ``top``: of [x is the most probable token] - max p.
    """

    surprise: float
    top: float


def standard_scores(
    columns: Mapping[str, NDArray[Any]], sampler_logprobs: NDArray[np.float32]
) -> StandardScores | None:
    """Return the standard scores of the sampled tokens.

    ``columns``: scores [N] of the model.  ``sampler_logprobs`` [N]: NaN for tokens that are not
    sampled.  None if there are too few sampled tokens, or if the engine knows no entropy.
    """
    if not columns.keys() >= {"entropy", "top1", "top1_logprob"}:
        return None
    is_sampled = ~np.isnan(sampler_logprobs)
    if is_sampled.sum() < LEAST_TOKENS:
        return None
    logprob = columns["logprob"][is_sampled].astype(np.float64)
    entropy = columns["entropy"][is_sampled].astype(np.float64)
    top = columns["top1"][is_sampled].astype(np.float64)
    top_probability = np.exp(columns["top1_logprob"][is_sampled].astype(np.float64))
    weights = np.exp(logprob - sampler_logprobs[is_sampled])
    return StandardScores(
        standard_score(weights * (logprob + entropy)),
        standard_score(weights * (top - top_probability)),
    )


def standard_score(values: NDArray[np.float64]) -> float:
    """Return the mean over its standard error; 0 if all values are 0, as for certain tokens."""
    error = values.std(ddof=1) / math.sqrt(len(values))
    if error == 0.0 and values.mean() == 0.0:
        return 0.0
    with np.errstate(divide="ignore"):
        return float(values.mean() / error)


def sampling_notes(
    columns: Mapping[str, NDArray[Any]],
    sampler_logprobs: NDArray[np.float32] | None,
    consequence: str = "estimates of KLD on this text are biased",
) -> list[str]:
    """Return a note if sampled tokens do not follow the distribution of the model's scores.

    ``consequence``: its last words.
    """
    if sampler_logprobs is None:
        return []
    scores = standard_scores(columns, sampler_logprobs)
    # Not "above", since NaN does not prove a right distribution.
    if scores is None or max(abs(scores.surprise), abs(scores.top)) <= LARGEST_SCORE:
        return []
    return [
        "the sampled tokens do not follow this model's distribution (ln p + entropy is "
        f"{scores.surprise:+.1f} standard errors from 0, the share of most probable tokens "
        f"{scores.top:+.1f}): {consequence}"
    ]
