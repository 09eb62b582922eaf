"""Rows -> conversations: what is read, and the one line that each malformed row gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eval.common.progress import Progress
from eval.specs.reading import parse_data_spec
from eval.text import conversations
from eval.text.conversations import Conversation
from tests.support.chats import WEATHER, write_lines
from tests.support.toy import refusal

ASK = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bern"}}}


def said_of(arguments: str) -> dict[str, Any]:
    """A row with a tool call."""
    return {"messages": [{"role": "a", "tool_calls": [{"name": "f", "arguments": arguments}]}]}


def read(file: Path, **keys: Any) -> list[Conversation]:
    spec = parse_data_spec({"tokenizer_dir": "t", "dataset": "chat", "path": file.name, "eval_len": 9, **keys}, file)
    return conversations.read(spec, Progress(quiet=True))


def test_a_tool_call_from_lines_and_from_parquet_is_the_same(tmp_path: Path) -> None:
    """Parquet gives every message every key: what is null there was not there."""
    lines = write_lines(tmp_path / "a.jsonl", WEATHER, {"messages": [ASK]})
    table = tmp_path / "a.parquet"
    columns = {"messages": [WEATHER["messages"], [ASK]], "tools": [json.dumps(WEATHER["tools"]), None], "id": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(columns), table)
    one, other = read(lines), read(table)
    assert [(each.messages, each.tools) for each in one] == [(each.messages, each.tools) for each in other]
    assert one[0].messages[1] == {"role": "assistant", "tool_calls": [CALL]}  # its arguments were JSON in a string
    assert one[0].tools == tuple(WEATHER["tools"])
    assert one[1] == Conversation((ASK,), (), f"path: {lines}: line 2")
    assert other[1].where == f"path: {table}: row 2"


def test_sharegpt_and_other_columns(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hello", "weight": None}, {"from": "gpt", "value": "Hi", "weight": 1}]
    file = write_lines(tmp_path / "a.jsonl", {"conversations": talk, "talk": [ASK]}, {"conversations": [], "talk": []})
    assert read(file)[0].messages == (ASK, {"role": "assistant", "content": "Hi", "weight": 1})
    assert [each.messages for each in read(file, text_column="talk")] == [(ASK,), ()]
    assert len(read(file, max_text_rows=1)) == 1


def test_parts_of_text_and_a_null_content_beside_calls(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    file = write_lines(
        tmp_path / "a.jsonl", {"messages": [parts, {"role": "a", "content": None, "tool_calls": [CALL]}]}
    )
    assert read(file)[0].messages == (parts, {"role": "a", "tool_calls": [CALL]})


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ("{", "column 2: not valid JSON"),
        ("[]", "must be a JSON object"),
        ({"text": "a"}, "no key messages or conversations; there are: text; name it in text_column"),
        ({"messages": None}, "messages: must be a list of objects, is missing or null"),
        ({"messages": {}}, "messages: must be a list of objects, is an object"),
        ({"messages": "[1]"}, "messages[0]: must be an object, is a number"),
        ({"messages": [ASK, "b"]}, "messages[1]: must be an object, is text"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: must be a name such as user or assistant, is missing"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role: must be a name such as user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: must be text, is missing or null"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be text, is a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: a part of type 'image': only text is scored",
        ),
        ({"messages": [{"from": "bot", "value": "a"}]}, "messages[0].from: 'bot' is no known speaker; there are"),
        ({"messages": [{"from": "gpt"}]}, "messages[0].value: must be text, is missing or null"),
        ({"messages": [{"role": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]: must have a function with a"),
        (said_of("[1]"), "messages[0].tool_calls[0].arguments: must be an object, or a JSON object in a string"),
        (said_of("[" * 100_000), "messages[0].tool_calls[0].arguments: brackets are nested more than 64 deep"),
        (said_of('{"a": "\\ud800"}'), "messages[0].tool_calls[0].arguments: a: no Unicode text"),
        (said_of('{"a": NaN}'), "messages[0].tool_calls[0].arguments: a: nan is no number that JSON has"),
        (said_of("{"), "messages[0].tool_calls[0].arguments: line 1, column 2: not valid JSON"),
        ({"messages": [{"from": "gpt", "value": "a", "content": "b"}]}, "messages[0].content: stands beside value"),
        ({"messages": [ASK], "tools": 1}, "tools: must be a list of objects, is a number"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_malformed_rows(tmp_path: Path, row: Any, gold: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", {"messages": [ASK]})
    with file.open("a") as stream:
        stream.write(row if isinstance(row, str) else json.dumps(row))
    message = refusal(read, file)
    assert message.startswith(f"path: {file}: line 2: ")
    assert gold in message


def test_files_that_hold_no_conversations(tmp_path: Path) -> None:
    assert "conversations are read from .jsonl and .parquet files, qbench's traces from .json" in refusal(
        read, write_lines(tmp_path / "a.txt")
    )
    assert refusal(read, write_lines(tmp_path / "a.jsonl")) == "dataset 'chat': no conversations in it"
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), table)
    assert "no key messages or conversations; there are: text" in refusal(read, table)
