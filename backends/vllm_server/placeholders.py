"""Placeholders: log-probabilities that no model gives, from servers that do not compute
``prompt_logprobs``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FEW, MANY = 4, 16
"""From ``FEW`` tokens on, an answer must have two different values; from ``MANY`` tokens on, three.
"""


def placeholder(logprob: NDArray[np.float32]) -> str:
    """Return why a prompt's log-probabilities [L - 1] cannot come from a model; "" if they can.

    Models repeat one value only where a token is certain: its float32 log-probability is then 0.0.
    The first tokens of a prompt are never certain, even if the prompt repeats one token.  Real
    answers therefore have other values too.
    """
    values = np.unique(logprob)
    fewest = 1 if len(logprob) < FEW else 2 if len(logprob) < MANY else 3
    if len(values) >= fewest:
        return ""
    found = " or ".join(f"{value:g}" for value in values)
    return f"all {len(logprob)} log-probabilities of its answer are {found}: placeholders, which no model gives"
