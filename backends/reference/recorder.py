"""Leaving a model behind as a reference: its states or its logits of every window, and its head once.

Every engine records by this file: those that hand out logits, and each of vLLM's ranks its own share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from backends.common.dtypes import dtype_name
from backends.common.head import Contents, Head, head_difference, head_mismatch, largest_finite
from backends.reference.store import Writer

if TYPE_CHECKING:
    import torch

    from backends.common.head import RecomputableHead

SAMPLED_ROWS = 64
"""Rows of a window's logits on which the head's product is compared with them."""


class Recorder:
    """One process's record in ``folder``: ``contents`` says what is kept of every window, ``reason`` why logits are."""

    def __init__(self, folder: Path, contents: Contents, reason: str = "") -> None:
        self.writer = Writer(folder, contents, reason)
        self.logits_head: Head | None = None
        self.states_head: Head | None = None

    @classmethod
    def of_engine(
        cls, folder: Path, head: RecomputableHead | str, logits: torch.Tensor, states: Callable[[], torch.Tensor]
    ) -> Recorder:
        """The record of an engine that hands out logits, from its head and its first window: states where they suffice.

        ``logits`` [T, V]; ``states`` gives the states [T, H], and is only called if there is a head.
        """
        sample = logits[:SAMPLED_ROWS]
        difference = head if isinstance(head, str) else head_difference(head, states()[:SAMPLED_ROWS], sample)
        reason = head_mismatch(difference, largest_finite(sample), dtype_name(sample.dtype))
        return cls(folder, "logits" if reason else "states", reason)

    def chosen(self, logits: torch.Tensor, states: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is kept of these rows: their ``states()`` [n, H] or ``logits`` [n, V]."""
        if self.writer.contents == "states":
            return states()
        self.logits_head = Head(logits.shape[1], dtype_name(logits.dtype))
        return logits

    def write(self, window: int, kept: torch.Tensor) -> None:
        """Write what was ``chosen`` of one whole window; thread-safe for distinct windows."""
        self.writer.window(window, kept)

    def write_head(self, head: RecomputableHead | str, first: int = 0) -> None:
        """Write the head, whose entries begin at ``first``; RuntimeError if there is none."""
        if isinstance(head, str):
            raise RuntimeError(head)
        weight, bias, self.states_head = head
        self.writer.head(first, weight, bias)

    def close(self) -> None:
        """Say that this process has written all that it had to: the windows, and for states the head.

        A rank that has kept no logits says nothing: it would describe a store of 0 entries.
        """
        head = self.logits_head if self.writer.contents == "logits" else self.states_head
        if head is not None:
            self.writer.close(head)
