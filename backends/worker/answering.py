"""A loaded model answers questions, and is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.worker import children
from backends.worker.messages import Answered, AnswerJob, Closed, Done
from backends.worker.scoring_job import Model, close, end_at_once


def answer(model: Model, job: AnswerJob, send: Callable[[Any], None]) -> None:
    """Do a job; CompareQError, or whatever an engine raises.  What was answered before an error has been sent."""
    backend = model.backend
    try:
        with children.watched(lambda reason: end_at_once(reason, send)):
            for found in backend.answers(job.questions, job.sampling):
                send(Answered(found))
            backend.check_unchanged()
        send(Done())
    finally:
        close(model, send)
    send(Closed())
