"""Method "gptq", compared with GPTQ's own evaluation in float64, on a toy model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compare_q.eval.api import compare
from tests.support.toy import ATOL_LOGPROB

ROWS = [
    "",
    " = A = \n",
    "",
    " The first one , with a mark . \n",
    " And a second row . \n",
    "",
    " = = B = = \n",
    "",
    " é \n",
]
LENGTH = 16


@torch.inference_mode()
def gptq(model_dir: Path, windows: int) -> dict[str, Any]:
    """Return GPTQ's perplexity of the joined rows in float64, as its ``llama.py`` computes it; 0
    windows: all.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer("\n\n".join(ROWS), return_tensors="pt").input_ids
    samples = windows or ids.numel() // LENGTH
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    total = 0.0
    for i in range(samples):
        batch = ids[:, i * LENGTH : (i + 1) * LENGTH]
        logits = model(batch, use_cache=False).logits
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], batch[0, 1:])) * LENGTH
    return {"tokens": ids.numel(), "windows": samples, "ppl": math.exp(total / (samples * LENGTH))}


@pytest.mark.engine
@pytest.mark.parametrize("windows", [0, 2])
def test_gptqs_perplexity(toy_model: Path, tmp_path: Path, windows: int) -> None:
    """One token per byte, so that the test can cut the joined rows: 16 tokens per window, of which
    15 are scored.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    gold = gptq(toy_model, windows)
    n = len("\n\n".join(ROWS).encode()) // LENGTH
    assert (gold["tokens"], gold["windows"]) == (len("\n\n".join(ROWS).encode()), windows or n)
    data = {
        "tokenizer_dir": str(toy_model),
        "dataset": "text",
        "path": str(rows),
        "method": "gptq",
        "eval_len": LENGTH,
    }
    model = {
        "load_fn": "transformers",
        "label": "model",
        "model_dir": str(toy_model),
        "engine": {"dtype": "float32"},
    }
    found = compare(data, [model], rows=windows, cache_dir=tmp_path / "cache")
    results = found.results
    (text,) = results.data["texts"]
    assert [text[key] for key in ("text_tokens", "windows", "scored_tokens")] == [
        gold["tokens"],
        windows or n,
        (windows or n) * (LENGTH - 1),
    ]
    ppl = results.models[0].ppl
    assert ppl is not None
    assert math.log(ppl) == pytest.approx(math.log(gold["ppl"]), abs=ATOL_LOGPROB)
