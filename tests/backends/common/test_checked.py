"""JSON that carries its own checksum."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from backends.common import checked


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
    assert not checked.is_checked(b'{"scale": 1.0}')


def with_checksum(body: bytes) -> bytes:
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[1", b"\xff\xfe", b'{"a": ' + b"[" * 100_000, b'{"a": ' + b"9" * 5000])
def test_a_right_checksum_of_something_else_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own words)
        checked.load(with_checksum(body))
