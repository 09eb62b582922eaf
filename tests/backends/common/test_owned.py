"""Files that appear whole or not at all, and the temporary files of processes that live, are gone or cannot be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.common import owned
from eval.common import files

WRITING = """
import sys, pathlib
from backends.common import owned
with owned.replacing(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_reader_finds_the_old_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 250)  # near the 255 bytes that a name may have
    owned.write_whole(target, b"old")

    def fail() -> None:
        with owned.replacing(target) as temporary:
            temporary.write_bytes(b"half")
            assert target.read_bytes() == b"old"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == [target]
    owned.write_whole(target, b"new")
    assert target.read_bytes() == b"new"


@pytest.mark.engine
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    """Also while only its exit status is left; and the next file that is written there takes it away."""
    command = [sys.executable, "-c", WRITING, str(tmp_path / "target")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        (left,) = tmp_path.iterdir()
        owned.sweep(tmp_path)
        assert left.exists()
        writer.kill()
        while owned.began(writer.pid) != -1:
            time.sleep(0.001)
        with files.replacing(tmp_path / "other") as temporary:
            temporary.write_bytes(b"whole")
        assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_only_what_is_named_like_a_temporary_file_of_ours_is_swept(tmp_path: Path) -> None:
    began, place = owned.began(os.getpid()), owned.place()
    gone = [
        f".compare_q.{os.getpid()}-{began}9-{place}.00000000.part",  # another process had this id
        f".compare_q.4194305-1-{place}.00000000.part",  # beyond the largest id that Linux gives
        f".compare_q.9999999999-1-{place}.00000000.part",
    ]
    kept = [
        f".compare_q.{os.getpid()}-{began}-{place}.00000000.part",
        f".compare_q.1-{owned.began(1)}-{place}.00000000.part",
        ".compare_q.4194305-1-00000000.00000000.part",  # another machine's
        f".compare_q.4194305-1-{place}.part",
        ".part",
        "mine.part",
    ]
    for name in (*gone, *kept):
        (tmp_path / name).write_text("")
    folder = tmp_path / f".compare_q.4194305-1-{place}.00000001.part"
    folder.mkdir()
    link = tmp_path / f".compare_q.4194305-1-{place}.00000002.part"
    link.symlink_to(tmp_path / "mine.part")
    owned.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, folder.name, link.name}
    foreign = tmp_path / ".compare_q.4194305-1-00000000.00000000.part"  # of another machine, after a day
    os.utime(foreign, (time.time() - 90_000,) * 2)
    owned.sweep(tmp_path)
    assert not foreign.exists()
    owned.sweep(tmp_path / "nowhere")
