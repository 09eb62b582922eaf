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
from tests.support.command_line import Run
from tests.support.made import QUANT, REF, results_of, run_of


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """results.json of a finished run."""
    results_of(run_of(REF, QUANT)).with_origin([]).write(tmp_path / "finished.json")
    return tmp_path / "finished.json"


def write(target: Path, content: bytes = b"new") -> None:
    with replacing(target) as part:
        part.write_bytes(content)


def device(file: Path, minor: int) -> Path:
    """A copy of /dev/null (3) or /dev/full (7), which a test may break."""
    try:
        os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("only root makes devices")
    return file


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


FLAGS = ("-o", "--csv", "--markdown", "--html", "-pf", "--card")


def test_devices_are_written_through_by_every_output(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    """To root the device was replaced by a file, and every other program then wrote into that."""
    targets = {flag: device(tmp_path / f"full{flag}.png", 7) for flag in FLAGS}
    ran = compare_q("show", finished, *(word for pair in targets.items() for word in pair))
    errors = sorted(line.partition(": could not be written: ")[::2] for line in ran.err.splitlines())
    assert [name for name, _ in errors] == sorted(f"error: {file}" for file in targets.values())
    assert all(why.startswith("No space left on device; ") for _, why in errors)
    assert ran.status == 2
    null = device(tmp_path / "null", 3)
    assert compare_q("show", finished, "-o", null).status == 0
    assert all(stat.S_ISCHR(file.lstat().st_mode) for file in (*targets.values(), null))
