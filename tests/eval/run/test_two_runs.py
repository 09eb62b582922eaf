"""Two runs at the same time on one cache, whose models and texts stand in other orders: neither waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from compare_q.backends.common.machine import Gpu
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.results import ModelResult
from compare_q.eval.run import runner
from compare_q.eval.run.devices import Devices
from compare_q.eval.run.hosts import Hosts, Session
from compare_q.eval.run.references import Reference
from compare_q.eval.run.runner import Finished
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import windows
from tests.support.comparisons import KLD, fake
from tests.support.processes import wait_until
from tests.support.text_runs import write_texts
from tests.support.threaded import ThreadedWorker, Told, threaded

GPUS = [Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(2)]
TOGETHER_S = 60.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the workers of both runs are told."""
    return threaded(monkeypatch)


class Run(threading.Thread):
    """A run of models on texts, with workers in threads, and with GPUs of its own."""

    def __init__(self, session: Session, texts: dict[str, DataSpec], models: Sequence[dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self.session, self.texts, self.models = session, texts, models
        self.finished: Finished | None = None

    def run(self) -> None:
        specs = [reading.parse_model_spec(model, Path("models.json")) for model in self.models]
        self.finished = runner.run(self.session, self.texts, specs)

    def of(self, label: str) -> list[ModelResult]:
        """A model's rows, one a text; none of the run's has failed."""
        assert self.finished is not None
        assert [row.error for result in self.finished.results.scored for row in result.models if row.error] == []
        return [row for result in self.finished.results.scored for row in result.models if row.label == label]


@pytest.fixture
def make(tmp_path: Path, toy_model: Path, own_cache: Path, told: Told) -> Iterator[Callable[..., Run]]:
    """Makes a run on texts in this order."""
    files, runs = write_texts(tmp_path, toy_model), []

    def made(names: Sequence[str], *models: dict[str, Any], gpus: int = 1, cache: Path = own_cache) -> Run:
        texts = {name: reading.load_data_specs([files[name]])[0] for name in names}
        for spec in texts.values():
            windows.build(spec, None, Cache(cache), Progress(quiet=True))
        hosts = Hosts(Devices(GPUS[:gpus]), make_worker=lambda job: ThreadedWorker(job, told))
        runs.append(Run(Session(Cache(cache), Progress(quiet=True), hosts=hosts), texts, models))
        return runs[-1]

    yield made
    for run in runs:
        run.session.hosts.stop()


def together(*runs: Run) -> None:
    """Let runs go on at the same time, up to their end."""
    for run in runs:
        run.start()
    for run in runs:
        run.join(TOGETHER_S)
    assert not [run for run in runs if run.is_alive()], "they wait for each other"


def test_models_and_texts_in_another_order(make: Callable[..., Run], told: Told) -> None:
    """Each run's second model waits for a GPU with the text that the other run's first model comes to next."""
    runs = (make(["prose", "code"], fake("a"), fake("b", boost=1.0)),
            make(["code", "prose"], fake("b too", boost=1.0), fake("a too")))  # fmt: skip
    waited: set[str] = set()

    def both_wait() -> bool:
        waited.update(str(run) for run in runs if any(hold.place for hold in run.session.hosts.devices.waiting))
        return len(waited) == 2

    told.may_score = both_wait
    together(*runs)
    for run in runs:
        assert [row.ppl for label in ("a", "a too") for row in run.of(label)] == pytest.approx([500.0] * 2)
    assert len([step for _, step in told.steps if step == "score done"]) == 4  # each model on each text, once


def test_a_reference_that_waits_for_a_lock_has_no_gpu(make: Callable[..., Run], told: Told, own_cache: Path) -> None:
    """And no other model of its run loads meanwhile."""
    models = (fake("ref", boost=3.0, reference=True), fake("a"))
    before = make(["prose", "code"], *models)
    together(before)
    cache, keys = Cache(own_cache), [row.scores_key.partition("/")[0] for row in before.of("ref")]
    for name in (*keys, *(row.scores_key.partition("/")[0] for row in before.of("a"))):
        cache.clear("scores", name)
    run = make(["prose", "code"], *models, gpus=2)
    told.steps.clear()
    with cache.lock("scores", keys[1]):
        run.start()
        devices = run.session.hosts.devices
        wait_until(lambda: ("ref", "score done") in told.steps and not devices.holds, TOGETHER_S)
        assert told.of("a") == []
    run.join(TOGETHER_S)
    assert [row.kld for row in run.of("a")] == [row.kld for row in before.of("a")]


def test_a_model_that_waits_for_a_lock_keeps_no_other_from_a_gpu(
    make: Callable[..., Run], told: Told, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that has the lock may wait for one of those.  That it waits is said once."""
    run, said = make(["prose"], fake("a"), fake("b", boost=1.0)), list[str]()
    monkeypatch.setattr(run.session.progress, "say", said.append)
    before = make(["prose"], fake("a"))
    together(before)
    cache, (key, _, _) = Cache(own_cache), before.of("a")[0].scores_key.partition("/")
    cache.clear("scores", key)
    told.steps.clear()
    with cache.lock("scores", key):
        run.start()
        wait_until(lambda: ("b", "score done") in told.steps, TOGETHER_S)
        assert told.of("a") == []
    run.join(TOGETHER_S)
    assert [line for line in said if "another run" in line] == ["a: another run is scoring it; this one waits for that"]
    assert run.of("a")[0].ppl == before.of("a")[0].ppl


def test_complete_rows_wait_for_no_lock(make: Callable[..., Run], told: Told, own_cache: Path) -> None:
    """Another run may hold them for long, to compare the same models with another reference."""
    models = (fake("ref", boost=3.0, reference=True), fake("a"))
    before = make(["prose"], *models)
    together(before)
    cache, told.steps[:] = Cache(own_cache), []
    run = make(["prose"], *models)
    with ExitStack() as held:
        for label in ("ref", "a"):
            key = before.of(label)[0].scores_key.partition("/")[0]
            held.enter_context(cache.lock("scores", key))
        together(run)
    assert [row.kld for row in run.of("a")] == [row.kld for row in before.of("a")]
    assert [row.from_cache for row in (*run.of("ref"), *run.of("a"))] == [True, True]
    assert told.steps == []


def test_two_caches_and_one_place_of_the_reference(make: Callable[..., Run], told: Told, tmp_path: Path) -> None:
    """The second one records there only when the first one is through, whose end removes what is half-made."""
    models = [fake(label, boost=3.0, out_logits=str(tmp_path / "refs")) for label in ("first", "second")]
    one, other = (make(["prose"], model, fake("a"), cache=tmp_path / model["label"]) for model in models)
    recording = ("second", "score")
    told.first[recording] = ("first", "score done")
    devices = other.session.hosts.devices
    told.may_score = lambda: devices.begun or recording in told.steps  # it lets others go first, or has a GPU
    one.start()
    wait_until(lambda: ("first", "score") in told.steps, TOGETHER_S)
    other.start()
    for run in (one, other):
        run.join(TOGETHER_S)
        assert [row.kld for row in run.of("a") if row.kld] == pytest.approx([KLD], rel=1e-5)


@pytest.mark.parametrize("name", ["ref", "0" * 40])
def test_a_store_has_one_lock(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run's cache is, and however it spells the path; none where nothing can be written."""
    folder = tmp_path / "references"
    folder.mkdir()
    monkeypatch.chdir(folder)
    ours, theirs = (Reference("0" * 40, path, "ref", {}) for path in (folder / name, Path(name)))
    with ours.lock(Cache(tmp_path)):
        with pytest.raises(Timeout):
            theirs.lock(Cache(tmp_path / "other")).acquire(timeout=0)
        monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)  # root may write everywhere
        theirs.lock(Cache(tmp_path / "other")).acquire(timeout=0)
