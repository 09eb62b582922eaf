"""Two runs at the same time, with models and texts in different orders: no run waits for ever."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.reference.store import Reader
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.results import ModelResult
from compare_q.eval.run import runner
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.gpus import GpuPool
from compare_q.eval.run.reference import Reference
from compare_q.eval.run.runner import RunOutcome
from compare_q.eval.run.workers import Workers
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import windows
from tests.support.comparisons import KLD, UNIFORM, Models, fake, write_texts
from tests.support.processes import wait_until
from tests.support.threaded import H200, Told, threaded

TOGETHER_S = 120.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return threaded(monkeypatch)


class Run(threading.Thread):
    """A run of models on texts, with workers in threads and its own GPUs; ``said``: its progress messages."""

    def __init__(self, config: RunConfig, texts: dict[str, DataSpec], models: Sequence[dict[str, Any]]) -> None:
        super().__init__(daemon=True)
        self.config, self.texts, self.models, self.said = config, texts, models, list[str]()
        self.outcome: RunOutcome | None = None
        vars(config.progress)["say"] = self.said.append

    def run(self) -> None:
        specs = [reading.parse_model_spec(model, Path("models.json")) for model in self.models]
        self.outcome = runner.run(self.config, self.texts, specs)

    def of(self, label: str) -> list[ModelResult]:
        """Return a model's rows, one per text; assert that no row of the run has failed."""
        assert self.outcome is not None, "it waits for ever"
        rows = [row for text in self.outcome.results.scored for row in text.models]
        assert [row.error for row in rows if row.error] == []
        return [row for row in rows if row.label == label]

    def keys(self, *labels: str) -> list[str]:
        return [row.scores_key.partition("/")[0] for label in labels for row in self.of(label)]


Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path, toy_model: Path, own_cache: Path, told: Told) -> Iterator[Make]:
    files, runs = write_texts(tmp_path, toy_model), list[Run]()

    def made(models: Models = UNIFORM, *names: str, gpus: int = 1, cache: Path = own_cache, **keys: Any) -> Run:
        texts = {name: reading.load_data_specs([files[name]])[0] for name in names or ("prose",)}
        for spec in texts.values():
            windows.build(spec, None, Cache(cache), Progress(quiet=True))
        pool = GpuPool(H200[:gpus])
        config = RunConfig(Cache(cache), Progress(quiet=True), Workers(gpus=pool), pool, **keys)
        runs.append(Run(config, texts, models))
        return runs[-1]

    yield made
    for run in runs:
        run.config.workers.stop()


def together(*runs: Run) -> None:
    """Execute runs at the same time, and wait for their end."""
    for run in runs:
        run.start()
    for run in runs:
        run.join(TOGETHER_S)


def held(cache: Cache, keys: Sequence[str]) -> Any:
    """Hold the locks of scores as another run does."""
    return cache.locked([cache.path("scores", key, ".lock") for key in keys], lambda: None)


def test_models_and_texts_in_another_order(make: Make, told: Told) -> None:
    """Each model scores each text once, in one of the two runs."""
    runs = (make([fake("a"), fake("b", boost=1.0)], "prose", "code"),
            make([fake("b", boost=1.0), fake("a")], "code", "prose"))  # fmt: skip
    told.may_score = lambda: all(run.ident for run in runs)
    together(*runs)
    for run in runs:
        assert [row.ppl for row in run.of("a")] == pytest.approx([500.0] * 2)
    assert len([step for _, step in told.steps if step == "score done"]) == 4


def test_a_model_that_waits_for_a_lock_has_no_gpu(make: Make, told: Told, own_cache: Path) -> None:
    """Other models of the run score at the same time, unless they need it as a reference.  Waiting is reported once."""
    before, cache = make(), Cache(own_cache)
    together(before)
    for key in before.keys("ref", "uniform"):
        cache.clear("scores", key)
    told.steps.clear()
    run = make([*UNIFORM, fake("b", boost=1.0)], gpus=2)

    def waiting() -> list[str]:
        return [line.partition(":")[0] for line in run.said if "another run" in line]

    with held(cache, before.keys("uniform")):
        with held(cache, before.keys("ref")):
            run.start()
            wait_until(waiting, TOGETHER_S)
            assert (told.steps, len(run.config.gpus.free)) == ([], 2)
        wait_until(lambda: ("b", "score done") in told.steps and len(waiting()) == 2, TOGETHER_S)
        assert told.of("uniform") == []
    run.join(TOGETHER_S)
    assert waiting() == ["ref", "uniform"]
    assert [row.kld for row in run.of("uniform")] == [row.kld for row in before.of("uniform")]


def test_complete_rows_wait_for_no_lock(make: Make, told: Told, own_cache: Path) -> None:
    """Another run may hold the locks for a long time, to compare the same models with another reference."""
    before, run = make(), make()
    together(before)
    told.steps.clear()
    with held(Cache(own_cache), before.keys("ref", "uniform")):
        together(run)
    assert [row.kld for row in run.of("uniform")] == [row.kld for row in before.of("uniform")]
    assert [row.from_cache for row in (*run.of("ref"), *run.of("uniform"))] == [True, True]
    assert told.steps == []


def assert_right(*runs: Run) -> None:
    """Assert that these runs end, and that their models have the KLD of the closed form."""
    for run in runs:
        run.join(TOGETHER_S)
        assert [row.kld for row in run.of("uniform") if row.kld] == pytest.approx([KLD], rel=1e-5)


def test_two_caches_and_one_place_of_the_reference(make: Make, told: Told, tmp_path: Path) -> None:
    """The second run records there after the end of the first run, which removes unfinished recordings."""
    models = [fake(label, boost=3.0, out_logits=str(tmp_path / "refs")) for label in ("first", "second")]
    one, other = (make([model, fake("uniform")], cache=tmp_path / model["label"]) for model in models)
    told.may_score = lambda: other.said != []  # ``other`` waits for the lock
    one.start()
    wait_until(lambda: ("first", "score") in told.steps, TOGETHER_S)
    other.start()
    assert_right(one, other)
    assert told.before(("first", "score done"), ("second", "load"))


def test_clearing_keeps_a_store_that_another_run_reads(make: Make, told: Told, own_cache: Path) -> None:
    """The store is deleted when the other run has ended."""
    reader, clearing = make(), make(clear=True)
    told.first[("uniform", "score")] = ("ref", "again")
    reader.start()
    wait_until(lambda: ("uniform", "score") in told.steps, TOGETHER_S)
    (store,) = (folder for folder in (own_cache / "references").iterdir() if folder.is_dir())
    before = {file.name: file.stat().st_mtime_ns for file in store.iterdir()}
    clearing.start()
    wait_until(lambda: told.of("ref").count("score") == 2, TOGETHER_S)
    assert {file.name: file.stat().st_mtime_ns for file in store.iterdir()} == before
    assert any(line.startswith(f"{store}: kept") for line in clearing.said)
    told.steps.append(("ref", "again"))
    assert_right(reader, clearing)
    Reader(store).verify()


@pytest.mark.parametrize("name", ["ref", "0" * 40])
def test_a_store_has_one_lock(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock does not depend on a run's cache or the spelling of the path; without write access, no lock is used."""
    folder = tmp_path / "references"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    ours, *theirs = (Reference("0" * 40, path, "ref", {}) for path in
                     (folder / name, Path(name), tmp_path / "link" / name))  # fmt: skip

    def stop() -> None:
        raise TimeoutError

    with Cache(tmp_path / "one").locked([ours.lock_file], lambda: None):
        for each in theirs:
            lock = Cache(tmp_path / "other").locked([each.lock_file], lambda: None, stop)
            with pytest.raises(TimeoutError):
                lock.__enter__()
    shutil.rmtree(folder)  # nothing can be written there
    with Cache(tmp_path / "one").locked([ours.lock_file], lambda: None):
        pass
