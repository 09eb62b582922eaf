"""Windows of a store, read ahead of their use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.common.errors import InputError
from backends.reference import reading
from backends.reference.reading import ReferenceWindows, open_reference
from backends.reference.store import Reader
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


def test_closed_windows_stop_reading(tmp_path: Path) -> None:
    store = counting(tmp_path / "store", 60)
    windows = ReferenceWindows(store, pin=False)
    windows.get(0)
    windows.close()
    assert windows.futures == {}
    assert not any(thread.is_alive() for thread in windows.pool._threads)
    with pytest.raises(RuntimeError):
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
from backends.reference import sealing, store
from backends.reference.reading import open_reference
from backends.scoring import segments
ours, building, upstream, scores = map(Path, sys.argv[1:5])
assert sorted(store.recorded(building)) == [2, 3]
sealing.seal(building, ours, {"windows": "abc"}, 4)
for path, count in ((ours, 4), (upstream, 3)):
    opened = open_reference(path)
    opened.verify()
    assert (opened.n_windows, opened.stored_bytes > 0) == (count, True)
segments.load(scores, "alone", [])
store.remove(ours)
assert not ours.exists()
print(sorted(name for name in ("torch", "pyarrow", "transformers", "pydantic") if name in sys.modules))
"""


@pytest.mark.engine
def test_reading_manifests_verifying_and_counting_need_no_torch(tmp_path: Path) -> None:
    ours, building = state_store(tmp_path / "ours").path, tmp_path / "building"
    record(building, [2, 3])
    upstream = upstream_store(tmp_path, "single with one tensor")
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, (ours, building, upstream, tmp_path / "scores"))]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
