"""Scores of trials: their file, and a worker that appends to it."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import Engine, PlannedModel, QuantizedModule, Trial, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.restoring import TrialScore
from compare_q.backends.worker import protocol, trial_scores, worker
from compare_q.backends.worker.protocol import (
    Done,
    Failed,
    LoadCommand,
    Progress,
    ReferenceCommand,
    TrialsCommand,
)
from compare_q.backends.worker.trial_scores import Place
from compare_q.backends.worker.worker import Worker
from compare_q.eval.common import processes
from compare_q.eval.common.processes import WorkerProcess
from tests.support.fake_engine import FakeEngine
from tests.support.toy import planned, toy_windows

WINDOWS = toy_windows(3, 20)
TRIALS = [Trial(()), Trial(("layers.0",)), Trial(("layers.0",), "reference")]
MODULE = QuantizedModule("layers.0", 0, 64, "int4 g32", 288.0, 1024.0)


def score(kld: float = 1.25, non_finite: int = 0) -> TrialScore:
    return TrialScore(0, 0, kld, 511, non_finite)


def test_scores_are_read_as_they_were_appended(tmp_path: Path) -> None:
    file = tmp_path / "scores"
    assert trial_scores.read(file) == {}
    trial_scores.append(file, [(Place("a", "1"), score()), (Place("a", "2"), score(0.5, 3))])
    trial_scores.append(file, [(Place("b", "1"), score(-1e-7))])
    assert trial_scores.read(file) == {
        Place("a", "1"): score(),
        Place("a", "2"): score(0.5, 3),
        Place("b", "1"): score(-1e-7),
    }
    first = json.loads(file.read_text().splitlines()[0])
    assert first == {"trial": "a", "window": "1", "kld": 1.25, "tokens": 511, "non_finite": 0}


def test_a_torn_line_is_scored_again(tmp_path: Path) -> None:
    """The line after it is complete."""
    file = tmp_path / "scores"
    trial_scores.append(file, [(Place("a", "1"), score()), (Place("a", "2"), score())])
    whole = file.read_bytes()
    for length in range(whole.index(b"\n") + 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert trial_scores.read(file) == {Place("a", "1"): score()}
        trial_scores.append(file, [(Place("b", "1"), score())])
        assert trial_scores.read(file) == {Place("a", "1"): score(), Place("b", "1"): score()}
    # Only the line's end is missing: the score is complete.
    file.write_bytes(whole[:-1])
    assert len(trial_scores.read(file)) == 2
    trial_scores.append(file, [(Place("b", "1"), score())])
    assert len(trial_scores.read(file)) == 3


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "scores"
    n_appends = 200

    def write(name: str) -> None:
        for number in range(n_appends):
            places = [Place(f"{name}{number}", str(window)) for window in range(5)]
            trial_scores.append(file, [(place, score()) for place in places])

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(trial_scores.read(file)) == 2 * n_appends * 5


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"5",
        b"\xff\xfe",
        b'{"trial": "a", "window": "1", "kld": 1.25, "tokens": 511}',
        b'{"trial": "a", "window": "1", "kld": "much", "tokens": 511, "non_finite": 0}',
        b'{"trial": "a", "window": "1", "kld": NaN, "tokens": 511, "non_finite": 0}',
        b'{"trial": "a", "window": "1", "kld": 1e999, "tokens": 511, "non_finite": 0}',
        b'{"trial": "a", "window": "1", "kld": 1.25, "tokens": -1, "non_finite": 0}',
    ],
)
def test_unreadable_lines_are_left_out(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "scores"
    trial_scores.append(file, [(Place("b", "1"), score())])
    file.write_bytes(line + b"\n" + file.read_bytes() + line)
    assert trial_scores.read(file) == {Place("b", "1"): score()}


def kld_of(score: TrialScore) -> float:
    """The KLD that the fake engine gives a trial in a window."""
    return score.trial + score.window / 16


@pytest.fixture
def restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine with trials, which differ in every window."""

    def trials(
        _: Engine, reference: Engine, windows: Sequence[Window], trials: Sequence[Trial]
    ) -> Iterator[TrialScore]:
        assert reference.planned.label == "reference"
        for window in windows:
            for index in range(len(trials)):
                place = TrialScore(index, window.index, 0.0, window.n_scored)
                yield place._replace(kld=kld_of(place))

    monkeypatch.setattr(FakeEngine, "exchangeable", lambda *_: (MODULE,))
    monkeypatch.setattr(FakeEngine, "trials", trials)


def model(label: str) -> PlannedModel:
    return planned(label, "fake", "none", 100)


def performed(folder: Path, windows: Sequence[Window] = WINDOWS) -> list[Any]:
    """Score the trials in windows with a worker in this process; return its messages."""
    file = folder / "windows.npz"
    protocol.write_windows(file, windows)
    messages: list[Any] = []
    scoring = Worker(0.0)
    scoring.perform(LoadCommand(model("quantized")), messages.append)
    scoring.perform(ReferenceCommand(model("reference")), messages.append)
    scoring.perform(TrialsCommand(TRIALS, file, folder / "scores"), messages.append)
    scoring.close()
    return messages


def expected(windows: Sequence[Window]) -> dict[Place, float]:
    """Return the KLDs of the fake engine by trial and window."""
    klds = {}
    for window in windows:
        for index, trial in enumerate(TRIALS):
            place = TrialScore(index, window.index, 0.0, 0)
            klds[Place(trial.digest, window.digest)] = kld_of(place)
    return klds


def stored(folder: Path) -> dict[Place, float]:
    """Return the KLDs in the file."""
    scores = trial_scores.read(folder / "scores")
    assert all(entry.tokens == 19 for entry in scores.values())
    return {place: entry.kld for place, entry in scores.items()}


@pytest.mark.usefixtures("restoring")
def test_a_worker_appends_the_scores_of_trials(tmp_path: Path) -> None:
    messages = performed(tmp_path, WINDOWS[:1])
    fields = {
        "name": "layers.0",
        "layer": 0,
        "n_weights": 64,
        "weights": "int4 g32",
        "bits": 288.0,
        "reference_bits": 1024.0,
    }
    assert messages[:2] == [Done(), Done([fields])]
    assert messages[2:-1] == [Progress(1)] * 3
    # The value says what ran.
    assert isinstance(messages[-1], Done)
    assert messages[-1].value.keys() >= {"notes", "layers"}
    assert stored(tmp_path) == expected(WINDOWS[:1])
    performed(tmp_path, WINDOWS[1:])
    assert stored(tmp_path) == expected(WINDOWS)


@pytest.mark.usefixtures("restoring")
def test_scores_before_an_error_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeEngine.trials

    def failing(*arguments: Any) -> Iterator[TrialScore]:
        for entry in trials(*arguments):
            if entry.window == WINDOWS[1].index:
                raise ModelError("told to fail")
            yield entry

    monkeypatch.setattr(FakeEngine, "trials", failing)
    assert performed(tmp_path)[-1] == Failed("told to fail")
    assert stored(tmp_path) == expected(WINDOWS[:1])


@pytest.mark.usefixtures("restoring")
@pytest.mark.parametrize("changed", ["quantized", "reference"])
def test_scores_of_a_changed_model_are_never_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Not even if the next check meets the right model again: only the second check fails."""
    n_checks = 0

    def check(engine: FakeEngine) -> None:
        nonlocal n_checks
        if engine.planned.label == changed:
            n_checks += 1
            if n_checks == 2:
                raise ModelError("another model answers")

    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    monkeypatch.setattr(FakeEngine, "check_unchanged", check)
    assert performed(tmp_path)[-1] == Failed("another model answers")
    places = list(expected(WINDOWS).items())
    assert stored(tmp_path) == dict(places[:1])


@pytest.mark.usefixtures("restoring")
def test_both_models_are_closed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr(FakeEngine, "close", lambda engine: labels.append(engine.planned.label))
    messages: list[Any] = []
    scoring = Worker(0.0)
    scoring.perform(LoadCommand(model("quantized")), messages.append)
    scoring.perform(ReferenceCommand(model("reference")), messages.append)
    assert labels == []
    scoring.perform(ReferenceCommand(model("another reference")), messages.append)
    assert labels == ["reference"]
    scoring.perform(LoadCommand(model("next")), messages.append)
    assert sorted(labels) == ["another reference", "quantized", "reference"]
    scoring.close()
    assert labels[3:] == ["next"]
    assert all(isinstance(message, Done) for message in messages)


def test_an_engine_without_trials_says_so(tmp_path: Path) -> None:
    messages = performed(tmp_path)
    assert isinstance(messages[1], Failed)
    assert "fake" in messages[1].reason
    assert isinstance(messages[2], Failed)
    assert not (tmp_path / "scores").exists()


@pytest.mark.engine
def test_a_killed_worker_keeps_what_it_has_appended(
    tmp_path: Path,
    toy_model: Path,
    quantized: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another worker continues the file."""
    monkeypatch.setenv(processes.IN_PROCESS_VARIABLE, "0")
    windows = toy_windows(3000, 60)
    trials = [Trial(()), Trial(("layers.0.mlp.up_proj",)), Trial(("layers.1.mlp.up_proj",))]
    scores = tmp_path / "scores"
    options = {"dtype": "float32"}
    models = [
        planned("quantized", "transformers", str(quantized("W4A16")), 60, options),
        planned("reference", "transformers", str(toy_model), 60, options),
    ]

    def run(name: str, windows: Sequence[Window], *, killed: bool) -> None:
        """Score windows in a worker process; kill it after its first commit."""
        file = tmp_path / f"{name}.npz"
        protocol.write_windows(file, windows)
        scoring = WorkerProcess(engine="transformers", log_file=tmp_path / f"{name}.log")
        try:
            scoring.perform(LoadCommand(models[0]), 300, print)
            modules = scoring.perform(ReferenceCommand(models[1]), 300, print)
            assert len([QuantizedModule(**fields) for fields in modules]) == 14
            for message in scoring.messages(TrialsCommand(trials, file, scores), 300):
                assert not isinstance(message, Failed), message
                if killed and scores.exists():
                    os.kill(scoring.group, signal.SIGKILL)
                    break
        finally:
            scoring.kill()
            scoring.close()

    run("killed", windows, killed=True)
    kept = trial_scores.read(scores)
    assert 0 < len(kept) < len(windows) * len(trials)
    n_bytes = scores.stat().st_size
    run("next", windows[-2:], killed=False)
    continued = trial_scores.read(scores)
    assert scores.read_bytes()[:n_bytes].startswith(b'{"trial"')
    assert kept.items() <= continued.items()
    last = {Place(trial.digest, window.digest) for trial in trials for window in windows[-2:]}
    assert continued.keys() == kept.keys() | last
    assert all(math.isfinite(entry.kld) for entry in continued.values())
