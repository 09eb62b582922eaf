"""Outputs: regular files are replaced; links, pipes and devices receive the content."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compare_q.eval.common.output_files import is_writable, replacing


def write(target: Path, content: bytes = b"new") -> None:
    with replacing(target) as part:
        part.write_bytes(content)


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder like /tmp: all users may write into it, but not replace files of other users."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@contextmanager
def a_user() -> Iterator[None]:
    """In this block the process is not root, because file modes do not restrict root."""
    root = os.getuid() == 0
    if root:
        # The user "nobody".
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
