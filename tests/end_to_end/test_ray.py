"""A table on two nodes of a Ray cluster that share no disk with the driver; one node dies while it
scores.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.processes import processes_of, users_environment, wait_until
from tests.support.ray_cluster import SMALL_NODE, ray_cluster
from tests.support.toy import Specs

NO_RAY = importlib.util.find_spec("ray") is None
APART = ["unshare", "-r", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']
"""Runs a command with a private view of a folder, like a driver whose disk no node shares."""
COLUMNS = (
    "label",
    "ppl",
    "ppl_stderr",
    "kld",
    "kld_stderr",
    "same_top",
    "tokens",
    "scores_key",
    "error",
)


def can_be_apart(folder: Path) -> bool:
    """True if this machine gives a process its own mounts."""
    try:
        return subprocess.run([*APART, str(folder), "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def two_segments(node: Path) -> bool:
    """True if a worker of this node has committed scores twice, which the reference's worker is too
    fast to do.
    """
    return len(list(node.glob("nodes/*/*/*/[0-9a-f]*.safetensors"))) >= 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A head node that runs no model, and two nodes, each with its own cache: ``node<number>``."""
    with ray_cluster() as made:
        for number in (1, 2):
            environment = {
                "COMPARE_Q_CACHE": str(tmp_path / f"node{number}"),
                "COMPARE_Q_IN_PROCESS": "0",
            }
            made.add_node(
                num_cpus=1, resources={f"node{number}": 1}, env_vars=environment, **SMALL_NODE
            )
        yield made


@pytest.mark.engine
@pytest.mark.skipif(NO_RAY, reason="ray is not installed")
def test_a_table_is_finished_on_the_node_that_is_left(
    cluster: Any, tmp_path: Path, write_specs: Specs, compare_q: Callable[..., Any]
) -> None:
    if not can_be_apart(tmp_path):
        pytest.skip("this machine does not give a process its own mounts")
    models = [
        {
            "load_fn": "fake",
            "label": label,
            "model_dir": "none",
            "engine": {"vocab_size": 300, **engine},
        }
        for label, engine in (
            ("a", {}),
            ("b", {"boost": 1.0, "seconds": 1.0}),
            ("c", {"boost": 2.0, "seconds": 1.0}),
        )
    ]
    models[0]["reference"] = True
    data, specs = write_specs(models)
    plain, ours, cache = tmp_path / "plain.json", tmp_path / "ray.json", tmp_path / "driver"
    assert compare_q("-d", data, "-m", specs, "-o", plain).status == 0
    cache.mkdir()
    command = [
        sys.executable,
        str(ROOT / "eval" / "compare_q.py"),
        "-d",
        data,
        "-m",
        specs,
        "-o",
        ours,
    ]
    with subprocess.Popen(
        list(map(str, [*APART, cache, *command, "--ray", cluster.address])),
        env=users_environment(COMPARE_Q_CACHE=str(cache)),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as driver:
        assert driver.stdout is not None
        lost = next(
            node
            for node in cluster.worker_nodes
            if "node1" in node.get_resource_and_label_spec().resources
        )
        wait_until(lambda: two_segments(tmp_path / "node1") or driver.poll() is not None, 120)
        cluster.remove_node(lost, allow_graceful=False)
        said = driver.stdout.read()
    assert driver.returncode == 0, said
    rows = [
        [{name: row[name] for name in COLUMNS} for row in json.loads(file.read_text())["models"]]
        for file in (plain, ours)
    ]
    assert rows[0] == rows[1], said
    assert "of the reference to node" in said
    assert " was lost (" in said, said
    wait_until(
        lambda: not [number for node in (1, 2) for number in processes_of(tmp_path / f"node{node}")]
    )
