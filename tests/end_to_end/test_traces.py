"""A model answers prompts, and its answers are scored: ``compare-q trace``, then a run on it, against float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.chats import MARKED, SUMS, WEATHER, encoded, save_chat_tokenizer, write_lines
from tests.support.command_line import Run
from tests.support.toy import APART, GPU, answered_logprobs, assert_refused, needs_accelerate, save_llama

pytestmark = [pytest.mark.engine, needs_accelerate]

PROMPTS = ({"prompt": "Rain in Bern?"}, {"messages": SUMS["messages"][:4]},
           {**WEATHER, "messages": WEATHER["messages"][:3]}, {"prompt": "Hi ☀"})  # fmt: skip
ASKED = (
    "<|im_start|>user\nRain in Bern?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    "<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n",
)
QBENCH = {"conversation", "turn", "input_ids", "response_ids"}
"""The keys of a row that qbench_prompts.py writes (ExLlamaV3, commit 4f8ad01); those of the file are below."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A toy of the tokenizer's 259 ids; of its generation config nothing but the ends of answers may count."""
    save_llama(tmp_path / "model", vocab_size=259, dtype="float32")
    ends = {"eos_token_id": [256, *range(40, 60)], "repetition_penalty": 9.0, "do_sample": True, "min_new_tokens": 19}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(ends))
    return save_chat_tokenizer(tmp_path / "model", MARKED)


def specs(folder: Path, model: Path, trace: str) -> tuple[Path, Path]:
    """A data spec of a trace, and a model spec."""
    (folder / "d.json").write_text(
        json.dumps({"tokenizer_dir": str(model), "dataset": "chat", "path": trace, "eval_len": 256})
    )
    spec = {"load_fn": "transformers", "label": "A", "model_dir": str(model), "engine": {"dtype": "float32"}}
    (folder / "m.json").write_text(json.dumps(spec))
    return folder / "d.json", folder / "m.json"


def test_greedy_answers_are_the_most_probable_tokens(compare_q: Run, tmp_path: Path, model: Path) -> None:
    asked, out = write_lines(tmp_path / "p.jsonl", *PROMPTS), tmp_path / "t.json"
    data, models = specs(tmp_path, model, "t.json")
    ran = compare_q("trace", "-o", out, "-m", models, asked, "--max-tokens", 20)
    assert ran.status == 0, ran.err
    trace = json.loads(out.read_text())
    rows = trace["rows"]
    assert [row["turn"] for row in rows] == [0, 1, 1, 0]
    for row, text in zip(rows, ASKED, strict=False):
        assert row["input_ids"] == encoded(model, text)
    ended = [row["response_ids"][-1] in (256, *range(40, 60)) for row in rows]
    assert [row["finish_reason"] == "stop" for row in rows] == ended
    assert any(ended)
    assert all(len(row["response_ids"]) == 20 for row, stopped in zip(rows, ended, strict=True) if not stopped)

    exact = answered_logprobs(model, rows)
    assert all(best - mine < APART for mine, best in exact)
    assert trace["vocab_size"] == 259
    scored = compare_q("-d", data, "-m", models, "-o", tmp_path / "r.json")
    assert scored.status == 0, scored.err
    (row,) = json.loads((tmp_path / "r.json").read_text())["texts"][0]["models"]
    assert row["tokens"] == len(exact) == trace["meta"]["output_tokens"]
    assert row["top1"] == pytest.approx(sum(mine == best for mine, best in exact) / len(exact), abs=0.1 if GPU else 0)
    nll = -math.fsum(mine for mine, _ in exact) / len(exact)
    assert math.log(row["ppl"]) == pytest.approx(nll, abs=1e-2 if GPU else 1e-5)

    keys = ("model", "vocab_size", "template_vars", "meta")
    theirs = [{key: row[key] for key in QBENCH} for row in rows]
    (tmp_path / "q.json").write_text(json.dumps({**{key: trace[key] for key in keys}, "rows": theirs}))
    data, models = specs(tmp_path, model, "q.json")
    assert compare_q("-d", data, "-m", models, "-o", tmp_path / "q.r.json").status == 0
    (same,) = json.loads((tmp_path / "q.r.json").read_text())["texts"][0]["models"]
    assert (same["ppl"], same["top1"], same["tokens"]) == (row["ppl"], row["top1"], row["tokens"])


def test_drawn_answers_do_not_depend_on_what_else_is_asked(compare_q: Run, tmp_path: Path, model: Path) -> None:
    _, models = specs(tmp_path, model, "t.json")
    drawn = ("trace", "-m", models, "--max-tokens", 12, "--temperature", 1)
    every, one = write_lines(tmp_path / "p.jsonl", *PROMPTS), write_lines(tmp_path / "q.jsonl", PROMPTS[3])
    answers = []
    for name, asked, seed in (("a", every, 0), ("b", one, 0), ("c", one, 1)):
        ran = compare_q(*drawn, "-o", tmp_path / f"{name}.json", asked, "--seed", seed)
        assert ran.status == 0, ran.err
        answers.append(json.loads((tmp_path / f"{name}.json").read_text())["rows"][-1]["response_ids"])
    assert answers[0] == answers[1] != answers[2]


def test_refused_before_anything_is_loaded(compare_q: Run, tmp_path: Path, model: Path) -> None:
    asked = write_lines(tmp_path / "p.jsonl", *PROMPTS)
    _, models = specs(tmp_path, model, "t.json")
    words = ("trace", "-m", models, asked)
    out = ("-o", tmp_path / "t.json")
    assert_refused(compare_q(*words, *out, "--max-tokens", 200), f"{asked}: line 2: has 72 tokens, and 200 more")
    assert_refused(compare_q(*words, "-o", tmp_path / "t.jsonl"), "must end in .json: of this engine's answers")
    assert_refused(compare_q(*words, "-o", tmp_path / "t.txt"), "must end in .json (tokens")
    assert_refused(compare_q(*words, *out, "--top-p", 0.5), "--top-p: goes with a --temperature above 0")
    spec = json.loads(models.read_text())
    for change, told in (
        ({"engine": {"streaming": True}}, "engine.streaming: "),
        ({"load_fn": "fake", "engine": {}}, "'fake' answers no prompts; these do: transformers, "),
        ({"noise_floor": True}, "noise_floor: "),
    ):
        models.write_text(json.dumps(spec | change))
        assert_refused(compare_q(*words, *out), told)
    models.write_text(json.dumps([spec, spec]))
    assert_refused(
        compare_q(*words, *out), "2 models of it are chosen, and one answers; choose it with -mask, of: A, A"
    )
    assert sorted(each.suffix for each in tmp_path.iterdir()) == ["", ".json", ".json", ".jsonl"]
