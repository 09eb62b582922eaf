"""Windows of a store, read ahead of their use, and rows in blocks, of which most steps read nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from compare_q.backends.common.errors import InputError
from compare_q.backends.reference import reading
from compare_q.backends.reference.reading import Blocks, ReferenceWindows, StoredRows, open_reference
from compare_q.backends.reference.store import Reader
from tests.support import ROOT
from tests.support.stores import UPSTREAM, numbers, record, state_store, upstream_store


class Counting(Reader):
    """A store that remembers which windows were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[int] = []

    def window(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return super().window(index)


def counting(folder: Path, count: int) -> Counting:
    return Counting(state_store(folder, count).path)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
@pytest.mark.parametrize("ahead_bytes", [0, 1 << 29])
def test_windows_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[int], ahead_bytes: int
) -> None:
    monkeypatch.setattr(reading, "AHEAD_BYTES", ahead_bytes)
    store = counting(tmp_path / "store", 6)
    windows = ReferenceWindows(store, pin=False)
    for window in order:
        assert torch.equal(windows.get(window), numbers(3, 4, seed=window))
    windows.close()
    assert sorted(store.read) == [0, 1, 2, 3, 4, 5]  # each once


def test_windows_are_read_ahead_within_the_memory_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bytes of 6 windows: 3 windows ahead of the one in use."""
    store = counting(tmp_path / "store", 6)
    monkeypatch.setattr(reading, "AHEAD_BYTES", (store.stored_bytes + 1) // 2)
    windows = ReferenceWindows(store, pin=False)
    windows.get(0)
    assert set(windows.futures) == {0, 1, 2, 3}
    windows.get(3)
    assert set(windows.futures) == {0, 1, 2, 3, 4, 5}
    windows.close()
    monkeypatch.setattr(reading, "AHEAD_BYTES", 0)  # never less than one
    windows = ReferenceWindows(store, pin=False)
    windows.get(4)  # a run that goes on there reads none before it
    assert set(windows.futures) == {4, 5}
    windows.close()


def test_a_dropped_window_is_forgotten_and_can_be_read_again(tmp_path: Path) -> None:
    store = counting(tmp_path / "store", 2)
    windows = ReferenceWindows(store, pin=False)
    for window in (0, 1):
        windows.get(window)
        windows.drop(window)
    assert windows.futures == {}
    windows.drop(0)  # twice is nothing
    assert torch.equal(windows.get(0), numbers(3, 4, seed=0))
    windows.close()
    assert store.read.count(0) == 2
    with pytest.raises(RuntimeError):  # what is closed reads no more
        windows.get(1)


def test_what_goes_wrong_ahead_is_raised_for_its_window(tmp_path: Path) -> None:
    path = upstream_store(tmp_path, "folder")
    store = open_reference(path)
    (path / "row_000001.safetensors").write_bytes(b"damaged")
    windows = ReferenceWindows(store, pin=False)
    assert torch.equal(windows.get(0), UPSTREAM[0][0, :4])
    with pytest.raises(InputError, match=r"row_000001\.safetensors: window 1 of the reference cannot be read"):
        windows.get(1)
    assert torch.equal(windows.get(2), UPSTREAM[2][0, :4])
    windows.close()


WITHOUT_TORCH = """
import sys
import subprocess
import sys
from pathlib import Path
from compare_q.backends.reference import store
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.scoring import segments
ours, upstream, scores = map(Path, sys.argv[1:4])
assert sorted(store.recorded(ours)) == [0, 1, 2]  # and 3, whose file is there
store.seal(ours, {"windows": "abc"}, 4)
for path, count in ((ours, 4), (upstream, 3)):
    opened = open_reference(path)
    opened.verify()
    assert (opened.n_windows, opened.stored_bytes > 0) == (count, True)
segments.load(scores, "alone", [])
store.discard(ours)
assert not ours.exists()
print(sorted(name for name in ("torch", "pyarrow", "transformers") if name in sys.modules))
"""


@pytest.mark.engine
def test_reading_manifests_verifying_and_counting_need_no_torch(tmp_path: Path) -> None:
    ours = state_store(tmp_path / "ours").path
    record(ours, [2])
    record(ours, [3])
    upstream = upstream_store(tmp_path, "single with one tensor")
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, (ours, upstream, tmp_path / "scores"))]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


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


def stored(parts: Sequence[StoredRows]) -> torch.Tensor:
    return torch.cat([STORED[part.window, part.begin : part.end] for part in parts])


def check(held: Blocks, parts: Sequence[StoredRows]) -> None:
    """The blocks have room for some rows, and give what is stored."""
    out = torch.full((sum(part.end - part.begin for part in parts), WIDTH), torch.nan)
    assert held.get(parts, out)
    assert torch.equal(out, stored(parts))


def test_one_token_a_step_reads_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 windows in blocks of 10 rows: 5 reads of each window for 50 steps."""
    monkeypatch.setattr(reading, "ROWS", 80)
    reads = Reads()
    held = Blocks(reads, CPU)
    for begin in range(LENGTH):
        parts = [rows(window, begin) for window in range(8)]
        check(held, parts)
    assert reads.pieces == [rows(window, begin, 10) for begin in range(0, LENGTH, 10) for window in range(8)]
    assert held.rows.shape == (80, WIDTH)


def test_windows_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any windows and rows, in any order, also back to earlier rows, as after a preemption."""
    monkeypatch.setattr(reading, "ROWS", 60)
    chance, held, sizes = random.Random(0), Blocks(Reads(), CPU), set()
    for _ in range(500):
        windows = chance.sample(range(N_WINDOWS), chance.randint(2, 20))
        parts = [rows(window, begin, chance.randint(1, min(2, LENGTH - begin)))
                 for window in windows for begin in [chance.randrange(LENGTH)]]  # fmt: skip
        check(held, parts)
        sizes.add(held.size)
    assert max(sizes) > min(sizes) == 2  # as small as a block can be


def test_the_chunks_of_a_step_do_not_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of 8 windows take turns: the first step makes room for 16, and then every row is read once."""
    monkeypatch.setattr(reading, "ROWS", 80)
    reads = Reads()
    held = Blocks(reads, CPU)
    for begin in range(LENGTH):
        for first in (0, 8):
            parts = [rows(window, begin) for window in range(first, first + 8)]
            check(held, parts)
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
    monkeypatch.setattr(reading, "ROWS", 60)
    reads = Reads()
    assert not Blocks(reads, CPU).get(parts, torch.empty(len(parts), WIDTH))
    assert reads.pieces == []


def test_the_dtype_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.empty(2, WIDTH, dtype=torch.bfloat16)
    assert Blocks(Reads(), CPU).get([rows(1, 2), rows(3, 4)], out)
    assert torch.equal(out, stored([rows(1, 2), rows(3, 4)]).bfloat16())
