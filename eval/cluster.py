"""``--ray``: models run on the nodes of a Ray cluster, and what compare_q runs there.

Ray places every worker by the GPUs, processors and resources that its model takes.  Ray's object
store carries windows, scores, and a reference that is not on a common disk.  Scores depend on the
hardware.  The nodes therefore report every part of the key of the scores, and a model runs on nodes
of one hardware class: the most frequent class among the nodes that its ``resources`` leave.

Each node has an agent, an actor that keeps engine processes and forks its workers from them.  A
second actor reserves the GPUs, processors and resources that a model takes.  When the agent ends
for any reason, its engine processes end the workers.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from .. import __version__, backends
from ..backends.base import EngineInfo, PlannedModel
from ..backends.common import machine, storage
from ..backends.common.errors import (
    CompareQError,
    InputError,
    LostWorkerError,
    ModelError,
    StoppedError,
)
from ..backends.common.message_text import bytes_in_words, one_line, shortened
from ..backends.reference.store import STORE_MANIFEST, read_manifest
from ..backends.worker import worker
from ..backends.worker.protocol import LoadCommand, Log, Message, ScoreCommand
from .common.cache import Cache, default_root
from .common.processes import WorkerProcess, result_of
from .common.progress import Show
from .run.gpu_pool import GpuPool
from .run.run_config import RunConfig
from .run.run_model import RunModel
from .run.workers import Hardware, Worker, Workers

INSTALL = "pip install 'ray>=2.49'"
"""First version whose actors can be bound to several nodes by labels; compare_q was run with 2.60.
"""
ROOT = Path(__file__).resolve().parents[1]
REMEDY = (
    f"install it in the Python that runs ray on this node, or put this checkout at {ROOT} there"
)
Job = LoadCommand | ScoreCommand
AT_ONCE = 64
"""Calls that the agent of a node performs at the same time: a few for each of its workers."""
READY_S, CLOSE_S, POLL_S = 120.0, 60.0, 1.0
"""Seconds that a node may take to start a compare_q process, and to close a worker, which gives an
engine 30."""
ENVIRON = Path("/proc/self/environ")
HEAD_ONLY = "it was started with neither CPUs nor GPUs for models"
RESERVED_RESOURCES = {"CPU", "GPU", "memory", "object_store_memory"}
"""Resources that Ray takes through separate options, not by name."""


Resources = Mapping[str, Mapping[str, float]]
"""Node -> the resources that Ray reports for it."""
Names = tuple[str, ...] | None
"""GPUs in CUDA_VISIBLE_DEVICES; None: none."""
Sent = tuple[Any, list[tuple[Path, bytes]], bytes]
"""(a message, None after the last one; files by their paths on the driver; new output for the log).
"""


@dataclass(frozen=True)
class HardwareClass(Hardware):
    """Nodes (ids) on which a model has the same scores; ``gpus``: the GPUs of the node with the
    most.
    """

    cpus: float  # processors that a model takes on a node without GPUs
    nodes: tuple[str, ...]

    @classmethod
    def of(cls, nodes: Sequence[tuple[str, Mapping[str, Any]]], there: Resources) -> HardwareClass:
        """Return the hardware class of nodes, from the facts that the nodes report."""
        largest, facts = max(nodes, key=lambda each: len(each[1]["gpus"]))
        cpus, ids = there[largest].get("CPU", 0), tuple(node for node, _ in nodes)
        return cls(tuple(facts["gpus"]), facts["processor"], facts["settings"], cpus, ids)

    def having(self, wanted: Mapping[str, float], there: Resources) -> HardwareClass:
        """Return the class with only the available nodes that have the wanted resources."""
        has = {
            node: all(found.get(name, 0) >= n for name, n in wanted.items())
            for node, found in there.items()
        }
        return replace(self, nodes=tuple(node for node in self.nodes if has.get(node)))

    @property
    def name(self) -> str:
        """The name of the nodes' GPUs, or of their processor."""
        return self.gpus[0].name if self.gpus else str(self.processor["cpu"])

    def most_replicas(self, n_gpus: int) -> int:
        return len(self.nodes) * (len(self.gpus) // n_gpus if n_gpus else 1)

    @property
    def slots(self) -> int:
        """Number of models that the nodes can run at the same time, each on one GPU."""
        return self.most_replicas(min(len(self.gpus), 1))


def code() -> tuple[Any, ...]:
    """Return the version, commit and code digest of this compare_q."""
    return __version__, machine.commit(), machine.code()[1][:12]


def undo_changes_of_ray() -> None:
    """Restore the variables that Ray changes (one thread, no GPUs) to this process's original
    environment.
    """
    lines = ENVIRON.read_bytes().split(b"\0") if ENVIRON.exists() else []
    before = dict(os.fsdecode(line).split("=", 1) for line in lines if b"=" in line)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


class Reservation:
    """An actor that reserves a model's resources on a node; the model runs in a worker of the
    node's agent.
    """

    def place(self) -> tuple[str, Names]:
        """Return (the id of the node, the names of the GPUs that Ray gives; None if it gives none)."""
        import ray

        context = ray.get_runtime_context()
        return str(context.get_node_id()), tuple(context.get_accelerator_ids()["GPU"]) or None


class NodeWorker:
    """A worker on a node; until it ends, its files are in a separate folder below ``folder``.

    ``python``: the Python that runs the model's engine; None: this one.  ``gpus``: names of the node's GPUs; ``devices``: names of the model's GPUs.  The model's
    ``log_file`` is a path on the driver's machine.
    """

    def __init__(
        self,
        folder: Path,
        planned: PlannedModel,
        python: str | None,
        gpus: Names,
        devices: Names,
    ) -> None:
        self.folder = folder / storage.temporary_name()
        self.devices = devices
        self.log_of_driver = planned.log_file
        self.folder.mkdir(parents=True)
        self.held = storage.hold(self.folder)
        self.log = (self.folder / "log").open("a+b", buffering=0)
        self.folders: dict[Path, Path] = {}
        self.sent: dict[Path, int] = {}
        verbose = planned.log_file is None
        log = None if verbose else self.folder / "log"
        self.worker = WorkerProcess(python, planned.engine, gpus, log_file=log, verbose=verbose)

    def perform(self, job: Job, silence_s: float, windows: bytes, *, sends: bool) -> Iterator[Sent]:
        """Perform a command of the driver's; yield what ``progress`` returns for each message, then
        raise its error.

        ``windows``: the content of the command's file; ``sends``: the driver does not see what is
        recorded here.
        """
        if isinstance(job, ScoreCommand):
            folder, record = self.folder / job.session, job.request.record
            scores = (
                folder / job.scores.name
            )  # the names of folders are keys, which the files in them repeat
            self.folders = {scores: job.scores}
            if sends and record is not None:
                self.folders[folder / "record" / record.name] = record
                record = folder / "record" / record.name
            for each in self.folders:
                each.mkdir(parents=True)
            (folder / "windows").write_bytes(windows)
            request = job.request.model_copy(update={"record": record})
            job = replace(job, request=request, windows=folder / "windows", scores=scores)
        else:  # the files of the model's copy on this node have different dates
            stamp = backends.files_of(job.model).stamp()
            job = LoadCommand(
                job.model.updated(stamp=stamp, log_file=self.worker.log_file), self.devices
            )
        try:
            for message in self.worker.messages(job, silence_s):
                yield self.progress(message)
        except CompareQError as error:
            yield self.progress(None)
            raise type(error)(
                str(error).replace(str(self.folder / "log"), str(self.log_of_driver))
            ) from None

    def progress(self, message: Any) -> Sent:
        """Return a message with the files that it is about: new ones, or with another size than
        when they were sent.
        """
        files = []
        for folder, of_driver in self.folders.items():
            for file in storage.files_in(folder):
                size = None if storage.TEMPORARY.fullmatch(file.name) else storage.size_of(file)
                if size is not None and self.sent.get(file) != size:
                    files.append((of_driver / file.name, file.read_bytes()))
                    self.sent[file] = size
        return message, files, self.log.read()

    def close(self) -> None:
        """Let the worker end, and delete its folder."""
        self.worker.close()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.held)


class Node:
    """The agent on a node: an actor that holds no resources, and lives as long as the driver, in
    its ``directory``.

    It keeps the engine processes of its workers, so that only the first worker of an engine waits
    for the import.
    """

    def __init__(self, directory: str) -> None:
        undo_changes_of_ray()
        with suppress(OSError):
            os.chdir(directory)
        self.cache = Cache(default_root())
        self.here = Workers(gpus=GpuPool(machine.gpus()))
        self.workers: dict[str, NodeWorker] = {}

    def facts(self) -> dict[str, Any]:
        """Return facts about this node: its compare_q, its hardware, and the settings that change
        arithmetic.
        """
        return {
            "code": code(),
            "processor": machine.processor(),
            "gpus": machine.gpus(),
            "settings": machine.settings(),
        }

    def inspect(self, planned: PlannedModel, python: str | None) -> tuple[EngineInfo, str]:
        """Return (information on the engine on this node, digest of the model's content here, empty
        if it is not here).

        InputError if the node's Python cannot run workers.
        """
        if python is None:
            info = worker.inspect(planned)
        else:
            info = self.here.inspect_in_worker(planned, python)
        with suppress(CompareQError, OSError):
            return info, backends.files_of(planned).content()
        return info, ""

    def sees(self, file: Path, content: bytes) -> bool:
        """Return whether this node has a file of the driver's, with this content, at the same path."""
        return os.access(file, os.R_OK) and file.read_bytes() == content

    def lacks(self, key: str, sizes: Mapping[str, int]) -> tuple[Path, list[str]]:
        """Return (the folder of a reference store in this node's cache, names of its missing
        files).
        """
        self.cache.check_writable()
        folder = self.cache.path("references", key, "")
        folder.mkdir(exist_ok=True)
        return folder, [
            name for name, size in sizes.items() if storage.size_of(folder / name) != size
        ]

    def add(self, file: Path, content: bytes) -> None:
        """Write a file into that folder."""
        storage.write_whole(file, content)

    def start_import(self, engine: str, python: str | None, *, verbose: bool) -> None:
        """Start to import an engine."""
        self.here.start_import(engine, python, verbose=verbose)

    def start(self, planned: PlannedModel, python: str | None, devices: Names) -> str:
        """Start a worker and return its name.  The folders of workers that are gone are deleted."""
        self.cache.check_writable()
        folder = self.cache.root / "nodes"
        made = NodeWorker(folder, planned, python, self.here.gpus.names, devices)
        for other in made.folder.parent.iterdir():
            if storage.is_abandoned(other) and not other.is_symlink():
                shutil.rmtree(other, ignore_errors=True)
        self.workers[made.folder.name] = made
        return made.folder.name

    def perform(self, name: str, *job: Any, **more: Any) -> Iterator[Any]:
        """Perform a command: see ``NodeWorker.perform``."""
        yield from self.workers[name].perform(*job, **more)

    def kill(self, name: str) -> None:
        """End a worker at once, if it runs; ``close`` follows."""
        if name in self.workers:
            self.workers[name].worker.kill()

    def close(self, name: str) -> None:
        """Let a worker end, and delete its folder."""
        self.workers.pop(name).close()


@dataclass
class Cluster:
    """A connected cluster."""

    ray: Any
    say: Callable[[str], None]  # prints a line, but only once
    agents: dict[str, Any] = field(default_factory=dict)  # by node
    hosts: dict[str, str] = field(default_factory=dict)  # node -> its name in messages
    classes: list[HardwareClass] = field(default_factory=list)
    # Held while a reference is copied to a node.
    copying: defaultdict[Any, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def resources(self) -> Resources:
        """Return the resources of the nodes that are alive."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def actor(self, of: type, nodes: Sequence[str], *arguments: Any, **options: Any) -> Any:
        """Return an actor of this class on one of these nodes, which Ray starts once one has room
        for it.
        """
        where = {"label_selector": {"ray.io/node-id": f"in({','.join(nodes)})"}}
        return self.ray.remote(of).options(**{"num_cpus": 0, **where, **options}).remote(*arguments)

    def result(self, asked: Any, seconds: float | None = None) -> Any:
        """Return the result of a call, or raise its compare_q error; LostWorkerError if the node
        does not answer.
        """
        try:
            return self.ray.get(asked, timeout=seconds)
        except self.ray.exceptions.GetTimeoutError:
            raise LostWorkerError(f"our process there said nothing for {seconds:.0f} s") from None
        except self.ray.exceptions.RayError as error:
            cause, last_line = (
                getattr(error, "cause", None),
                shortened(str(error).strip().rpartition("\n")[2], 300),
            )
            if isinstance(cause, CompareQError):
                raise cause from None
            if "failed to import" in str(error):
                raise InputError(f"it has no compare_q that runs ({last_line}): {REMEDY}") from None
            if cause is not None:  # a bug in compare_q
                raise ModelError(f"its node raised {last_line}") from None
            raise LostWorkerError(one_line(error, 160)) from None

    def look(self) -> None:
        """Find out the hardware of the nodes; InputError if no node can run a worker."""
        there = self.resources()
        self.agents = {
            node: self.actor(Node, [node], os.getcwd(), max_concurrency=AT_ONCE) for node in there
        }
        asked = {node: agent.facts.remote() for node, agent in self.agents.items()}
        named = [(node["NodeID"], node["NodeManagerHostname"]) for node in self.ray.nodes()]
        self.hosts = {node: f"{host} ({node[:8]})" for node, host in named}
        alike = defaultdict[str, list[tuple[str, Mapping[str, Any]]]](list)
        for node in there:
            try:
                facts = self.result(asked[node], READY_S)
                facts["gpus"] = facts["gpus"][
                    : math.floor(there[node].get("GPU", 0))
                ]  # Ray hands out the first ones
                check_node(facts, there[node])
            except CompareQError as error:
                if str(error) != HEAD_ONLY:
                    self.say(f"--ray: node {self.hosts[node]}: not used: {error}")
                self.ray.kill(self.agents.pop(node))
                continue
            gpu, processor = (
                [(gpu.name, gpu.driver) for gpu in facts["gpus"][:1]],
                facts["processor"],
            )
            on_cpu = None if gpu else (sorted(processor.items()), there[node]["CPU"])
            kind = (
                gpu,
                processor["cpu"],
                processor["instructions"],
                sorted(facts["settings"].items()),
                on_cpu,
            )
            alike[repr(kind)].append((node, facts))
        self.classes = [HardwareClass.of(nodes, there) for _, nodes in sorted(alike.items())]
        if not self.classes:
            raise InputError("--ray: no node of the cluster can run a model")

    def place(self, model: RunModel) -> tuple[EngineInfo, HardwareClass]:
        """Return what the nodes have of a model's engine, and the nodes that it can run on.

        InputError if no node fits.  If this machine has the model's files: also if no node has the
        same content.
        """
        label, resources, files = model.label, model.resources, model.files
        content = None if files.is_remote else files.content()
        if taken := sorted(RESERVED_RESOURCES & resources.keys()):
            raise InputError(
                f"resources: {taken[0]}: compare_q counts these itself; use the key gpus"
            )
        there, reasons, answers = self.resources(), [], {}
        fitting = [each.having(resources, there) for each in self.classes]
        for found in sorted(fitting, key=lambda each: (-each.slots, each.name)):
            asked = {
                node: self.agents[node].inspect.remote(model.planned, model.python)
                for node in found.nodes
            }
            for node, answer in asked.items():
                try:
                    info, content_there = self.result(answer)
                    if content not in (None, content_there):
                        raise ModelError(
                            f"{model.planned.model_dir} is not there, or another model"
                        )
                    answers[node] = info
                except (InputError, ModelError) as error:
                    reasons.append(f"node {self.hosts[node]}: {error}")
            if answers:
                told = list(answers.values())
                usual = max(told, key=lambda described: (told.count(described), repr(described)))
                same = tuple(node for node, described in answers.items() if described == usual)
                reasons += [
                    f"node {self.hosts[node]}: has other versions"
                    for node in answers
                    if node not in same
                ]
                for reason in reasons:
                    self.say(f"{label}: not used: {reason}")
                return usual, replace(found, nodes=same)
        wanted = ", ".join(f"{name}: {number:g}" for name, number in resources.items())
        raise InputError(
            "; ".join(reasons)
            or f"resources: no node of the cluster has {wanted or 'room for a model'}"
        )


def check_node(facts: Mapping[str, Any], resources: Mapping[str, float]) -> None:
    """Raise InputError with the reason if a node cannot take models."""
    if facts["code"] != code():
        theirs, ours = (" ".join(map(str, each)) for each in (facts["code"], code()))
        raise InputError(f"its compare_q is {theirs}, this one {ours}")
    if len(names := {gpu.name for gpu in facts["gpus"]}) > 1:
        raise InputError(
            f"it has GPUs of several kinds ({', '.join(sorted(names))}), and Ray may assign any of them"
        )
    if not (resources.get("CPU") or facts["gpus"]):
        raise InputError(HEAD_ONLY)


class RayWorker:
    """A worker (``eval/run/workers.py``) on one of ``nodes``; it requests room when its model is
    about to be loaded.

    ``node``: the name of its node, empty before that.
    """

    def __init__(self, cluster: Cluster, model: RunModel, nodes: HardwareClass) -> None:
        self.cluster = cluster
        self.model = model
        self.nodes = nodes
        self.log_file = model.planned.log_file
        self.killed = threading.Event()
        self.reservation: Any = None
        self.agent: Any = None
        self.node = self.name = ""

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        return result_of(self.messages(job, silence_s), show)

    def messages(self, job: Job, silence_s: float) -> Iterator[Message]:
        """Yield the messages of a command."""
        try:
            if not self.node:
                self.place()
            yield from self.fetched(job, silence_s)
        except LostWorkerError as error:
            if self.killed.is_set():
                raise StoppedError("interrupted") from None
            self.killed.set()
            where = f"node {self.node}" if self.node else "its node"
            raise LostWorkerError(f"{where} was lost ({error})") from None
        except ModelError as error:
            raise ModelError(f"on node {self.node}: {error}" if self.node else str(error)) from None

    def place(self) -> None:
        """Wait until a node has room, and start a worker on it."""
        nodes, cluster, model = self.nodes, self.cluster, self.model
        takes = {"num_gpus": model.n_gpus, "num_cpus": 0 if model.n_gpus else nodes.cpus}
        self.reservation = cluster.actor(
            Reservation, nodes.nodes, resources=model.resources, **takes
        )
        placed = self.reservation.place.remote()
        while not cluster.ray.wait([placed], timeout=POLL_S)[0]:
            if self.killed.is_set():
                raise StoppedError("interrupted")
            if not set(nodes.nodes) & cluster.resources().keys():
                raise ModelError(f"no node with {nodes.name} is left in the cluster")
        node, devices = cluster.result(placed)
        self.node, self.agent = cluster.hosts[node], cluster.agents[node]
        self.name = cluster.result(self.agent.start.remote(model.planned, model.python, devices))
        if self.killed.is_set():
            self.kill()

    def fetched(self, job: Job, silence_s: float) -> Iterator[Message]:
        """Yield the messages of a job, and copy the files that its worker writes to this machine."""
        windows, sends = b"", False
        if isinstance(job, ScoreCommand):
            windows, record = job.windows.read_bytes(), job.request.record
            sends = record is not None and not self.is_seen(record)
            if job.request.reference is not None:
                reference = yield from self.brought(job.request.reference)
                job = replace(job, request=job.request.model_copy(update={"reference": reference}))
            job = replace(
                job, facts={**job.facts, "known": {**job.facts.get("known", {}), "node": self.node}}
            )
        streaming = self.agent.perform.options(num_returns="streaming")
        for item in streaming.remote(self.name, job, silence_s, windows, sends=sends):
            message, files, added_to_log = self.cluster.result(item)
            self.keep(files, added_to_log)
            if message is not None:
                yield message

    def keep(self, files: Sequence[tuple[Path, bytes]], added_to_log: bytes) -> None:
        """Write the files and the log text from the node; InputError if they cannot be written."""
        try:
            for file, content in files:
                file.parent.mkdir(parents=True, exist_ok=True)
                storage.write_whole(file, content)
            if self.log_file is not None:
                with self.log_file.open("ab") as log:
                    log.write(added_to_log)
        except OSError as error:
            where = error.filename or self.log_file
            raise InputError(
                f"{where}: what came from a node cannot be kept: {error.strerror}"
            ) from None

    def is_seen(self, folder: Path) -> bool:
        """Return True if the node sees a folder of the driver's, by checking for a file that the
        driver just made.
        """
        with storage.temporary_next_to(folder / "seen") as token:
            token.write_text(token.name, encoding="utf-8")
            return bool(self.cluster.result(self.agent.sees.remote(token, token.name.encode())))

    def brought(self, store: Path) -> Generator[Log, None, Path]:
        """Return the path of a reference store on the node: its own path, or a copy in the node's
        cache.
        """
        result, agent = self.cluster.result, self.agent
        try:
            whole = (store / STORE_MANIFEST).read_bytes()
        except OSError:
            raise ModelError(
                f"{store}: has no checksums, so that --ray cannot send it; run without --ray"
            ) from None
        if result(agent.sees.remote(store / STORE_MANIFEST, whole)):
            return store
        manifest = read_manifest(store)
        key = Cache.key("copied reference", {"identity": manifest.identity})
        with self.cluster.copying[self.node, key]:
            copy, lacking = result(agent.lacks.remote(key, manifest.files))
            for name in (*lacking, STORE_MANIFEST):
                result(agent.add.remote(copy / name, (store / name).read_bytes()))
        if lacking:
            size = bytes_in_words(sum(manifest.files[name] for name in lacking))
            yield Log(f"{self.model.label}: copied {size} of the reference to node {self.node}")
        return Path(copy)

    def kill(self) -> None:
        """End the worker, and release its resources on the node."""
        self.killed.set()
        with suppress(Exception):  # the node may be gone
            if self.name:
                self.agent.kill.remote(self.name)
            if self.reservation is not None:
                self.cluster.ray.kill(self.reservation)

    def close(self) -> None:
        if self.name:
            with suppress(CompareQError):
                self.cluster.result(self.agent.close.remote(self.name), CLOSE_S)
        self.kill()


class RayWorkers(Workers):
    """The workers of a run on the nodes of a cluster."""

    is_local = False

    def __init__(self, cluster: Cluster, here: Workers) -> None:
        super().__init__(here.pythons)
        self.cluster, self.in_process = cluster, False
        self.placed: dict[str, HardwareClass] = {}

    def inspect(self, model: RunModel) -> tuple[EngineInfo, HardwareClass]:
        info, found = self.cluster.place(model)
        self.placed[model.label] = found
        return info, found

    def create(self, model: RunModel) -> Worker:
        return RayWorker(self.cluster, model, self.placed[model.label])

    def import_ahead(self, model: RunModel, *, verbose: bool) -> None:
        """Start to import a model's engine on each node that may get it."""
        for node in self.placed[model.label].nodes:
            agent = self.cluster.agents[node]
            agent.start_import.remote(model.engine, model.python, verbose=verbose)


def on_cluster(config: RunConfig, address: str, say: Callable[[str], None]) -> RunConfig:
    """Return the configuration with workers on the cluster at an address, ``auto``: this machine's;
    InputError.
    """
    os.environ.setdefault(
        "RAY_DEDUP_LOGS_SKIP_REGEX", "."
    )  # Ray's messages about its nodes would be in the table
    try:
        import ray
    except ImportError:
        raise InputError(f"--ray: ray is not installed: {INSTALL}") from None
    host, _, port = address.rpartition(":")
    try:
        if (
            host and port.isdecimal() and "/" not in address
        ):  # Ray waits two minutes for a closed port
            socket.create_connection((host, int(port)), timeout=5).close()
        with chdir(
            ROOT
        ):  # first on the path of Ray's processes, so that they do not import another ``eval``
            ray.init(
                address=address, namespace="compare_q", log_to_driver=False, logging_level="ERROR"
            )
    except Exception as error:  # OSError, ValueError, RuntimeError, by what is wrong
        raise InputError(f"--ray: {address}: no cluster answers: {one_line(error, 160)}") from None
    cluster = Cluster(ray, cache(say))
    cluster.look()
    pool = GpuPool(slots=sum(found.slots for found in cluster.classes))
    return replace(config, workers=RayWorkers(cluster, config.workers), gpus=pool)
