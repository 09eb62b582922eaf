"""Token ids that a model has and the reference lacks: padding rows of its head, or added tokens.

The reference gives them the probability 0, so that the KLD of a model that may predict them is
larger: KLD = sum over the reference's tokens of p ln(p / q), where q sums to less than 1.
"""

from __future__ import annotations

import numpy as np

from ..scoring.entries import Entries, Logprobs

NOTED = 0.001
"""Smallest mean probability of such tokens that adds a note to the row.

A probability m of such tokens makes the KLD larger by at least -ln(1 - m), about m nats; roundings
alone may cost 0.001 nats.
"""


def outside_probability(entries: Entries, vocab_size: int) -> Logprobs:
    """Return the probability [T] of the entries whose ids the reference lacks.

    ``vocab_size``: number of its tokens.
    """
    is_outside = entries.ids >= vocab_size
    return np.asarray(np.where(is_outside, np.exp(entries.logprobs), 0.0).sum(axis=1), np.float64)


class OutsideTokens:
    """Adds up the probability of such tokens over the windows of a run.

    ``vocab_size``: number of the reference's tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.n_positions = 0
        self.total = 0.0  # sum of the probabilities over the positions

    def add(self, top: Entries | None) -> None:
        """Add the most probable tokens of a window; None: unknown."""
        if top is None:
            return
        self.n_positions += len(top.ids)
        self.total += float(outside_probability(top, self.vocab_size).sum())

    def notes(self) -> list[str]:
        """Return a note if the mean probability of such tokens is ``NOTED`` or more."""
        if not self.n_positions or self.total < NOTED * self.n_positions:
            return []
        percent = 100 * self.total / self.n_positions
        return [
            f"{percent:.2g} % of its probability is on token ids beyond the reference's "
            f"{self.vocab_size:,} tokens, which increases the KLD; an estimate lacks the part of "
            "such tokens that are not among the most probable ones"
        ]
