"""``compare-q doctor`` as a user runs it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compare_q.backends.checkpoint.doctor.examining import Patient
from compare_q.backends.layers.groups import AFTER_LOADING
from compare_q.backends.vllm.engine import VllmEngine
from compare_q.eval.cli.doctor import kernels, predictions
from compare_q.eval.common import processes
from compare_q.eval.common.progress import Progress
from tests.support.broken import FAULTS, good
from tests.support.command_line import Run, in_transformers
from tests.support.toy import Ran, assert_refused

Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def good_model(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good(toy_model, tmp_path_factory.mktemp("good") / "nvfp4")


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is asked what would run, which takes some seconds."""
    monkeypatch.setattr("compare_q.backends.engines", lambda: ())


def sections(ran: Ran) -> dict[str, list[str]]:
    """First line of each model's part -> its other lines."""
    parts = [part.splitlines() for part in ran.out.split("\n\n")]
    return {part[0]: part[1:] for part in parts}


@pytest.mark.engine
def test_good_and_broken_models(
    compare_q: Run, good_model: Path, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(processes.ENVIRONMENT)
    broken: dict[Callable[[Path, Path], Path], Path] = {
        fault: fault(good_model, tmp_path / fault.__name__) for fault in FAULTS
    }
    ran = compare_q("doctor", toy_model, good_model, *broken.values())
    found = sections(ran)
    assert ran.status == 1
    assert "  nothing wrong found" in found[str(toy_model)]
    assert "  nothing wrong found" in found[str(good_model)]
    here = [line for line in found[str(good_model)] if line.startswith("  here ")]
    assert re.search(
        r"vllm_score: \w+: 8 layers \(matrices that the engine joins are one\) in nvfp4 g16, activations ", here[0]
    ), ran.out
    for fault, folder in broken.items():
        severity, text = FAULTS[fault]
        assert any(line.startswith(f"  {severity}: ") and text in line for line in found[str(folder)]), fault


@pytest.mark.usefixtures("without_engines")
def test_against_a_reference(compare_q: Run, good_model: Path, toy_model: Path, tmp_path: Path) -> None:
    ran = compare_q("doctor", good_model, "--against", toy_model, "-pf", tmp_path / "errors.svg", "-t", "Nine")
    assert ran.status == 0, ran.err
    ranked = [
        float(value) for value in re.findall(r"^│ model\.layers\.\d\S+ +│ +nvfp4 g16 │ +(0\.\d+) ", ran.out, re.M)
    ]
    assert len(ranked) == 10
    assert ranked == sorted(ranked, reverse=True)
    assert 0.05 < ranked[-1] <= ranked[0] < 0.15
    drawing = (tmp_path / "errors.svg").read_text()
    assert "Nine" in drawing
    assert "self_attn.q_proj" in drawing


@pytest.mark.usefixtures("without_engines")
def test_other_weights_are_wrong(compare_q: Run, good_model: Path, toy_model: Path, tmp_path: Path) -> None:
    """A global scale that is three times too large: only the comparison of weights sees it in a layer of its own."""
    from safetensors.torch import load_file

    from tests.support.transformers_models import changed

    name = "model.layers.1.mlp.down_proj.weight_global_scale"
    scale = load_file(good_model / "model.safetensors")[name]
    folder = changed(good_model, tmp_path / "scaled", {}, **{name: scale / 3})
    assert compare_q("doctor", folder).status == 0
    ran = compare_q("doctor", folder, "--against", toy_model)
    assert ran.status == 1
    assert re.search(
        r"wrong: model\.layers\.1\.mlp\.down_proj: relative error (1\.9|2)\S*: its weights are not", ran.out
    )


@pytest.mark.usefixtures("without_engines")
def test_models_of_a_spec_and_the_first_as_reference(
    compare_q: Run, good_model: Path, toy_model: Path, tmp_path: Path
) -> None:
    folder = next(iter(FAULTS))(good_model, tmp_path / "broken")
    spec = tmp_path / "models.json"
    spec.write_text(json.dumps([in_transformers(toy_model), in_transformers(folder, label="second")]))
    ran = compare_q("doctor", spec)
    assert (ran.status, list(sections(ran))) == (1, ["toy", "second"])
    said = [line.rpartition(":")[0] for line in ran.err.splitlines()]
    assert said[-3:] == ["building models from configs", "examining toy", "examining second"]


def test_a_check_examines_the_models(compare_q: Run, good_model: Path, tmp_path: Path, write_specs: Run) -> None:
    fault = next(iter(FAULTS))
    data, models = write_specs(
        [in_transformers(fault(good_model, tmp_path / "broken"), load_fn="transformers_auto_bf16")]
    )
    ran = compare_q("check", "-d", data, "-m", models)
    assert ran.status == 1, ran.err
    assert "toy: 14 matrices in nvfp4 g16, activations nvfp4 g16; layers 4.5" in ran.out
    assert f"toy: wrong: model.safetensors: {FAULTS[fault][1]}" in ran.out


def told(folders: list[str]) -> list[str]:
    return [f"asked for {Path(folder).name}" for folder in folders]


def test_only_the_engine_of_a_spec_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine, "predictor", lambda: told)
    bare = Patient("a", tmp_path / "a")
    spec = Patient("b", tmp_path / "b", "vllm_score", has_options=True)
    other = Patient("c", tmp_path / "c", "transformers_auto_bf16")
    assert predictions([bare, spec, other], Progress(quiet=True)) == {
        bare: ["vllm_score: refuses it here: asked for a"],
        spec: ["vllm_score with its default options, not the spec's: refuses it here: asked for b"],
        other: [],
    }


def test_refused_or_known_after_loading() -> None:
    assert kernels("no weights in meta-llama/x") == ["refuses it here: no weights in meta-llama/x"]
    assert kernels({AFTER_LOADING: "no data"}) == ["known after loading (no data)"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "gone"], "gone: no such folder or GGUF file"),
        (["doctor", "{empty}"], "config.json: missing"),
        (["doctor", "{toy}", "-pf", "x.png"], "-p: doctor draws the errors of one model's weights"),
        (
            ["doctor", "{toy}", "-d", "x.json"],
            "-d: is no flag of compare-q doctor, but of compare-q run",
        ),
        (["cache", "--against", "{toy}"], "--against: is no flag of compare-q cache, but of compare-q doctor"),
    ],
)
def test_refusals(compare_q: Run, toy_model: Path, tmp_path: Path, words: list[str], said: str) -> None:
    assert_refused(compare_q(*(word.format(toy=toy_model, empty=tmp_path) for word in words)), said)
