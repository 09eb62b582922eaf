"""``compare-q trace`` with a server: what it is sent, what is kept, and what an interrupted run goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common import storage
from tests.support.chats import WEATHER, write_lines
from tests.support.command_line import Run
from tests.support.toy import assert_refused
from tests.support.vllm_server import Stub, new_weights

WORDS = ["one", "two", "three", "four"]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n" + "".join(f"{word}\n" for word in WORDS))
    return file


def rows_of(file: Path) -> list[tuple[str, str, str]]:
    """(prompt, answer without the token that ends it, how it ended) of each row of a trace of the stand-in server."""
    rows = json.loads(file.read_text())["rows"]
    both = [[bytes(each for each in row[key] if each < 256).decode() for row in rows] for key in KEYS]
    return list(zip(*both, [row["finish_reason"] for row in rows], strict=True))


KEYS = ("input_ids", "response_ids")


def test_a_trace_of_tokens(stub: Stub, compare_q: Run, tmp_path: Path, asked: Path) -> None:
    out = tmp_path / "t.json"
    ran = compare_q("trace", "-o", out, "-m", stub.url, asked, "--max-tokens", 4)
    assert ran.status == 0, ran.err
    assert f"{out}: 4 answers of 16 tokens, behind 15 of prompts; 2 hit --max-tokens 4\n" in ran.out
    gold = [("one", "eno", "stop"), ("two", "owt", "stop"), ("three", "eerh", "length"), ("four", "ruof", "length")]
    assert rows_of(out) == gold
    found = json.loads(out.read_text())
    assert found["meta"] == {"rows": 4, "input_tokens": 15, "output_tokens": 16}
    assert found["made"]["sampling"]["max_tokens"] == 4
    assert "vocab_size" not in found
    sent = min(stub.chats, key=lambda body: body["messages"][0]["content"])
    assert {key: sent[key] for key in ("temperature", "top_k", "repetition_penalty")} == {
        "temperature": 0.0, "top_k": -1, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert not (tmp_path / "t.json.partial").exists()
    assert_refused(compare_q("trace", "-o", out, "-m", stub.url, asked), "is there already; move it away")


def test_an_interrupted_trace_goes_on(stub: Stub, compare_q: Run, tmp_path: Path, asked: Path) -> None:
    out, words = tmp_path / "t.json", ("trace", "-o", tmp_path / "t.json", asked, "--max-tokens", 8)
    model = tmp_path / "m.json"
    spec = {"load_fn": "vllm_server", "model_dir": stub.url, "engine": {"concurrency": 1}}
    model.write_text(json.dumps(spec))
    stub.refuses = lambda body: "too hard" if body["messages"][0]["content"] == "three" else ""
    ran = compare_q(*words, "-m", model)
    assert ran.status == 2
    assert f"error: {asked}: line 4: {stub.url}: HTTP 400 from /v1/chat/completions: too hard" in ran.err
    assert not out.exists()
    partial = tmp_path / "t.json.partial"
    with partial.open("a") as stream:
        stream.write('{"key": "cut off')
    stub.refuses, stub.chats[:] = lambda body: "", []
    assert_refused(compare_q(*words, "-m", model, "--temperature", 1), f"{partial}: has 2 answers", "temperature")
    before = stub.model
    new_weights(stub)
    assert_refused(compare_q(*words, "-m", model), "made otherwise (the model's weights)")
    stub.model = before
    ran = compare_q(*words, "-m", model)
    assert ran.status == 0, ran.err
    assert "2 of 4 prompts are answered already" in ran.err
    assert sorted(body["messages"][0]["content"] for body in stub.chats) == ["four", "three"]
    assert [prompt for prompt, _, _ in rows_of(out)] == WORDS


def test_answers_of_an_interrupted_run_are_not_lost(stub: Stub, compare_q: Run, tmp_path: Path, asked: Path) -> None:
    """Neither to other prompts, nor to a file that has come between, nor to a partial that is damaged."""
    out, partial = tmp_path / "t.json", tmp_path / "t.json.partial"
    words = ("trace", "-o", out, "-m", stub.url, asked)

    def refuses(body: dict[str, Any]) -> str:
        out.write_text("of another program")
        return ""

    stub.refuses = refuses
    ran = compare_q(*words)
    assert ran.status == 2
    told = "has appeared meanwhile; move it away and run again: the answers are kept"
    assert ran.err.splitlines()[-1] == f"error: -o: {out}: {told}"
    assert out.read_text() == "of another program"
    out.unlink()
    whole, prompts = partial.read_bytes(), asked.read_text()
    head, first, *rest = map(storage.load, whole.splitlines(keepends=True))
    assert len(rest) == 3
    del stub.chats[:]
    asked.write_text("two\nfive\n")
    told = f"{partial}: has 3 answers to prompts that are not in {asked}; give the same prompts, another -o, or move"
    assert_refused(compare_q(*words), told)
    asked.write_text(prompts)

    partial.write_bytes(whole.replace(b'"key"', b"\0", 1))
    assert_refused(compare_q(*words), f"{partial}: line 2: is damaged; move it away")
    (before, *_) = first["response_ids"]
    partial.write_bytes(whole.replace(b'"response_ids": [%d' % before, b'"response_ids": [%d' % (before ^ 1), 1))
    assert_refused(compare_q(*words), f"{partial}: line 2: is damaged; move it away")
    for stamp in ("{", "[]", "{}", "3", "[1, {}, null, [[]]]"):
        partial.write_bytes(storage.dump({**head, "made": {**head["made"], "stamp": stamp}}) + storage.dump(first))
        assert_refused(compare_q(*words), f"{partial}: has 1 answers that were made otherwise (the model's weights)")

    partial.write_bytes(whole)
    stub.refuses = lambda body: ""
    assert compare_q(*words).status == 0
    assert [prompt for prompt, _, _ in rows_of(out)] == WORDS
    assert not stub.chats


def test_a_trace_is_extended(stub: Stub, compare_q: Run, tmp_path: Path, asked: Path) -> None:
    out, words = tmp_path / "t.json", ("trace", "-o", tmp_path / "t.json", "-m", stub.url, asked, "--extend")
    assert compare_q(*words).status == 0
    asked.write_text("five\nthree\none\none\n")
    stub.chats[:] = []
    ran = compare_q(*words)
    assert ran.status == 0, ran.err
    assert [prompt for prompt, _, _ in rows_of(out)] == [*WORDS, "five", "one"]
    assert sorted(body["messages"][0]["content"] for body in stub.chats) == ["five", "one"]
    assert_refused(compare_q(*words, "--max-tokens", 9), "has 6 answers that were made otherwise", "1024")
    qbench = {"model": "m", "vocab_size": 9, "meta": {}, "rows": [{"input_ids": [1], "response_ids": [2]}]}
    out.write_text(json.dumps(qbench))
    assert_refused(compare_q(*words), f"{out}: was not written by compare-q trace; move it away")
    assert json.loads(out.read_text()) == qbench
    assert not (tmp_path / "t.json.partial").exists()


def test_a_trace_of_messages(stub: Stub, compare_q: Run, tmp_path: Path) -> None:
    """Tools reach the server as it takes them; an answer that was cut has no end that could be scored."""
    weather = {**WEATHER, "messages": WEATHER["messages"][:3]}
    asked = write_lines(tmp_path / "p.jsonl", {"prompt": "12345678"}, weather)
    out = tmp_path / "t.jsonl"
    ran = compare_q("trace", "-o", out, "-m", stub.url, asked, "--max-tokens", 5)
    assert ran.status == 0, ran.err
    assert "1 answers as messages; 1 hit --max-tokens 5 and are left out" in ran.out
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["messages"][-1] == {"role": "assistant", "content": "yrd"}
    assert row["tools"] == WEATHER["tools"]
    sent = next(body for body in stub.chats if "tools" in body)
    (call,) = sent["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"town": "Bern"}'}
    assert sent["tool_choice"] == "auto"
    assert compare_q("trace", "-o", tmp_path / "t.json", "-m", stub.url, asked).status == 0
    assert stub.chats[-1].get("tool_choice", "none") == "none"


ABORTED = [{"message": {}, "finish_reason": "abort"}]


@pytest.mark.parametrize(
    ("change", "gold"),
    [
        ({"prompt_token_ids": None}, "its answer has no token ids, which vLLM's own server returns (return_token_ids)"),
        ({"choices": ABORTED}, "an answer ended by 'abort', and neither by itself nor by --max-tokens"),
        ({"choices": []}, "its answer has another shape than vLLM's"),
        ({"system_fingerprint": "x"}, "x answers in place of vllm-0.0-abc"),
    ],
)  # fmt: skip
def test_answers_that_are_none(
    stub: Stub, compare_q: Run, tmp_path: Path, asked: Path, change: dict[str, Any], gold: str
) -> None:
    whole = stub.chat
    stub.chat = lambda body: whole(body) | change  # type: ignore[method-assign]
    ran = compare_q("trace", "-o", tmp_path / "t.json", "-m", stub.url, asked)
    assert ran.status == 2
    assert gold in ran.err
    assert "Traceback" not in ran.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["prompts.txt"]
