"""A worker's life: jobs in, messages out, until the driver closes the channel."""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from backends.common import machine
from backends.common.errors import CompareQError
from backends.common.messages import one_line
from backends.worker import describing, memory, scoring_job
from backends.worker.messages import (
    JOB,
    MESSAGE,
    AnswerJob,
    CallJob,
    Closed,
    Described,
    DescribeJob,
    Failed,
    Loaded,
    LoadJob,
    Ready,
    Returned,
    Told,
)

Send = Callable[[Any], None]
LAST = (Loaded, Closed, Failed, Described, Returned)
"""The message that ends a job is one of these."""


def serve(jobs: IO[bytes], channel: IO[bytes], asked: float, why: str = "") -> None:
    """Do every job that comes; what goes wrong in one is a message.

    ``asked``, ``why``: as of ``Server``.
    """
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:  # a download tells from threads of its own
            channel.write(MESSAGE.dump_json(message) + b"\n")

    server = Server(asked, why)
    send(Ready(os.getpid(), machine.code()))
    for line in jobs:
        server.perform(JOB.validate_json(line), send)
    server.close()


class Server:
    """What a worker keeps from one job to the next: its model.

    ``asked``: when the driver asked for the worker, in seconds since 1970; ``why``: why no worker can be forked from a
    process that has imported the engine, so that this one imports it for its model alone; else empty.
    """

    def __init__(self, asked: float | None = None, why: str = "") -> None:
        machine.keep_compiled_kernels_apart()
        self.asked, self.why = time.time() if asked is None else asked, why
        self.model: scoring_job.Model | None = None
        self.request: Any = None

    def perform(self, job: Any, send: Send) -> None:
        """Do one job, whose outcome is always a message, one of ``LAST``."""
        self.request = job if hasattr(job, "request") else self.request
        try:
            self._do(job, send)
        except Exception as error:
            known = isinstance(error, CompareQError)
            if not known:  # a bug, in compare_q or in an engine
                os.write(2, traceback.format_exc().encode())
            reason = str(error) if known else f"{type(error).__name__}: {one_line(error)}"
            advice = memory.advice(self.request, error) if self.request else ""
            send(Failed(advice or reason, memory=bool(advice)))

    def _do(self, job: Any, send: Send) -> None:
        if isinstance(job, DescribeJob):
            send(describing.describe(job))
        elif isinstance(job, CallJob):
            send(Returned(returned_by(job, send)))
        elif isinstance(job, LoadJob):
            self.close()
            self.model = scoring_job.load(job, self.asked, self.why)
            send(Loaded(self.model.load_seconds))
        else:
            assert self.model is not None, "no model is loaded"
            model, self.model = self.model, None
            if isinstance(job, AnswerJob):
                scoring_job.answer(model, job, send)
            else:
                scoring_job.score(model, job, send)
                self.model = model if job.keeps else None

    def close(self) -> None:
        """Release a model that was loaded and not scored."""
        if self.model is not None:
            self.model.backend.close()
            self.model = None


def returned_by(job: CallJob, send: Send) -> str:
    """What the function of a job returns, as JSON; whatever it raises."""
    module, _, name = job.function.partition(":")
    found = getattr(importlib.import_module(module), name)(
        lambda kind, content: send(Told(kind, json.dumps(content))), **json.loads(job.arguments)
    )
    return json.dumps(found)
