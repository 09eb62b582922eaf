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
from ..backends.worker.protocol import LoadCommand, Log, Message, SampleCommand, ScoreCommand
from .common.cache import Cache, default_root
from .common.processes import WorkerProcess, result_of
from .common.progress import Show
from .run.gpu_pool import GpuPool
from .run.run_config import RunConfig
from .run.run_model import RunModel
from .run.workers import Hardware, Worker, Workers

INSTALL_RAY = "pip install 'ray>=2.49'"
"""First version whose actors can be bound to several nodes by labels.

compare_q was run with 2.60.
"""
ROOT = Path(__file__).resolve().parent.parent
REMEDY = (
    f"install it in the Python that runs ray on this node, or put this checkout at {ROOT} there"
)
MOST_CALLS_OF_NODE = 64
"""Calls that the agent of a node performs at the same time: a few for each of its workers."""
NODE_READY_S = 120.0
"""Seconds that a node may take to start a compare_q process."""
NODE_CLOSE_S = 60.0
"""Seconds that a node may take to close a worker, which gives an engine 30."""
PLACE_POLL_S = 1.0
"""Seconds between two checks of whether a model that waits for a node was stopped."""
ENVIRON = Path("/proc/self/environ")
HEAD_ONLY = "it was started with neither CPUs nor GPUs for models"
RESERVED_RESOURCES = {"CPU", "GPU", "memory", "object_store_memory"}
"""Resources that Ray takes through separate options, not by name."""

Job = LoadCommand | ScoreCommand | SampleCommand
Resources = Mapping[str, Mapping[str, float]]
"""Node -> the resources that Ray reports for it."""
Names = tuple[str, ...] | None
"""GPUs in CUDA_VISIBLE_DEVICES; None: none."""
Sent = tuple[Any, list[tuple[Path, bytes]], bytes]
"""A message, None if the command ended with an error; files by their paths on the driver; new
output for the log.
"""


@dataclass(frozen=True)
class HardwareClass(Hardware):
    """Nodes (ids) on which a model has the same scores.

    ``gpus``: the GPUs of the node with the most.
    """

    # Processors that a model takes on a node without GPUs.
    cpus: float
    nodes: tuple[str, ...]

    @classmethod
    def of(
        cls, nodes: Sequence[tuple[str, Mapping[str, Any]]], alive_nodes: Resources
    ) -> HardwareClass:
        """Return the hardware class of nodes, from the facts that the nodes report."""
        largest_node, facts = max(nodes, key=lambda node_and_facts: len(node_and_facts[1]["gpus"]))
        return cls(
            gpus=tuple(facts["gpus"]),
            processor=facts["processor"],
            settings=facts["settings"],
            cpus=alive_nodes[largest_node].get("CPU", 0),
            nodes=tuple(node for node, _ in nodes),
        )

    def with_resources(
        self, required: Mapping[str, float], alive_nodes: Resources
    ) -> HardwareClass:
        """Return the class with only the alive nodes that have the ``required`` resources."""
        nodes = []
        for node in self.nodes:
            if node not in alive_nodes:
                continue
            resources = alive_nodes[node]
            if all(resources.get(name, 0) >= number for name, number in required.items()):
                nodes.append(node)
        return replace(self, nodes=tuple(nodes))

    @property
    def name(self) -> str:
        """The name of the nodes' GPUs, or of their processor."""
        if self.gpus:
            return self.gpus[0].name
        return str(self.processor["cpu"])

    def most_replicas(self, n_gpus: int) -> int:
        replicas_of_node = 1
        if n_gpus:
            replicas_of_node = len(self.gpus) // n_gpus
        return len(self.nodes) * replicas_of_node

    @property
    def slots(self) -> int:
        """Number of models that the nodes can run at the same time, each on one GPU."""
        return self.most_replicas(min(len(self.gpus), 1))


def code() -> tuple[Any, ...]:
    """Return the version, commit and code digest of this compare_q."""
    return __version__, machine.commit(), machine.code()[1][:12]


def undo_changes_of_ray() -> None:
    """Restore the variables that Ray changes (one thread, no GPUs) to their original values."""
    lines = []
    if ENVIRON.exists():
        lines = ENVIRON.read_bytes().split(b"\0")
    original = {}
    for line in lines:
        if b"=" in line:
            name, value = os.fsdecode(line).split("=", 1)
            original[name] = value
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
        if name in original:
            os.environ[name] = original[name]


class Reservation:
    """An actor that reserves a model's resources on a node.

    The model runs in a worker of the node's agent.
    """

    def place(self) -> tuple[str, Names]:
        """Return (the id of the node, the names of the GPUs that Ray assigns, None without any)."""
        import ray

        context = ray.get_runtime_context()
        names = tuple(context.get_accelerator_ids()["GPU"])
        return str(context.get_node_id()), names or None


class NodeWorker:
    """A worker on a node; until it ends, its files are in a separate folder below ``folder``.

    ``python``: the Python that runs the model's engine; None: this one.  ``gpus``: names of the
    node's GPUs; ``devices``: names of the model's GPUs.  The model's ``log_file`` is a path on the
    driver's machine.
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
        # As long as it is held, no other worker deletes the folder as abandoned.
        self.lock = storage.hold(self.folder)
        self.log = (self.folder / "log").open("a+b", buffering=0)
        # Folder on this node -> the same folder on the driver's machine.
        self.folders: dict[Path, Path] = {}
        # File -> its size when it was sent.
        self.sent: dict[Path, int] = {}
        is_verbose = planned.log_file is None
        log_file = None
        if not is_verbose:
            log_file = self.folder / "log"
        self.worker = WorkerProcess(
            python, planned.engine, gpus, log_file=log_file, verbose=is_verbose
        )

    def perform(self, job: Job, silence_s: float, windows: bytes, *, sends: bool) -> Iterator[Sent]:
        """Perform a command of the driver's; yield what ``progress`` returns for each message.

        If the worker dies, falls silent or is stopped: first yield the last files and log output,
        without a message, then raise the worker's error with the log's path on the driver.

        ``windows``: the content of the command's file; ``sends``: True if the driver does not see
        this node's disk, so that recorded files must be sent to it.
        """
        if isinstance(job, ScoreCommand):
            job = self.local_score_command(job, windows, sends=sends)
        elif isinstance(job, LoadCommand):
            job = self.local_load_command(job)
        try:
            for message in self.worker.messages(job, silence_s):
                yield self.progress(message)
        except CompareQError as error:
            # The driver's log then has the output that explains the error.
            yield self.progress(None)
            reason = str(error).replace(str(self.folder / "log"), str(self.log_of_driver))
            raise type(error)(reason) from None

    def local_score_command(
        self, command: ScoreCommand, windows: bytes, *, sends: bool
    ) -> ScoreCommand:
        """Return a command with paths on this node, whose folders are made."""
        folder = self.folder / command.session
        # The names of folders are keys, which the files in them repeat.
        scores = folder / command.scores.name
        self.folders = {scores: command.scores}
        record = command.request.record
        if sends and record is not None:
            local_record = folder / "record" / record.name
            self.folders[local_record] = record
            record = local_record
        for local_folder in self.folders:
            local_folder.mkdir(parents=True)
        windows_file = folder / "windows"
        windows_file.write_bytes(windows)
        request = command.request.model_copy(update={"record": record})
        return replace(command, request=request, windows=windows_file, scores=scores)

    def local_load_command(self, command: LoadCommand) -> LoadCommand:
        """Return a command with the model as it is on this node."""
        # The files of the model's copy on this node have different dates.
        stamp = backends.files_of(command.model).stamp()
        model = command.model.updated(stamp=stamp, log_file=self.worker.log_file)
        # Windows and reference arrive with the first ScoreCommand, whose first step warms up.
        return LoadCommand(model, self.devices)

    def progress(self, message: Any) -> Sent:
        """Return a message with the files that it is about.

        These are new files, and those with another size than when they were sent.
        """
        files = []
        for folder, folder_of_driver in self.folders.items():
            for file in storage.files_in(folder):
                if storage.TEMPORARY.fullmatch(file.name):
                    continue
                size = storage.size_of(file)
                if size is not None and self.sent.get(file) != size:
                    files.append((folder_of_driver / file.name, file.read_bytes()))
                    self.sent[file] = size
        return message, files, self.log.read()

    def close(self) -> None:
        """Let the worker end, and delete its folder."""
        self.worker.close()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


class Node:
    """The agent on a node: an actor that holds no resources, and lives as long as the driver.

    It works in the driver's ``directory``.  It keeps the engine processes of its workers, so that
    only the first worker of an engine waits for the import.
    """

    def __init__(self, directory: str) -> None:
        undo_changes_of_ray()
        with suppress(OSError):
            os.chdir(directory)
        self.cache = Cache(default_root())
        self.local_workers = Workers(gpus=GpuPool(machine.gpus()))
        self.workers: dict[str, NodeWorker] = {}

    def facts(self) -> dict[str, Any]:
        """Return this node's compare_q, hardware, and the settings that change arithmetic."""
        return {
            "code": code(),
            "processor": machine.processor(),
            "gpus": machine.gpus(),
            "settings": machine.settings(),
        }

    def inspect(self, planned: PlannedModel, python: str | None) -> tuple[EngineInfo, str]:
        """Return (information on the engine on this node, digest of the model's content).

        The digest is empty if the model is not on this node.  InputError if the node's Python
        cannot run workers.
        """
        if python is None:
            info = worker.inspect(planned)
        else:
            info = self.local_workers.inspect_in_worker(planned, python)
        with suppress(CompareQError, OSError):
            return info, backends.files_of(planned).content()
        return info, ""

    def has_file(self, file: Path, content: bytes) -> bool:
        """Return True if this node has a file of the driver's at the same path."""
        return os.access(file, os.R_OK) and file.read_bytes() == content

    def missing_files(self, key: str, sizes: Mapping[str, int]) -> tuple[Path, list[str]]:
        """Return (the folder of a reference store in this node's cache, its missing files).

        ``sizes``: of all files of the store, by name.
        """
        self.cache.check_writable()
        folder = self.cache.path("references", key, "")
        folder.mkdir(exist_ok=True)
        missing = []
        for name, size in sizes.items():
            if storage.size_of(folder / name) != size:
                missing.append(name)
        return folder, missing

    def add(self, file: Path, content: bytes) -> None:
        """Write a file into that folder."""
        storage.write_whole(file, content)

    def start_import(self, engine: str, python: str | None, *, verbose: bool) -> None:
        """Start to import an engine."""
        self.local_workers.start_import(engine, python, verbose=verbose)

    def start(self, planned: PlannedModel, python: str | None, devices: Names) -> str:
        """Start a worker and return its name.  The folders of workers that are gone are deleted."""
        self.cache.check_writable()
        folder = self.cache.root / "nodes"
        node_worker = NodeWorker(folder, planned, python, self.local_workers.gpus.names, devices)
        for other_folder in folder.iterdir():
            if storage.is_abandoned(other_folder) and not other_folder.is_symlink():
                shutil.rmtree(other_folder, ignore_errors=True)
        name = node_worker.folder.name
        self.workers[name] = node_worker
        return name

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
    # Prints a line, but only once.
    say: Callable[[str], None]
    # By node.
    agents: dict[str, Any] = field(default_factory=dict)
    # Node -> its name in messages.
    hosts: dict[str, str] = field(default_factory=dict)
    classes: list[HardwareClass] = field(default_factory=list)
    # Held while a reference is copied to a node.
    copying: defaultdict[Any, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )

    def resources(self) -> Resources:
        """Return the resources of the nodes that are alive."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def actor(self, of: type, nodes: Sequence[str], *arguments: Any, **options: Any) -> Any:
        """Return an actor of this class on one of these nodes.

        Ray starts it once a node has room for it.
        """
        names = ",".join(nodes)
        place = {"label_selector": {"ray.io/node-id": f"in({names})"}}
        actor_class = self.ray.remote(of).options(**{"num_cpus": 0, **place, **options})
        return actor_class.remote(*arguments)

    def result(self, call: Any, seconds: float | None = None) -> Any:
        """Return the result of a call, or raise its compare_q error.

        LostWorkerError if the node does not answer.
        """
        try:
            return self.ray.get(call, timeout=seconds)
        except self.ray.exceptions.GetTimeoutError:
            raise LostWorkerError(f"our process there said nothing for {seconds:.0f} s") from None
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            # Ray's message begins with Ray's own words and a traceback.
            last_line = shortened(str(error).strip().rpartition("\n")[2], 300)
            if isinstance(cause, CompareQError):
                raise cause from None
            if "failed to import" in str(error):
                raise InputError(f"it has no compare_q that runs ({last_line}): {REMEDY}") from None
            if cause is not None:
                # A bug in compare_q.
                raise ModelError(f"its node raised {last_line}") from None
            raise LostWorkerError(one_line(error, 160)) from None

    def inspect_nodes(self) -> None:
        """Find out the hardware of the nodes; InputError if no node can run a worker."""
        alive_nodes = self.resources()
        directory = os.getcwd()
        for node in alive_nodes:
            self.agents[node] = self.actor(
                Node, [node], directory, max_concurrency=MOST_CALLS_OF_NODE
            )
        # All nodes start at the same time.
        calls = {node: agent.facts.remote() for node, agent in self.agents.items()}
        for node_facts in self.ray.nodes():
            node = node_facts["NodeID"]
            host = node_facts["NodeManagerHostname"]
            self.hosts[node] = f"{host} ({node[:8]})"
        nodes_of_hardware = defaultdict[str, list[tuple[str, Mapping[str, Any]]]](list)
        for node, resources in alive_nodes.items():
            try:
                facts = self.result(calls[node], NODE_READY_S)
                # Ray assigns the first ones.
                facts["gpus"] = facts["gpus"][: math.floor(resources.get("GPU", 0))]
                check_node(facts, resources)
            except CompareQError as error:
                if str(error) != HEAD_ONLY:
                    self.say(f"--ray: node {self.hosts[node]}: not used: {error}")
                self.ray.kill(self.agents.pop(node))
                continue
            nodes_of_hardware[hardware_name(facts, resources)].append((node, facts))
        self.classes = []
        for _, nodes in sorted(nodes_of_hardware.items()):
            self.classes.append(HardwareClass.of(nodes, alive_nodes))
        if not self.classes:
            raise InputError("--ray: no node of the cluster can run a model")

    def place(self, model: RunModel) -> tuple[EngineInfo, HardwareClass]:
        """Return what the nodes have of a model's engine, and the nodes that it can run on.

        InputError if no node fits.  If this machine has the model's files: also if no node has the
        same content.
        """
        content = None
        if not model.files.is_remote:
            content = model.files.content()
        reserved_names = sorted(RESERVED_RESOURCES & model.resources.keys())
        if reserved_names:
            raise InputError(
                f"resources: {reserved_names[0]}: compare_q counts these itself; use the key gpus"
            )
        alive_nodes = self.resources()
        classes = [
            hardware.with_resources(model.resources, alive_nodes) for hardware in self.classes
        ]
        reasons: list[str] = []
        # The class with the most slots comes first; of several, the first by name.
        for hardware in sorted(classes, key=lambda hardware: (-hardware.slots, hardware.name)):
            engine_infos = self.inspect_on_nodes(model, content, hardware.nodes, reasons)
            if not engine_infos:
                continue
            info = most_frequent(list(engine_infos.values()))
            nodes = []
            for node, info_of_node in engine_infos.items():
                if info_of_node == info:
                    nodes.append(node)
                else:
                    reasons.append(f"node {self.hosts[node]}: has other versions")
            for reason in reasons:
                self.say(f"{model.label}: not used: {reason}")
            return info, replace(hardware, nodes=tuple(nodes))
        if reasons:
            raise InputError("; ".join(reasons))
        wanted = ", ".join(f"{name}: {number:g}" for name, number in model.resources.items())
        if not wanted:
            wanted = "room for a model"
        raise InputError(f"resources: no node of the cluster has {wanted}")

    def inspect_on_nodes(
        self, model: RunModel, content: str | None, nodes: Sequence[str], reasons: list[str]
    ) -> dict[str, EngineInfo]:
        """Return the information on a model's engine on each of the nodes that can run it.

        ``content``: digest of the model's content, which a node must have too; None: unknown.
        Adds to ``reasons`` why a node cannot run it.
        """
        calls = {}
        for node in nodes:
            calls[node] = self.agents[node].inspect.remote(model.planned, model.python)
        engine_infos = {}
        for node, call in calls.items():
            try:
                info, content_on_node = self.result(call)
                if content not in (None, content_on_node):
                    raise ModelError(f"{model.planned.model_dir} is not there, or another model")
                engine_infos[node] = info
            except (InputError, ModelError) as error:
                reasons.append(f"node {self.hosts[node]}: {error}")
        return engine_infos


def hardware_name(facts: Mapping[str, Any], resources: Mapping[str, float]) -> str:
    """Return a text that is the same for nodes on which a model has the same scores."""
    # The first GPU is enough: ``check_node`` refuses a node with GPUs of several kinds.  Nodes
    # with different numbers of GPUs are in one class.
    gpus = [(gpu.name, gpu.driver) for gpu in facts["gpus"][:1]]
    processor = facts["processor"]
    # Without GPUs, a model runs on all processors of its node: their number and details count too.
    on_cpu = None
    if not gpus:
        on_cpu = (sorted(processor.items()), resources["CPU"])
    settings = sorted(facts["settings"].items())
    return repr((gpus, processor["cpu"], processor["instructions"], settings, on_cpu))


def most_frequent(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the most frequent information; of several, the last one in the order of its text."""
    return max(infos, key=lambda info: (infos.count(info), repr(info)))


def check_node(facts: Mapping[str, Any], resources: Mapping[str, float]) -> None:
    """Raise InputError with the reason if a node cannot take models."""
    if facts["code"] != code():
        code_of_node = " ".join(map(str, facts["code"]))
        code_of_driver = " ".join(map(str, code()))
        raise InputError(f"its compare_q is {code_of_node}, this one {code_of_driver}")
    gpu_names = {gpu.name for gpu in facts["gpus"]}
    if len(gpu_names) > 1:
        names = ", ".join(sorted(gpu_names))
        raise InputError(f"it has GPUs of several kinds ({names}), and Ray may assign any of them")
    if not (resources.get("CPU") or facts["gpus"]):
        raise InputError(HEAD_ONLY)


class RayWorker:
    """A worker (``eval/run/workers.py``) on one of ``nodes``.

    It requests room when its model is about to be loaded.  ``node``: the name of its node, empty
    before that.
    """

    def __init__(self, cluster: Cluster, model: RunModel, nodes: HardwareClass) -> None:
        self.cluster = cluster
        self.model = model
        self.nodes = nodes
        self.log_file = model.planned.log_file
        self.killed = threading.Event()
        self.reservation: Any = None
        self.agent: Any = None
        self.node = ""
        # Of the worker on its node.
        self.name = ""

    def perform(self, job: Any, silence_s: float, show: Show) -> Any:
        return result_of(self.messages(job, silence_s), show)

    def messages(self, job: Job, silence_s: float) -> Iterator[Message]:
        """Yield the messages of a command."""
        try:
            if not self.node:
                self.place()
            yield from self.messages_of_node(job, silence_s)
        except LostWorkerError as error:
            if self.killed.is_set():
                raise StoppedError("interrupted") from None
            self.killed.set()
            place = "its node"
            if self.node:
                place = f"node {self.node}"
            raise LostWorkerError(f"{place} was lost ({error})") from None
        except ModelError as error:
            if not self.node:
                raise ModelError(str(error)) from None
            raise ModelError(f"on node {self.node}: {error}") from None

    def place(self) -> None:
        """Wait until a node has room, and start a worker on it."""
        nodes = self.nodes
        cluster = self.cluster
        model = self.model
        # A model without GPUs has all processors of its node.
        n_cpus: float = 0
        if not model.n_gpus:
            n_cpus = nodes.cpus
        self.reservation = cluster.actor(
            Reservation,
            nodes.nodes,
            resources=model.resources,
            num_gpus=model.n_gpus,
            num_cpus=n_cpus,
        )
        call = self.reservation.place.remote()
        while not cluster.ray.wait([call], timeout=PLACE_POLL_S)[0]:
            if self.killed.is_set():
                raise StoppedError("interrupted")
            if not set(nodes.nodes) & cluster.resources().keys():
                raise ModelError(f"no node with {nodes.name} is left in the cluster")
        node, devices = cluster.result(call)
        self.node = cluster.hosts[node]
        self.agent = cluster.agents[node]
        self.name = cluster.result(self.agent.start.remote(model.planned, model.python, devices))
        # ``kill`` may have come before the worker had a name.
        if self.killed.is_set():
            self.kill()

    def messages_of_node(self, job: Job, silence_s: float) -> Iterator[Message]:
        """Yield the messages of a job, and copy its worker's files to this machine."""
        windows = b""
        sends = False
        if isinstance(job, ScoreCommand):
            windows = job.windows.read_bytes()
            record = job.request.record
            sends = record is not None and not self.is_seen(record)
            if job.request.reference is not None:
                reference = yield from self.store_on_node(job.request.reference)
                request = job.request.model_copy(update={"reference": reference})
                job = replace(job, request=request)
            # "known": the provenance that the driver knew before the model ran.  The record of the
            # scores starts from it (``stored_scores.joined_record``).
            provenance = {**job.facts.get("known", {}), "node": self.node}
            job = replace(job, facts={**job.facts, "known": provenance})
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
            path = error.filename or self.log_file
            raise InputError(
                f"{path}: what came from a node cannot be kept: {error.strerror}"
            ) from None

    def is_seen(self, folder: Path) -> bool:
        """Return True if the node sees a folder of the driver's.

        The node looks for a file that the driver has just made.
        """
        with storage.temporary_next_to(folder / "seen") as token:
            token.write_text(token.name, encoding="utf-8")
            call = self.agent.has_file.remote(token, token.name.encode())
            return bool(self.cluster.result(call))

    def store_on_node(self, store: Path) -> Generator[Log, None, Path]:
        """Return the path of a reference store on the node; yield a line if files were copied.

        The path is the store's own if the node sees the store there, or else that of a copy in the
        node's cache.  The store's manifest lists its files and their sizes: ModelError without one,
        InputError for a damaged one.
        """
        result = self.cluster.result
        agent = self.agent
        try:
            manifest_bytes = (store / STORE_MANIFEST).read_bytes()
        except OSError:
            raise ModelError(
                f"{store}: has no checksums, so that --ray cannot send it; run without --ray"
            ) from None
        if result(agent.has_file.remote(store / STORE_MANIFEST, manifest_bytes)):
            return store
        manifest = read_manifest(store)
        key = Cache.key("copied reference", {"identity": manifest.identity})
        # Workers of several models on the node wait for one copy.
        with self.cluster.copying[self.node, key]:
            copy, missing = result(agent.missing_files.remote(key, manifest.files))
            # The manifest last, so that it lists no file that is not there yet.
            for name in (*missing, STORE_MANIFEST):
                result(agent.add.remote(copy / name, (store / name).read_bytes()))
        if missing:
            size = bytes_in_words(sum(manifest.files[name] for name in missing))
            yield Log(f"{self.model.label}: copied {size} of the reference to node {self.node}")
        return Path(copy)

    def kill(self) -> None:
        """End the worker, and release its resources on the node."""
        self.killed.set()
        # The node may be gone.
        with suppress(Exception):
            if self.name:
                self.agent.kill.remote(self.name)
            if self.reservation is not None:
                self.cluster.ray.kill(self.reservation)

    def close(self) -> None:
        if self.name:
            with suppress(CompareQError):
                self.cluster.result(self.agent.close.remote(self.name), NODE_CLOSE_S)
        self.kill()


class RayWorkers(Workers):
    """The workers of a run on the nodes of a cluster."""

    is_local = False

    def __init__(self, cluster: Cluster, local_workers: Workers) -> None:
        super().__init__(local_workers.pythons)
        self.cluster = cluster
        self.in_process = False
        # Label of a model -> the nodes that it can run on.
        self.placed: dict[str, HardwareClass] = {}

    def inspect(self, model: RunModel) -> tuple[EngineInfo, HardwareClass]:
        info, hardware = self.cluster.place(model)
        self.placed[model.label] = hardware
        return info, hardware

    def create(self, model: RunModel) -> Worker:
        return RayWorker(self.cluster, model, self.placed[model.label])

    def import_ahead(self, model: RunModel, *, verbose: bool) -> None:
        """Start to import a model's engine on each node that may get it."""
        for node in self.placed[model.label].nodes:
            agent = self.cluster.agents[node]
            agent.start_import.remote(model.engine, model.python, verbose=verbose)


def on_cluster(config: RunConfig, address: str, say: Callable[[str], None]) -> RunConfig:
    """Return the configuration with workers on the cluster at an address.

    ``auto``: the cluster of this machine.  InputError if no cluster answers.
    """
    # Ray's messages about its nodes would be in the table.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise InputError(f"--ray: ray is not installed: {INSTALL_RAY}") from None
    host, _, port = address.rpartition(":")
    try:
        # Ray waits two minutes for a closed port.
        if host and port.isdecimal() and "/" not in address:
            socket.create_connection((host, int(port)), timeout=5).close()
        # The folder is first on the path of Ray's processes, so that they do not import another
        # ``eval``.
        with chdir(ROOT):
            ray.init(
                address=address, namespace="compare_q", log_to_driver=False, logging_level="ERROR"
            )
    except Exception as error:
        # OSError, ValueError or RuntimeError, by what is wrong.
        raise InputError(f"--ray: {address}: no cluster answers: {one_line(error, 160)}") from None
    say_once = cache(say)
    cluster = Cluster(ray, say_once)
    cluster.inspect_nodes()
    pool = GpuPool(slots=sum(hardware.slots for hardware in cluster.classes))
    return replace(config, workers=RayWorkers(cluster, config.workers), gpus=pool)
