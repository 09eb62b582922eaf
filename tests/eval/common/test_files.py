"""Outputs: regular files are replaced, whatever else has the name stays what it is and gets the content."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compare_q.eval.common.files import is_writable, replacing


def write(target: Path, content: bytes = b"new") -> None:
    with replacing(target) as part:
        part.write_bytes(content)


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder like /tmp: all may write in it, and none may replace another's file."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@contextmanager
def a_user() -> Iterator[None]:
    """A block in which this process is not root's, whom no mode of a file stops."""
    root = os.getuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


def test_a_file_keeps_its_mode_and_one_that_may_only_be_read_stays(common: Path) -> None:
    file = common / "file"
    with a_user():
        file.touch(0o640)
        write(file)
        assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"new", 0o640)
        file.chmod(0o444)
        assert not is_writable(file)
