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

from tests.support.planted.planted import FROM
from tests.support.toy import Run, Specs, in_transformers, with_changed_weight

pytestmark = pytest.mark.engine
EAGER_ATTENTION = modeling_llama.eager_attention_forward
PLANTED = Path(__file__).parents[1] / "support" / "planted"


def python_with_faults(folder: Path) -> Path:
    """Return a Python that adds the faults (``tests/support/planted``) to the vLLM it imports."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PLANTED}" exec {sys.executable} "$@"\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_planted_faults_are_found(
    compare_q: Run,
    quantized: Callable[..., Path],
    toy_text: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults of the toy in W8A8, which vLLM computes on every CPU: a channel's scale is dropped,
    attention is wrong in layer 1 from position 64 on, a kernel is wrong at batch 1, another one is
    random, values in the KV cache are halved in decode, and an option is ignored.
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
    python = str(python_with_faults(tmp_path))
    models.write_text(
        json.dumps({"load_fn": "vllm_score", "model_dir": str(model), "python": python})
    )
    faults: dict[str, dict[str, Any]] = {
        "scale": {"planted": "scale"},
        "late_attention": {"planted": "late_attention", "planted_layer": 1},
        "alone": {"planted": "alone"},
        "noise": {"planted": "noise"},
        "decoded_values": {"planted": "decoded_values"},
    }
    words = ["--variant", "none:"]
    for name, overrides in faults.items():
        words += ["--variant", f"{name}:engine.hf_overrides={json.dumps(overrides)}"]
    words += ["--variant", "ignored:engine.attention_backend=TORCH_SDPA", "--where"]
    ran = compare_q("gate", "-m", models, "-d", data, "-r", 2, *words, "-o", report)
    assert report.exists(), ran.err
    outcomes = {}
    verdicts = {}
    places = {}
    for variant in json.loads(report.read_text())["variants"]:
        label = variant["label"]
        outcomes[label] = variant["outcome"]
        verdicts[label] = variant["words"]
        places[label] = variant["where"]
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
    for same in ("none", "noise", "ignored"):
        assert places[same] == ""
    assert "output of layers.0.self_attn.qkv_proj on" in places["scale"]
    assert "output of layers.1.self_attn.attn on" in places["late_attention"]
    assert "output of layers.0.self_attn.attn on" in places["alone"]
    assert "it does not differ in prefill" in places["decoded_values"]
    assert places["late_attention"] in ran.out
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
