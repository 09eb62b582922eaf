"""Rows in blocks: whatever steps ask for, they get what is stored, and most steps read nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from backends.reference import blocks
from backends.reference.blocks import Blocks
from backends.reference.reading import StoredRows

CPU = torch.device("cpu")
N_WINDOWS, LENGTH, WIDTH = 40, 50, 3
STORED = torch.arange(N_WINDOWS * LENGTH * WIDTH, dtype=torch.float32).view(N_WINDOWS, LENGTH, WIDTH)


class Reads:
    """A store in memory that counts the pieces that are read from it."""

    def __init__(self) -> None:
        self.pieces: list[StoredRows] = []

    def __call__(self, part: StoredRows) -> torch.Tensor:
        assert 0 <= part.begin < part.end <= part.n_scored == LENGTH
        self.pieces.append(part)
        return STORED[part.window, part.begin : part.end]


def rows(window: int, begin: int, n_rows: int = 1) -> StoredRows:
    return StoredRows(window, LENGTH, begin, begin + n_rows)


def got(held: Blocks, parts: Sequence[StoredRows]) -> torch.Tensor | None:
    """What the blocks give of some rows; None if they have no room for them."""
    out = torch.full((sum(part.end - part.begin for part in parts), WIDTH), torch.nan)
    return out if held.get(parts, out) else None


def stored(parts: Sequence[StoredRows]) -> torch.Tensor:
    return torch.cat([STORED[part.window, part.begin : part.end] for part in parts])


def test_one_token_a_step_reads_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 windows in blocks of 10 rows: 5 reads of each window for 50 steps."""
    monkeypatch.setattr(blocks, "ROWS", 80)
    reads = Reads()
    held = Blocks(reads, CPU)
    for begin in range(LENGTH):
        parts = [rows(window, begin) for window in range(8)]
        found = got(held, parts)
        assert found is not None
        assert torch.equal(found, stored(parts))
    assert reads.pieces == [rows(window, begin, 10) for begin in range(0, LENGTH, 10) for window in range(8)]
    assert held.rows is not None
    assert held.rows.shape == (80, WIDTH)


def test_windows_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any windows and rows, in any order, also back to earlier rows, as after a preemption."""
    monkeypatch.setattr(blocks, "ROWS", 60)
    chance, held, sizes = random.Random(0), Blocks(Reads(), CPU), set()
    for _ in range(500):
        windows = chance.sample(range(N_WINDOWS), chance.randint(2, 20))
        parts = [rows(window, begin, chance.randint(1, min(2, LENGTH - begin)))
                 for window in windows for begin in [chance.randrange(LENGTH)]]  # fmt: skip
        found = got(held, parts)
        sizes.add(held.size)
        assert found is not None
        assert torch.equal(found, stored(parts))
    assert max(sizes) > min(sizes) == 2  # as small as a block can be


def test_the_chunks_of_a_step_do_not_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of 8 windows take turns: the first step makes room for 16, and then every row is read once."""
    monkeypatch.setattr(blocks, "ROWS", 80)
    reads = Reads()
    held = Blocks(reads, CPU)
    for begin in range(LENGTH):
        for first in (0, 8):
            parts = [rows(window, begin) for window in range(first, first + 8)]
            found = got(held, parts)
            assert found is not None
            assert torch.equal(found, stored(parts))
    assert held.size == 5
    n_read = sum(part.end - part.begin for part in reads.pieces)
    assert n_read <= 16 * LENGTH + 8 * 10  # and the first chunk's first blocks of 10, made when it was alone


@pytest.mark.parametrize(
    "parts",
    [
        [rows(window % N_WINDOWS, 0) for window in range(60)],  # a block would be one row, and windows come twice
        [rows(1, 0), rows(2, 0, 31)],
        [rows(1, 0), rows(1, 3)],
    ],
    ids=["many", "long", "twice"],
)
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, parts: list[StoredRows]) -> None:
    monkeypatch.setattr(blocks, "ROWS", 60)
    reads = Reads()
    assert got(Blocks(reads, CPU), parts) is None
    assert reads.pieces == []


def test_the_dtype_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.empty(2, WIDTH, dtype=torch.bfloat16)
    assert Blocks(Reads(), CPU).get([rows(1, 2), rows(3, 4)], out)
    assert torch.equal(out, stored([rows(1, 2), rows(3, 4)]).bfloat16())
