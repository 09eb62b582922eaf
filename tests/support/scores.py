"""Random windows and token scores."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.scoring.segments import SCORE_COLUMNS


def random_windows(count: int, seed: int = 0, longest: int = 40) -> list[Window]:
    """Return windows of 2 to ``longest`` tokens that are scored at the end.

    Every other window is also scored in earlier ranges.
    """
    rng = np.random.default_rng(seed)
    windows = []
    for index in range(count):
        tokens = rng.integers(0, 50_000, rng.integers(2, longest + 1)).astype(np.int32)
        # The additional False at the end lets ``np.diff`` find the end of the last range.
        scored = np.zeros(len(tokens) + 1, np.bool_)
        scored[int(rng.integers(1, len(tokens))) : -1] = True
        if index % 2:
            scored[1:-1] |= rng.random(len(tokens) - 1) < 0.5
        edges = np.flatnonzero(np.diff(scored)) + 1
        spans = tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        windows.append(Window(index, tokens, spans))
    return windows


def random_scores(
    window: Window, names: Iterable[str] = SCORE_COLUMNS, seed: int = 0
) -> TokenScores:
    """Return scores from the whole range of float32.

    NaN with any payload, infinities, subnormals and signed zeros are among them.
    """
    rng = np.random.default_rng([seed, window.index])
    # inf, -inf, a NaN with a payload, a NaN of ones only, -0.0 and the smallest subnormal.
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x80000000, 1], np.uint32)
    columns = {}
    for name in names:
        bits = rng.integers(0, 1 << 32, window.n_scored, dtype=np.uint32)
        is_special = rng.random(window.n_scored) < 0.2
        bits = np.where(is_special, special[rng.integers(6, size=window.n_scored)], bits)
        if SCORE_COLUMNS[name] is np.float32:
            columns[name] = bits.view(np.float32)
        else:
            columns[name] = (bits & 1).astype(np.bool_)
    return TokenScores(window.index, **columns)
