"""Rows with scores, and the sums over their blocks of the text."""

from __future__ import annotations

from collections.abc import Iterable

from ..results import ModelResult
from ..stats.block_sums import BlockSums


def measured_rows(models: Iterable[ModelResult]) -> list[ModelResult]:
    """Return the rows of models that were scored."""
    return [model for model in models if model.blocks]


def blocks_of(models: Iterable[ModelResult]) -> list[BlockSums]:
    """Return the sums over blocks of each model that was scored."""
    blocks = []
    for model in models:
        if model.blocks:
            blocks.append(model.blocks)
    return blocks
