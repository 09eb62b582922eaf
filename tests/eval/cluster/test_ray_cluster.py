"""Nodes and their kinds: which can run models, and which give a model the same scores."""

from __future__ import annotations

from typing import Any

import pytest

from backends.common import machine
from eval import __version__
from eval.cluster.ray_cluster import Cluster, kind_of_nodes, restricted


def facts(*gpus: str, **other: Any) -> dict[str, Any]:
    return {
        "version": __version__, "commit": machine.commit(), "code": machine.code()[1],
        "host": "h", "settings": {"A": "1"},
        "gpus": [{"device": "0", "name": name, "driver": "580", "mib": 80.0} for name in gpus],
        "processor": {"cpu": "Some CPU", "instructions": "avx2", "cores": 4}, **other,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "resources", "problem"),
    [
        (facts("H200", "H200"), {"GPU": 2.0}, ""),
        (facts(), {"CPU": 2.0}, ""),
        (facts(), {}, "neither CPUs nor GPUs for models"),
        (facts("H200", "H100"), {"GPU": 2.0}, "several kinds (H100, H200)"),
        (facts(version="0.0"), {"CPU": 2.0}, "its compare_q is 0.0"),
        (facts(code="0123"), {"CPU": 2.0}, " 0123, this one "),
        (None, {"CPU": 2.0}, "said nothing"),
    ],
)
def test_which_nodes_take_models(found: Any, resources: dict[str, float], problem: str) -> None:
    said = Cluster.problem_of(found, resources)
    assert problem in said
    assert bool(said) == bool(problem)


def test_a_kind_has_the_gpus_of_its_largest_node_and_names_its_own_processor() -> None:
    there = {"one": {"GPU": 1.0, "big": 1.0}, "two": {"GPU": 2.0}}
    kind = kind_of_nodes([("one", facts("H200")), ("two", facts("H200", "H200"))], there)
    assert (kind.name, kind.slots, kind.nodes) == ("H200", 4, ("one", "two"))
    assert [gpu.name for gpu in kind.devices.planned(0)] == ["H200", "H200"]
    gpus = kind.devices.planned(1)
    assert kind.hardware(gpus, torch=True, cpu_only=False) == {"gpus": ["H200"], "driver": "580", "A": "1"}
    assert kind.hardware(gpus, torch=True, cpu_only=True) == {**facts()["processor"], "A": "1"}
    assert restricted(kind, there, {"big": 1}).nodes == ("one",)
    assert restricted(kind, {"two": there["two"]}, {}).nodes == ("two",)
    assert restricted(kind, there, {"big": 2}).nodes == ()
