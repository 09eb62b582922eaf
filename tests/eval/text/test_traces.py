"""qbench's traces, in the form that its ``qbench_prompts.py`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.common.cache import Cache
from eval.common.progress import Progress
from eval.specs.reading import parse_data_spec
from eval.text import windows
from eval.text.windows import EvalData
from tests.support.chats import MARKED, encoded, save_chat_tokenizer
from tests.support.toy import refusal

ASKED = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = ["<think>2 more</think>4<|im_end|>", "Four<|im_end|>"]


def trace(folder: Path) -> dict[str, Any]:
    """Two answers to one question."""
    tokenizer = save_chat_tokenizer(folder / "tokenizer", MARKED)
    asked, answers = encoded(tokenizer, ASKED), [encoded(tokenizer, answer) for answer in ANSWERS]
    rows = [{"conversation": 0, "turn": i, "input_ids": asked, "response_ids": each} for i, each in enumerate(answers)]
    counts = {"rows": 2, "input_tokens": 2 * len(asked), "output_tokens": sum(map(len, answers))}
    return {"model": "m", "vocab_size": 259, "template_vars": {"enable_thinking": True}, "meta": counts, "rows": rows}


def built(folder: Path, content: Any, **keys: Any) -> EvalData:
    (folder / "trace.json").write_text(json.dumps(content))
    base = {"tokenizer_dir": "tokenizer", "dataset": "chat", "path": "trace.json", "eval_len": 99}
    spec = parse_data_spec({**base, **keys}, folder / "d.json")
    return windows.build(spec, None, Cache(folder / "cache"), Progress(quiet=True))


def test_answers_are_scored_and_nothing_else(tmp_path: Path) -> None:
    """Of a question of p tokens and an answer of R, positions p to p + R - 1, as qbench takes them for perplexity."""
    content = trace(tmp_path)
    data = built(tmp_path, content)
    question = len(content["rows"][0]["input_ids"])
    lengths = [len(row["response_ids"]) for row in content["rows"]]
    assert [window.spans for window in data.windows] == [((question, question + length),) for length in lengths]
    rows = [row["input_ids"] + row["response_ids"] for row in content["rows"]]
    assert [window.token_ids.tolist() for window in data.windows] == rows
    assert data.n_scored == content["meta"]["output_tokens"]
    assert data.n_tokens == data.n_scored + content["meta"]["input_tokens"]
    assert data.text_note == "bytes and words are not known: the text came as tokens"
    assert data.conversations is not None
    assert data.conversations.told_by == "the trace"
    smaller, padded = (built(tmp_path, content | {"vocab_size": size}).conversations for size in (250, 512))
    assert smaller is not None
    assert smaller.told_by == "the trace, of a tokenizer of 250 ids where this one has 259"
    assert padded == data.conversations
    assert len(built(tmp_path, content, max_text_rows=1).windows) == 1
    cut = built(tmp_path, content, eval_len=question + 1)  # the first token of each answer alone
    assert [window.spans for window in cut.windows] == [((question, question + 1),)] * 2


@pytest.mark.parametrize(
    ("content", "gold"),
    [
        ({"messages": []}, "rows: must be a list of rows; .json is read as a trace of qbench_prompts.py"),
        ([], "rows: must be a list of rows"),
        ({"rows": [1], "vocab_size": 999}, "vocab_size: is 999, and the tokenizer has 259 ids; give the tokenizer"),
        ({"rows": [1], "vocab_size": "259"}, "vocab_size: is no number, and the tokenizer has 259 ids"),
        ({"rows": [1]}, "rows[0].input_ids: must be a list of token ids below 259, the size of the tokenizer"),
        ({"rows": [{"input_ids": [1], "response_ids": [259]}]}, "rows[0].response_ids: must be a list of token ids"),
        ({"rows": [{"input_ids": [True], "response_ids": [2]}]}, "rows[0].input_ids: must be a list of token ids"),
        ({"rows": [{"input_ids": [1], "response_ids": [-1]}]}, "rows[0].response_ids: must be a list of token ids"),
    ],
)
def test_malformed_traces(tmp_path: Path, content: Any, gold: str) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", MARKED)
    assert refusal(built, tmp_path, content).startswith(f"path: {tmp_path / 'trace.json'}: {gold}")


def test_keys_without_meaning_for_traces(tmp_path: Path) -> None:
    content = trace(tmp_path)
    message = refusal(built, tmp_path, content, score_roles=["assistant"])
    assert message == "score_roles: a trace (.json) says itself which tokens are scored; leave it out"
