"""A worker's life: jobs in, messages out, until the driver closes the channel."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import IO, Any

from backends.common.errors import CompareQError
from backends.common.messages import one_line
from backends.worker import describing, memory, scoring_job
from backends.worker.messages import JOB, MESSAGE, DescribeJob, Failed, Ready, ScoreJob

Send = Callable[[Any], None]


def serve(jobs: IO[bytes], channel: IO[bytes]) -> None:
    """Do every job that comes; what goes wrong in one is a message."""

    def send(message: Any) -> None:
        channel.write(MESSAGE.dump_json(message) + b"\n")

    send(Ready(os.getpid()))
    for line in jobs:
        perform(JOB.validate_json(line), send)


def perform(job: ScoreJob | DescribeJob, send: Send) -> None:
    """Do one job, whose outcome is always a message."""
    try:
        if isinstance(job, DescribeJob):
            send(describing.describe(job))
        else:
            scoring_job.score(job, send)
    except CompareQError as error:
        send(Failed(memory.advice(job, error) or str(error)))
    except Exception as error:  # a bug, in compare_q or in an engine
        os.write(2, traceback.format_exc().encode())
        send(Failed(memory.advice(job, error) or f"{type(error).__name__}: {one_line(error)}"))
