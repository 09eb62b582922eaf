"""What the benchmark of compilation asks compare_q to run, and how it reads the speeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled
from compare_q.eval.run import jobs
from compare_q.eval.run.hosts import Hosts
from compare_q.eval.specs import reading

FAKE = {"load_fn": "fake", "model_dir": "none", "engine": {"vocab_size": 500}}
ROWS = {
    "eager": {**FAKE, "label": "eager", "reference": True},
    "again": {**FAKE, "label": "again", "engine": {"vocab_size": 500, "boost": 3.0}},
    "compiled": {**FAKE, "label": "compiled", "engine": {"vocab_size": 500, "boost": 2.0}},
}


@pytest.mark.engine
def test_compare_q_takes_every_row(toy_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    models = compiled.specs(toy_model, list(compiled.ROWS), {"max_num_batched_tokens": 512})
    file = tmp_path / "models.json"
    file.write_text(json.dumps(models), encoding="utf-8")
    specs = reading.load_model_specs([file])
    assert [spec.name for spec in specs] == ["eager", "again", "compiled", "noise"]
    assert [spec.options["enforce_eager"] for spec in specs] == [True, True, False, True]
    assert jobs.plan(specs, 64, Hosts())[1] == []


@pytest.mark.parametrize(("rows", "known"), [(["eager", "again", "compiled"], True), (["eager", "compiled"], False)])
def test_speeds_are_compared_where_both_rows_ran(
    toy_model: Path, toy_text: Path, tmp_path: Path, rows: list[str], known: bool
) -> None:
    data: dict[str, Any] = {
        "tokenizer_dir": str(toy_model), "dataset": "text", "path": str(toy_text), "eval_len": 100, "eval_stride": 100,
    }  # fmt: skip
    found = compiled.measured(data, [ROWS[name] for name in rows], tmp_path)
    speed = {row["label"]: row["tokens_per_second"] for row in found["rows"]}
    assert list(speed) == rows
    assert found["rows"][-1]["kld"] > 0
    assert found["compiled_over_again"] == (speed["compiled"] / speed["again"] if known else None)
