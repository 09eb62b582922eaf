"""The workers of a model: when they start, how they die, and equal scores by all of them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common import machine
from compare_q.backends.worker.engine_process import ENDING
from compare_q.backends.worker.protocol import LoadCommand
from compare_q.eval.common.processes import PROCESSES
from compare_q.eval.run import workers
from compare_q.eval.run.gpu_pool import GpuPool
from compare_q.eval.run.workers import InterruptedRun, Workers, signals_interrupt
from tests.support.comparisons import Compare, Models, fake, store_of, three, toy
from tests.support.fake_engine import FakeEngine
from tests.support.run_models import run_model
from tests.support.threaded import threaded
from tests.support.toy import planned


def models_of(labels: str = "abc", **keys: Any) -> list[dict[str, Any]]:
    return [fake(label, boost="_abc".index(label) / 2, **keys) for label in labels]


def numbers(ran: Any) -> dict[str, tuple[float, float]]:
    return {label: (model["ppl"], model["kld"]) for label, model in ran.models.items()}


def test_without_gpus_one_model_follows_the_other(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = measured(models_of())
    told = threaded(monkeypatch)
    ran = measured(models_of(), "-cc")
    assert ran.status == 0, ran.err
    assert numbers(ran) == numbers(alone)
    assert told.steps == [
        (label, step) for label in "abc" for step in ("load", "load done", "score", "score done")
    ]
    again = measured(models_of())
    for label, model in ran.models.items():
        assert set(model["seconds"]) == {"load", "first_step", "scoring", "close"}
        # Those of the run that scored.
        assert again.models[label]["seconds"] == model["seconds"]
    assert "an earlier run measured their speed (*)" in again.out


def test_a_model_in_the_drivers_process_has_a_workers_environment(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait do not spin; what an engine sets ends with its model."""
    waits = []

    def load(_: FakeEngine) -> None:
        waits.append(os.environ.get("OMP_WAIT_POLICY"))
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE"

    monkeypatch.setattr(FakeEngine, "load", load)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert measured(models_of()).status == 0
    assert waits == ["PASSIVE"] * 3
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize(("lost", "status"), [(3, 0), (4, 2)])
def test_a_worker_that_is_lost_with_its_machine_is_replaced_three_times(
    measured: Compare, monkeypatch: pytest.MonkeyPatch, lost: int, status: int
) -> None:
    told = threaded(monkeypatch)
    told.fails = {("a", "score"): "lost " * lost}
    ran = measured(models_of("a"))
    assert ran.status == status
    assert told.of("a") == ["load", "score"] * 4
    assert ran.err.count("a: its machine was lost; what is not kept of it is scored again") == 3
    assert ("its machine was lost, as 3 workers of this model before" in ran.err) == bool(status)


def test_no_model_overtakes_one_that_is_slow_to_request_gpus(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threaded(monkeypatch, gpus=2)
    take = GpuPool.take
    slow = ["a"]

    def take_late(*arguments: Any, **keys: Any) -> Any:
        if slow:
            slow.clear()
            time.sleep(0.5)
        return take(*arguments, **keys)

    monkeypatch.setattr(GpuPool, "take", take_late)
    # If c were queued first, it would wait for both GPUs, and a for c.
    ran = measured([*models_of("ab"), {**fake("c", boost=3.0), "gpus": 2}])
    assert ran.status == 0, ran.err
    assert told.before(("a", "load"), ("c", "load"))


def test_no_model_loads_before_the_reference_is_there(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [fake("a", boost=3.0, reference=True), fake("b", boost=1.0)]
    alone = measured(models)
    told = threaded(monkeypatch, gpus=2)
    ran = measured(models, "-cc")
    assert ran.status == 0, ran.err
    assert numbers(ran) == numbers(alone)
    assert told.before(("a", "score done"), ("b", "load"))
    told.fails = {("a", "score"): "dies"}
    lost = measured(models, "-cc")
    assert (lost.models["b"]["ppl"], lost.models["b"]["kld"]) == (alone.models["b"]["ppl"], None)
    assert "b: no KLD: the reference failed" in lost.out


def test_the_references_engine_is_imported_while_the_text_is_tokenized(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the text is tokenized, an engine is imported only if a model must be scored."""
    told = threaded(monkeypatch)
    monkeypatch.setattr(
        Workers,
        "import_ahead",
        lambda self, model, verbose: told.steps.append((model.label, "import")),
    )
    models = [fake("a"), fake("b", boost=1.0, reference=True)]
    # The last one also deletes the tokens.
    for flags, imports in (((), ["b"]), ((), []), (("-cc",), ["b"])):
        told.steps.clear()
        assert measured(models, *flags).status == 0
        assert [label for label, step in told.steps if step == "import"] == imports
        assert told.steps[:1] == [(label, "import") for label in imports]


def test_the_engine_that_is_asked_for_a_refusal_is_the_one_imported_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    refuses = dataclasses.replace(FakeEngine.capabilities, refuses=True)
    monkeypatch.setattr(FakeEngine, "capabilities", refuses)
    model = run_model(planned("a", "fake", "none", 100))
    here = Workers()
    here.import_for_refusal(model)
    started = list(PROCESSES.running.values())
    assert here.refusal(model) == ""
    assert list(PROCESSES.running.values()) == started
    assert len(started) == 1


@pytest.mark.parametrize("engine", ["stub", "transformers"])
def test_replicas_give_the_numbers_of_one_worker(
    measured: Compare,
    pair: Models,
    toy_model: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    """This also holds for a reference.

    Each replica records its share of the windows, and one head is kept.
    """
    models = pair
    if engine == "transformers":
        models = [toy(toy_model, "ref", reference=True), toy(toy_model, "noisy", dtype="bfloat16")]

    def files() -> Any:
        return json.loads(next(store_of(own_cache).glob("*.json")).read_text())["files"]

    alone = measured(models)
    gold = files()
    told = threaded(monkeypatch)
    ran = measured([{**model, "replicas": 2} for model in models], "-cc")
    assert ran.status == 0, ran.err
    for label in ("ref", "noisy"):
        assert ran.tokens(label) == alone.tokens(label)
        assert ran.models[label]["notes"][0] == "scored by 2 replicas"
    assert files() == gold
    assert told.of("noisy")[-2:] == ["score", "score"]
    assert "scored in" not in ran.out


def test_replicas_share_the_gpus_and_cores(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threaded(monkeypatch, gpus=2)
    ran = measured(
        [{**fake("a"), "replicas": 3}, {**fake("b", boost=1.0), "replicas": 2, "gpus": 2}]
    )
    assert ran.status == 0, ran.err
    assert sorted(job.devices for job in told.jobs if isinstance(job, LoadCommand)) == [
        ("0",),
        ("0", "1"),
        ("1",),
    ]
    fewer = "scored by 2 replicas, not by 3: there were no more GPUs, or no more windows"
    assert [model["notes"][0] for model in ran.models.values()] == [
        fewer,
        fewer.replace("2", "1").replace("3", "2"),
    ]


def test_no_speed_where_another_process_uses_the_gpu(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded(monkeypatch, gpus=1)
    others = {"a": "other (process 7, 61.0 GB)", "b": ""}
    monkeypatch.setattr(machine, "gpu_users", lambda devices: next(iter(others.values())))
    first = measured(models_of("a"))
    others.pop("a")
    # In the second run the row of a comes from the cache, with its note.
    for ran in (first, measured(models_of("ab"))):
        assert ran.models["a"]["tokens_per_second"] is None
        assert (
            "a: tok/s n/a: while it was scored the GPU was also used by other (process 7, 61.0 GB)"
            in ran.out
        )
    assert ran.models["b"]["tokens_per_second"] > 0


def test_the_next_model_prepares_while_a_model_has_the_gpu(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = measured(three())
    told = threaded(monkeypatch, gpus=1)
    told.first = {("a", "score"): ("b", "prepare done")}
    ran = measured(three(), "-cc")
    assert ran.status == 0, ran.err
    assert numbers(ran) == numbers(alone)
    # The GPU was free for both.
    assert told.of("ref") == told.of("a") == ["load", "score"]
    assert told.of("b") == ["prepare", "load", "score"]
    assert told.before(("a", "score done"), ("b", "load"))


def test_seconds_of_loading_are_without_the_wait_for_a_gpu(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threaded(monkeypatch, gpus=1)
    told.first = {("a", "score"): ("b", "prepare done")}
    run_began = time.time()
    waits_began = list[float]()

    def wait_once_prepared() -> bool:
        if ("b", "prepare done") in told.steps and not waits_began:
            waits_began.append(time.time())
            # Longer than b has prepared.
            time.sleep(waits_began[0] - run_began)
        return True

    told.may_score = wait_once_prepared
    ran = measured(three())
    assert ran.status == 0, ran.err
    timing = ran.models["b"]["timing"]
    assert waits_began[0] < timing["started"] < timing["loaded"]


def test_a_model_that_fails_while_it_prepares_is_a_row_with_the_reason(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threaded(monkeypatch, gpus=1)
    told.first = {("a", "score"): ("c", "prepare done")}
    told.fails = {("b", "prepare"): "dies"}
    ran = measured([*three(), fake("c", boost=2.0)])
    assert ran.status == 1
    assert ran.models["b"]["error"] == "its worker was ended by a test"
    assert told.of("b") == ["prepare"]
    assert told.of("c") == ["prepare", "load", "score"]
    assert ran.models["c"]["kld"] > 0


@pytest.fixture
def handlers() -> Iterator[None]:
    """Install Python's default signal handlers, even for ignored signals.

    Restore the old handlers afterwards.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_an_ignored_signal_stays_ignored() -> None:
    # As nohup does before it starts a program.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_interrupt(Workers()):
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(InterruptedRun):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_an_interrupt_that_got_lost_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal interrupts: Python discards exceptions while it deletes an object."""
    running = Workers()
    with signals_interrupt(running):
        with pytest.raises(InterruptedRun):
            signal.raise_signal(signal.SIGINT)
        # At once, which is too early for a second interrupt by the same signal.
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(workers, "AGAIN_S", -1.0)
        # A signal other than the first one does not interrupt again.
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(InterruptedRun):
            signal.raise_signal(signal.SIGINT)
        running.stop()
        # The run has been stopped: what follows are its finished rows, which no signal may end.
        signal.raise_signal(signal.SIGINT)
