"""A run of several texts: models load once, numbers equal those of one run per text, a failure affects one text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.base import ModelFacts, ModelFiles
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.store import MANIFEST
from tests.support import stub_engine
from tests.support.comparisons import LENGTHS, Measured, fake, result_of, three, toy, write_texts
from tests.support.fake_engine import FakeEngine
from tests.support.threaded import threaded
from tests.support.toy import assert_refused, needs_accelerate

Start = Callable[[list[dict[str, Any]]], Callable[..., Measured]]
RUN = ("score_seconds", "load_seconds", "tokens_per_second", "seconds", "timing", "from_cache", "provenance", "notes")
"""Keys of a model in results.json that differ between runs."""


@pytest.fixture
def start(compare_q: Any, tmp_path: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that runs the models, with flags, on the named texts, or on all texts if none is named."""
    monkeypatch.setitem(backends.ENGINES, "stub", stub_engine.LOCATION)
    files, output = write_texts(tmp_path, toy_model), tmp_path / "results.json"

    def started(models: list[dict[str, Any]]) -> Callable[..., Measured]:
        (tmp_path / "models.json").write_text(json.dumps(models))

        def run(*names: str, flags: Any = ()) -> Measured:
            output.unlink(missing_ok=True)
            data = [files[name] for name in names or files]
            ran = compare_q("-d", *data, "-m", tmp_path / "models.json", "-o", output, *flags)
            return result_of(ran, output, tmp_path)

        return run

    return started


def of_texts(many: Measured, label: str, name: str) -> list[Any]:
    return [many.model(label, text)[name] for text in LENGTHS]


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
            one, other = ({key: value for key, value in model.items() if key not in RUN}
                          for model in (many.model(label, name), alone.model(label)))  # fmt: skip
            assert one == other
        for key in ("data", "subtitle"):
            assert alone.results[key] == many.texts[name][key]
        assert alone.results["reference"]["key"] == many.texts[name]["reference"]["key"]
    assert len(set(of_texts(many, "noisy", "kld"))) == 3


@needs_accelerate
def test_noise_begins_anew_with_each_text(start: Start, toy_model: Path, tmp_path: Path) -> None:
    """The noise of each text is drawn from the seed again, no matter which text was scored before."""
    floor = toy(toy_model, "floor", noise_floor=True)
    floor["engine"] |= {"noise": "bf16"}
    run = start([floor])
    many, alone = run("prose", "code"), run("code", flags=("--cache-dir", tmp_path / "alone"))
    rows = many.model("floor", "code"), alone.model("floor")
    assert rows[0]["kld"] == rows[1]["kld"]
    assert rows[0]["blocks"] == rows[1]["blocks"]


def test_scores_are_shared_with_runs_of_one_text_and_the_second_text_waits_for_no_load(start: Start) -> None:
    run = start(three())
    assert run("code").loaded == ["ref", "a", "b"]
    many = run()
    assert many.loaded == ["ref", "a", "b"]
    assert of_texts(many, "a", "from_cache") == [False, True, False]
    assert "scoring a on code" not in many.err
    again = run("logs", "code")
    assert (again.status, again.loaded) == (0, [])
    for label in ("ref", "a", "b"):
        first, last = many.model(label, "prose")["timing"], many.model(label, "logs")["timing"]
        assert first["loaded"] > first["started"]
        assert last["loaded"] == last["started"] == first["closed"]


def test_a_model_that_cannot_be_loaded_is_tried_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def load(engine: FakeEngine) -> None:
        tries.append(engine.planned.label)
        if engine.planned.label == "b":
            raise ModelError("no kernel for it")

    monkeypatch.setattr(FakeEngine, "load", load)
    many = start(three())()
    assert (many.status, tries) == (1, ["ref", "a", "b"])
    assert of_texts(many, "b", "error") == ["no kernel for it"] * 3
    assert all(of_texts(many, "a", "kld"))


def test_a_model_that_fails_on_one_text_goes_on_with_the_next(start: Start) -> None:
    """Texts of 9, 15 and 9 windows.  The fake fails after 12 windows per load: in the second text.  It loads again."""
    many = start(three(fail=12))()
    assert (many.status, many.loaded) == (1, ["ref", "a", "b", "b"])
    assert of_texts(many, "b", "error") == [None, "told to fail after 12 windows", None]
    assert [kld is None for kld in of_texts(many, "b", "kld")] == [False, True, False]
    assert [each["mean_kld"] is None for each in many.whole["means"]] == [False, False, True]
    assert "code: b: failed: told to fail after 12 windows" in many.out


def test_a_text_that_cannot_be_made_is_a_column_with_its_reason(start: Start, tmp_path: Path) -> None:
    run = start(three())
    (tmp_path / "code.txt").write_text("short")
    many = run()
    assert (many.status, many.loaded) == (1, ["ref", "a", "b"])
    assert many.texts["code"]["error"] == "eval_len: the text has 5 tokens, one window takes 61; shorten eval_len"
    assert many.texts["code"]["models"] == []
    assert f"code: failed: {many.texts['code']['error']}" in many.out
    for name in ("prose", "logs"):
        assert many.model("a", name)["kld"]
        (tmp_path / f"{name}.txt").write_text("short")
    ran = run()
    assert (ran.status, ran.out) == (2, "")
    refusals = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1] for line in refusals] == [" prose", " code", " logs"]


def test_a_damaged_reference_of_one_text_is_found_before_anything_loads(start: Start, own_cache: Path) -> None:
    run = start([fake("ref", boost=3.0, reference=True), fake("a")])
    many = run("prose", "code")
    store = own_cache / "references" / many.texts["code"]["reference"]["key"]
    (store / MANIFEST).write_text("{}")
    for file in (own_cache / "scores" / many.model("a", "code")["scores_key"].split("/")[0]).glob("*.safetensors"):
        file.unlink()
    assert_refused(run("prose", "code"), f"{store / MANIFEST}: not a reference store")


def test_models_run_side_by_side_on_several_gpus(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = start(three())()
    told = threaded(monkeypatch, gpus=2)
    many = start([{**spec, "replicas": 2} for spec in three()])(flags=("-cc",))
    assert many.status == 0, many.err
    for label in ("ref", "a", "b"):
        assert told.of(label) == ["load", "load", *["score"] * 6]
        assert of_texts(many, label, "kld") == of_texts(alone, label, "kld")


@pytest.mark.parametrize("dies", ["ref", "a"])
def test_a_worker_that_dies_between_texts_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch, dies: str) -> None:
    """The other models have no KLD on a text whose reference failed."""
    told = threaded(monkeypatch, gpus=1)
    told.fails = {(dies, "score"): "dies"}
    run = start(three())
    many = run()
    assert many.status == 1
    assert of_texts(many, dies, "error") == ["its worker was ended by a test", None, None]
    assert told.of(dies) == ["load", "score", "load", "score", "score"]
    assert [kld is None for kld in of_texts(many, "b", "kld")] == [dies == "ref", False, False]
    told.steps.clear()
    assert run().status == 0
    assert dies in [label for label, step in told.steps if step == "load"]


def test_texts_on_both_sides_of_a_change_of_rope_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest text sets a model's context, and so its rotary factors; a shorter text alone has other factors."""
    edge = 61

    def facts(files: ModelFiles) -> ModelFacts:
        return ModelFacts(rope_changes_above=edge if files.planned.label == "a" else None)

    monkeypatch.setattr(ModelFiles, "facts", facts)
    run = start(three())
    assert_refused(run(), f"a: eval_len: the model has other rotary factors in contexts above {edge} tokens, and the ")
    edge = 101
    assert run().status == 0


def test_one_logits_file_is_of_one_text(start: Start, tmp_path: Path) -> None:
    ran = start(three())(flags=("-lf", tmp_path / "store"))
    assert_refused(ran, "--logits_file: a reference store is of one text")
