"""Find log-probabilities that no model gives.

Some servers return such placeholders, because they do not compute ``prompt_logprobs``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOKENS_FOR_TWO_VALUES = 4
"""From this number of tokens on, an answer must have two different values."""
TOKENS_FOR_THREE_VALUES = 16
"""From this number of tokens on, an answer must have three different values."""


def placeholder(logprob: NDArray[np.float32]) -> str:
    """Return why a prompt's log-probabilities [L - 1] cannot come from a model; "" if they can.

    Models repeat one value only where a token is certain: its float32 log-probability is then 0.0.
    The first tokens of a prompt are never certain, even if the prompt repeats one token.  Real
    answers therefore have other values too: in a few tokens one, in longer prompts several.
    """
    values = np.unique(logprob)
    if len(logprob) < TOKENS_FOR_TWO_VALUES:
        fewest = 1
    elif len(logprob) < TOKENS_FOR_THREE_VALUES:
        fewest = 2
    else:
        fewest = 3
    if len(values) >= fewest:
        return ""
    values_text = " or ".join(f"{value:g}" for value in values)
    return (
        f"all {len(logprob)} log-probabilities of its answer are {values_text}: placeholders, "
        "which no model gives"
    )
