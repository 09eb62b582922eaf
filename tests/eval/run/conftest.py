"""Fixtures of the tests on runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run.gpu_pool import GpuPool
from compare_q.eval.run.run_config import RunConfig
from compare_q.eval.run.workers import Workers
from compare_q.eval.specs import spec_files
from tests.support import stub_engine
from tests.support.comparisons import (
    N_WINDOWS,
    UNIFORM,
    Measured,
    Models,
    result_of,
    stub,
    write_texts,
)
from tests.support.threaded import H200, Told, threaded
from tests.support.toy import Ran
from tests.support.two_runs import Run


@pytest.fixture
def measured(
    compare_q: Callable[..., Ran],
    write_specs: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Measured]:
    """Run models with flags, by default on 3 windows of the toy text.

    ``data`` replaces keys of the data spec.
    """
    monkeypatch.setitem(backends.ENGINES, "stub", stub_engine.LOCATION)

    def run(models: Models, *flags: object, **data: Any) -> Measured:
        files = write_specs(list(models), **{"max_rows": N_WINDOWS, **data})
        file = tmp_path / "results.json"
        folder = tmp_path / "tokens"
        # Files of an earlier run would be read as the outcome of one that fails.
        file.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        ran = compare_q("-d", files[0], "-m", files[1], "-o", file, "--tokens-out", folder, *flags)
        return result_of(ran, file, folder)

    return run


@pytest.fixture(scope="session")
def stub_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_engine.save_stub_model(tmp_path_factory.mktemp("stub") / "stub")


@pytest.fixture(scope="session")
def noisy_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_engine.save_stub_model(tmp_path_factory.mktemp("stub") / "noisy", noise=0.2)


@pytest.fixture
def pair(stub_model: Path, noisy_stub: Path) -> list[dict[str, Any]]:
    """A reference and a model that differs from it, in float32."""
    return [stub(stub_model, "ref", reference=True), stub(noisy_stub, "noisy")]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The jobs of workers in threads."""
    return threaded(monkeypatch)


@pytest.fixture
def make(
    tmp_path: Path, toy_model: Path, own_cache: Path, told: Told
) -> Iterator[Callable[..., Run]]:
    """Return a function that makes a run of models on texts.

    Without names on the text ``prose`` of ``write_texts``.
    """
    files = write_texts(tmp_path, toy_model)
    runs: list[Run] = []

    def made(
        models: Models = UNIFORM,
        *names: str,
        n_windows: int | None = None,
        gpus: int = 1,
        cache: Path = own_cache,
        **keys: Any,
    ) -> Run:
        texts = {name: spec_files.load_data_specs([files[name]])[0] for name in names or ("prose",)}
        pool = GpuPool(H200[:gpus])
        config = RunConfig(Cache(cache), Progress(quiet=True), Workers(gpus=pool), pool, **keys)
        runs.append(Run(config, texts, models, n_windows))
        return runs[-1]

    yield made
    for run in runs:
        run.config.workers.stop()
