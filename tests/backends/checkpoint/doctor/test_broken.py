"""Every fault is found, by the name of its layer; a good checkpoint has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.checkpoint.doctor import parameters
from backends.checkpoint.doctor.examining import Examination, Patient, examine
from tests.support.broken import FAULTS, LAYER, good, missing_tensor


@pytest.fixture(scope="module")
def good_model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good(toy_model, tmp_path_factory.mktemp("good") / "nvfp4")


def examined(folder: Path, reference: Path) -> Examination:
    return examine(Patient("x", folder), Patient("reference", reference), parameters.compared(str(folder)))


def test_good_checkpoints_have_no_finding(good_model: Path, toy_model: Path) -> None:
    for folder in (good_model, toy_model):
        found = examined(folder, toy_model)
        assert (found.findings, found.unchecked) == ((), ())
    facts = dict(examined(good_model, toy_model).facts)
    assert facts["layers"].startswith("14 x nvfp4 g16, activations nvfp4 g16: model.layers.*.mlp.down_proj, ")
    assert facts["head"] == facts["embedding"].replace("model.embed_tokens", "lm_head") == "bfloat16: lm_head"
    assert facts["KV cache"] == "in the model's dtype"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fault_is_found(
    fault: Callable[[Path, Path], Path], good_model: Path, toy_model: Path, tmp_path: Path
) -> None:
    found = examined(fault(good_model, tmp_path / "broken"), toy_model)
    severity, text = FAULTS[fault]
    worst = found.findings[0]
    assert worst.severity == severity
    assert text in str(worst)
    assert found.is_wrong == (severity == "wrong")
    assert all(len(str(each).splitlines()) == 1 for each in found.findings)


def test_what_is_left_over_is_named_too(good_model: Path, toy_model: Path, tmp_path: Path) -> None:
    found = examined(missing_tensor(good_model, tmp_path / "broken"), toy_model)
    assert [(each.severity, each.where) for each in found.findings] == [
        ("wrong", f"model.safetensors: {LAYER}.input_layernorm.weight"),
        ("warning", "model.safetensors: model.layers.2.input_layernorm"),
    ]
