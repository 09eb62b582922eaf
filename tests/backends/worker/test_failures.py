"""What is said where the memory did not suffice: numbers where there are some, and nothing of other errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare_q.backends.base import PlannedModel, ScoreRequest
from compare_q.backends.common.errors import ModelError
from compare_q.backends.worker import worker
from compare_q.backends.worker.messages import Failed, LoadCommand, ScoreCommand, write_windows
from tests.support.planned import planned
from tests.support.toy import toy_windows

CURE = "close what else uses it, give the model more GPUs, or shorten eval_len"
SAID = [
    MemoryError("Unable to allocate 2.00 GiB for an array"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ModelError("vLLM could not load m: No available memory for the cache blocks."),
    ModelError("Free memory on device (1/80 GiB) is less than desired GPU memory utilization (0.9)"),
    ModelError("llama.cpp: ggml_backend_cuda_buffer_type_alloc_buffer: failed to allocate CUDA0 buffer"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    OSError(12, "Cannot allocate memory"),
]


def model(engine: str = "fake", folder: Path | str = "none", **options: Any) -> PlannedModel:
    return planned("m", engine, str(folder), 100, options)


@pytest.mark.parametrize("error", SAID, ids=lambda error: str(error)[:20])
def test_what_engines_say(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    said = worker.out_of_memory(model(), error)
    assert said.startswith(f"out of memory: {CURE}; the engine says: ")
    assert said.endswith(str(error)[-20:])
    assert len(said.splitlines()) == 1


def test_numbers(toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 4 x 64 x 64 + 3 x 64 x 128 and a head of 320 x 64, in 16 bits: 204,800 bytes; 1.5 of 80 GiB."""
    cuda = SimpleNamespace(is_initialized=lambda: True, mem_get_info=lambda: (3 << 29, 80 << 30))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    said = worker.out_of_memory(model("transformers", toy_model), MemoryError("no"))
    numbers = "its weights take 204.8 kB, 1.6 GB of the GPU's 85.9 GB are free"
    assert said == f"out of memory ({numbers}): {CURE}; the engine says: no"


def test_a_job_that_runs_out_of_memory(tmp_path: Path) -> None:
    windows = toy_windows(2, 10)
    write_windows(tmp_path / "w.npz", windows)
    request = planned("m", "fake", "none", 100, {"vocab_size": 500, "fail": 1, "failure": "memory"})
    messages: list[Any] = []
    server = worker.Worker(time.time())
    server.perform(LoadCommand(request), messages.append)
    job = ScoreCommand(ScoreRequest(), windows=tmp_path / "w.npz", scores=tmp_path / "scores", tag="alone", session="s")
    server.perform(job, messages.append)
    assert isinstance(messages[-1], Failed)
    assert messages[-1].reason.startswith("out of memory")
    assert messages[-1].reason.endswith("the engine says: CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("how", "gold"),
    [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSEGV, "was ended by SIGSEGV"), (None, None)],
)
def test_a_death_is_told_and_a_good_end_is_not(how: signal.Signals | None, gold: str | None) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(60 if how else 0.2,), name="core")
    child.start()
    told: list[str] = []
    heard = threading.Event()

    def send(message: Failed) -> None:
        told.append(message.reason)
        heard.set()

    with worker.watched_children(send):
        if how is not None:
            assert child.pid is not None
            os.kill(child.pid, how)
            assert heard.wait(10)
        else:
            child.join()
            time.sleep(1)
    assert told == ([] if gold is None else [f"core, a process of its engine, {gold}"])
