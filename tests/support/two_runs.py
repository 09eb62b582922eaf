"""Finished runs of two machines, written as files by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compare_q.eval import results
from compare_q.eval.results import ModelResult, RunResult, TextResult
from tests.support.made import QUANT, REF, raw_of, replace, run_result, text_result

DATA = {"windows_sha256": "w", "vocabulary_sha256": "v", "windows": 2, "text_tokens": 400, "scored_tokens": 40}
CPU, GPU = {"cpu": "AMD EPYC"}, {"gpus": ["NVIDIA H200"] * 2, "driver": "580.1"}
IDENTITY = {"label": "bf16", "key": "a" * 40, "model": "m", "engine": "fake", "hardware": CPU, "version": 3}
ON_GPU = {**IDENTITY, "key": "b" * 40, "hardware": GPU, "bytes": 5}
Write = Callable[..., Path]


def on(model: ModelResult, key: str, machine: dict[str, Any] = CPU, **fields: Any) -> ModelResult:
    """The model with that key of its scores, measured on that machine."""
    return replace(model, scores_key=key, provenance={**model.provenance, **machine}, **fields)


REF_A, QUANT_A = on(REF, "ref"), on(QUANT, "w4")
FP8_B = on(QUANT, "fp8", label="FP8")


def writer(tmp_path: Path) -> Write:
    """Writes a results.json as another machine would: ``write(name, models..., reference=, hardware=, ...)``."""

    def written(name: str, *models: ModelResult, **keys: Any) -> Path:
        reference, data = keys.get("reference", IDENTITY), {**DATA, **keys.get("data", {})}
        run = run_result((text_result("text", data, "letters", models, reference),), keys.get("title"))
        raw = raw_of(run, ["compare_q.py", "-d", name])
        raw |= {"hardware": keys.get("hardware", CPU), "versions": {"torch": keys.get("torch", "2.13")}}
        raw |= {"created": keys.get("created", "2026-11-20T00:00:00+00:00"), "commit": "c"}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(raw))
        return tmp_path / name

    return written


def combined(files: Sequence[Path]) -> tuple[RunResult, TextResult]:
    """The runs of these files as one, and its only text."""
    found = results.load(files)
    return found, found.texts[0]


def labels(text: TextResult) -> list[str]:
    return [model.label for model in text.models]
