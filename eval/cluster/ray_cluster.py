"""A Ray cluster from the driver's side: its nodes, the kinds that they are of, and an actor on one of them.

Ray is imported here and nowhere else.  Scores belong to a kind of hardware, so that all that is part of their key is
asked on the nodes, and a model runs on nodes of one kind: those that its ``resources`` leave, else the kind of which
the cluster has most.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backends.common import machine
from backends.common.errors import InputError, ModelError
from backends.common.machine import Gpu
from backends.common.messages import one_line
from backends.worker.messages import DESCRIBED, JOB, Described, DescribeJob
from eval import __version__
from eval.cluster.node import raised
from eval.run.devices import Devices, Kind

INSTALL = "pip install 'ray>=2.49'"
"""The first version whose actors may be bound to several nodes by their labels; 2.60 is the one that was run."""
ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 5.0
"""Seconds that a cluster may take to take a connection."""
READY_S = 120.0
"""Seconds that a node may take to start a process of ours; two local nodes took 2."""


HEAD_ONLY = "it was started with neither CPUs nor GPUs for models"
NOTHING: Mapping[str, float] = {}
OTHERWISE = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
"""What Ray takes in other ways than by name."""


class LostError(ModelError):
    """A node, or our actor on it, is gone."""


def on_node(root: str, folder: str) -> type:
    """The class of the actor, which Ray sends by its code, so that a node without compare_q can say so."""

    class OnNode:
        def __init__(self, holds_gpus: bool) -> None:
            import os
            import sys

            self.node: Any = None
            self.problem = ""
            if os.path.isdir(folder):  # relative paths of the specs start where the driver's do
                os.chdir(folder)
            if os.path.isfile(os.path.join(root, "eval", "cluster", "node.py")):
                sys.path.insert(0, root)
            try:
                from eval.cluster.node import Node

                self.node = Node(holds_gpus=holds_gpus)
            except ImportError as error:
                self.problem = (
                    f"{sys.executable} has no compare_q that runs ({error}): install it in the Python that runs "
                    f"ray on this node, or put this checkout at {root} there"
                )

        def call(self, name: str, *arguments: Any) -> tuple[str, Any]:
            """("", what a method of ``Node`` returns), or (kind, text) of its error."""
            if self.node is None:
                return "input", self.problem
            from backends.common.errors import CompareQError
            from eval.cluster.node import kind_of

            try:
                return "", getattr(self.node, name)(*arguments)
            except CompareQError as error:
                return kind_of(error), str(error)

    return OnNode


@dataclass(frozen=True)
class Actor:
    """Our actor on a node; LostError if it, or the node, is gone."""

    ray: Any
    handle: Any

    def ask(self, name: str, *arguments: Any) -> Any:
        """Begin a call of a method of ``Node``, whose result ``result`` waits for."""
        return self.handle.call.remote(name, *arguments)

    def result(self, asked: Any, seconds: float | None = None) -> Any:
        """What a call returned, None if it did not within ``seconds``; the error of ours that it raised."""
        try:
            kind, value = self.ray.get(asked, timeout=seconds)
        except self.ray.exceptions.GetTimeoutError:
            return None
        except self.ray.exceptions.RayTaskError as error:  # a bug of ours
            raise ModelError(f"its node raised {one_line(error.cause or error)}") from None
        except self.ray.exceptions.RayError as error:
            raise LostError(one_line(error, 160)) from None
        if kind:
            raise raised(kind, value)
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        """What a method of ``Node`` returns."""
        return self.result(self.ask(name, *arguments))

    def end(self) -> None:
        """End the actor's process, if it is there; the engine process then ends its worker."""
        self.ray.kill(self.handle, no_restart=True)


@dataclass
class Cluster:
    """A connected cluster: ``agents``: node -> an actor of ours there, which holds nothing; ``hosts``: node -> name.

    ``shared``: a file in the cache and its text, by which a node tells whether it has the driver's cache.
    """

    ray: Any
    shared: tuple[Path, str]
    say: Callable[[str], None]
    agents: dict[str, Actor] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    places: dict[str, Kind] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    losses: Counter[str] = field(default_factory=Counter)
    avoided: set[str] = field(default_factory=set)

    def tell(self, *lines: str) -> None:
        """Say lines that have not been said yet."""
        for line in lines:
            if line not in self.said:
                self.said.add(line)
                self.say(line)

    @property
    def slots(self) -> int:
        """Models that may be in work at the same time; Ray lets those wait for which there is no room."""
        return sum(kind.slots for kind in self.kinds)

    def resources(self) -> dict[str, Mapping[str, float]]:
        """Node -> what Ray says that it has, of the nodes that are there now."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def actor(
        self, nodes: Sequence[str], *, cpus: float = 0, gpus: int = 0, resources: Mapping[str, float] = NOTHING
    ) -> Actor:
        """An actor on one of these nodes, once one has room for it."""
        options = {
            "num_cpus": cpus, "num_gpus": gpus, "resources": dict(resources), "max_restarts": 0, "max_concurrency": 4,
            "label_selector": {"ray.io/node-id": f"in({','.join(nodes)})"},
        }  # fmt: skip
        return Actor(self.ray, self.ray.remote(on_node(str(ROOT), os.getcwd())).options(**options).remote(gpus > 0))

    def look(self) -> None:
        """Find out what the nodes are; InputError if none can run a worker."""
        there = self.resources()
        self.agents = {node: self.actor([node]) for node in there}
        asked = {node: agent.ask("facts") for node, agent in self.agents.items()}
        found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
        for node, agent in list(self.agents.items()):
            try:
                facts = agent.result(asked[node], READY_S)
                if facts is not None:  # Ray hands out the first ones
                    facts["gpus"] = facts["gpus"][: math.floor(there[node].get("GPU", 0))]
                problem = self.problem_of(facts, there[node])
            except (InputError, LostError) as error:
                facts, problem = {}, str(error)
            if problem:
                if problem != HEAD_ONLY:
                    self.tell(f"--ray: node {self.address(node)}: not used: {problem}")
                self.agents.pop(node).end()
                continue
            self.hosts[node] = f"{facts['host']} ({node[:8]})"
            gpu = [(gpu["name"], gpu["driver"]) for gpu in facts["gpus"][:1]]
            processor, shared = facts["processor"], ("cpu", "instructions")
            on_cpu = None if gpu else (sorted(processor.items()), there[node]["CPU"])
            kind = (gpu, [processor[name] for name in shared], sorted(facts["settings"].items()), on_cpu)
            found.setdefault(repr(kind), []).append((node, facts))
        self.kinds = [kind_of_nodes(nodes, there) for _, nodes in sorted(found.items())]
        if not self.kinds:
            raise InputError("--ray: no node of the cluster can run a model")

    def lost(self, label: str, node: str | None) -> int:
        """Note that a worker of this model was lost on a node, which is avoided from now on; how many were lost."""
        self.avoided |= {node} if node else set()  # Ray takes a while to see that a node is dead
        self.losses[label] += 1
        return self.losses[label]

    def address(self, node: str) -> str:
        """How a user knows a node."""
        known: Mapping[str, Any] = next((each for each in self.ray.nodes() if each["NodeID"] == node), {})
        return f"{known.get('NodeManagerHostname', '?')} ({node[:8]})"

    @staticmethod
    def problem_of(facts: Mapping[str, Any] | None, resources: Mapping[str, float]) -> str:
        """Why a node takes no model; empty if it does."""
        if facts is None:
            return f"our process there said nothing for {READY_S:.0f} s"
        ours = (__version__, machine.commit(), machine.code()[1][:12])
        theirs = (facts["version"], facts["commit"], facts.get("code", "")[:12])
        if ours != theirs:
            return f"its compare_q is {' '.join(map(str, theirs))}, this one {' '.join(map(str, ours))}"
        names = {gpu["name"] for gpu in facts["gpus"]}
        if len(names) > 1:
            return f"it has GPUs of several kinds ({', '.join(sorted(names))}), of which Ray gives any"
        if not (resources.get("CPU") or facts["gpus"]):
            return HEAD_ONLY
        return ""

    def place(
        self, label: str, resources: Mapping[str, float], python: str | None, question: DescribeJob, content: str | None
    ) -> tuple[Described, Kind]:
        """(what the nodes have of a model's engine, the kind of node that it runs on), which ``label`` stands for.

        ``content``: of the model's files, None if these are still to be fetched.  InputError if no node fits.
        """
        if taken := sorted(OTHERWISE & resources.keys()):
            raise InputError(f"resources: {taken[0]}: compare_q counts these itself; the key gpus says how many")
        there, reasons, place = self.resources(), [], question.request.model_dir
        fitting = [restricted(kind, there, resources) for kind in self.kinds]
        for kind in sorted((each for each in fitting if each.nodes), key=lambda kind: (-kind.slots, kind.name)):
            asked = {
                node: self.agents[node].ask("describe", JOB.dump_json(question), python)
                for node in kind.nodes
            }  # fmt: skip
            answers: dict[str, bytes] = {}
            for node, reference in asked.items():
                try:
                    described, found = self.agents[node].result(reference)
                except (InputError, ModelError) as error:
                    reasons.append(f"node {self.hosts[node]}: {error}")
                    continue
                if content is not None and found != content:
                    reasons.append(f"node {self.hosts[node]}: {place} is not there, or another model")
                else:
                    answers[node] = described
            if answers:
                first = max(answers.values(), key=lambda answer: (list(answers.values()).count(answer), answer))
                same = tuple(node for node, answer in answers.items() if answer == first)
                reasons += [f"node {self.hosts[node]}: has other versions" for node in answers if node not in same]
                self.places[label] = chosen = replace(kind, nodes=same)
                self.tell(*(f"{label}: not used: {reason}" for reason in reasons))
                return DESCRIBED.validate_json(first), chosen
        wanted = ", ".join(f"{name}: {number:g}" for name, number in resources.items())
        raise InputError("; ".join(reasons) or f"resources: no node of the cluster has {wanted or 'room for a model'}")


def kind_of_nodes(nodes: Sequence[tuple[str, Mapping[str, Any]]], there: Mapping[str, Mapping[str, float]]) -> Kind:
    """A kind from its nodes and what these say of themselves."""
    largest, facts = max(nodes, key=lambda each: len(each[1]["gpus"]))
    gpus = [Gpu(**gpu) for gpu in facts["gpus"]]
    return Kind(
        Devices(gpus), facts["processor"], facts["settings"], there[largest].get("CPU", 0),
        tuple(node for node, _ in nodes),
    )  # fmt: skip


def restricted(kind: Kind, there: Mapping[str, Mapping[str, float]], wanted: Mapping[str, float]) -> Kind:
    """The kind with the nodes that are there and have what is wanted."""
    nodes = tuple(
        node
        for node in kind.nodes
        if node in there and all(there[node].get(name, 0) >= number for name, number in wanted.items())
    )
    return replace(kind, nodes=nodes)


def check_answer(address: str) -> None:
    """InputError if nobody listens at ``host:port``, for which Ray waits two minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in address:
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except (OSError, OverflowError) as error:
            raise InputError(f"--ray: {address}: no cluster answers: {one_line(error)}") from None


def connect(address: str, shared: tuple[Path, str], say: Callable[[str], None]) -> Cluster:
    """The cluster at an address (``auto``: the one of this machine); InputError without Ray, or without a cluster."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # what Ray says of its nodes would stand in the table
    try:
        import ray
    except ImportError:
        raise InputError(f"--ray: ray is not installed: {INSTALL}") from None
    check_answer(address)
    try:
        ray.init(address=address, namespace="compare_q", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, ValueError, RuntimeError, by what is wrong
        raise InputError(f"--ray: {address}: no cluster answers: {one_line(error, 160)}") from None
    cluster = Cluster(ray, shared, say)
    cluster.look()
    return cluster
