"""A node of a cluster and its driver, without Ray between them.

A real worker performs each call immediately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compare_q.backends.base import EngineInfo, PlannedModel, ScoreRequest
from compare_q.backends.common.errors import InputError, LostWorkerError, ModelError, StoppedError
from compare_q.backends.common.machine import Gpu
from compare_q.backends.reference.store import Reader, begin, seal
from compare_q.backends.scoring import segments
from compare_q.backends.worker.protocol import (
    LoadCommand,
    Message,
    SampleCommand,
    ScoreCommand,
    write_windows,
)
from compare_q.eval import cluster
from compare_q.eval.cluster import Cluster, HardwareClass, Node, RayWorker, check_node
from compare_q.eval.common.cache import CACHE_VARIABLE
from compare_q.eval.common.processes import PROCESSES
from compare_q.eval.run.model_hardware import hardware_of
from tests.support.run_models import run_model
from tests.support.scores import random_windows
from tests.support.stores import IDENTITY, digest, record, state_store
from tests.support.toy import planned, refusal

WINDOWS = random_windows(4)


class GoneError(Exception):
    """Stands for Ray's error about a lost node."""


class Direct:
    """A handle of an actor, or of one of its methods, as in Ray.

    ``remote`` performs the call immediately.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Direct:
        return Direct(getattr(self.target, name))

    def options(self, **_: Any) -> Direct:
        return self

    def remote(self, *given: Any, **named: Any) -> Any:
        return self.target(*given, **named)


def cluster_of(nodes: tuple[str, ...] = ("n",), **other: Any) -> Cluster:
    """A cluster that performs each call immediately."""
    alive_nodes = [{"NodeID": node, "Alive": True, "Resources": {"CPU": 2.0}} for node in nodes]
    ray: Any = SimpleNamespace(
        exceptions=SimpleNamespace(GetTimeoutError=TimeoutError, RayError=GoneError),
        get=lambda asked, timeout: asked,
        kill=lambda actor: None,
        nodes=lambda: alive_nodes,
        **other,
    )
    return Cluster(ray, print, hosts={node: node for node in nodes})


def request(**options: Any) -> PlannedModel:
    # The token ids of ``random_windows`` go up to 50,000.
    return planned("fake", "fake", "none", 40, {"vocab_size": 50_000, **options})


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Node]:
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "node"))
    agent = Node(os.getcwd())
    yield agent
    for name in list(agent.workers):
        agent.close(name)
    PROCESSES.close()


def ray_worker(cluster: Cluster | None = None, log_file: Path | None = None) -> RayWorker:
    nodes = HardwareClass.of([("n", facts())], {"n": {"CPU": 2.0}})
    model = run_model(request().updated(log_file=log_file))
    return RayWorker(cluster or cluster_of(), model, nodes)


def shown(message: Message) -> None:
    """Show nothing."""


def started(node: Node, log: Path) -> RayWorker:
    """Return a worker that was placed on this node."""
    worker = ray_worker(log_file=log)
    worker.agent = Direct(node)
    worker.node = "n"
    worker.name = node.start(worker.model.planned, None, None)
    return worker


def score_command(folder: Path, scores: Path, session: str) -> ScoreCommand:
    return ScoreCommand(
        ScoreRequest(),
        windows=folder / "windows",
        scores=scores,
        tag=segments.ALONE,
        session=session,
    )


@pytest.mark.engine
def test_scores_of_every_text_come_back_to_their_own_folder(node: Node, tmp_path: Path) -> None:
    """A worker keeps its model for another text.

    Its scores arrive before it reports that they are done.
    """
    worker = started(node, tmp_path / "log")
    worker.perform(LoadCommand(request()), 60.0, shown)
    write_windows(tmp_path / "windows", WINDOWS)
    for text in ("one", "two"):
        here = tmp_path / text
        worker.perform(score_command(tmp_path, here, f"{text}-0"), 60.0, shown)
        assert segments.records(here)[f"{text}-0"]["known"]["node"] == "n"
        assert len(segments.load(here, segments.ALONE, WINDOWS).scores) == 4
        folder_on_node = node.workers[worker.name].folder / f"{text}-0" / text
        assert {file.name: file.read_bytes() for file in folder_on_node.iterdir()} == {
            file.name: file.read_bytes() for file in here.iterdir()
        }
    second = started(node, tmp_path / "log")
    second.perform(LoadCommand(request()), 60.0, shown)
    assert len(PROCESSES.running) == 1, "both are forks of one engine process"
    for worker_to_close in (worker, second):
        worker_to_close.close()
    assert list((tmp_path / "node" / "nodes").iterdir()) == []


@pytest.mark.engine
def test_a_command_to_sample_reaches_the_engine_on_a_node(node: Node, tmp_path: Path) -> None:
    """This engine refuses it."""
    worker = started(node, tmp_path / "log")
    worker.perform(LoadCommand(request()), 60.0, shown)
    with pytest.raises(ModelError, match="fake does not sample text"):
        worker.perform(SampleCommand([[1, 2]], 1, 0), 60.0, shown)
    worker.close()


@pytest.mark.engine
def test_a_worker_that_dies_on_a_node_is_told_with_its_reason_and_its_log(
    node: Node, tmp_path: Path
) -> None:
    worker = started(node, tmp_path / "log")
    worker.perform(LoadCommand(request(fail=2, failure="abort")), 60.0, shown)
    write_windows(tmp_path / "windows", WINDOWS)
    task = score_command(tmp_path, tmp_path / "scores", "one")
    with pytest.raises(
        ModelError, match=f"on node n: its worker .*SIGABRT.*log: {tmp_path / 'log'}"
    ):
        worker.perform(task, 60.0, shown)
    assert "Fatal Python error: Aborted" in (tmp_path / "log").read_text()


def test_a_recording_comes_back_as_the_store_that_it_would_have_been(
    node: Node, tmp_path: Path
) -> None:
    store_on_node = tmp_path / "there" / "store"
    store = tmp_path / "store"
    worker = ray_worker()
    begin(store, IDENTITY)
    node_worker = node.workers[node.start(request(), None, None)]
    node_worker.folders = {store_on_node: store}
    # The second share has the head.
    for first in (0, 2):
        record(store_on_node, range(first, first + 2), closed=first == 2)
        worker.keep(*node_worker.progress(None)[1:])
        assert node_worker.progress(None)[1] == [], "what has come does not come again"
    seal(store, IDENTITY, list(map(digest, range(4))))
    assert (
        Reader(store).manifest.files
        == state_store(tmp_path / "whole" / "store", windows=4).manifest.files
    )
    Reader(store).verify()


def brought(worker: RayWorker, store: Path) -> tuple[list[Any], Path]:
    """Return (the messages while a reference store is transferred, its path on the node)."""
    messages: list[Any] = []
    bringing = worker.store_on_node(store)
    while True:
        try:
            messages.append(next(bringing))
        except StopIteration as end:
            return messages, end.value


def test_a_reference_is_used_where_it_is_seen_and_is_copied_once_where_it_is_not(
    node: Node, tmp_path: Path
) -> None:
    store = state_store(tmp_path / "store")
    worker = ray_worker()
    worker.agent = Direct(node)
    assert brought(worker, store.path) == ([], store.path)
    assert worker.is_seen(tmp_path)
    worker.agent = Direct(
        SimpleNamespace(
            missing_files=node.missing_files,
            add=node.add,
            has_file=lambda file, content: False,
        )
    )
    assert not worker.is_seen(tmp_path)
    messages, copy = brought(worker, store.path)
    assert copy.is_relative_to(tmp_path / "node")
    assert "of the reference to node" in messages[0].text
    Reader(copy).verify()
    assert brought(worker, store.path) == ([], copy)
    record(store.path, [2])
    seal(store.path, IDENTITY, list(map(digest, range(3))))
    assert brought(worker, store.path)[0][0].text.startswith("fake: copied "), "what has grown"
    assert Reader(copy).manifest.files == Reader(store.path).manifest.files


def test_a_worker_is_lost_with_its_node() -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise GoneError("The node was terminated")

    lost_cluster = cluster_of()
    lost_cluster.ray.get = gone
    worker = ray_worker(lost_cluster)
    worker.agent = Direct(SimpleNamespace(perform=lambda *_, **__: [0]))
    worker.node = "n"
    with pytest.raises(LostWorkerError, match=r"^node n was lost "):
        worker.perform(LoadCommand(request()), 60.0, shown)
    worker.node = ""
    waiting = {
        "remote": lambda cls: Direct(lambda *_, **__: Direct(SimpleNamespace(place=lambda *_: 0)))
    }
    vars(lost_cluster.ray).update(waiting, wait=lambda asked, timeout: ([], asked), nodes=list)
    with pytest.raises(StoppedError):
        worker.place()
    with pytest.raises(ModelError, match="no node with Some CPU is left"):
        ray_worker(lost_cluster).place()


def test_a_node_says_what_it_has(node: Node, tmp_path: Path) -> None:
    described, content = node.inspect(request(), None)
    assert (described.installed, content) == (("built in", ""), "")
    check_node(node.facts(), {"CPU": 1.0})
    with pytest.raises(InputError, match="cannot be started"):
        node.inspect(request(), str(tmp_path / "python"))


def test_what_ray_changed_in_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets variables for one thread and no GPU in an actor.

    The node restores the original environment.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "17")
    cluster.undo_changes_of_ray()
    assert os.environ.get("OMP_NUM_THREADS") != "17"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "17"


def facts(*gpus: str, **other: Any) -> dict[str, Any]:
    return {
        "code": cluster.code(),
        "settings": {"A": "1"},
        "gpus": [Gpu("0", name, "580", 80.0) for name in gpus],
        "processor": {"cpu": "Some CPU", "instructions": "avx2", "cores": 4},
        **other,
    }


@pytest.mark.parametrize(
    ("found", "resources", "problem"),
    [
        (facts("H200", "H200"), {"GPU": 2.0}, ""),
        (facts(), {"CPU": 2.0}, ""),
        (facts(), {}, "neither CPUs nor GPUs for models"),
        (facts("H200", "H100"), {"GPU": 2.0}, "several kinds (H100, H200)"),
        (
            facts(code=("0.0", None, "0123")),
            {"CPU": 2.0},
            "its compare_q is 0.0 None 0123, this one ",
        ),
    ],
)
def test_which_nodes_take_models(found: Any, resources: dict[str, float], problem: str) -> None:
    said = refusal(check_node, found, resources) if problem else check_node(found, resources)
    assert problem in (said or "")


def test_nodes_of_one_class_have_the_gpus_of_the_largest_and_its_processor() -> None:
    alive_nodes = {"one": {"GPU": 1.0, "big": 1.0}, "two": {"GPU": 2.0}}
    hardware = HardwareClass.of(
        [("one", facts("H200")), ("two", facts("H200", "H200"))], alive_nodes
    )
    # Two GPUs, as on the larger node, for each of two nodes.
    assert (hardware.name, hardware.slots, hardware.nodes) == ("H200", 4, ("one", "two"))
    assert [gpu.name for gpu in hardware.gpus] == ["H200", "H200"]
    assert [hardware.most_replicas(n_gpus) for n_gpus in (1, 2)] == [4, 2]
    for cpu_only, gold in (
        (False, {"gpus": ["H200"], "driver": "580"}),
        (True, facts()["processor"]),
    ):
        info = EngineInfo(cpu_only=cpu_only)
        model = run_model(planned("m", "transformers", "none", 40), info=info)
        assert hardware_of(model, hardware, 1) == {**gold, "A": "1"}
    assert hardware.with_resources({"big": 1}, alive_nodes).nodes == ("one",)
    assert hardware.with_resources({}, {"two": alive_nodes["two"]}).nodes == ("two",)
    assert hardware.with_resources({"big": 2}, alive_nodes).nodes == ()
