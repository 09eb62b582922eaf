"""The gate with real engines: faults planted in vLLM's kernels are found, and another engine is as
before.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama import modeling_llama

from tests.support.toy import Run, Specs, in_transformers, with_changed_weight

pytestmark = pytest.mark.engine
FROM = 64
EAGER_ATTENTION = modeling_llama.eager_attention_forward
PLANTED = Path(__file__).parents[1] / "support" / "planted"


def python_with(fault: str, folder: Path, layer: str = "") -> Path:
    """Return a Python that adds a fault (``tests/support/planted``) to the vLLM that it imports.

    ``layer``: number of the only layer with a fault in attention; "": all.
    """
    file = folder / f"{fault}{layer}"
    variables = f'PLANTED={fault} PLANTED_FROM={FROM} PYTHONPATH="$PYTHONPATH:{PLANTED}"'
    if layer:
        variables += f" PLANTED_LAYER={layer}"
    file.write_text(f'#!/bin/sh\n{variables} exec {sys.executable} "$@"\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_planted_faults_are_found(
    compare_q: Run,
    quantized: Callable[..., Path],
    toy_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults of the toy in W8A8, which vLLM computes on every CPU: a channel's scale is dropped,
    attention is wrong from position 64 on, a kernel is wrong at batch 1, another one is random,
    values in the KV cache are halved in decode, and an option is ignored.
    """
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    model = quantized("W8A8")
    data = tmp_path / "data.json"
    models = tmp_path / "models.json"
    report = tmp_path / "gate.json"
    data.write_text(
        json.dumps(
            {
                "tokenizer_dir": str(model),
                "dataset": "text",
                "path": str(toy_text),
                "eval_len": 128,
                "eval_stride": 128,
            }
        )
    )
    # One Python for all, so that vLLM is imported once.
    python = str(python_with("none", tmp_path))
    models.write_text(
        json.dumps({"load_fn": "vllm_score", "model_dir": str(model), "python": python})
    )
    words = ["--variant", "none:"]
    for name in ("scale", "late_attention", "alone", "noise", "decoded_values"):
        overrides = json.dumps({"planted": name})
        words += ["--variant", f"{name}:engine.hf_overrides={overrides}"]
    ignored = ("--variant", "ignored:engine.attention_backend=TORCH_SDPA")
    ran = compare_q("gate", "-m", models, "-d", data, "-r", 2, *words, *ignored, "-o", report)
    assert report.exists(), ran.err
    outcomes = {}
    verdicts = {}
    for variant in json.loads(report.read_text())["variants"]:
        outcomes[variant["label"]] = variant["outcome"]
        verdicts[variant["label"]] = variant["words"]
    assert outcomes == {
        "none": "as before",
        "scale": "differs",
        "late_attention": "differs",
        "alone": "differs",
        "noise": "not deterministic",
        "decoded_values": "differs",
        "ignored": "not applied",
    }, ran.out
    assert ran.status == 1
    position = verdicts["late_attention"].partition("from position ")[2].split()[0]
    assert FROM - 4 <= int(position) <= FROM + 6
    shapes_of_alone = verdicts["alone"].partition("only in ")[2]
    assert shapes_of_alone.startswith("prefill at batch 1 and ")
    assert "full batch" not in shapes_of_alone
    shapes_of_decoded_values = verdicts["decoded_values"].partition("only in ")[2]
    assert shapes_of_decoded_values == "decode at full batch and decode at batch 1"


def test_places_in_vllm(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention is wrong in layer 1 from position 64 on, and in all layers at batch 1."""
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    spec = {"load_fn": "vllm_score", "model_dir": str(toy_model), "engine": {"dtype": "float32"}}
    data, models = write_specs([spec])
    in_layer_1 = python_with("late_attention", tmp_path, "1")
    words = ["--variant", "first:", "--variant", f"in_layer_1:python={in_layer_1}"]
    words += ["--variant", f"alone:python={python_with('alone', tmp_path)}"]
    report = tmp_path / "gate.json"
    words += ["--phase", "prefill", "--where", "-o", str(report)]
    ran = compare_q("gate", "-m", models, "-d", data, "-r", 2, *words)
    assert ran.status == 1, ran.err
    places = {}
    for variant in json.loads(report.read_text())["variants"]:
        places[variant["label"]] = variant["where"]
    assert places["first"] == ""
    assert "output of layers.1.self_attn.attn on" in places["in_layer_1"]
    assert "output of layers.0.self_attn.attn on" in places["alone"]
    assert places["in_layer_1"] in ran.out
    assert list(own_cache.glob(".compare_q.*")) == []


def test_places_in_transformers(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults in layer 1: attention is computed wrong, which no module shows as its output, and a
    weight of another checkpoint is wrong.
    """
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", wrong_attention_of_layer_1)
    faulty = with_changed_weight(toy_model, tmp_path / "faulty", "model.layers.1.mlp.down_proj")
    specs = []
    for label, model in (("first", toy_model), ("same", toy_model), ("down", faulty)):
        options = {"dtype": "float32"}
        specs.append(in_transformers(model, label=label, engine=options))
    options = {"dtype": "float32", "attn_implementation": "eager"}
    specs.append(in_transformers(toy_model, label="attention", engine=options))
    data, models = write_specs(specs)
    report = tmp_path / "gate.json"
    junit = tmp_path / "gate.xml"
    files = ("-o", report, "--junit", junit)
    ran = compare_q("gate", "-m", models, "-d", data, "-r", 2, "--where", *files)
    assert ran.status == 1, ran.err
    places = {}
    for variant in json.loads(report.read_text())["variants"]:
        places[variant["label"]] = variant["where"]
    assert places["first"] == ""
    assert places["same"] == ""
    assert "output of layers.1.mlp.down_proj on" in places["down"]
    assert "attention in layers.1.self_attn, before o_proj" in places["attention"]
    assert places["attention"] in ran.out
    assert places["attention"] in junit.read_text()


def wrong_attention_of_layer_1(module: Any, *arguments: Any, **keys: Any) -> Any:
    output, weights = EAGER_ATTENTION(module, *arguments, **keys)
    if module.layer_idx == 1:
        output = 1.5 * output
    return output, weights
