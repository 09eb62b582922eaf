"""What a worker does before it loads a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compare_q.backends.common import machine
from compare_q.backends.worker import worker as worker_module
from compare_q.backends.worker.protocol import LoadCommand, PrepareCommand
from compare_q.backends.worker.worker import Worker
from tests.support.fake_engine import FakeEngine
from tests.support.toy import planned

MODEL = planned("a", "fake", "none", 100)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of a worker, in order, as they happen."""
    steps: list[str] = []

    def gpu_users(devices: Sequence[str], ours: int = 0) -> str:
        steps.append("users")
        return ""

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "gpu_users", gpu_users)
    monkeypatch.setattr(FakeEngine, "load", lambda engine: steps.append("load"))
    monkeypatch.setattr(FakeEngine, "close", lambda engine: steps.append("close"))
    return steps


def test_the_last_model_is_closed_before_the_users_of_its_gpus_are_asked_for(
    steps: list[str],
) -> None:
    """Otherwise the worker itself would be one of them."""
    worker = Worker(0.0)
    for _ in range(2):
        worker.perform(LoadCommand(MODEL, ("0",)), lambda message: None)
    assert steps == ["users", "load", "close", "users", "load"]


def test_the_engine_of_a_prepared_model_is_loaded(steps: list[str]) -> None:
    worker = Worker(0.0)
    worker.perform(PrepareCommand(MODEL), lambda message: None)
    prepared = worker.engine
    worker.perform(LoadCommand(MODEL, ("0",)), lambda message: None)
    assert worker.engine is prepared
    # The next model was not prepared.
    worker.perform(LoadCommand(MODEL, ("0",)), lambda message: None)
    assert worker.engine is not prepared
    assert steps == ["users", "load", "close", "users", "load"]


@pytest.mark.parametrize("n_answers", [2, 1000])
@pytest.mark.parametrize("n_ending", [1, 0])
def test_a_model_that_ends_is_no_other_user_of_the_gpu(
    n_answers: int, n_ending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model before this one may still be ending when this one has scored."""
    other = "python (process 7)"
    answers = [other] * n_answers + [""]

    def gpu_users(devices: Sequence[str], ours: int = 0) -> str:
        assert (list(devices), ours) == (["0"], 2)
        return answers.pop(0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(machine, "gpu_users", gpu_users)
    monkeypatch.setattr(worker_module, "in_worker", lambda: True)
    # As long as two answers may take on a busy machine.
    ending_s = 60.0
    if n_answers > 2:
        ending_s = 0.1
    monkeypatch.setattr(worker_module, "ENDING_S", ending_s)
    monkeypatch.setattr(worker_module, "ENDING_POLL_S", 0.01)
    users = Worker(0.0).other_gpu_users(2, n_ending)
    if n_ending and n_answers == 2:
        assert users == ""
    else:
        assert users == other
    # Without a model that ends, nothing is waited for.
    assert n_ending or len(answers) == n_answers
