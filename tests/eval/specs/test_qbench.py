"""qbench's YAML projects -> specs, by its own example and by a project with a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare_q.eval.specs import qbench, reading
from tests.support.command_line import Run
from tests.support.toy import refusal

MODELS = """
models:
  - {label: HF BF16, group: reference, engine: transformers, source: hf_model/, options: {streaming: true, x: 1}}
  - {label: 3.00 bpw, group: EXL3, engine: exllamav3, source: exl3/3.00bpw/}
  - {label: Q4_K_M, group: GGUF, engine: llamacpp, source: gguf/q4.gguf, options: {n_gpu_layers: 7}}
"""
TEXT = """
title: A title
test_data: {source: wiki2, rows: 10, length: 2048}
tokenizer: {source: hf_model/, template: true}
logit_cache: {dir: _logit_cache/, max_size_gb: 50}
output: {plot_ppl: a.png}
colour: red
"""


def test_a_project(tmp_path: Path, compare_q: Run) -> None:
    """Both specs, written beside the project, load; what was left out is said."""
    project = tmp_path / "p.yml"
    project.write_text(TEXT + MODELS)
    ran = compare_q("convert", project)
    assert ran.status == 0, ran.err
    data, models = tmp_path / "p.data.json", tmp_path / "p.models.json"
    assert json.loads(data.read_text()) == {
        "tokenizer_dir": "hf_model/", "dataset": "wiki2", "eval_len": 2048, "eval_stride": 2048, "max_rows": 10,
        "chat_template": True,
    }  # fmt: skip
    floor = {"streaming": True, "noise": "bf16"}
    assert json.loads(models.read_text()) == [
        {"load_fn": "transformers_auto_bf16", "label": "HF BF16", "model_dir": "hf_model/",
         "engine": {"streaming": True}, "reference": True},
        {"load_fn": "transformers_auto_bf16", "label": "Noise floor", "model_dir": "hf_model/", "engine": floor,
         "noise_floor": True},
        {"load_fn": "exllamav3", "label": "3.00 bpw", "model_dir": "exl3/3.00bpw/", "group": "EXL3"},
        {"load_fn": "llamacpp", "label": "Q4_K_M", "model_dir": "gguf/q4.gguf", "engine": {"n_gpu_layers": 7},
         "group": "GGUF"},
    ]  # fmt: skip
    assert len(reading.load_model_specs([models])) == 4
    assert reading.load_data_specs([data])[0].stride == 2048
    for part in ("title: is a flag here, -t", "colour: no key of qbench's", "models[0].options.x: left out"):
        assert part in ran.err
    assert f"compare-q -d {data} -m {models}" in ran.out
    assert "-d: is no flag of compare-q convert, but of compare-q run" in compare_q("convert", project, "-d", data).err
    again = compare_q("convert", project)
    assert (again.status, again.err) == (2, f"error: {data}: is there already; move it away\n")


def test_a_trace_has_the_references_tokenizer(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "response_ids": [3]}, {"input_ids": [1], "response_ids": [2, 3, 4]}]
    (tmp_path / "t.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "p.yml").write_text("test_trace: t.json\nnoise_floor: false\n" + MODELS)
    data, models, said = qbench.read(tmp_path / "p.yml")
    assert data == {"tokenizer_dir": "hf_model/", "dataset": "chat", "path": "t.json", "eval_len": 4}
    assert len(models) == 3
    assert "tokenizer: the reference's, since a trace names none" in said


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("a: [", "not valid YAML: "),
        ("- 1", "is no project of qbench, which has keys such as models and test_data"),
        (
            "models: [{engine: vllm, source: a}]",
            "models.0.engine: input should be 'transformers', 'exllamav3' or 'llamacpp'",
        ),
        ("models: [{engine: llamacpp}]", "models.0.source: missing"),
        ("models: [{engine: llamacpp, source: a}]", "models: 0 models of group reference; a project has one"),
        (MODELS, "test_data and tokenizer: both are needed where there is no test_trace"),
        (MODELS + "test_data: {source: wiki2}\ntokenizer: {source: a}", "test_data.length: missing"),
        (MODELS + "test_trace: none.json", "none.json: no such file"),
    ],
)
def test_refusals(tmp_path: Path, text: str, gold: str) -> None:
    (tmp_path / "p.yml").write_text(text)
    message = refusal(qbench.convert, tmp_path / "p.yml")
    assert str(tmp_path) in message
    assert gold in message
    assert [file.name for file in tmp_path.iterdir()] == ["p.yml"]


def test_a_spec_that_is_there_keeps_both_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "p.yml").write_text(TEXT + MODELS)
    (tmp_path / "p.models.json").write_text("mine")
    message = refusal(qbench.convert, tmp_path / "p.yml")
    assert message == f"{tmp_path / 'p.models.json'}: is there already; move it away"
    assert not (tmp_path / "p.data.json").exists()
