"""What an actor does on its node, without Ray around it: a real worker, whose files come back with its messages."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.base import LoadRequest, Task
from backends.common.errors import InputError
from backends.scoring import segments
from backends.worker.messages import (
    DESCRIBED,
    JOB,
    DescribeJob,
    LoadJob,
    Returned,
    ScoreJob,
    Told,
    parse_message,
    write_windows,
)
from eval.cluster.node import Node
from eval.cluster.parcels import keep
from eval.cluster.ray_workers import RayWorker, Seat
from eval.common.processes import Deadline, Wanted
from tests.support.scores import random_windows

WINDOWS = random_windows(4)


def request(**options: Any) -> LoadRequest:
    return LoadRequest("fake", "fake", "none", 40, {"vocab_size": 50_000, **options})


def performed(node: Node, job: Any, here: Path | None = None) -> tuple[list[Any], dict[str, Any]]:
    """(the messages of a job, how it ended), while what comes from the node is kept in ``here``."""
    folders = {} if here is None else {"scores": here}
    there = {} if here is None else {"scores": str(job.scores)}
    node.begin(JOB.dump_json(job), asdict(Deadline()), there)
    found: list[Any] = []
    while True:
        parcels, messages = node.take(1.0)
        for parcel in parcels:
            keep(folders, parcel)
        for message in messages:
            if isinstance(message, dict):
                return found, message
            found.append(parse_message(message))
            if found[-1] == Told("done") and here is not None:
                assert segments.committed(here, segments.ALONE) == frozenset(range(4)), "scores come before that"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    made = Node(holds_gpus=True)
    yield made
    made.close()


@pytest.mark.engine
def test_scores_of_a_worker_on_a_node_come_back(node: Node, tmp_path: Path) -> None:
    folder, here = Path(node.folder()), tmp_path / "here"
    write_windows(tmp_path / "windows", WINDOWS)
    windows = node.write("windows.npz", (tmp_path / "windows").read_bytes())
    node.start({"label": "fake", "engine": "fake", "python": None, "log_file": str(folder / "log")})
    _, end = performed(node, LoadJob("fake", request()))
    assert (end["error"], end["has_died"]) == (None, False)
    job = ScoreJob(Task(), Path(windows), folder / "scores", segments.ALONE, "one")
    _, end = performed(node, job, here)
    assert end["error"] is None
    assert len(segments.load(here, segments.ALONE, WINDOWS).scores) == 4
    assert list(segments.records(here)) == ["one"]
    node.close()
    assert not folder.exists()


@dataclass
class Direct:
    """An actor without Ray: what is asked of it, its node does at once."""

    node: Node

    def call(self, name: str, *given: Any) -> Any:
        return getattr(self.node, name)(*given)


@pytest.mark.engine
def test_scores_of_a_second_text_do_not_come_back_with_those_of_the_first(node: Node, tmp_path: Path) -> None:
    """A worker keeps its model for another text, whose scores lie in another folder here."""
    worker: Any = RayWorker(None, Wanted("fake"))  # type: ignore[arg-type]  # a cluster is asked for places only
    folder = Path(node.folder())
    assert node.folder() == str(folder)
    seat: Any = Seat(Direct(node), "id", "name", folder)  # type: ignore[arg-type]
    node.start({"label": "fake", "engine": "fake", "python": None, "log_file": str(folder / "log")})
    performed(node, LoadJob("fake", request()))
    write_windows(tmp_path / "windows", WINDOWS)
    for text, keeps in (("one", True), ("two", False)):
        (tmp_path / text).mkdir()
        job = ScoreJob(Task(), tmp_path / "windows", tmp_path / text, segments.ALONE, f"{text}-0", keeps=keeps)
        messages = list(worker.followed(seat, job, Deadline()))
        assert messages[-1] == Returned()
        assert list(segments.records(tmp_path / text)) == [f"{text}-0"]
        found = segments.load(tmp_path / text, segments.ALONE, WINDOWS)
        assert (len(found.scores), set(found.sessions)) == (4, {f"{text}-0"})


@pytest.mark.engine
def test_a_worker_that_dies_on_a_node_is_told_with_its_reason(node: Node, tmp_path: Path) -> None:
    folder = Path(node.folder())
    write_windows(folder / "windows.npz", WINDOWS)
    node.start({"label": "fake", "engine": "fake", "python": None, "log_file": str(folder / "log")})
    performed(node, LoadJob("fake", request(fail=2, failure="abort")))
    job = ScoreJob(Task(), folder / "windows.npz", folder / "scores", segments.ALONE, "one")
    _, end = performed(node, job, tmp_path / "here")
    assert (end["error"], end["has_died"]) == ("model", True)
    assert "SIGABRT" in end["text"]
    assert b"Fatal Python error: Aborted" in node.log_tail()


def test_a_node_says_what_it_has_and_what_it_sees(node: Node, tmp_path: Path) -> None:
    described, content = node.describe(JOB.dump_json(DescribeJob("fake", request())), None)
    assert DESCRIBED.validate_json(described).installed == ("built in", "")
    assert content == ""
    assert {"version", "commit", "code", "host", "processor", "gpus", "settings"} == node.facts().keys()
    token = tmp_path / "token"
    token.write_text("this one")
    assert node.sees(str(token), "this one")
    assert not node.sees(str(token), "another")
    assert not node.sees(str(tmp_path / "nowhere"), "")
    with pytest.raises(InputError, match="cannot be started"):
        node.describe(JOB.dump_json(DescribeJob("fake", request())), str(tmp_path / "python"))


def test_what_ray_changed_in_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives an actor one thread and no GPU, which this process was not started with."""
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "17")
    Node(holds_gpus=True)
    assert (os.environ.get("OMP_NUM_THREADS"), os.environ["CUDA_VISIBLE_DEVICES"]) != ("17", "17")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "17", "the GPUs that Ray gave"
    Node(holds_gpus=False)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "17"
