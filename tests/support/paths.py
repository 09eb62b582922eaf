"""Runs of the command line in separate processes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.processes import processes_of, users_environment, wait_until, workers_of
from tests.support.texts import tokenize

EACH_WINDOW = ROOT / "tests/support/each_window"
FEW_WINDOWS = 6
"""Windows of most runs."""
MANY_WINDOWS = 40
"""Windows of the text."""
TIME_KEYS = {
    "created",
    "command",
    "load_seconds",
    "score_seconds",
    "tokens_per_second",
    "from_cache",
    "seconds",
    "timing",
}
"""Keys of results.json whose values depend on the time, or on what was in the cache."""


@dataclass(frozen=True)
class Models:
    """The models of an engine's runs.

    ``roles``: role -> label, for the roles that the engine can have: "reference", "row" (compared
    with the reference) and "second" (the model after it).  ``tolerance``: largest relative
    difference of PPL and KLD between two runs, 0 for engines whose scores do not depend on the
    batch.  ``words``: flags; ``paths``: folders for ``$PYTHONPATH``.  ``node``: a folder with the
    cache and the notes of a node that runs the models; None if the run's machine does.
    """

    roles: dict[str, str]
    specs: list[dict[str, Any]]
    tolerance: float = 0.0
    words: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    node: Path | None = None


@dataclass
class Run:
    """One run of the command line: its process, its results, and what it printed."""

    process: subprocess.Popen[bytes]
    results: Path
    log: Path

    @property
    def output(self) -> str:
        """What the run has printed."""
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        """Wait for the end; return the exit status."""
        return self.process.wait(600)

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return label -> row of results.json, without times."""
        models = json.loads(self.results.read_text())["models"]
        return {model["label"]: without_times(model) for model in models}


class Runs:
    """Runs of an engine's models on one cache.

    Their workers write notes, as ``each_window/sitecustomize.py`` describes.
    """

    def __init__(self, models: Models, data: Path, folder: Path) -> None:
        self.models = models
        self.data = data
        self.folder = folder
        self.worker_folder = models.node or folder
        self.notes = self.worker_folder / "notes"
        self.notes.mkdir(exist_ok=True)
        self.commits = self.notes / "commits"
        self.commits.write_text("")
        self.started: list[Run] = []
        folder.joinpath("models.json").write_text(json.dumps(models.specs))
        tokenize(data, folder / "cache")

    def start(self, windows: int, *, each_window: bool = True, held: str = "") -> Run:
        """Start a run; its workers commit after each window, or as usual.

        ``held``: label of a model whose worker waits after its first commit.
        """
        return self.start_command(["-r", str(windows)], each_window=each_window, held=held)

    def start_command(
        self, words: Sequence[str], out: Path | None = None, *, each_window: bool, held: str = ""
    ) -> Run:
        """Start a command line on the models; ``out``: its results, by default in a new file."""
        name = self.folder / f"run{len(self.started)}"
        log = name.with_suffix(".log")
        if out is None:
            out = name.with_suffix(".json")
        command = [sys.executable, str(ROOT / "eval" / "compare_q.py"), *words]
        command += ["-d", str(self.data), "-m", str(self.folder / "models.json")]
        command += ["-o", str(out), *self.models.words]
        cache = str(self.folder / "cache")
        environment = users_environment(COMPARE_Q_CACHE=cache, NOTES=str(self.notes))
        (self.notes / "held").write_text(held)
        paths = [*self.models.paths, str(ROOT)]
        if each_window:
            paths.insert(0, str(EACH_WINDOW))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        run = Run(process, out, log)
        self.started.append(run)
        return run

    def finish(self, windows: int, *, each_window: bool = True) -> Run:
        """Start a run, wait for its end, and assert that it succeeded."""
        run = self.start(windows, each_window=each_window)
        assert run.wait() == 0, run.output
        return run

    def end_after_one_commit(self, label: str, who: str, number: signal.Signals) -> Run:
        """Start a run, and send a signal to its "driver" or "worker" after a model's first commit.

        Returns the run, ended.
        """
        run = self.start(FEW_WINDOWS, held=label)
        wait_until(lambda: self.committed()[label] or run.process.poll() is not None)
        assert run.process.poll() is None, run.output
        if who == "worker":
            (target,) = workers_of(self.worker_cache)
        else:
            target = run.process.pid
        os.kill(target, number)
        run.wait()
        wait_until(lambda: not processes_of(self.worker_cache))
        return run

    @property
    def worker_cache(self) -> Path:
        """The cache that the workers' environment names."""
        return self.worker_folder / "cache"

    def committed(self) -> Counter[str]:
        """Return label -> number of its windows that workers have committed."""
        return Counter(line.split()[0] for line in self.commits.read_text().splitlines())

    def committed_twice(self, label: str) -> list[str]:
        """Return the notes on a model's windows that workers have committed more than once."""
        counts: Counter[str] = Counter()
        for line in self.commits.read_text().splitlines():
            if line.split()[0] == label:
                counts[line] += 1
        return [line for line, count in counts.items() if count > 1]

    def close(self) -> None:
        """End runs that a failed test has left."""
        for run in self.started:
            run.process.kill()
            run.process.wait()


def without_times(value: Any, keys: Collection[str] = TIME_KEYS) -> Any:
    """Return results without some of their keys, at every depth."""
    if isinstance(value, dict):
        others = {}
        for key, member in value.items():
            if key not in keys:
                others[key] = without_times(member, keys)
        return others
    if isinstance(value, list):
        return [without_times(member, keys) for member in value]
    return value


def assert_equal(rows: dict[str, Any], gold: dict[str, Any], tolerance: float) -> None:
    """Assert that rows are equal: all of them, or PPL and KLD within a tolerance."""
    assert rows.keys() == gold.keys()
    if not tolerance:
        assert rows == gold
        return
    for label, gold_row in gold.items():
        row = rows[label]
        assert row["error"] is None
        assert row["tokens"] == gold_row["tokens"]
        assert row["ppl"] == pytest.approx(gold_row["ppl"], rel=tolerance)
        if gold_row["kld"] is None:
            assert row["kld"] is None
        else:
            assert row["kld"] == pytest.approx(gold_row["kld"], rel=tolerance)
