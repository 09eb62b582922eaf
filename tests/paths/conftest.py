"""The models of each engine for ``tests/paths``, all on one text."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.stale_inputs import write_gguf
from tests.support import ROOT, exllamav3_stub
from tests.support.paths import EACH_WINDOW, MANY_WINDOWS, Models, Runs
from tests.support.ray_cluster import SMALL_NODE, ray_cluster
from tests.support.real_server import running
from tests.support.toy import GPU, TOY_VOCAB, save_llama
from tests.support.vllm_server import Stub

LENGTH = 40
ROLES = {"reference": "ref", "row": "row", "second": "second"}
BATCHES = 1e-3
"""Largest relative difference of PPL and KLD in float32 between two runs whose batches differ."""


@pytest.fixture(scope="session")
def folders(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Role -> a toy model, each with its own weights."""
    made = tmp_path_factory.mktemp("roles")
    return {
        "reference": toy_model,
        "row": save_llama(made / "row", initializer_range=0.2),
        "second": save_llama(made / "second", initializer_range=0.25),
    }


@pytest.fixture(scope="session")
def data(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data spec of a text of 40 windows, and one token: ExLlamaV3's method needs it."""
    folder = tmp_path_factory.mktemp("text")
    letters = np.random.default_rng(0).choice(list("abcdefgh \n"), MANY_WINDOWS * LENGTH + 1)
    text = folder / "text.txt"
    text.write_text("".join(letters))
    spec = {"tokenizer_dir": str(toy_model), "dataset": "text", "path": str(text)}
    file = folder / "data.json"
    file.write_text(json.dumps({**spec, "eval_len": LENGTH, "eval_stride": LENGTH}))
    return file


def specs_of(load_fn: str, folders: dict[str, Path], **engine: Any) -> list[dict[str, Any]]:
    """A spec for each role's model in one engine."""
    specs = []
    for role, folder in folders.items():
        spec = {
            "load_fn": load_fn,
            "label": ROLES[role],
            "model_dir": str(folder),
            "engine": engine,
        }
        specs.append(spec)
    specs[0]["reference"] = True
    return specs


def closed_form(label: str, boost: float = 0.0) -> dict[str, Any]:
    """The spec of a closed-form model."""
    engine = {"vocab_size": TOY_VOCAB, "boost": boost}
    return {"load_fn": "fake", "label": label, "model_dir": "none", "engine": engine}


@pytest.fixture(scope="session")
def in_transformers(folders: dict[str, Path]) -> Models:
    return Models(ROLES, specs_of("transformers_auto_bf16", folders, dtype="float32"))


@pytest.fixture(scope="session")
def in_vllm(folders: dict[str, Path]) -> Models:
    memory = {"gpu_memory_utilization": 0.05} if GPU else {}
    specs = specs_of("vllm_score", folders, dtype="float32", enforce_eager=True, **memory)
    return Models(ROLES, specs, tolerance=BATCHES)


def served(url: str) -> Models:
    """Two clients of a server, beside a closed-form reference."""
    specs: list[dict[str, Any]] = [{**closed_form("ref"), "reference": True}]
    for label, concurrency in (("row", 2), ("second", 1)):
        engine = {"concurrency": concurrency}
        specs.append({"load_fn": "vllm_server", "label": label, "model_dir": url, "engine": engine})
    return Models({"row": "row", "second": "second"}, specs, tolerance=BATCHES)


@pytest.fixture(scope="session")
def in_vllms_server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with running(toy_model, tmp_path_factory.mktemp("server") / "log") as url:
        yield served(url)


@pytest.fixture(scope="session")
def in_a_server() -> Iterator[Models]:
    """A stand-in for a server, with closed-form scores."""
    with Stub() as stub:
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        yield served(stub.url)
        stub.shutdown()


@pytest.fixture(scope="session")
def in_llama_cpp(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    made = tmp_path_factory.mktemp("gguf")
    files = {role: write_gguf(folder, made / f"{role}.gguf") for role, folder in folders.items()}
    return Models(ROLES, specs_of("llamacpp", files))


@pytest.fixture(scope="session")
def with_a_pack(
    in_transformers: Models, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Models:
    """Two models in Transformers, compared with a pack of the reference."""
    folder = tmp_path_factory.mktemp("pack")
    pack = folder / "pack"
    reference, row, second = in_transformers.specs
    recorded = Runs(Models({}, [reference]), data, folder)
    run = recorded.start_command(
        ["pack", "--no-floor", "-r", str(MANY_WINDOWS)], pack, each_window=False
    )
    assert run.wait() == 0, run.output
    from_pack = {"load_fn": "pack", "label": "ref", "model_dir": str(pack), "reference": True}
    return Models({"row": "row", "second": "second"}, [from_pack, row, second])


@pytest.fixture(scope="session")
def in_exllamav3(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    site = tmp_path_factory.mktemp("exllamav3")
    exllamav3_stub.install(site)
    return Models(ROLES, specs_of("exllamav3", folders), paths=(str(site),))


@pytest.fixture(scope="session")
def on_a_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Closed-form models on the only node of a Ray cluster."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    node = tmp_path_factory.mktemp("node")
    (node / "cache").mkdir()
    (node / "notes").mkdir()
    variables = {
        "COMPARE_Q_CACHE": str(node / "cache"),
        "COMPARE_Q_IN_PROCESS": "0",
        "NOTES": str(node / "notes"),
        "PYTHONPATH": os.pathsep.join([str(EACH_WINDOW), str(ROOT)]),
    }
    specs = [
        {**closed_form("ref", 3.0), "reference": True},
        closed_form("row"),
        closed_form("second", 1.0),
    ]
    with ray_cluster() as cluster:
        cluster.add_node(num_cpus=1, env_vars=variables, **SMALL_NODE)
        yield Models(ROLES, specs, words=("--ray", cluster.address), node=node)


FIXTURES = {
    "Transformers": "in_transformers",
    "vLLM": "in_vllm",
    "vLLM's server": "in_vllms_server",
    "a server": "in_a_server",
    "llama.cpp": "in_llama_cpp",
    "pack": "with_a_pack",
    "ExLlamaV3": "in_exllamav3",
    "Ray": "on_a_node",
}
"""Engine -> the fixture of its models."""


@pytest.fixture(scope="session")
def runs_in(request: pytest.FixtureRequest, data: Path) -> Callable[[str, Path], Runs]:
    """(engine, folder) -> runs of the engine's models on a new cache in the folder."""

    def runs(engine: str, folder: Path) -> Runs:
        return Runs(request.getfixturevalue(FIXTURES[engine]), data, folder)

    return runs
