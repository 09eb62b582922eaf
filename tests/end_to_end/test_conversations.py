"""Conversations from a JSON lines file to the table, compared with float64 brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chats import MARKED, QUESTION, SUMS, WEATHER, save_chat_tokenizer, write_lines
from tests.support.toy import GPU, Run, log_softmax, needs_accelerate

pytestmark = pytest.mark.engine


def gold(tokenizer_folder: Path, model_folder: Path) -> list[float]:
    """Return the log-probabilities of the tokens in Transformers' assistant mask, one by one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    logprobs = []
    for row in (WEATHER, SUMS):
        messages = [dict(message) for message in row["messages"]]
        for message in messages:
            for call in message.get("tool_calls", []):
                # Templates take the arguments as an object, not as JSON in a string.
                function = {"name": "weather", "arguments": {"town": "Bern"}}
                message["tool_calls"] = [{**call, "function": function}]
        encoded = tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        ids = encoded["input_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].double()
        for position, is_scored in enumerate(encoded["assistant_masks"]):
            if is_scored:
                logprobs.append(log_softmax(logits[position - 1].tolist())[ids[position]])
    return logprobs


@needs_accelerate
def test_conversations_against_float64(compare_q: Run, tmp_path: Path, toy_model: Path) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", MARKED)
    talks = write_lines(tmp_path / "talks.jsonl", WEATHER, QUESTION, SUMS)
    data = tmp_path / "data.json"
    keys = {
        "tokenizer_dir": str(tokenizer),
        "dataset": "chat",
        "path": str(talks),
        "eval_len": 250,
    }
    data.write_text(json.dumps(keys))
    models = tmp_path / "models.json"
    spec = {
        "load_fn": "transformers",
        "label": "A",
        "model_dir": str(toy_model),
        "engine": {"dtype": "float32"},
    }
    models.write_text(json.dumps(spec))
    checked = compare_q("check", "-d", data, "-m", models)
    assert "2 of 3 conversations in 2 windows, 93 scored tokens" in checked.out
    assert "generation mask" in checked.out
    ran = compare_q("-d", data, "-m", models, "-o", tmp_path / "r.json")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("talks, 2 conversations, 93 scored tokens of the assistant")
    assert "\nconversations: 2 windows, 93 scored tokens\n" in ran.out
    exact = gold(tokenizer, toy_model)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["data"]["texts"][0]["conversations"]["without_scored_tokens"] == 1
    (model,) = written["models"]
    assert model["tokens"] == len(exact) == 93
    tolerance = 1e-5
    if GPU:
        tolerance = 1e-2
    assert math.log(model["ppl"]) == pytest.approx(-math.fsum(exact) / 93, abs=tolerance)
    again = compare_q("show", tmp_path / "r.json")
    assert again.out.splitlines()[:5] == ran.out.splitlines()[:5]
