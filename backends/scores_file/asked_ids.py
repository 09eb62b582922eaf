"""Choose the tokens whose log-probabilities a file of windows requests.

At each position these are the reference's most probable tokens, and tokens that are drawn from its
other tokens with its probabilities: the estimate of ``partial_kld.estimate_by_draws`` needs both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..reference.stored_logprobs import StoredLogprobs
from ..scoring.entries import Ids
from ..window import Window
from .format import Asked

N_TOP = 20
N_DRAWN = 4
Array = NDArray[np.float64]


def asked_of(window: Window, reference: StoredLogprobs) -> Asked | None:
    """Return the ids of a window; None if the reference has no tokens except the most probable.

    The seed follows from the window: the same file is written again.
    """
    if reference.vocab_size <= N_TOP:
        return None
    generator = np.random.default_rng(int(window.digest, 16))
    parts: list[Ids] = []
    for logprobs in reference.pieces(window):
        parts.append(chosen(logprobs.cpu().numpy(), N_TOP, N_DRAWN, generator))
    recording = reference.store.recording(window.digest)
    return Asked.of(window.digest, np.concatenate(parts), N_DRAWN, recording)


def chosen(logprobs: Array, n_top: int, n_drawn: int, generator: np.random.Generator) -> Ids:
    """Return ids [n, n_top + n_drawn] by ln p [n, V]: the most probable tokens, and then the drawn.

    Each drawn token is drawn independently from p without the most probable ones.
    """
    top = np.argsort(-logprobs, axis=1, kind="stable")[:, :n_top]
    rest = np.exp(logprobs)
    np.put_along_axis(rest, top, 0.0, axis=1)
    ends = rest.cumsum(axis=1)
    drawn = np.empty((len(logprobs), n_drawn), np.int64)
    for position, end in enumerate(ends):
        # Above the draw: a token of probability 0 ends where the token before it ends.
        draws = generator.random(n_drawn) * end[-1]
        drawn[position] = np.searchsorted(end, draws, side="right")
        if not end[-1]:
            # Nothing is left to draw: such tokens have no weight in the estimate.
            drawn[position] = top[position, -1]
    ids: Ids = np.concatenate([top, np.minimum(drawn, logprobs.shape[1] - 1)], axis=1)
    return ids.astype(np.int32)
