"""A window of tokens, its scores, and the request to score windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

KldKind = Literal["exact", "estimate", "bound"]
"""The kinds of the values of ``TokenScores.kld`` (``scoring/partial_kld.py``).

- exact: the KLD of each token;
- estimate: values whose mean has the expectation of the mean KLD; single values may be negative;
- bound: the KLD of each token is at least this value.
"""
Spans = tuple[tuple[int, int], ...]
"""The scored positions of a window: non-empty ranges [begin, end) in order, with gaps between."""


def span_numbers(spans: Spans, length: int) -> tuple[int, ...]:
    """Return begin and end of each range of scored positions.

    Only the first position if all positions after it are scored.
    """
    first, end = spans[0]
    if len(spans) == 1 and end == length:
        return (first,)
    numbers: list[int] = []
    for span in spans:
        numbers += span
    return tuple(numbers)


@dataclass(frozen=True)
class Window:
    """A token sequence that one forward pass scores.

    Attributes:
        index: its number in the run, from 0.
        token_ids: [L].
        spans: the scored positions, within 1 to L - 1; each is predicted from all tokens before it.
        is_single: no other window is computed with it, so that its roundings are those of batch 1.
        sampler_logprobs: [T], log-probability of each scored token in the model that sampled it, in
            nats; None if the tokens are not sampled.  Not part of the digest: the model's scores do
            not depend on it.
    """

    index: int
    token_ids: NDArray[np.int32]
    spans: Spans
    is_single: bool = False
    sampler_logprobs: NDArray[np.float32] | None = None

    @classmethod
    def scored_from(cls, index: int, token_ids: NDArray[np.int32], first: int = 1) -> Window:
        """Return a window whose positions from ``first`` on are all scored."""
        return cls(index, token_ids, ((first, len(token_ids)),))

    @property
    def n_scored(self) -> int:
        """Number of scored positions T."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def positions(self) -> NDArray[np.int32]:
        """The scored positions [T]."""
        return np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in self.spans])

    @property
    def targets(self) -> NDArray[np.int32]:
        """The scored tokens [T]."""
        return self.token_ids[self.positions]

    def predicting(self, begin: int, end: int) -> Iterator[slice]:
        """Yield the positions from ``begin`` to ``end`` whose logits predict a scored token.

        They are counted from ``begin``.
        """
        for first, last in self.spans:
            # The shift by one: the logits at position i predict token i + 1.
            low = max(first - 1, begin)
            high = min(last - 1, end)
            if low < high:
                yield slice(low - begin, high - begin)

    @property
    def positions_text(self) -> str:
        """The scored positions as text, for digests."""
        return ",".join(str(number) for number in span_numbers(self.spans, len(self.token_ids)))

    @cached_property
    def digest(self) -> str:
        """The key of stored scores: the first 32 hexadecimal digits of a SHA-256.

        It covers the tokens, the scored positions and ``is_single``: windows with the same digest
        have the same scores, whichever text they are cut from.
        """
        facts = f"{self.positions_text} "
        if self.is_single:
            # Part of the keys of stored scores: this word must not change.
            facts += "alone "
        tokens = self.token_ids.astype("<i4").tobytes()
        return hashlib.sha256(facts.encode() + tokens).hexdigest()[:32]


@dataclass(frozen=True)
class TokenScores:
    """Scores of the window with index ``window``.

    ``backends/scoring/token_statistics.py`` defines them.  Each array is [T], one entry per scored
    position, in nats where it has a unit; None if the engine does not know it.  With a reference,
    all arrays exist.

    Attributes:
        logprob: of the real token.
        entropy: of the model's prediction.
        top1_logprob: of the most probable token.
        top1: the real token is the most probable one.
        ref_logprob: of the real token in the reference.
        ref_top1_logprob: of the reference's most probable token, in the reference.
        kld: KL(reference || model), or what ``kld_kind`` calls it.
        same_top: both have the same most probable token.
        kld_kind: of all values of ``kld``.
    """

    window: int
    logprob: NDArray[np.float32]
    entropy: NDArray[np.float32] | None = None
    top1_logprob: NDArray[np.float32] | None = None
    top1: NDArray[np.bool_] | None = None
    ref_logprob: NDArray[np.float32] | None = None
    ref_top1_logprob: NDArray[np.float32] | None = None
    kld: NDArray[np.float32] | None = None
    same_top: NDArray[np.bool_] | None = None
    kld_kind: KldKind = "exact"


class ScoreRequest(BaseModel):
    """Options of ``Engine.score``, apart from the windows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Folder of the reference store to compare with.
    reference: Path | None = None
    # Number of entries that are compared, the first ones; None: all of the reference's.
    vocab_size: int | None = None
    # Existing folder into which this model's states or logits are written, as a store.
    record: Path | None = None
    # Key of the reference that is recorded, for the header of each file.
    record_key: str = ""
    # If memory is too small, smaller chunks are tried, whose products may round otherwise.
    may_halve_chunks: bool = True
