"""Spares and replicas: who begins when, what becomes of those that die, and that no number depends on them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from backends.common import machine
from backends.common.machine import Gpu
from backends.worker.messages import LoadJob
from eval.run import early, spares
from eval.run.devices import Devices
from eval.run.rows import model_run
from tests.support.comparisons import Compare, Models, fake, store_of, toy
from tests.support.threaded import threaded

GIB = 1 << 30
H200 = [Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(2)]
WAITS = {("a", "score"): ("b", "prepare done"), ("b", "score"): ("c", "prepare done")}
"""While one model scores, the next one is prepared, however slow this machine is."""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 GiB are available."""
    monkeypatch.setattr(machine, "available_memory", lambda: 20 * GIB)


def three(**keys: Any) -> list[dict[str, Any]]:
    return [fake(label, boost=boost, **keys) for label, boost in (("a", 0.5), ("b", 1.0), ("c", 1.5))]


def numbers(ran: Any) -> dict[str, tuple[float, float]]:
    return {label: (model["ppl"], model["kld"]) for label, model in ran.models.items()}


def test_a_spare_is_prepared_while_another_model_scores(measured: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = measured(three())
    told = threaded(monkeypatch)
    told.first = WAITS
    ran = measured(three(), "-cc")
    assert ran.status == 0, ran.err
    assert numbers(ran) == numbers(alone)
    assert [told.of(label) for label in "abc"] == [["load", "score"], *[["prepare", "load", "score"]] * 2]
    assert told.before(("a", "load done"), ("b", "prepare"))
    assert told.before(("a", "score done"), ("b", "load"))
    assert told.before(("b", "load done"), ("c", "prepare"))
    seconds = {label: model["seconds"] for label, model in ran.models.items()}
    assert seconds["a"]["spare"] == 0 < seconds["b"]["spare"]
    for model in ran.models.values():
        timing = model["timing"]
        assert sum(model["seconds"].values()) == pytest.approx(timing["closed"] - timing["started"], abs=1e-3)
    again = measured(three())
    assert {label: model["seconds"] for label, model in again.models.items()} == seconds  # of the run that scored
    assert "(*) is of an earlier run" in again.out


def test_models_in_the_cache_get_no_spare(measured: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(three()[1:2])
    told = threaded(monkeypatch)
    told.first = {("a", "score"): ("c", "prepare done")}
    ran = measured(three())
    assert ran.status == 0, ran.err
    assert (told.of("b"), told.of("c")) == ([], ["prepare", "load", "score"])


@pytest.mark.parametrize("step", ["prepare", "waits", "load"])
def test_a_spare_that_dies_is_no_spare(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    told = threaded(monkeypatch)
    told.first = {("a", "score"): ("b", "prepare")}
    told.fails = {("b", step): "dies"}
    ran = measured(three()[:2])
    assert ran.status == 0, ran.err
    assert told.of("b")[-2:] == ["load", "score"]
    assert told.of("b").count("load") == (2 if step == "load" else 1)
    assert told.fails == {}
    assert not list(own_cache.glob("runs/*.died"))


@pytest.mark.parametrize("step", ["load", "score"])
def test_a_worker_that_dies_at_its_turn_leaves_a_mark(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    told = threaded(monkeypatch)
    told.fails = {("a", step): "dies"}
    ran = measured(three()[:2])
    assert [bool(model["error"]) for model in ran.models.values()] == [True, False]
    assert len(list(own_cache.glob("runs/*.died"))) == 1
    assert measured(three()[:2]).status == 0
    assert not list(own_cache.glob("runs/*.died"))


@pytest.mark.parametrize("why", ["memory", "unknown", "off"])
def test_no_spare(measured: Compare, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Where memory is short, where it is not known how much there is, and where nobody wants one."""
    if why != "off":
        available = early.SPARE_BYTES - 1 if why == "memory" else None
        monkeypatch.setattr(machine, "available_memory", lambda: available)
    told = threaded(monkeypatch, spares=why != "off")
    assert measured(three()).status == 0
    assert [told.of(label) for label in "abc"] == [["load", "score"]] * 3


def test_where_both_fit_the_next_model_loads_while_one_scores(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda names: 20 * GIB)
    told = threaded(monkeypatch, gpus=H200[:1])
    told.first = {("a", "score"): ("b", "load done")}
    ran = measured(three(bytes=20 * GIB))
    assert ran.status == 0, ran.err
    assert told.before(("a", "score done"), ("b", "score"))
    assert ran.models["b"]["timing"]["loaded"] < ran.models["a"]["timing"]["first_window"]


def test_a_load_that_lacked_memory_beside_another_model_is_tried_alone(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threaded(monkeypatch, overlap="always")
    told.first = {("a", "score"): ("b", "load")}
    told.fails = {("b", "load"): "memory"}
    ran = measured(three()[:2])
    assert ran.status == 0, ran.err
    assert told.of("b") == ["prepare", "load", "load", "score"]
    last = len(told.steps) - 1 - told.steps[::-1].index(("b", "load"))
    assert told.steps.index(("a", "score done")) < last
    told = threaded(monkeypatch)
    told.fails = {("a", "load"): "memory"}
    ran = measured(three()[:1], "-cc")
    assert ran.err.endswith("error: a: out of memory: says a test\n")
    assert told.of("a") == ["load"]


def test_a_model_is_ready_when_the_reference_is_there(measured: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [fake("a", boost=3.0, reference=True, bytes=GIB), fake("b", boost=1.0, bytes=GIB)]
    alone = measured(models)
    told = threaded(monkeypatch, overlap="always")
    told.first = {("a", "score"): ("b", "load done")}
    ran = measured(models, "-cc")
    assert ran.status == 0, ran.err
    assert numbers(ran) == numbers(alone)
    assert told.before(("a", "score done"), ("b", "score"))
    told = threaded(monkeypatch, overlap="always")
    told.first = {("a", "score"): ("b", "load done")}
    told.fails = {("a", "score"): "dies"}
    lost = measured(models, "-cc")
    assert (lost.models["b"]["ppl"], lost.models["b"]["kld"]) == (alone.models["b"]["ppl"], None)
    assert "b: no KLD: the reference failed" in lost.out


def test_two_gpus_have_two_spares(measured: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    measured([fake("tokenized", boost=3.0)])  # so that no worker is there before the text is
    told = threaded(monkeypatch, gpus=H200, overlap="never")
    told.spares = 2  # of whichever models do not get a GPU at first
    ended, scored = {}, Devices.scored
    monkeypatch.setattr(
        Devices, "scored", lambda self, hold: (ended.update({hold.place: hold.ends}), scored(self, hold))
    )
    began = time.monotonic()
    ran = measured([*three(), fake("d", boost=2.0)])
    assert ran.status == 0, ran.err
    assert len(ended) == 4
    assert all(began < ends < time.monotonic() for ends in ended.values())  # it is known when each one has scored
    assert {job.devices for job in told.jobs if isinstance(job, LoadJob)} == {("0",), ("1",)}
    spares = told.prepared()[:2]
    first = min(told.steps.index((label, "score done")) for label in "abcd" if label not in spares)
    assert first < min(told.steps.index((label, "load")) for label in spares)  # a spare of two has no GPU yet


@pytest.mark.parametrize("engine", ["stub", "transformers"])
def test_replicas_give_the_numbers_of_one_worker(
    measured: Compare, pair: Models, toy_model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Also where replicas record the reference: every share of its windows, and one head."""
    models = pair if engine == "stub" else [toy(toy_model, "ref", reference=True),
                                            toy(toy_model, "noisy", dtype="bfloat16")]  # fmt: skip
    alone = measured(models)
    manifest = json.loads(next(store_of(own_cache).glob("*.json")).read_text())
    told = threaded(monkeypatch)
    ran = measured([{**model, "replicas": 2} for model in models], "-cc")
    assert ran.status == 0, ran.err
    assert ran.tokens("ref") == alone.tokens("ref")
    assert ran.tokens("noisy") == alone.tokens("noisy")
    assert json.loads(next(store_of(own_cache).glob("*.json")).read_text())["files"] == manifest["files"]
    assert sorted(told.of("noisy")[-2:]) == ["score", "score"]
    assert [model["notes"][0] for model in ran.models.values()] == ["scored by 2 replicas"] * 2
    assert "scored in" not in ran.out


def test_replicas_share_the_gpus_and_cores(measured: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threaded(monkeypatch, gpus=H200)
    ran = measured([{**fake("a"), "replicas": 3}, {**fake("b", boost=1.0), "replicas": 2, "gpus": 2}])
    assert ran.status == 0, ran.err
    assert sorted(job.devices for job in told.jobs if isinstance(job, LoadJob)) == [("0",), ("0", "1"), ("1",)]
    fewer = "scored by 2 replicas, not by 3: there were no more GPUs, or no more windows"
    assert [model["notes"][0] for model in ran.models.values()] == [fewer, fewer.replace("2", "1").replace("3", "2")]


def test_shares_and_parts_by_hand() -> None:
    windows: Any = list(range(7))
    assert model_run.shares(windows, 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert model_run.shares(windows[:2], 3) == [[0], [1]]
    assert model_run.shares([], 3) == [[]]
    assert spares.parts_of((0, 1, 2, 3, 4), 2) == [(0, 1), (2, 3)]
    assert spares.parts_of((0, 1), 3) == [(0,), (1,), (1,)]
    assert spares.parts_of(None, 2) == [None, None]
