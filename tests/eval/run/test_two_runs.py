"""Two runs at the same time, with models and texts in different orders: no run waits for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.reference.store import Reader
from compare_q.eval.common.cache import Cache
from compare_q.eval.run.claims import claimed, lock_file
from tests.support.comparisons import KLD, UNIFORM, fake
from tests.support.processes import wait_until
from tests.support.threaded import Told
from tests.support.two_runs import TOGETHER_S, Run, together

Make = Callable[..., Run]


def held(cache: Cache, folder: Path, windows: Collection[str]) -> Any:
    """Claim windows of a folder of scores as another run does."""
    return claimed(cache, folder, windows, lambda: None)


def test_models_and_texts_in_another_order(make: Make, told: Told) -> None:
    """Each model scores its windows once, in one of the two runs."""
    runs = (
        make([fake("a"), fake("b", boost=1.0)], "prose", "code"),
        make([fake("b", boost=1.0), fake("a")], "code", "prose"),
    )
    # A thread that has started has an ident: no run ends before the other one begins.
    told.may_score = lambda: all(run.ident for run in runs)
    together(*runs)
    for run in runs:
        assert run.of("a").ppl == pytest.approx(500.0)
    assert len([step for _, step in told.steps if step == "score done"]) == 2


def test_a_model_that_waits_for_another_run_has_no_gpu(
    make: Make, told: Told, own_cache: Path
) -> None:
    """Other models of the run score at the same time, unless they need it as a reference.

    Waiting is reported once.
    """
    # A first run shows in which folders the scores are; they are deleted below.
    before = make()
    cache = Cache(own_cache)
    together(before)
    folders = {label: before.scores_of(label) for label in ("ref", "uniform")}
    for folder in folders.values():
        cache.clear("scores", folder.name)
    told.steps.clear()
    run = make([*UNIFORM, fake("b", boost=1.0)], gpus=2)

    def waiting() -> list[str]:
        return [line.partition(":")[0] for line in run.said if "another run" in line]

    with held(cache, folders["uniform"], run.data.digests):
        with held(cache, folders["ref"], run.data.digests):
            run.start()
            wait_until(waiting, TOGETHER_S)
            assert (told.steps, len(run.config.gpus.free)) == ([], 2)
        wait_until(lambda: ("b", "score done") in told.steps and len(waiting()) == 2, TOGETHER_S)
        assert told.of("uniform") == []
    run.join(TOGETHER_S)
    assert waiting() == ["ref", "uniform"]
    assert run.of("uniform").kld == before.of("uniform").kld


def test_complete_rows_wait_for_nobody(make: Make, told: Told, own_cache: Path) -> None:
    """Another run may have claimed the windows for a long time.

    It compares the same models with another reference.
    """
    before = make()
    run = make()
    together(before)
    told.steps.clear()
    cache = Cache(own_cache)
    windows = run.data.digests
    with (
        held(cache, before.scores_of("ref"), windows),
        held(cache, before.scores_of("uniform"), windows),
    ):
        together(run)
    assert run.of("uniform").kld == before.of("uniform").kld
    assert run.of("ref").from_cache
    assert run.of("uniform").from_cache
    assert told.steps == []


def assert_right(*runs: Run) -> None:
    """Assert that these runs end, and that their models have the KLD of the closed form."""
    for run in runs:
        run.join(TOGETHER_S)
        assert run.of("uniform").kld == pytest.approx(KLD, rel=1e-5)


def test_two_caches_and_one_place_of_the_reference(make: Make, told: Told, tmp_path: Path) -> None:
    """The second run records there after the end of the first run.

    The first run removes unfinished recordings.
    """
    models = [
        fake(label, boost=3.0, out_logits=str(tmp_path / "refs")) for label in ("first", "second")
    ]
    one, other = (
        make([model, fake("uniform")], cache=tmp_path / model["label"]) for model in models
    )
    # ``other`` waits for the windows of ``one``.
    told.may_score = lambda: other.said != []
    one.start()
    wait_until(lambda: ("first", "score") in told.steps, TOGETHER_S)
    other.start()
    assert_right(one, other)
    assert told.before(("first", "score done"), ("second", "load"))


def test_clearing_keeps_a_store_that_another_run_reads(
    make: Make, told: Told, own_cache: Path
) -> None:
    """The store is deleted when the other run has ended."""
    reader = make()
    clearing = make(clear=True)
    # The reader holds the store until the test adds this step.
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


# A folder of the user and one named by its key have different names of their lock files.
@pytest.mark.parametrize("name", ["ref", "0" * 40])
def test_a_store_has_one_lock(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock does not depend on a run's cache or the spelling of the path.

    Without write access, no lock is used.
    """
    folder = tmp_path / "references"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    spellings = (folder / name, Path(name), tmp_path / "link" / name)

    def stop() -> None:
        raise TimeoutError

    with Cache(tmp_path / "one").locked([lock_file(spellings[0])], lambda: None):
        for spelling in spellings[1:]:
            lock = Cache(tmp_path / "other").locked([lock_file(spelling)], lambda: None, stop)
            with pytest.raises(TimeoutError):
                lock.__enter__()
    # Nothing can be written there.
    shutil.rmtree(folder)
    with Cache(tmp_path / "one").locked([lock_file(spellings[0])], lambda: None):
        pass
