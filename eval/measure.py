"""Logits -> log-probabilities of the real tokens: the one place with the shift by one.

The logits at position i predict token i + 1.  log p = z[target] - logsumexp(z), in float32 over the logits' whole last
dimension, with nothing added and nothing clamped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from backends.base import Backend, LogitsBackend, ModelError, ScoringBackend, TokenScores, Window

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 25
"""Logits turned to float32 at a time: 128 MiB, 256 rows of a vocabulary of 131,072."""


def target_logprobs(logits: torch.Tensor, window: Window) -> NDArray[np.float32]:
    """Log-probabilities float32 [T] of the window's scored tokens, from its logits [L, V] of any float dtype."""
    import torch

    length = len(window.token_ids)
    if logits.ndim != 2 or logits.shape[0] != length:
        raise ModelError(f"row {window.row}: logits of shape {tuple(logits.shape)} for a window of {length} tokens")
    targets = torch.from_numpy(window.token_ids[window.score_from :]).long().to(logits.device)
    if int(targets.max()) >= logits.shape[1]:
        raise ModelError(f"row {window.row}: token {int(targets.max())} is outside the {logits.shape[1]} logits")
    sources = logits[window.score_from - 1 : length - 1]
    rows = max(CHUNK_ELEMENTS // logits.shape[1], 1)
    parts = []
    for begin in range(0, len(targets), rows):
        z = sources[begin : begin + rows].float()
        chosen = z.gather(1, targets[begin : begin + rows, None])[:, 0]
        parts.append(chosen - z.logsumexp(-1))
    logprob: NDArray[np.float32] = torch.cat(parts).cpu().numpy()
    return logprob


def token_scores(backend: Backend, windows: Iterable[Window]) -> Iterator[TokenScores]:
    """Scores of every window from either kind of engine, as they become ready."""
    if isinstance(backend, ScoringBackend):
        yield from backend.score(windows)
    elif isinstance(backend, LogitsBackend):
        for window in windows:
            yield TokenScores(window.row, target_logprobs(backend.logits(window), window))
    else:
        raise TypeError(f"{type(backend).__name__} is neither a LogitsBackend nor a ScoringBackend")
