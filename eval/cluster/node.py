"""What the driver's Ray actor does on a node: say what the node is, take files, and run a worker as any driver does.

The worker on a node is an ordinary ``WorkerProcess`` with its engine process, deadline and log: when the actor ends, in
whatever way, the engine process ends the worker.  Arguments and results are JSON types and bytes.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import backends
from backends.common import machine, storage
from backends.common.errors import CompareQError, InputError, ModelError, StoppedError
from backends.worker import describing
from backends.worker.messages import JOB, encoded
from eval import __version__
from eval.cluster.parcels import Outbox, Parcel, StoreCopy, is_seen
from eval.common.cache import Cache, default_root
from eval.common.processes import Deadline, Wanted, WorkerProcess
from eval.run.hosts import Hosts

BATCH = 1 << 26
"""Bytes of files that are given to the driver at a time."""
SCRATCH = "nodes"
"""Folder of the node's cache in which workers work that share no disk with the driver."""
GATHER_S = 0.25
"""Seconds in which messages are gathered: asked for one by one, 600 windows of 16 ms took 54 s in place of 9."""
LOG_TAIL = 1 << 20
GIVEN_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def started_with() -> dict[str, str]:
    """The environment that this process was started with: Ray changes it afterwards."""
    with suppress(OSError):
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
        return dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line)
    return dict(os.environ)


class Node:
    """One actor; ``holds_gpus``: Ray gives it GPUs, which are those that its worker sees."""

    def __init__(self, *, holds_gpus: bool) -> None:
        before = started_with()
        for name in GIVEN_BY_RAY[: 1 if holds_gpus else 2]:  # Ray sets one thread, and no GPU
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
        self.cache = Cache(default_root())
        self.scratch: Path | None = None
        self.worker: WorkerProcess | None = None
        self.out: Queue[bytes | dict[str, Any]] = Queue()
        self.outbox = Outbox({})
        self.copy: StoreCopy | None = None
        self.held: list[Any] = []

    def node(self) -> str:
        """The id of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def facts(self) -> dict[str, Any]:
        """What this node is: compare_q's version, the hardware, and what of the environment changes arithmetic."""
        return {
            "version": __version__, "commit": machine.commit(), "code": machine.code()[1], "host": platform.node(),
            "processor": machine.processor(), "gpus": [asdict(gpu) for gpu in machine.gpus()],
            "settings": machine.settings(),
        }  # fmt: skip

    def describe(self, job: bytes, python: str | None) -> tuple[bytes, str]:
        """(what this node has of an engine, the content of the request's model as it lies here, empty if it does not).

        InputError if the node's Python cannot run workers.
        """
        question = JOB.validate_json(job)
        found = describing.describe(question) if python is None else Hosts().describe(python, question)
        content = ""
        with suppress(CompareQError, OSError):
            content = backends.engine_class(question.engine).files(question.request).content()
        return encoded(found), content

    def stamp(self, job: bytes) -> str:
        """The stamp of a request's model as it lies on this node; InputError if it is not there."""
        question = JOB.validate_json(job)
        return backends.engine_class(question.engine).files(question.request).stamp()

    def sees(self, file: str, text: str) -> bool:
        """Whether this node has a file that the driver has just written, at the same path."""
        try:
            return Path(file).read_text(encoding="utf-8") == text
        except (OSError, ValueError):
            return False

    def sees_store(self, folder: str, manifest: bytes) -> bool:
        """Whether this node has the driver's reference store at the same path."""
        return is_seen(Path(folder), manifest)

    def missing(self, manifest: bytes) -> list[str] | None:
        """The files that this node's copy of a store lacks, which come next; None while another worker copies it."""
        self.copy = StoreCopy(self.cache, manifest)
        return self.copy.missing()

    def add(self, name: str, piece: bytes, last: bool) -> None:
        """The next piece of a store's file."""
        assert self.copy is not None
        self.copy.add(name, piece, last=last)

    def copied(self) -> str:
        """The folder of the store's copy, all files of which have come."""
        assert self.copy is not None
        return self.copy.close()

    def folder(self) -> str:
        """A folder for this actor's worker, which is deleted with it; those of actors that are gone are deleted now."""
        root = self.cache.root / SCRATCH
        if self.scratch is not None:
            return str(self.scratch)
        self.scratch = root / storage.temporary_name()
        try:
            self.scratch.mkdir(parents=True)
            self.hold = storage.hold(self.scratch)
        except OSError as error:
            raise InputError(f"{root}: cannot be written: {error.strerror}") from None
        for other in root.iterdir():
            if storage.is_abandoned(other) and other.is_dir() and not other.is_symlink():
                shutil.rmtree(other, ignore_errors=True)
        return str(self.scratch)

    def write(self, name: str, data: bytes) -> str:
        """Write a file into that folder; its path."""
        assert self.scratch is not None
        (self.scratch / name).write_bytes(data)
        return str(self.scratch / name)

    def start(self, wanted: dict[str, Any]) -> None:
        """Start a worker in the Python that is wanted, else in this one."""
        log_file = None if wanted["log_file"] is None else Path(wanted["log_file"])
        python = wanted["python"] or sys.executable
        self.worker = WorkerProcess(Wanted(wanted["label"], wanted["engine"], python, log_file))
        self.worker.start()

    def begin(self, job: bytes, deadline: dict[str, float], fetched: dict[str, str]) -> None:
        """Give the worker a job; ``take`` hands out what comes of it, and the files in the folders ``fetched``."""
        self.outbox = Outbox({purpose: Path(folder) for purpose, folder in fetched.items()})
        for folder in self.outbox.folders.values():
            folder.mkdir(exist_ok=True)
        arguments = (JOB.validate_json(job), Deadline(**deadline))
        threading.Thread(target=self.follow, args=arguments, daemon=True).start()

    def follow(self, job: Any, deadline: Deadline) -> None:
        """The messages of a job, and then how it ended."""
        assert self.worker is not None
        end: dict[str, Any] = {"error": None, "text": ""}
        try:
            for message in self.worker.messages(job, deadline):
                self.out.put(encoded(message))
        except CompareQError as error:
            end = {"error": kind_of(error), "text": str(error)}
        except Exception as error:  # a bug of ours
            end = {"error": "model", "text": f"{type(error).__name__}: {error}"}
        self.out.put({**end, "has_died": self.worker.has_died})

    def take(self, seconds: float) -> tuple[list[Parcel], list[bytes | dict[str, Any]]]:
        """(files that are new, messages that have come, the last of which may be how the job ended).

        Waits so long for a message, and a little for more.  The files are there that were there before the last of the
        messages came.
        """
        with suppress(Empty):
            self.held.append(self.out.get(timeout=0 if self.held else seconds))
            until = time.monotonic() + GATHER_S
            while isinstance(self.held[-1], bytes):
                self.held.append(self.out.get(timeout=max(until - time.monotonic(), 0)))
        parcels, size = [], 0
        for parcel in self.outbox.waiting():
            parcels.append(parcel)
            size += len(parcel[2])
            if size > BATCH:  # what the messages tell of may not be among these files
                return parcels, []
        messages, self.held = self.held, []
        return parcels, messages

    def log_tail(self) -> bytes:
        """The end of the worker's log."""
        if self.worker is None or self.worker.log_file is None:
            return b""
        with suppress(OSError), self.worker.log_file.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, 0))
            return log.read()
        return b""

    def kill(self) -> None:
        """End the worker at once."""
        if self.worker is not None:
            self.worker.kill()

    def close(self) -> None:
        """Let the worker end, and delete its folder."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def kind_of(error: CompareQError) -> str:
    """What kind of error it is, by a name that travels."""
    kinds = {InputError: "input", StoppedError: "stopped"}
    return next((name for kind, name in kinds.items() if isinstance(error, kind)), "model")


def raised(error: str, text: str) -> CompareQError:
    """The error that ``kind_of`` named."""
    return {"input": InputError, "stopped": StoppedError}.get(error, ModelError)(text)
