"""Random windows and token scores."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.scoring.segments import COLUMNS


def random_windows(count: int, seed: int = 0, longest: int = 40) -> list[Window]:
    """Return windows of 2 to ``longest`` tokens that are scored at the end, every other one also in
    earlier ranges.
    """
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        tokens = rng.integers(0, 50_000, rng.integers(2, longest + 1)).astype(np.int32)
        scored = np.zeros(len(tokens) + 1, np.bool_)
        scored[int(rng.integers(1, len(tokens))) : -1] = True
        if index % 2:
            scored[1:-1] |= rng.random(len(tokens) - 1) < 0.5
        edges = np.flatnonzero(np.diff(scored)) + 1
        made.append(
            Window(
                index, tokens, tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
            )
        )
    return made


def random_scores(window: Window, names: Iterable[str] = COLUMNS, seed: int = 0) -> TokenScores:
    """Return scores from the whole range of float32: NaN with any payload, infinities, subnormals,
    signed zeros.
    """
    rng = np.random.default_rng([seed, window.index])
    columns = {}
    for name in names:
        bits = rng.integers(0, 1 << 32, window.n_scored, dtype=np.uint32)
        special = np.array(
            [0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x80000000, 1], np.uint32
        )
        bits = np.where(
            rng.random(window.n_scored) < 0.2, special[rng.integers(6, size=window.n_scored)], bits
        )
        columns[name] = (
            bits.view(np.float32) if COLUMNS[name] is np.float32 else (bits & 1).astype(np.bool_)
        )
    return TokenScores(window.index, **columns)
