"""The tokens in a reference pack are untrusted: types and shapes are checked before use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compare_q.backends.reference import pack_files
from compare_q.eval.text import stored_tokens
from compare_q.eval.text.text_tokens import Chat, Tokens
from tests.support.toy import refusal

IDS = np.arange(5, dtype=np.int32)
CHAT = Chat(np.zeros(5, np.int8), ("assistant",), "generation mask", 0, "t")
TOKENS = Tokens(
    IDS,
    IDS[:0],
    9,
    "v",
    ends=np.array([2, 5]),
    sizes=IDS,
    n_bytes=7,
    n_words=2,
    chat=CHAT,
    source="s",
)
# So deep that Python's JSON parser may raise RecursionError.
DEEP = "[" * 20_000 + "]" * 20_000


def test_tokens_are_read_as_they_were_written(tmp_path: Path) -> None:
    stored_tokens.write_pack(tmp_path, TOKENS)
    tokens = stored_tokens.tokens_of_pack(tmp_path)
    assert (tokens.n_bytes, tokens.source, tokens.leading_token, tokens.top_id) == (7, "s", None, 9)
    np.testing.assert_array_equal(tokens.ids, IDS)
    assert tokens.chat is not None
    assert tokens.chat.role_names == ("assistant",)


def array(
    name: str, changed: Callable[[Any], Any]
) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def change(arrays: dict[str, Any], _: dict[str, str]) -> None:
        arrays[name] = changed(np.asarray(arrays[name]))

    return change


def text(name: str, content: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def change(_: dict[str, Any], texts: dict[str, str]) -> None:
        texts[name] = content
        if not isinstance(content, str):
            texts[name] = json.dumps(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        array("ids", lambda ids: ids.reshape(1, -1)),
        array("ids", lambda ids: ids.astype(np.float32)),
        array("ids", lambda ids: -ids),
        array("ids", lambda ids: ids[:2]),
        array("prefix", lambda ids: np.array([-1], np.int32)),
        array("ends", lambda ends: ends.reshape(1, -1)),
        array("ends", lambda ends: ends + 10**12),
        array("ends", lambda ends: ends[::-1].copy()),
        array("sizes", lambda sizes: sizes[:3]),
        array("numbers", lambda numbers: numbers[:2]),
        array("numbers", lambda numbers: numbers[0]),
        array("top_id", lambda top: np.array([1.5])),
        array("top_id", lambda top: np.array([1, 2])),
        array("roles", lambda roles: roles + 1),
        array("roles", lambda roles: roles.reshape(1, -1)),
        text("facts", DEEP),
        # Python refuses to read an integer of more than 4,300 digits.
        text("facts", "9" * 5_000),
        text("facts", [pack_files.TOKENS_FILE, 5, "", ""]),
        text("facts", [pack_files.TOKENS_FILE, [5], "", ""]),
        text("facts", [pack_files.TOKENS_FILE, [], 1, 2]),
        text("facts", [pack_files.TOKENS_FILE, [], "", "", *range(20)]),
        text("facts", {}),
        text("chat", DEEP),
        text("chat", ["mask", "x", "t", ["assistant"]]),
        text("chat", ["mask", 0, "t", [5]]),
        text("chat", [0]),
    ],
)
def test_hostile_tokens_are_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]
) -> None:
    stored_tokens.write_pack(tmp_path, TOKENS)
    arrays, texts = pack_files.arrays_of(tmp_path / pack_files.TOKENS_FILE)
    change(arrays, texts)
    file = tmp_path / pack_files.TOKENS_FILE
    # safetensors writes the memory of an array as it is, whatever its strides.
    contiguous = {name: np.array(value, order="C") for name, value in arrays.items()}
    save_file(contiguous, file, texts)
    assert refusal(stored_tokens.tokens_of_pack, tmp_path).startswith(f"{file}: ")
