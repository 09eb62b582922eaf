"""Files are read into the page cache ahead."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from compare_q.backends.common import machine
from compare_q.backends.common.errors import StoppedError
from compare_q.eval.common import page_cache

SIZE = 8 << 20


def go_on() -> None:
    """Let the reading go on."""


def resident(file: Path) -> int:
    """Return the number of a file's pages in the page cache."""
    n_pages = SIZE // mmap.PAGESIZE
    states = (ctypes.c_ubyte * n_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    # Private, so that ctypes may take the address; its pages are the file's until they are written.
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), SIZE, mmap.MAP_PRIVATE) as pages:
        view = ctypes.c_char.from_buffer(pages)
        assert libc.mincore(ctypes.byref(view), ctypes.c_size_t(SIZE), states) == 0
        del view
    return sum(state & 1 for state in states)


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    """A file whose pages are not in the page cache."""
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(SIZE))
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file):
        pytest.skip("this file system keeps its files in memory")
    return file


def read_exactly(file: Path, begin: int, size: int) -> None:
    """Read some bytes of a file; the system reads no others ahead."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(stream.fileno(), size, begin)


def test_a_file_is_read_ahead(cold_file: Path) -> None:
    page_cache.read_ahead([cold_file], go_on)
    assert resident(cold_file) == SIZE // mmap.PAGESIZE


def test_a_file_whose_ends_were_read_is_read_ahead(cold_file: Path) -> None:
    """The fingerprint of a model reads both ends of each file."""
    read_exactly(cold_file, 0, mmap.PAGESIZE)
    read_exactly(cold_file, SIZE - mmap.PAGESIZE, mmap.PAGESIZE)
    page_cache.read_ahead([cold_file], go_on)
    assert resident(cold_file) == SIZE // mmap.PAGESIZE


def test_only_chunks_that_are_not_in_memory_are_read(
    cold_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = SIZE // 8
    monkeypatch.setattr(page_cache, "CHUNK_BYTES", chunk)
    read_exactly(cold_file, 0, 2 * chunk)
    with cold_file.open("rb") as stream:
        if not page_cache.is_in_memory(stream.fileno(), 0):
            pytest.skip("this file system does not say what is in memory")
    read: list[int] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[bytearray], begin: int, flags: int = 0) -> int:
        if len(buffers[0]) == chunk:
            read.append(begin)
        return preadv(descriptor, buffers, begin, flags)

    monkeypatch.setattr(os, "preadv", noted)
    page_cache.read_ahead([cold_file], go_on)
    assert resident(cold_file) == SIZE // mmap.PAGESIZE
    # The system may read ahead after a chunk.
    assert 0 < len(read) <= 6
    assert min(read) >= 2 * chunk


def test_reading_ends_when_the_run_is_stopped(
    cold_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "CHUNK_BYTES", SIZE // 8)
    chunks = iter(range(2))

    def check() -> None:
        if next(chunks, None) is None:
            raise StoppedError

    with pytest.raises(StoppedError):
        page_cache.read_ahead([cold_file], check)
    assert resident(cold_file) > 0


def test_files_that_memory_cannot_hold_are_not_read(
    cold_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * SIZE - 1)
    page_cache.read_ahead([cold_file], go_on)
    assert resident(cold_file) == 0
