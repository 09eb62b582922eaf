"""The first model's worker, which imports its engine while the text is being tokenized.

Tokenizing begins with importing Transformers, which takes seconds, and a run of an engine such as vLLM with importing
that; meanwhile the model's files are read ahead, too.  Only on a machine with GPUs: elsewhere both want the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from backends.common import machine
from backends.common.errors import CompareQError
from backends.worker.messages import Prepared, PrepareJob
from eval.common.cache import Cache
from eval.run.hosts import Hosts
from eval.run.jobs import Job
from eval.run.session import Session
from eval.run.workers import Deadline, EarlyWorker, Wanted, Worker

SPARE_BYTES = 4 << 30
"""Memory that must be available for a worker before its turn: an imported vLLM takes 1 GB, and others may grow."""


@contextmanager
def begun(session: Session, job: Job | None) -> Iterator[None]:
    """Have a worker of the model whose turn comes first in ``session.early``, and end it unless it is taken."""
    if job is None or not is_worth_it(session.hosts, job):
        yield
        return
    label = job.request.label
    log = (
        None
        if session.verbose
        else session.cache.log_file(label, Cache.key("logs", {"label": label, "pid": os.getpid()}))
    )
    try:
        with ExitStack() as ending:
            with suppress(CompareQError):  # loading will say it
                session.early[label] = started(session.hosts, job, log, ending)
            yield
    finally:
        if session.early.pop(label, None) is not None and log is not None:
            log.unlink(missing_ok=True)


def is_worth_it(hosts: Hosts, job: Job) -> bool:
    """Whether a worker can be there before the windows are, and does not take what others need."""
    available = machine.available_memory()
    can_be = hosts.spares and bool(hosts.devices.gpus) and hosts.nodes is None and not hosts.in_process
    return can_be and not job.is_remote and available is not None and available >= SPARE_BYTES


def started(hosts: Hosts, job: Job, log: Path | None, ending: ExitStack) -> EarlyWorker:
    """Start the worker; CompareQError.  What ``ending`` holds then ends it."""
    wanted = Wanted(job.request.label, job.python, log, len(job.gpus), job.spec.resources)
    worker = ending.enter_context(hosts.running.started(hosts.worker(wanted)))
    pool = ending.enter_context(ThreadPoolExecutor(1))
    request = replace(job.request, log_file=log)
    prepare_job = PrepareJob(job.engine, request, tuple(job.backend.weight_files(request)))
    prepared = pool.submit(prepare, worker, prepare_job, hosts.limits)
    found = EarlyWorker(worker, log, prepared, ending)
    ending.callback(found.end)  # before the pool waits for the thread
    return found


def prepare(worker: Worker, job: PrepareJob, limits: Deadline) -> bool:
    """Whether a worker has imported its engine."""
    try:
        return all(isinstance(message, Prepared) for message in worker.perform(job, limits))
    except CompareQError:
        return False
