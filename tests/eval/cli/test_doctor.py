"""``compare-q doctor`` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compare_q.eval.common import processes
from tests.support.broken import FAULTS
from tests.support.toy import Ran, Run, in_transformers


def sections(ran: Ran) -> dict[str, list[str]]:
    """Return the first line of each model's section -> the other lines of the section."""
    parts = [part.splitlines() for part in ran.out.split("\n\n")]
    return {part[0]: part[1:] for part in parts}


@pytest.mark.engine
def test_models_of_a_spec_and_by_name(
    compare_q: Run,
    quantized: Callable[..., Path],
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models are examined in another process; the first model of the spec is the reference."""
    monkeypatch.delenv(processes.IN_PROCESS_VARIABLE)
    fault, (severity, text) = next(iter(FAULTS.items()))
    spec = tmp_path / "models.json"
    second = in_transformers(fault(quantized("NVFP4"), tmp_path / "broken"), label="second")
    spec.write_text(json.dumps([in_transformers(toy_model), second]))
    ran = compare_q("doctor", spec)
    assert ran.status == 1
    assert list(sections(ran)) == ["toy", "second"]
    lines_of_fault = [line for line in sections(ran)["second"] if text in line]
    assert any(line.startswith(f"  {severity}: ") for line in lines_of_fault)
    ran = compare_q("doctor", toy_model, quantized("NVFP4"))
    assert ran.status == 0
    assert len(sections(ran)) == 2
    for lines in sections(ran).values():
        assert "  nothing wrong found" in lines


def test_a_check_examines_the_models(
    compare_q: Run, quantized: Callable[..., Path], tmp_path: Path, write_specs: Run
) -> None:
    fault = next(iter(FAULTS))
    data, models = write_specs(
        [
            in_transformers(
                fault(quantized("NVFP4"), tmp_path / "broken"), load_fn="transformers_auto_bf16"
            )
        ]
    )
    ran = compare_q("check", "-d", data, "-m", models)
    assert ran.status == 1, ran.err
    assert "toy: 14 matrices in nvfp4 g16, activations nvfp4 g16; layers 4.5" in ran.out
    assert f"toy: wrong: model.safetensors: {FAULTS[fault][1]}" in ran.out
