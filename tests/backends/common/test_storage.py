"""Files that compare_q writes, which appear complete or not at all, and JSON that is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.common import storage
from compare_q.backends.common.json_files import (
    open_regular,
    parsed,
    parsed_line,
    read_bytes,
    read_json,
)
from compare_q.eval.common import output_files
from tests.support.toy import refusal

WRITING = """
import sys, pathlib
from compare_q.backends.common import storage
with storage.replacing(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_reader_finds_the_old_or_the_new(tmp_path: Path) -> None:
    # A name may have 255 bytes, so that no temporary name can be made by adding to this one.
    target = tmp_path / ("n" * 250)
    storage.write_whole(target, b"old")

    def fail() -> None:
        with storage.replacing(target) as temporary:
            temporary.write_bytes(b"half")
            assert target.read_bytes() == b"old"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == [target]
    storage.write_whole(target, b"new")
    assert target.read_bytes() == b"new"
    storage.write_whole(tmp_path / "other", b"")
    assert (tmp_path / "other").stat().st_mode == target.stat().st_mode


@pytest.mark.engine
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    """Writing the next file into the folder deletes the file of the killed process."""
    command = [sys.executable, "-c", WRITING, str(tmp_path / "target")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "writing\n"
        (temporary,) = tmp_path.iterdir()
        storage.sweep(tmp_path)
        assert temporary.exists()
        writer.kill()
        writer.wait()
        with output_files.replacing(tmp_path / "other") as other:
            other.write_bytes(b"whole")
        assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_every_single_bit_and_every_length_is_checked() -> None:
    good = storage.dump({"scale": 1.0, "files": {"a": 1}})
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(ValueError, match="checksum"):
                storage.load(bytes(bad))
        with pytest.raises(ValueError, match="checksum"):
            storage.load(good[:position])


def test_every_byte_and_every_length_of_arrays_is_checked(tmp_path: Path) -> None:
    """A flipped bit could rename an array: .npz has no checksums of the names."""
    file = tmp_path / "arrays.npz"
    storage.write_arrays(file, ids=np.arange(3), scored=np.array([True, False]), chat="x")
    good = file.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        for damaged in (bytes(bad), good[:position]):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="checksum"):
                storage.read_arrays(file)
    file.write_bytes(good)
    arrays = storage.read_arrays(file)
    assert arrays.keys() == {"ids", "scored", "chat"}
    assert arrays["ids"].tolist() == [0, 1, 2]
    assert arrays["scored"].tolist() == [True, False]
    assert arrays["chat"].tolist() == "x"
    # numpy can read them without compare_q.
    with np.load(file) as plain:
        assert sorted(plain) == sorted(arrays)


def test_only_what_is_named_like_a_temporary_file_of_ours_is_swept(tmp_path: Path) -> None:
    """Folders and links are kept; on a file system without locks, files are kept for a day."""
    abandoned = tmp_path / storage.temporary_name()
    abandoned.write_text("")
    held = tmp_path / storage.temporary_name()
    users = {".compare_q.part", ".part", "mine.part", f"{storage.temporary_name()}.txt"}
    for name in users:
        (tmp_path / name).write_text("")
    folder = tmp_path / storage.temporary_name()
    folder.mkdir()
    held_folder = tmp_path / storage.temporary_name()
    held_folder.mkdir()
    link = tmp_path / storage.temporary_name()
    link.symlink_to(tmp_path / "mine.part")
    descriptors = [storage.hold(held), storage.hold(held_folder)]
    assert storage.is_abandoned(folder)
    assert not storage.is_abandoned(held_folder)
    storage.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *users,
        folder.name,
        link.name,
        held.name,
        held_folder.name,
    }
    for descriptor in descriptors:
        os.close(descriptor)
    storage.sweep(tmp_path)
    assert not held.exists()
    storage.sweep(tmp_path / "nowhere")


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"[1]")
    assert read_bytes(tmp_path / "x", 3) == b"[1]"
    assert "too large: 3 bytes, and at most 2 bytes are read" in refusal(
        read_bytes, tmp_path / "x", 2
    )
    with (tmp_path / "sparse").open("wb") as stream:
        # A sparse file takes no space on the disk.
        stream.truncate(10**12)
    assert "too large: 1.0 TB" in refusal(read_json, tmp_path / "sparse")
    with open_regular(tmp_path / "x") as stream:
        assert stream.read(1) == b"["


@pytest.mark.parametrize(
    ("content", "gold"),
    [
        (b"[" * 100_000, "w: brackets are nested more than 64 deep"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "w: brackets are nested more than 64 deep"),
        (b'{"a":\n [' + b"9" * 5000 + b"]}", "w: an integer of thousands of digits"),
        (b'{"a": [1, 1' + b"0" * 41 + b"]}", "w: an integer beyond 1e+40"),
        (b'{"a": {"b": "\\ud800"}}', "w: no Unicode text: half of a surrogate pair"),
        (b'{"\\udfff": 1}', "w: no Unicode text: half of a surrogate pair"),
        (b'{"a": NaN}', "w: a: nan is not a number in JSON"),
        (b'{"a": [1.5, -Infinity]}', "w: a: -inf is not a number in JSON"),
        (b"1e999", "w: inf is not a number in JSON"),
        (b'{"a": 1, "\\u001b[2J": 1, "\\u001b[2J": 2}', "w: \\x1b[2J: stands twice in one object"),
        (
            b"\xff",
            "w: cannot be read: not UTF-8 text: invalid start byte at byte 0; save it as UTF-8",
        ),
        (b"\xef\xbb\xbf{}", "w: line 1, column 1: not valid JSON: a byte order mark"),
        (b'{\n"a" 1}', "w: line 2, column 5: not valid JSON: Expecting ':' delimiter, not 1"),
        (b'{"a": 1,}', "w: line 1, column 9: not valid JSON: a comma with nothing after it"),
        (b'{"a": 1}\n{"a": 2}', "w: line 2, column 1: not valid JSON: a second value"),
        (b'{"a": True}', "w: line 1, column 7: not valid JSON: Expecting value, not True"),
        (b'{\n// why\n"a": 1}', "w: line 2, column 1: not valid JSON: a comment"),
        (b'{"a": [1,\n', "w: line 2, column 1: not valid JSON: it ends too early"),
        (b" ", "w: not valid JSON: there is nothing in it"),
    ],
)
def test_what_no_reader_takes(content: bytes, gold: str) -> None:
    assert refusal(parsed, content, "w").startswith(gold)


@pytest.mark.parametrize(
    ("content", "gold"),
    [
        (b'{"a": 1,}\n', "w: line 3, column 9: not valid JSON"),
        # The line ends after 9 characters.
        (b'{"a": [1,\r\n', "w: line 3, column 10: not valid JSON: it ends too early"),
        (b'{"a": 1} {"a": 2}', "w: line 3, column 10: not valid JSON: a second value"),
        (b" \n", "w: line 3: not valid JSON: there is nothing in it"),
        (b'{"a": NaN}', "w: line 3: a: nan is not a number in JSON"),
        (b"9" * 5000, "w: line 3: an integer of thousands of digits"),
    ],
)
def test_a_fault_in_a_line_has_one_place(content: bytes, gold: str) -> None:
    text = refusal(parsed_line, content, "w: line 3")
    assert text.startswith(gold)
    assert "JSON Lines" not in text


def test_a_line_has_the_value_that_a_file_has() -> None:
    for content in (b'{"a": [1, 2.5, null]}\n', b"[]\r\n", b"1"):
        assert parsed_line(content, "w: line 1") == parsed(content, "w")
    assert np.isnan(parsed_line(b"NaN", "w: line 1", strict=False))
