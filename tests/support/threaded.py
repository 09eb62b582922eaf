"""Workers in threads of this process: they work as real ones, and a test chooses which fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from compare_q.backends.base import PlannedModel
from compare_q.backends.common import machine
from compare_q.backends.common.errors import MEMORY_TOO_SMALL, LostWorkerError, ModelError
from compare_q.backends.common.machine import Gpu
from compare_q.backends.worker import worker
from compare_q.eval.common.processes import result_of
from compare_q.eval.common.progress import Show
from compare_q.eval.run import workers
from compare_q.eval.run.workers import Workers
from tests.support.processes import wait_until

# nvidia-smi reports 143,771 MiB for an H200.
H200 = [Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(4)]
LOADING = threading.Lock()
Step = tuple[str, str]
"""(label of a model, type of a job), or (label, type + " done") before a worker reports that the
job is done."""


@dataclass
class Told:
    """The jobs that the workers of a run received, in order, and what a test makes of them."""

    steps: list[Step] = field(default_factory=list)
    # Steps that fail: once ("dies", "memory"), or once per "lost " in the text.
    fails: dict[Step, str] = field(default_factory=dict)
    # Step -> step for which it waits, so that a test knows which steps overlap.
    first: dict[Step, Step] = field(default_factory=dict)
    jobs: list[Any] = field(default_factory=list)
    # Scoring waits until it returns True.
    may_score: Callable[[], object] = lambda: True

    def of(self, label: str) -> list[str]:
        """Return the steps of one model."""
        steps = []
        for name, step in self.steps:
            if name == label and not step.endswith(" done"):
                steps.append(step)
        return steps

    def halving(self) -> list[bool]:
        """Return for each scoring whether its chunks may be halved, in their order."""
        return [job.request.may_halve_chunks for job in self.jobs if job.type == "score"]

    def before(self, one: Step, other: Step) -> bool:
        """True if one step came before another one."""
        return self.steps.index(one) < self.steps.index(other)

    def await_first(self, step: Step) -> None:
        """Wait for the step that must come before this step."""
        wait_until(lambda: step not in self.first or self.first[step] in self.steps, 600)


class ThreadedWorker:
    """A worker (``eval/run/workers.py``) in this process."""

    def __init__(self, model: PlannedModel, told: Told) -> None:
        self.label = model.label
        self.told = told
        self.worker = worker.Worker(time.time())

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        step = (self.label, job.type)
        done = (self.label, f"{job.type} done")
        self.told.steps.append(step)
        self.told.jobs.append(job)
        self.told.await_first(step)
        if job.type == "score":
            wait_until(self.told.may_score, 600)
        failure, _, later_failures = self.told.fails.pop(step, "").partition(" ")
        if failure == "dies":
            raise ModelError("its worker was ended by a test")
        if failure == "memory":
            raise ModelError(f"{MEMORY_TOO_SMALL}: a test took it")
        if failure == "lost":
            self.told.fails[step] = later_failures
            raise LostWorkerError("its machine was lost")
        messages: list[Any] = []
        if job.type in ("prepare", "load"):
            # Transformers sets torch's default dtype meanwhile, for the whole process.
            with LOADING:
                self.worker.perform(job, messages.append)
        else:
            self.worker.perform(job, messages.append)
        returned = result_of(iter(messages), show)
        self.told.await_first(done)
        self.told.steps.append(done)
        return returned

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""

    def close(self) -> None:
        self.told.await_first((self.label, "close"))
        self.worker.close()


def threaded(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0) -> Told:
    """Make runs use such workers, on a machine with ``gpus`` GPUs; return what they are told."""
    told = Told()
    monkeypatch.setattr(machine, "gpus", lambda: tuple(H200[:gpus]))
    monkeypatch.setattr(workers, "in_process", lambda: False)
    monkeypatch.setattr(Workers, "create", lambda self, model: ThreadedWorker(model.planned, told))
    monkeypatch.setattr(Workers, "import_ahead", lambda self, model, verbose: None)
    # It would restrict the process of the tests.
    monkeypatch.setattr(worker, "keep_to_share", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return told
