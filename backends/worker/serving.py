"""A worker's life: jobs in, messages out, until the driver closes the channel."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from compare_q.backends.common import machine
from compare_q.backends.common.errors import CompareQError
from compare_q.backends.common.messages import one_line
from compare_q.backends.worker import describing, failures, scoring_job
from compare_q.backends.worker.messages import (
    AnswerJob,
    CallJob,
    DescribeJob,
    Failed,
    LoadJob,
    Ready,
    Returned,
    Told,
    encoded,
    parse_job,
)

Send = Callable[[Any], None]


def serve(channel: Connection, asked: float, why: str = "") -> None:
    """Do every job that comes through the channel to the driver, until that closes it; what goes wrong is a message.

    ``asked``, ``why``: as of ``Server``.
    """
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:  # a download tells from threads of its own
            channel.send_bytes(encoded(message))

    server = Server(asked, why)
    send(Ready(os.getpid(), machine.code()))
    with suppress(EOFError, ConnectionError):
        while True:
            server.perform(parse_job(channel.recv_bytes()), send)
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
        """Do one job, whose last message is ``Returned`` or ``Failed``."""
        self.request = job if hasattr(job, "request") else self.request
        try:
            outcome = Returned(self._do(job, send))
        except Exception as error:
            known = isinstance(error, CompareQError)
            if not known:  # a bug, in compare_q or in an engine
                os.write(2, traceback.format_exc().encode())
            reason = str(error) if known else f"{type(error).__name__}: {one_line(error)}"
            advice = failures.memory_advice(self.request, error) if self.request else ""
            send(Failed(advice or reason, memory=bool(advice)))
        else:
            send(outcome)

    def _do(self, job: Any, send: Send) -> Any:
        if isinstance(job, DescribeJob):
            return asdict(describing.describe(job))
        if isinstance(job, CallJob):
            module, _, name = job.function.partition(":")
            function = getattr(importlib.import_module(module), name)
            return function(lambda kind, content: send(Told(kind, content)), **job.arguments)
        if isinstance(job, LoadJob):
            self.close()
            self.model = scoring_job.load(job, self.asked, self.why)
            return None
        assert self.model is not None, "no model is loaded"
        model, self.model = self.model, None
        if isinstance(job, AnswerJob):
            scoring_job.answer(model, job, send)
        else:
            scoring_job.score(model, job, send)
            self.model = model if job.keeps else None
        return None

    def close(self) -> None:
        """Release a model that was loaded and not scored."""
        if self.model is not None:
            self.model.engine.close()
            self.model = None
