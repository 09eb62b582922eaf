"""Sums of a model's scores by block of the text, and the paired difference of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from .uncertainty import (
    SHORT,
    BlockAssignment,
    Columns,
    Count,
    Value,
    low_frequency_error,
    n_waves,
)

MOST_TEXTS = 1000
"""Largest number of texts of a run: each has at least one block."""


@dataclass(frozen=True)
class BlockSums:
    """Sums over the entries of each of G blocks: ``tokens`` (entries), ``nll``, ``kld`` (nats),
    ``same_top``.

    The difference of any two models' means, and its error, follow from the sums.  ``whole`` names
    the sums with only finite entries, which can be compared; the other sums leave out entries that
    are not finite.  ``length``: tokens of the text that the blocks cover, each counted once.
    """

    tokens: Annotated[tuple[Count, ...], Field(max_length=MOST_TEXTS)]
    nll: tuple[float, ...]
    kld: tuple[float, ...] | None = None
    same_top: tuple[float, ...] | None = None
    whole: tuple[Annotated[str, Field(pattern="^(nll|kld|same_top)$")], ...] = ()
    length: Count = 0

    def __post_init__(self) -> None:
        """ValueError for sums of another number of blocks, or for sums that cannot be compared."""
        sums = {"nll": self.nll, "kld": self.kld, "same_top": self.same_top}
        for name, values in sums.items():
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"{name} has {len(values)} sums for {len(self.tokens)} blocks")
        for name in self.whole:
            if sums[name] is None or sum(self.tokens) == 0:
                raise ValueError(f"whole: there is no mean of {name}")

    @property
    def held(self) -> int:
        """Number of blocks that hold tokens: the errors come from these."""
        return sum(count > 0 for count in self.tokens)

    @property
    def waves(self) -> int:
        """Degrees of freedom of the errors."""
        return n_waves(self.held, self.length)


def block_sums(columns: Columns, assignment: BlockAssignment) -> BlockSums:
    """Return the sums by block of the scores that can be compared between models."""
    scores = {"nll": -columns["logprob"].astype(np.float64)}
    for name in ("kld", "same_top"):
        if name in columns:
            scores[name] = columns[name]
    sums: dict[str, tuple[float, ...]] = {}
    is_finite: dict[str, bool] = {}
    for name, values in scores.items():
        finite = np.isfinite(values)
        is_finite[name] = bool(finite.all())
        finite_values = np.where(finite, values, 0)
        sums[name] = tuple(np.bincount(assignment.block, finite_values).tolist())
    if "same_top" in is_finite:
        # ``same_top`` is a bool, also where a model's logits are NaN: argmax returns some token.
        # It is comparable only where the log-probabilities of both are numbers.
        is_comparable = is_finite["nll"]
        if "ref_logprob" in columns and not np.isfinite(columns["ref_logprob"]).all():
            is_comparable = False
        is_finite["same_top"] = is_finite["same_top"] and is_comparable
    return BlockSums(
        tokens=tuple(np.bincount(assignment.block).tolist()),
        **sums,
        whole=tuple(name for name in is_finite if is_finite[name]),
        length=assignment.length,
    )


def paired_difference(a: BlockSums, b: BlockSums, name: str) -> Value | None:
    """Return the mean of ``name`` of a minus the mean of b, with its paired error.

    ``name``: "nll" (the difference is ln of the ratio of perplexities), "kld" or "same_top".  None
    if a model has no such scores, or some that are not finite, or the windows are not the same.
    """
    if name not in a.whole or name not in b.whole or a.tokens != b.tokens:
        return None
    tokens = np.asarray(a.tokens)
    difference = np.asarray(getattr(a, name)) - np.asarray(getattr(b, name))
    mean = float(difference.sum()) / int(tokens.sum())
    return Value(mean, low_frequency_error(difference, tokens, a.length))


def short_text_cautions(blocks_of_models: Sequence[BlockSums], text: int | None) -> list[str]:
    """Return cautions, without repeats, about errors that come from few tokens.

    ``text``: number of tokens of the whole text, if known.
    """
    advice = "take a longer text"
    if text and text >= SHORT:
        advice = "score more windows (-r, max_rows)"
    short_lengths = {blocks.length for blocks in blocks_of_models if blocks.length < SHORT}
    cautions = []
    for length in sorted(short_lengths):
        part = f"{length:,} tokens"
        if text and text > length:
            part += f" of a text of {text:,}"
        cautions.append(
            f"the scored part spans {part}: with less than {SHORT:,}, errors (±) may be far too "
            f"small; {advice}"
        )
    return cautions
