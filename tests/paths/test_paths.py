"""Each engine as users run it: with commits between windows, killed and resumed, beside another
run, interrupted.

``make test`` runs one path of each engine, killed after the first commit of a compared model and
resumed; ``make paths`` runs the whole table (engine x role of the model x what happens).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import FEW_WINDOWS, MANY_WINDOWS, Runs, assert_equal

pytestmark = pytest.mark.engine

ALL = ["reference", "row", "second"]
ROLES = {
    "Transformers": ALL,
    "vLLM": ALL,
    "vLLM's server": ["row", "second"],
    "a server": ["row", "second"],
    "llama.cpp": ALL,
    "pack": ["row", "second"],
    "ExLlamaV3": ALL,
    "Ray": ALL,
}
"""Engine -> roles of its models: a server's log-probabilities are no reference, and a pack is not
scored."""
ENGINES = list(ROLES)
IN_PATHS_ONLY = {"vLLM's server"}
Start = Callable[[str], Runs]


def each_engine_and_role() -> list[Any]:
    """Parameters (engine, role); all but one role of each engine belong to ``make paths``."""
    parameters = []
    for engine in ENGINES:
        for role in ROLES[engine]:
            in_test = role == "row" and engine not in IN_PATHS_ONLY
            marks = [] if in_test else [pytest.mark.paths]
            parameters.append(pytest.param(engine, role, marks=marks))
    return parameters


@pytest.fixture(scope="module")
def gold(
    runs_in: Callable[[str, Path], Runs], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Any]:
    """(engine, windows) -> rows of an undisturbed run without commits between windows, measured
    once.
    """
    measured: dict[tuple[str, int], Any] = {}

    def rows(engine: str, windows: int) -> Any:
        if (engine, windows) not in measured:
            runs = runs_in(engine, tmp_path_factory.mktemp("gold"))
            measured[engine, windows] = runs.finish(windows, each_window=False).rows()
        return measured[engine, windows]

    return rows


@pytest.fixture
def start(runs_in: Callable[[str, Path], Runs], tmp_path: Path) -> Iterator[Start]:
    """Engine -> runs of its models on a new cache."""
    made = []

    def runs(engine: str) -> Runs:
        made.append(runs_in(engine, tmp_path))
        return made[-1]

    yield runs
    for each in made:
        each.close()


@pytest.mark.parametrize(("engine", "role"), each_engine_and_role())
def test_killed_after_a_commit_and_resumed(start: Start, gold: Any, engine: str, role: str) -> None:
    """No window of the killed model is scored twice, no process is left, and the result is the
    undisturbed one.
    """
    runs = start(engine)
    label = runs.models.roles[role]
    runs.end_after_one_commit(label, "driver", signal.SIGKILL)
    assert 0 < runs.committed()[label] < FEW_WINDOWS
    rows = runs.finish(FEW_WINDOWS).rows()
    assert runs.committed_twice(label) == []
    assert runs.committed()[label] == FEW_WINDOWS
    assert_equal(rows, gold(engine, FEW_WINDOWS), runs.models.tolerance)


@pytest.mark.paths
@pytest.mark.parametrize(
    ("engine", "role"), [(engine, role) for engine in ENGINES for role in ROLES[engine]]
)
def test_its_worker_is_killed_and_the_run_goes_on(
    start: Start, gold: Any, engine: str, role: str
) -> None:
    runs = start(engine)
    label = runs.models.roles[role]
    lost = runs.end_after_one_commit(label, "worker", signal.SIGKILL)
    assert lost.process.returncode == 1, lost.output
    failed = [name for name, row in lost.rows().items() if row["error"]]
    assert failed == [label]
    rows = runs.finish(FEW_WINDOWS).rows()
    assert runs.committed_twice(label) == []
    assert_equal(rows, gold(engine, FEW_WINDOWS), runs.models.tolerance)


@pytest.mark.paths
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("engine", "role"), [(engine, role) for engine in ENGINES for role in ROLES[engine]]
)
def test_interrupted_and_resumed(
    start: Start, gold: Any, engine: str, role: str, number: signal.Signals
) -> None:
    """The rows before the interrupted one are shown and kept; the others say that they were
    interrupted.
    """
    runs = start(engine)
    label = runs.models.roles[role]
    ended = runs.end_after_one_commit(label, "driver", number)
    assert ended.process.returncode == 128 + number, ended.output
    assert "Traceback" not in ended.output
    labels = list(gold(engine, FEW_WINDOWS))
    before = labels[: labels.index(label)]
    if before:
        assert [name for name, row in ended.rows().items() if row["error"] is None] == before
    else:
        assert not ended.results.exists()  # there was no row to show
    rows = runs.finish(FEW_WINDOWS).rows()
    assert runs.committed_twice(label) == []
    assert_equal(rows, gold(engine, FEW_WINDOWS), runs.models.tolerance)


@pytest.mark.paths
@pytest.mark.parametrize("engine", ENGINES)
def test_a_commit_between_any_two_windows(start: Start, gold: Any, engine: str) -> None:
    runs = start(engine)
    rows = runs.finish(FEW_WINDOWS).rows()
    assert_equal(rows, gold(engine, FEW_WINDOWS), runs.models.tolerance)
    for role in ROLES[engine]:
        assert runs.committed()[runs.models.roles[role]] == FEW_WINDOWS


@pytest.mark.paths
@pytest.mark.parametrize("engine", ENGINES)
def test_more_windows_of_a_text(start: Start, gold: Any, engine: str) -> None:
    """A run of 40 windows, after a run of 6 of them."""
    runs = start(engine)
    runs.finish(FEW_WINDOWS)
    rows = runs.finish(MANY_WINDOWS).rows()
    assert_equal(rows, gold(engine, MANY_WINDOWS), runs.models.tolerance)
    for role in ROLES[engine]:
        label = runs.models.roles[role]
        assert runs.committed_twice(label) == []
        assert runs.committed()[label] == MANY_WINDOWS


@pytest.mark.paths
@pytest.mark.parametrize("engine", ENGINES)
def test_two_runs_on_one_cache(start: Start, gold: Any, engine: str) -> None:
    """Both runs show the whole table; each window is scored by one of them."""
    runs = start(engine)
    both = [runs.start(FEW_WINDOWS), runs.start(FEW_WINDOWS)]
    for run in both:
        assert run.wait() == 0, run.output
        assert_equal(run.rows(), gold(engine, FEW_WINDOWS), runs.models.tolerance)
    for role in ROLES[engine]:
        assert runs.committed_twice(runs.models.roles[role]) == []
