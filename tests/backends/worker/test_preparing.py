"""Before a model's turn: its files are read in pieces as far as memory allows, and no GPU is touched."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from backends.base import LoadRequest
from backends.common import machine
from backends.common.errors import ModelError
from backends.worker import preparing
from backends.worker.preparing import ReadAhead, budget, import_engine

FAKE = LoadRequest("m", "fake", "none", 100)


def test_how_much_is_read_by_hand() -> None:
    gib = 1 << 30
    assert [budget(n) for n in (None, 0, 2 * gib - 1, 2 * gib, 10 * gib)] == [0, 0, 0, gib, 5 * gib]


@pytest.mark.parametrize(("available", "gold"), [(100 << 30, 2500), (2000, 1000), (None, 0)])
def test_files_are_read_as_far_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int | None, gold: int
) -> None:
    """In pieces of 1,000 bytes; a file that is gone is left out."""
    monkeypatch.setattr(preparing, "PIECE", 1000)
    monkeypatch.setattr(preparing, "RESERVE", 0)
    monkeypatch.setattr(machine, "available_memory", lambda: available)
    for name, size in (("a", 1500), ("b", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    ahead = ReadAhead([tmp_path / "a", tmp_path / "gone", tmp_path / "b"])
    ahead.thread.join(30)
    assert ahead.n_read == gold


def test_an_engine_that_touches_a_gpu_is_no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    import_engine("fake", FAKE)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    with pytest.raises(ModelError, match=r"^importing its engine has touched a GPU$"):
        import_engine("fake", FAKE)


def test_the_priority_of_this_process_stays() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    import_engine("fake", FAKE)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
