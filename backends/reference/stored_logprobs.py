"""Log-probabilities of a reference store, for models whose whole distribution is not known.

They are computed from the stored states or logits of a window, some positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..common.errors import ModelError
from ..window import Window
from .comparison import load_head
from .head import head_logits
from .store import Reader

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]
PIECE_ELEMENTS = 1 << 23
"""Log-probabilities at a time: 64 MiB in float64."""


class Gathered(NamedTuple):
    """Log-probabilities of a reference at T scored positions, nats.

    Attributes:
        logprobs: of the requested ids [T, k]; minus infinity for an id outside the vocabulary.
        top: ids of the most probable tokens [T], the lowest of equal ones.
        top_logprob: their log-probabilities [T].
    """

    logprobs: Array
    top: NDArray[np.int64]
    top_logprob: Array


class StoredLogprobs:
    """The distributions of a reference store, on one device.

    ``device``: torch's name of it.
    """

    def __init__(self, store: Reader, device: str = "cpu") -> None:
        import torch

        self.store = store
        self.device = torch.device(device)
        self.vocab_size = store.head.vocab_size
        self.head = None
        if store.contents == "states":
            self.head = load_head(store, (0, self.vocab_size), self.device)

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        """Yield ln p of a window's scored positions, float64 [n, V], in their order.

        ModelError if the store has another number of positions.
        """
        n_stored = self.store.n_rows(window.digest)
        if n_stored != window.n_scored:
            raise ModelError(
                f"window {window.index}: the reference has {n_stored} positions, "
                f"the window {window.n_scored}"
            )
        step = max(PIECE_ELEMENTS // self.vocab_size, 1)
        for begin in range(0, n_stored, step):
            rows = self.store.window(window.digest, begin, begin + step).to(self.device)
            if self.head is not None:
                rows = head_logits(self.store.head, rows, self.head.weight, self.head.bias)
            yield rows.double().log_softmax(-1)

    def gathered(self, window: Window, ids: NDArray[np.integer]) -> Gathered:
        """Return ln p of the ids [T, k] at a window's scored positions, and of the top tokens.

        The reference gives an id outside its vocabulary the probability 0.  Negative ids stand for
        missing tokens.
        """
        import torch

        parts: list[Array] = []
        tops: list[NDArray[np.int64]] = []
        top_logprobs: list[Array] = []
        begin = 0
        for logprobs in self.pieces(window):
            end = begin + len(logprobs)
            wanted = torch.from_numpy(ids[begin:end].astype(np.int64)).to(self.device)
            values = logprobs.gather(1, wanted.clamp(min=0, max=self.vocab_size - 1))
            is_outside = (wanted < 0) | (wanted >= self.vocab_size)
            parts.append(values.masked_fill(is_outside, -torch.inf).cpu().numpy())
            # numpy's argmax returns the first of equal values.
            on_cpu = logprobs.cpu().numpy()
            top = on_cpu.argmax(axis=1)
            tops.append(top)
            top_logprobs.append(on_cpu[np.arange(len(top)), top])
            begin = end
        return Gathered(np.concatenate(parts), np.concatenate(tops), np.concatenate(top_logprobs))
