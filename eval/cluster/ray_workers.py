"""A worker on a node of a Ray cluster, as the driver sees any worker (``eval/run/hosts.py``).

It asks Ray for room when its model is to be loaded, and not before.  Where the node sees
the driver's cache, the paths of a job are used there as they are; else the windows are sent, the reference is copied
once, and scores and recorded windows come back while the model is at work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backends.common import storage
from backends.common.errors import CompareQError, LostWorkerError, ModelError, StoppedError
from backends.common.messages import bytes_in_words
from backends.reference.store import MANIFEST
from backends.worker.messages import JOB, DescribeJob, LoadJob, ScoreJob, Told, parse_message
from eval.cluster.parcels import keep, pieces
from eval.cluster.ray_cluster import Actor, Cluster, LostError
from eval.common.processes import Deadline, Wanted, outcome
from eval.common.progress import Tell

POLL_S = 1.0
MOST_LOST = 3
"""Workers of one model that may be lost with their nodes; what ends a fourth is more likely the model."""
CLOSE_S = 60.0
"""Seconds that a node may take to close a worker, which itself gives an engine 30."""


@dataclass(frozen=True)
class Seat:
    """Where a worker sits: the actor, its node's id and name, and its folder there, None where the cache is shared."""

    actor: Actor
    node: str
    name: str
    folder: Path | None

    def path(self, ours: Path) -> Path:
        """A path of the driver as it is called on the node."""
        return ours if self.folder is None else self.folder / ours.name


class RayWorker:
    """See the module's docstring, and the protocol ``Worker`` of eval/run/hosts.py."""

    def __init__(self, cluster: Cluster, wanted: Wanted) -> None:
        self.cluster, self.wanted, self.log_file = cluster, wanted, wanted.log_file
        self.killed = threading.Event()
        self.has_died = self.is_lost = False
        self.actor: Actor | None = None
        self.seat: Seat | None = None

    @property
    def is_alive(self) -> bool:
        return not (self.killed.is_set() or self.has_died or self.is_lost)

    def start(self) -> None:
        """Nothing: a place is asked for when the model is to be loaded."""

    def perform(self, job: Any, deadline: Deadline, show: Tell) -> Any:
        return outcome(self.messages(job, deadline), show)

    def messages(self, job: Any, deadline: Deadline) -> Iterator[Any]:
        """The messages of one job."""
        try:
            if self.seat is None:
                self.seat = self.seated()
            yield from self.followed(self.seat, job, deadline)
        except LostError as error:
            if self.killed.is_set():
                raise StoppedError("interrupted") from None
            self.is_lost = True
            where, node = (f"node {self.seat.name}", self.seat.node) if self.seat else ("its node", None)
            if self.cluster.lost(self.wanted.label, node) > MOST_LOST:
                raise ModelError(f"{where} was lost, as {MOST_LOST} workers of this model before: {error}") from None
            raise LostWorkerError(f"{where} was lost") from None

    def seated(self) -> Seat:
        """A place on the first node that has room, with a started worker; waits for it."""
        kind, wanted = self.cluster.places[self.wanted.label], self.wanted
        there = self.cluster.resources()
        nodes = [node for node in kind.nodes if node in there]
        nodes = [node for node in nodes if node not in self.cluster.avoided] or nodes
        if not nodes:
            raise ModelError(f"no node with {kind.name} is left in the cluster")
        gpus = kind.devices.needed(wanted.gpus)
        self.actor = actor = self.cluster.actor(
            nodes, cpus=0 if gpus else kind.cpus, gpus=gpus, resources=wanted.resources
        )
        node = self.waited(actor, actor.ask("node"), nodes)
        file, text = self.cluster.shared
        folder = None if actor.call("sees", str(file), text) else Path(actor.call("folder"))
        seat = Seat(actor, node, self.cluster.hosts[node], folder)
        log_file = None if wanted.log_file is None else seat.path(wanted.log_file)
        actor.call("start", {**asdict(wanted), "log_file": log_file and str(log_file), "resources": {}})
        return seat

    def waited(self, actor: Actor, asked: Any, nodes: list[str]) -> Any:
        """What a call returns once there is room; StoppedError, or ModelError if all nodes are gone meanwhile."""
        while True:
            if self.killed.is_set():
                raise StoppedError("interrupted")
            found = actor.result(asked, POLL_S)
            if found is not None:
                return found
            if not set(nodes) & self.cluster.resources().keys():
                raise ModelError("all nodes that it could run on have left the cluster")

    def followed(self, seat: Seat, job: LoadJob | ScoreJob, deadline: Deadline) -> Iterator[Any]:
        """The messages of a job, while what its worker writes is brought here."""
        folders: dict[str, Path] = {}
        fetched: dict[str, str] = {}
        there: LoadJob | ScoreJob
        if isinstance(job, LoadJob):
            there = self.loading(seat, job)
        else:
            there = yield from self.scoring(seat, job)
            for name, ours, theirs in (
                ("scores", job.scores, there.scores), ("record", job.task.record, there.task.record)
            ):  # fmt: skip
                if ours is not None and ours != theirs:
                    folders[name], fetched[name] = ours, str(theirs)
        seat.actor.call("begin", JOB.dump_json(there), asdict(deadline), fetched)
        while True:
            parcels, messages = seat.actor.call("take", POLL_S)
            for parcel in parcels:
                keep(folders, parcel)
            for message in messages:
                if isinstance(message, bytes):
                    yield parse_message(message)
                    continue
                self.has_died = message["has_died"]
                if message["error"]:
                    raise raised_here(message, seat, self.wanted)
                return

    def loading(self, seat: Seat, job: LoadJob) -> LoadJob:
        """The job for the node: Ray has chosen the GPUs, and its copy of the model has dates of its own."""
        stamp = seat.actor.call("stamp", JOB.dump_json(DescribeJob(job.engine, job.request)))
        log_file = None if job.request.log_file is None else seat.path(job.request.log_file)
        return replace(job, request=replace(job.request, stamp=stamp, log_file=log_file), devices=None, cores=None)

    def scoring(self, seat: Seat, job: ScoreJob) -> Generator[Any, None, ScoreJob]:
        """The job for the node (the generator's result), after what it needs is there, which is said."""
        known = {**job.facts.get("known", {}), "node": seat.name}
        task, facts = job.task, {**job.facts, "known": known}
        reference, record = task.reference, task.record
        if reference is not None:
            reference = yield from self.brought(seat, reference)
        if seat.folder is None and (record is None or self.seen(seat, record)):
            return replace(job, task=replace(task, reference=reference), facts=facts)
        folder = seat.folder or Path(seat.actor.call("folder"))
        sent = Path(seat.actor.call("write", "windows.npz", job.windows.read_bytes()))
        # By the job's own name: what another text left there must not come back as this one's.
        there = replace(task, reference=reference, record=folder / f"record-{job.session}" if record else None)
        return replace(job, task=there, windows=sent, scores=folder / f"scores-{job.session}", facts=facts)

    def seen(self, seat: Seat, folder: Path) -> bool:
        """Whether the node sees a folder of the driver's: it is asked for a file that was made just now."""
        token = folder / storage.temporary_name()
        try:
            token.write_text(token.name, encoding="utf-8")
            return bool(seat.actor.call("sees", str(token), token.name))
        finally:
            token.unlink(missing_ok=True)

    def brought(self, seat: Seat, store: Path) -> Generator[Any, None, Path]:
        """Where the node finds a reference store (the generator's result): where it is, or in a copy made now."""
        try:
            origin = (store / MANIFEST).read_bytes()
        except OSError:
            raise ModelError(f"{store}: has no checksums, so that --ray cannot send it; run without --ray") from None
        if seat.actor.call("sees_store", str(store), origin):
            return store
        while (missing := seat.actor.call("missing", origin)) is None:
            if self.killed.wait(POLL_S):
                raise StoppedError("interrupted")
        began, sent = time.monotonic(), 0
        for name in missing:
            for piece, last in pieces(store / name):
                if self.killed.is_set():
                    raise StoppedError("interrupted")
                seat.actor.call("add", name, piece, last)
                sent += len(piece)
        if sent:
            copied = f"copied {bytes_in_words(sent)} of the reference to node {seat.name}"
            yield Told("say", f"{self.wanted.label}: {copied} in {time.monotonic() - began:.0f} s")
        return Path(seat.actor.call("copied"))

    def kill(self) -> None:
        self.killed.set()
        actor = self.actor
        if actor is not None:
            with suppress(Exception):  # the node may be gone; ``close`` ends what is left
                actor.ask("kill")

    def close(self) -> None:
        actor, self.actor = self.actor, None
        if actor is None:
            return
        with suppress(CompareQError):
            if self.seat is not None:
                self.fetch_log(self.seat)
            actor.result(actor.ask("close"), CLOSE_S)
        with suppress(Exception):
            actor.end()

    def fetch_log(self, seat: Seat) -> None:
        """Add the end of the log, which lies on the node, to the one that lies here."""
        if seat.folder is not None and self.wanted.log_file is not None:
            tail = seat.actor.result(seat.actor.ask("log_tail"), CLOSE_S) or b""
            with suppress(OSError), self.wanted.log_file.open("ab") as log:
                log.write(tail)


def raised_here(message: dict[str, Any], seat: Seat, wanted: Wanted) -> CompareQError:
    """The error that ended a job on a node, which names our log in place of the node's."""
    from eval.cluster.node import raised

    text = message["text"]
    if wanted.log_file is not None:
        text = text.replace(str(seat.path(wanted.log_file)), str(wanted.log_file))
    return raised(message["error"], f"on node {seat.name}: {text}")
