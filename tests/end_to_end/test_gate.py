"""The gate with real engines: faults planted in vLLM's kernels are found, and another engine is as
before.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.toy import Run

pytestmark = pytest.mark.engine
FROM = 64
PLANTED = Path(__file__).parents[1] / "support" / "planted"


def python_with(fault: str, folder: Path) -> Path:
    """Return a Python that adds a fault (``tests/support/planted``) to the vLLM that it imports."""
    file = folder / fault
    variables = f'PLANTED={fault} PLANTED_FROM={FROM} PYTHONPATH="$PYTHONPATH:{PLANTED}"'
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
    """Faults of the toy in W4A16: a group's scale is dropped, attention is wrong from position 64
    on, a kernel is wrong at batch 1, another one is random, values in the KV cache are halved in
    decode, and an option is ignored.
    """
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    model = quantized("W4A16")
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
    models.write_text(json.dumps({"load_fn": "vllm_score", "model_dir": str(model)}))
    faults = ("none", "scale", "late_attention", "alone", "noise", "decoded_values")
    words = []
    for name in faults:
        words += ["--variant", f"{name}:python={python_with(name, tmp_path)}"]
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
