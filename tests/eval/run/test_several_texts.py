"""A run of several texts: each model loads once, and a worker that dies fails one row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common.errors import ModelError
from tests.support.comparisons import Measured, result_of, three, toy, write_texts
from tests.support.fake_engine import FakeEngine
from tests.support.threaded import threaded
from tests.support.toy import needs_accelerate

Start = Callable[[list[dict[str, Any]]], Callable[..., Measured]]


@pytest.fixture
def start(compare_q: Any, tmp_path: Path, toy_model: Path) -> Start:
    """Return a function that runs the models on the named texts, or on all texts."""
    files = write_texts(tmp_path, toy_model)
    output = tmp_path / "results.json"

    def started(models: list[dict[str, Any]]) -> Callable[..., Measured]:
        (tmp_path / "models.json").write_text(json.dumps(models))

        def run(*names: str, flags: Any = ()) -> Measured:
            output.unlink(missing_ok=True)
            data = [files[name] for name in names or files]
            ran = compare_q("-d", *data, "-m", tmp_path / "models.json", "-o", output, *flags)
            return result_of(ran, output, tmp_path)

        return run

    return started


@needs_accelerate
def test_noise_does_not_depend_on_other_texts(
    start: Start, toy_model: Path, tmp_path: Path
) -> None:
    floor = toy(toy_model, "floor", noise_floor=True)
    floor["engine"] |= {"noise": "bf16"}
    run = start([floor])
    first = run("code")
    assert first.status == 0, first.err
    # In a cache of its own, so that the text is scored again after another one.
    after = run("prose", "code", flags=("--cache-dir", tmp_path / "joined"))
    again = run("code", flags=("--cache-dir", tmp_path / "joined"))
    assert (after.status, again.loaded) == (0, [])
    assert again.models["floor"]["ppl"] == first.models["floor"]["ppl"]


def test_a_model_that_cannot_be_loaded_is_tried_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def load(engine: FakeEngine) -> None:
        tries.append(engine.planned.label)
        if engine.planned.label == "b":
            raise ModelError("no kernel for it")

    monkeypatch.setattr(FakeEngine, "load", load)
    many = start(three())()
    assert (many.status, tries) == (1, ["ref", "a", "b"])
    assert many.models["b"]["error"] == "no kernel for it"
    assert many.models["a"]["kld"]


def test_models_run_side_by_side_on_several_gpus(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = start(three())()
    told = threaded(monkeypatch, gpus=2)
    many = start([{**spec, "replicas": 2} for spec in three()])(flags=("-cc",))
    assert many.status == 0, many.err
    for label in ("ref", "a", "b"):
        # The second compared model is prepared while the first one has the GPUs.
        steps = [step for step in told.of(label) if step != "prepare"]
        assert steps == ["load", "load", "score", "score"]
        assert many.models[label]["kld"] == alone.models[label]["kld"]


@pytest.mark.parametrize("dies", ["ref", "a"])
def test_a_worker_that_dies_fails_its_row(
    start: Start, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """Without their reference, the other models have no KLD."""
    told = threaded(monkeypatch, gpus=1)
    told.fails = {(dies, "score"): "dies"}
    run = start(three())
    many = run()
    assert many.status == 1
    assert many.models[dies]["error"] == "its worker was ended by a test"
    assert (many.models["b"]["kld"] is None) == (dies == "ref")
    told.steps.clear()
    assert run().status == 0
    assert dies in [label for label, step in told.steps if step == "load"]
