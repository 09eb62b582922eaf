"""What a worker commits: scores, and the recordings of the reference that they are relative to."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compare_q.backends.base import ScoreRequest, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.store import Reader, forget
from compare_q.backends.scoring import segments
from compare_q.backends.worker import protocol, worker
from compare_q.backends.worker.protocol import Done, Failed, LoadCommand, ScoreCommand
from compare_q.backends.worker.worker import Worker
from tests.support.fake_engine import FakeEngine
from tests.support.stores import recorded
from tests.support.toy import TOY_VOCAB, planned, toy_windows

TAG = "0123456789abcdef"
WINDOWS = toy_windows(4, 20)


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(planned("m", "fake", "none", 100, {"vocab_size": TOY_VOCAB, **options}))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return recorded(engine(), WINDOWS, tmp_path)


def scored(folder: Path, windows: list[Window], tag: str, request: ScoreRequest) -> Done | Failed:
    """Score windows in a worker; return its last message."""
    file = folder / "windows.npz"
    protocol.write_windows(file, windows)
    messages: list[Any] = []
    scoring = Worker(0.0)
    scoring.perform(LoadCommand(engine(boost=1.0).planned), messages.append)
    scoring.perform(ScoreCommand(request, file, folder / "scores", tag, "s"), messages.append)
    scoring.close()
    last = messages[-1]
    assert isinstance(last, Done | Failed)
    return last


def test_scores_carry_the_recordings_of_their_windows(tmp_path: Path, store: Path) -> None:
    """They are used as long as the store has the same numbers of these windows."""
    scores = tmp_path / "scores"
    digests = [window.digest for window in WINDOWS]
    assert isinstance(scored(tmp_path, WINDOWS[1:3], TAG, ScoreRequest(reference=store)), Done)
    reader = Reader(store)
    recordings = {digest: reader.recording(digest) for digest in digests}
    assert segments.committed(scores, TAG, recordings) == set(digests[1:3])
    committed = {}
    for segment in segments.segments_in(scores):
        for entry in segment.windows:
            committed[entry.window] = entry.recording
    assert committed == {digest: recordings[digest] for digest in digests[1:3]}
    recorded_anew = {**recordings, digests[1]: "f" * 16}
    assert segments.committed(scores, TAG, recorded_anew) == {digests[2]}
    assert segments.load(scores, TAG, WINDOWS, recordings).scores[digests[2]].kld is not None


def test_looking_for_other_programs_is_no_scoring_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that ends may be waited for, and tok/s is computed from the segments' seconds."""
    now = 5.0

    def gpu_users(self: Worker, n_on_gpus: int, n_ending: int) -> str:
        nonlocal now
        now += 100.0
        return ""

    clock = SimpleNamespace(time=time.time, perf_counter=lambda: now)
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(Worker, "other_gpu_users", gpu_users)
    assert isinstance(scored(tmp_path, WINDOWS, segments.ALONE, ScoreRequest()), Done)
    assert now == 105.0
    (segment,) = segments.segments_in(tmp_path / "scores")
    assert segment.seconds == 0.0


def test_scores_without_a_reference_carry_none(tmp_path: Path) -> None:
    assert isinstance(scored(tmp_path, WINDOWS, segments.ALONE, ScoreRequest()), Done)
    (segment,) = segments.segments_in(tmp_path / "scores")
    assert [entry.recording for entry in segment.windows] == [""] * len(WINDOWS)


@pytest.mark.parametrize("lacks", ["the window", "everything"])
def test_a_store_that_lacks_a_window_fails_in_one_line(
    tmp_path: Path, store: Path, lacks: str
) -> None:
    if lacks == "the window":
        forget(store, [WINDOWS[0].digest])
    else:
        forget(store, Reader(store).windows)
    message = scored(tmp_path, WINDOWS[:1], TAG, ScoreRequest(reference=store))
    assert isinstance(message, Failed)
    assert str(store) in message.reason
    assert "\n" not in message.reason
    assert not segments.scores_folder(tmp_path / "scores").own_tensor_files()


def test_scores_of_a_changed_model_are_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the next check meets the right model again: only the second check fails."""
    n_checks = 0

    def check(engine: FakeEngine) -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks == 2:
            raise ModelError("another model answers")

    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    monkeypatch.setattr(FakeEngine, "check_unchanged", check)
    assert isinstance(scored(tmp_path, WINDOWS, segments.ALONE, ScoreRequest()), Failed)
    assert segments.committed(tmp_path / "scores", segments.ALONE, {}) == {WINDOWS[0].digest}
