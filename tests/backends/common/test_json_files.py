"""Files that others wrote: what is no regular file, what no JSON reader takes, and text that moves a cursor."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_q.backends.common.json_files import open_regular, parsed, read_bytes, read_json
from tests.support.toy import refusal


def test_no_more_is_read_than_may_be(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"[1]")
    assert read_bytes(tmp_path / "x", 3) == b"[1]"
    assert "too large: 3 bytes, and at most 2 bytes are read" in refusal(read_bytes, tmp_path / "x", 2)
    with (tmp_path / "sparse").open("wb") as stream:
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
        (b'{"a": NaN}', "w: nan is not a number in JSON"),
        (b"1e999", "w: inf is not a number in JSON"),
        (b'{"a": 1, "\\u001b[2J": 1, "\\u001b[2J": 2}', "w: \\x1b[2J: stands twice in one object"),
        (b"\xff", "w: cannot be read: not UTF-8 text: invalid start byte at byte 0"),
        (b"\xef\xbb\xbf{}", "w: line 1, column 1: not valid JSON: "),
        (b'{\n"a" 1}', "w: line 2, column 5: not valid JSON: "),
    ],
)
def test_what_no_reader_takes(content: bytes, gold: str) -> None:
    assert refusal(parsed, content, "w").startswith(gold)
