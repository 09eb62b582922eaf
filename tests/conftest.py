"""Shared fixtures: a toy model that every engine runs, and the command line in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q import backends
from compare_q.backends.common import machine
from compare_q.backends.worker.engine_process import ENDING
from compare_q.eval.cli import main
from compare_q.eval.common import processes
from tests.support import fake_engine
from tests.support.toy import Ran, save_llama

machine.keep_compiled_kernels_apart()
# Another process needs 5 s to import torch.
os.environ[processes.IN_PROCESS_VARIABLE] = "1"
os.environ[backends.OUTSIDE] = fake_engine.LOCATION
LONGEST = ("test_whole_runs.py", "test_peers.py")
"""Files that start first, in this order; the other files with engines follow, and then the fast
files."""


def pytest_configure() -> None:
    """Give each of several test processes its own share of the cores, and let signals end it.

    A shell starts background processes with SIGINT ignored, ``nohup`` with SIGHUP ignored;
    processes that tests start and end would inherit this.  Without shares, engines in two processes
    wait for each other's threads.
    """
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            continue
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_DFL)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        share = cores[int(worker[2:]) % len(cores) :: count]
        os.sched_setaffinity(0, share)
        torch.set_num_threads(len(share))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no process runs one of them alone at the end."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.name
        number = len(LONGEST)
        if name in LONGEST:
            number = LONGEST.index(name)
        return number, item.get_closest_marker("engine") is None

    files: dict[Path, tuple[int, bool]] = {}
    for item in items:
        files[item.path] = min(files.get(item.path, place(item)), place(item))
    items.sort(key=lambda item: files[item.path])


@pytest.fixture(autouse=True)
def own_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Give each test its own cache instead of the user's, and end its engine processes."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("COMPARE_Q_CACHE", str(folder))
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "1")
    yield folder
    processes.PROCESSES.close()


@pytest.fixture
def compare_q(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process: ``compare_q("-d", file, ...)``."""

    def run(*words: object) -> Ran:
        capfd.readouterr()
        try:
            status = main.main([str(word) for word in words])
        except SystemExit as stop:
            # From argparse.
            status = int(stop.code or 0)
        out, err = capfd.readouterr()
        return Ran(status, out, err)

    return run


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("toy") / "toy-llama")


@pytest.fixture(scope="session")
def quantized(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the toy quantized with a preset of compressed-tensors, made once.

    Call it with a preset and a group size; W4 has groups of 32 by default.
    """
    folder = tmp_path_factory.mktemp("quantized")

    def quantized_toy(preset: str, group_size: int | None = None) -> Path:
        from demo.quantize import quantize

        if group_size is None and preset.startswith("W4"):
            group_size = 32
        checkpoint = folder / f"{preset}-{group_size}"
        if not checkpoint.exists():
            # Compiling the packing of FP4 takes 20 s.
            with torch.compiler.set_stance("force_eager"):
                quantize(toy_model, preset, checkpoint, group_size=group_size)
        return checkpoint

    return quantized_toy


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 1,000 ASCII characters, that is 1,000 toy tokens."""
    letters = np.random.default_rng(0).choice(list("abcdefgh \n"), 1000)
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(letters))
    return file


@pytest.fixture
def write_specs(
    tmp_path: Path, toy_model: Path, toy_text: Path
) -> Callable[..., tuple[Path, Path]]:
    """Write a data spec and a list of model specs.

    The data are the toy text in windows of 100 tokens every 100, changed by ``data``; ``...``
    removes a key.  Without ``models``: one of the fake engine.
    """

    def write(models: list[dict[str, Any]] | None = None, **data: Any) -> tuple[Path, Path]:
        spec: dict[str, Any] = {
            "tokenizer_dir": str(toy_model),
            "dataset": "text",
            "path": str(toy_text),
            "eval_len": 100,
            "eval_stride": 100,
        }
        for key, value in data.items():
            if value is ...:
                spec.pop(key, None)
            else:
                spec[key] = value
        if models is None:
            model = {"load_fn": "fake", "label": "fake uniform", "model_dir": "none"}
            models = [{**model, "engine": {"vocab_size": 500}}]
        data_file = tmp_path / "data.json"
        models_file = tmp_path / "models.json"
        data_file.write_text(json.dumps(spec))
        models_file.write_text(json.dumps(models))
        return data_file, models_file

    return write
