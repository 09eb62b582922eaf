"""A worker's life: jobs in, messages out, until the driver closes the channel."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from backends.common import machine
from backends.common.errors import CompareQError
from backends.common.messages import one_line
from backends.worker import answering, describing, memory, scoring_job
from backends.worker.messages import (
    JOB,
    MESSAGE,
    AnswerJob,
    Closed,
    Described,
    DescribeJob,
    Failed,
    Loaded,
    LoadJob,
    Prepared,
    PrepareJob,
    Ready,
)
from backends.worker.preparing import ReadAhead, import_engine

Send = Callable[[Any], None]
LAST = (Prepared, Loaded, Closed, Failed, Described)
"""The message that ends a job is one of these."""


def serve(jobs: IO[bytes], channel: IO[bytes]) -> None:
    """Do every job that comes; what goes wrong in one is a message."""

    def send(message: Any) -> None:
        channel.write(MESSAGE.dump_json(message) + b"\n")

    server = Server()
    send(Ready(os.getpid(), machine.code()))
    for line in jobs:
        server.perform(JOB.validate_json(line), send)
    server.close()


class Server:
    """What a worker keeps from one job to the next: its model, and when it did what (``scoring_job.Model``)."""

    def __init__(self) -> None:
        machine.keep_compiled_kernels_apart()
        self.started = time.time()
        self.prepared: float | None = None
        self.reading: ReadAhead | None = None
        self.model: scoring_job.Model | None = None
        self.asked: Any = None

    def perform(self, job: Any, send: Send) -> None:
        """Do one job, whose outcome is always a message, one of ``LAST``."""
        self.asked = job if hasattr(job, "request") else self.asked
        try:
            self._do(job, send)
        except Exception as error:
            known = isinstance(error, CompareQError)
            if not known:  # a bug, in compare_q or in an engine
                os.write(2, traceback.format_exc().encode())
            reason = str(error) if known else f"{type(error).__name__}: {one_line(error)}"
            advice = memory.advice(self.asked, error)
            send(Failed(advice or reason, memory=bool(advice)))

    def _do(self, job: Any, send: Send) -> None:
        if isinstance(job, DescribeJob):
            send(describing.describe(job))
        elif isinstance(job, PrepareJob):
            self.reading = ReadAhead(job.files)
            import_engine(job.engine, job.request)
            self.prepared = time.time()
            send(Prepared())
        elif isinstance(job, LoadJob):
            self.close()
            self.model = scoring_job.load(job, self.started, self.prepared)
            send(Loaded(self.model.load_seconds))
        else:
            assert self.model is not None, "no model is loaded"
            model, self.model = self.model, None
            if isinstance(job, AnswerJob):
                answering.answer(model, job, send)
            else:
                scoring_job.score(model, job, send)
                self.model = model if job.keeps else None

    def close(self) -> None:
        """Stop reading ahead, and release a model that was loaded and not scored."""
        if self.reading is not None:
            self.reading.stop()
        if self.model is not None:
            self.model.backend.close()
            self.model = None
