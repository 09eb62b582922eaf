"""Files of prompts: what is asked, and what is refused; and which tokens end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.cli.trace import files
from tests.support.chats import MARKED, SUMS, WEATHER, save_chat_tokenizer, write_lines
from tests.support.toy import refusal


def test_lines_of_text_and_of_json(tmp_path: Path) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("Hi\n\n  Rain in Bern?\u2028Now? \nHi\n", encoding="utf-8")
    found = files.read_prompts(plain)
    asked = ["Hi", "Rain in Bern?\u2028Now?", "Hi"]
    assert [each.talk.messages for each in found] == [({"role": "user", "content": text},) for text in asked]
    assert found[2].key == f"{found[0].key}-2"
    rows = [{"prompt": "Hi"}, {"messages": SUMS["messages"][:4]}, {**WEATHER, "messages": WEATHER["messages"][:3]}]
    again = files.read_prompts(write_lines(tmp_path / "p.jsonl", *rows))
    assert again[0].key == found[0].key
    assert [each.turn for each in again] == [0, 1, 1]
    assert again[2].talk.tools == tuple(WEATHER["tools"])
    (call,) = again[2].talk.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"town": "Bern"}


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ([], "line 1: must be an object with prompt, or with messages"),
        ({"text": "Hi"}, "line 1: must be an object with prompt, or with messages"),
        ({"prompt": "Hi", "messages": []}, "line 1: must be an object with prompt, or with messages"),
        ({"prompt": 3}, "line 1: messages[0].content: must be text"),
        ({"messages": []}, "line 1: messages: is empty; a prompt ends with what is to be answered, of user or tool"),
        (SUMS, "line 1: messages: ends with the assistant; a prompt ends with what is to be answered"),
        ({"messages": [{"role": "user"}]}, "line 1: messages[0].content: must be text, is missing or null"),
        ({"prompt": "Hi", "tools": "x"}, "line 1: tools: line 1, column 1: not valid JSON"),
    ],
)
def test_malformed_prompts(tmp_path: Path, row: Any, gold: str) -> None:
    file = write_lines(tmp_path / "p.jsonl", row)
    assert refusal(files.read_prompts, file).startswith(f"{file}: {gold}")


def test_files_that_are_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "p.json").write_text("[]")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert refusal(files.read_prompts, tmp_path / "empty.txt").endswith("empty.txt: no prompts in it")
    assert "prompts are read from .jsonl" in refusal(files.read_prompts, tmp_path / "p.json")
    assert refusal(files.read_prompts, tmp_path / "latin.txt").endswith("at byte 3")


@pytest.mark.parametrize(
    ("configs", "gold"),
    [
        ({}, [256]),
        ({"generation_config.json": {"eos_token_id": [258, 7]}, "config.json": {"eos_token_id": 9}}, [258, 7, 256]),
        ({"generation_config.json": {"temperature": 0.6}, "config.json": {"eos_token_id": 9}}, [9, 256]),
        ({"config.json": {"text_config": {"eos_token_id": 256}}}, [256]),
    ],
)
def test_what_ends_an_answer(tmp_path: Path, configs: dict[str, Any], gold: list[int]) -> None:
    from compare_q.eval.text.vocabulary import load_tokenizer

    folder = save_chat_tokenizer(tmp_path / "t", MARKED)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content))
    assert files.answer_ends(folder, tokenizer) == gold
