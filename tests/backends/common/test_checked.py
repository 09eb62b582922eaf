"""JSON and arrays that carry their own checksum."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.common import checked
from backends.common.errors import InputError


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("value", [{"a": 1}, {"x": {"y": [None, "é\ud800\n", 1e300]}, "z": {}}, {"n": "}, "}])
def test_what_is_dumped_is_json_and_comes_back(value: dict[str, Any], indent: int | None) -> None:
    data = checked.dump(value, indent)
    assert checked.load(data) == value
    read = json.loads(data)
    digest = hashlib.sha256(data[: data.rindex(b', "sha256"')]).hexdigest()
    assert read == {**value, "sha256": digest}


def test_every_single_bit_and_every_length_is_checked() -> None:
    good = checked.dump({"scale": 1.0, "files": {"a": 1}})
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(ValueError, match="checksum"):
                checked.load(bytes(bad))
        with pytest.raises(ValueError, match="checksum"):
            checked.load(good[:position])


def with_checksum(body: bytes) -> bytes:
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[1", b"\xff\xfe", b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000])
def test_a_right_checksum_of_something_else_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own words)
        checked.load(with_checksum(body))


def test_every_byte_and_every_length_of_arrays_is_checked(tmp_path: Path) -> None:
    """The names are in the directory of the .npz, which no checksum of its own covers: an array got another name."""
    file = tmp_path / "arrays.npz"
    checked.write_arrays(file, ids=np.arange(3), scored=np.array([True, False]), chat="x")
    good = file.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        file.write_bytes(bad)
        with pytest.raises(ValueError, match="checksum"):
            checked.read_arrays(file)
        file.write_bytes(good[:position])
        with pytest.raises(ValueError, match="checksum"):
            checked.read_arrays(file)
    file.write_bytes(good)
    found = checked.read_arrays(file)
    assert {name: array.tolist() for name, array in found.items()} == {
        "ids": [0, 1, 2], "scored": [True, False], "chat": "x",
    }  # fmt: skip
    with np.load(file) as plain:  # anybody can read them
        assert sorted(plain) == sorted(found)


def test_arrays_that_are_no_file_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "nothing"):
        with pytest.raises(InputError):
            checked.read_arrays(tmp_path / name)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(1 << 42)
    with pytest.raises(ValueError, match="no checksum"):
        checked.read_arrays(tmp_path / "sparse")
