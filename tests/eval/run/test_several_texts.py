"""A run of several texts: models load once, numbers are those of a run for each text, failures stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.base import ModelFacts, ModelFiles
from compare_q.backends.common.errors import ModelError
from compare_q.backends.common.machine import Gpu
from compare_q.backends.reference.store import MANIFEST
from tests.support import stub_engine
from tests.support.comparisons import fake, toy
from tests.support.fake_engine import FakeEngine
from tests.support.text_runs import LENGTHS, RunTexts, measured, runs_of, write_texts
from tests.support.threaded import threaded
from tests.support.toy import assert_refused, needs_accelerate

Start = Callable[..., RunTexts]


@pytest.fixture
def start(compare_q: Any, tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs of these models on the three texts."""
    monkeypatch.setitem(backends.ENGINES, "stub", stub_engine.LOCATION)
    files = write_texts(tmp_path, toy_model)
    return lambda models: runs_of(compare_q, tmp_path, files, models)


def three(**keys: Any) -> list[dict[str, Any]]:
    return [fake("ref", boost=3.0, reference=True), fake("a"), fake("b", boost=1.0, **keys)]


def test_each_model_loads_once_and_has_the_numbers_of_three_runs(
    start: Start, pair: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = start(pair)
    many = run()
    assert many.status == 0, many.err
    assert many.loaded == ["ref", "noisy"]
    for name in LENGTHS:
        alone = run(name, flags=("--cache-dir", tmp_path / f"cache-{name}"))
        assert alone.loaded == ["ref", "noisy"]
        for label in ("ref", "noisy"):
            assert measured(many.model(label, name)) == measured(alone.model(label))
        assert alone.texts[""]["data"] == many.texts[name]["data"]
        assert alone.texts[""]["subtitle"] == many.texts[name]["subtitle"]
        assert alone.texts[""]["reference"]["key"] == many.texts[name]["reference"]["key"]
    assert len({many.model("noisy", name)["kld"] for name in LENGTHS}) == 3


@needs_accelerate
def test_noise_begins_anew_with_each_text(start: Start, toy_model: Path, tmp_path: Path) -> None:
    """The noise floor draws from its seed, whatever was scored before."""
    floor = toy(toy_model, "floor", noise_floor=True)
    floor["engine"] |= {"noise": "bf16"}
    run = start([floor])
    many, alone = run("prose", "code"), run("code", flags=("--cache-dir", tmp_path / "alone"))
    assert many.model("floor", "code")["estimates"] == alone.model("floor")["estimates"]


def test_scores_are_shared_with_runs_of_one_text(start: Start) -> None:
    run = start(three())
    assert run("code").loaded == ["ref", "a", "b"]
    assert (many := run()).loaded == ["ref", "a", "b"]
    assert [many.model("a", name)["from_cache"] for name in LENGTHS] == [False, True, False]
    assert "scoring a on code" not in many.err
    for names in (("prose",), ("logs", "code"), ()):
        again = run(*names)
        assert (again.status, again.loaded) == (0, [])


def test_the_second_text_waits_for_no_load(start: Start) -> None:
    many = start(three())()
    for label in ("ref", "a", "b"):
        first, *others = (many.model(label, name)["timing"] for name in LENGTHS)
        assert first["loaded"] > first["started"]
        for before, after in zip([first, *others], others, strict=False):
            assert after["loaded"] == after["started"] == before["closed"]


def test_a_model_that_cannot_be_loaded_is_tried_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def load(engine: FakeEngine) -> None:
        tries.append(engine.planned.label)
        if engine.planned.label == "b":
            raise ModelError("no kernel for it")

    monkeypatch.setattr(FakeEngine, "load", load)
    run = start(three())
    many = run()
    assert (many.status, tries) == (1, ["ref", "a", "b"])
    assert [many.model("b", name)["error"] for name in LENGTHS] == ["no kernel for it"] * 3
    assert all(many.model("a", name)["kld"] for name in LENGTHS)


def test_a_model_that_fails_on_one_text_goes_on_with_the_next(start: Start) -> None:
    """Of 9, 15 and 9 windows the fake fails after 12 of one load: in the second text; a fresh one scores the third."""
    many = start(three(fail=12))()
    assert many.status == 1
    assert many.loaded == ["ref", "a", "b", "b"]
    found = [many.model("b", name) for name in LENGTHS]
    assert [model["error"] for model in found] == [None, "told to fail after 12 windows", None]
    assert [model["kld"] is None for model in found] == [False, True, False]
    assert [each["mean_kld"] is None for each in many.results["means"]] == [False, False, True]
    assert "code: b: failed: told to fail after 12 windows" in many.out


def test_a_reference_that_fails_on_one_text_leaves_that_without_kld(start: Start) -> None:
    many = start([fake("ref", boost=3.0, reference=True, fail=12), fake("a")])()
    assert many.status == 1
    assert [many.model("a", name)["kld"] is None for name in LENGTHS] == [False, True, False]
    assert many.model("a", "code")["ppl"]
    assert "code: a: no KLD: the reference failed" in many.out


def test_a_text_that_cannot_be_made_is_a_column_with_its_reason(start: Start, tmp_path: Path) -> None:
    run = start(three())
    (tmp_path / "code.txt").write_text("short")
    many = run()
    assert many.status == 1
    assert many.texts["code"]["error"] == "eval_len: the text has 5 tokens, one window takes 61; shorten eval_len"
    assert many.texts["code"]["models"] == []
    assert f"code: failed: {many.texts['code']['error']}" in many.out
    assert many.loaded == ["ref", "a", "b"]
    assert all(many.model("a", name)["kld"] for name in ("prose", "logs"))
    for name in ("prose", "logs"):
        (tmp_path / f"{name}.txt").write_text("short")
    ran = run()
    assert (ran.status, ran.out) == (2, "")
    refusals = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1] for line in refusals] == [" prose", " code", " logs"]


def test_a_damaged_reference_of_one_text_is_found_before_anything_loads(start: Start, own_cache: Path) -> None:
    run = start([fake("ref", boost=3.0, reference=True), fake("a")])
    many = run()
    store = own_cache / "references" / many.texts["code"]["reference"]["key"]
    (store / MANIFEST).write_text("{}")
    for folder in (own_cache / "scores").iterdir():
        if folder.name in many.model("a", "code")["scores_key"]:
            for file in folder.glob("*.safetensors"):
                file.unlink()
    assert_refused(run(), f"{store / MANIFEST}: not a reference store")


def test_models_run_side_by_side_on_several_gpus(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = start(three())()
    told = threaded(monkeypatch, gpus=[Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(2)])
    run = start([{**spec, "replicas": 2} for spec in three()])
    many = run(flags=("-cc",))
    assert many.status == 0, many.err
    for label in ("ref", "a", "b"):
        assert told.of(label) == ["load", "load", *["score"] * 6]
        for name in LENGTHS:
            assert many.model(label, name)["kld"] == alone.model(label, name)["kld"]


def test_a_worker_that_dies_between_texts_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threaded(monkeypatch)
    told.fails = {("a", "score"): "dies"}
    run = start(three())
    many = run()
    assert many.status == 1
    assert many.model("a", "prose")["error"] == "its worker was ended by a test"
    assert told.of("a") == ["load", "score", "load", "score", "score"]
    again = run()
    assert again.status == 0
    assert [label for label, step in told.steps if step == "load"][-1:] == ["a"]


def test_a_reference_that_dies_gets_its_gpu_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model has it by then, with its worker, and waits for the reference of the next text."""
    told = threaded(monkeypatch, gpus=[Gpu("0", "NVIDIA H200", "580.1", 143771.0)])
    told.fails = {("ref", "score"): "dies"}
    many = start(three())()
    assert many.status == 1
    assert [many.model("ref", name)["error"] is None for name in LENGTHS] == [False, True, True]
    for label in ("a", "b"):
        assert [many.model(label, name)["kld"] is None for name in LENGTHS] == [True, False, False]


def test_texts_on_both_sides_of_a_change_of_rope_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's context, and so its rotary factors, would be those of the longest text."""
    edge = 0

    def facts(files: ModelFiles) -> ModelFacts:
        return ModelFacts(rope_changes_above=edge if files.planned.label == "a" else None)

    monkeypatch.setattr(ModelFiles, "facts", facts)
    run = start(three())
    lengths = sorted(text["data"]["window_length"] for text in run().texts.values())
    edge = lengths[0]
    assert lengths[0] < lengths[-1]
    assert_refused(run(), f"a: eval_len: the model has other rotary factors in contexts above {edge} tokens, and the ")
    edge = lengths[-1]
    assert run().status == 0


def test_one_logits_file_is_of_one_text(start: Start, tmp_path: Path) -> None:
    ran = start(three())(flags=("-lf", tmp_path / "store"))
    assert_refused(ran, "--logits_file: a reference store is of one text")
