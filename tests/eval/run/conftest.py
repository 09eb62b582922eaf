"""Fixtures of the tests on references: the command line, a stub engine, a model and a noisy copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from tests.support import stub_engine
from tests.support.comparisons import N_WINDOWS, Measured, Models, result_of, stub
from tests.support.toy import Ran


@pytest.fixture
def measured(
    compare_q: Callable[..., Ran], write_specs: Callable[..., tuple[Path, Path]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Measured]:  # fmt: skip
    """Run models with flags, by default on 3 windows of the toy text; ``data`` replaces keys of the data spec."""
    monkeypatch.setitem(backends.ENGINES, "stub", stub_engine.LOCATION)

    def run(models: Models, *flags: object, **data: Any) -> Measured:
        files = write_specs(list(models), **{"max_rows": N_WINDOWS, **data})
        file, folder = tmp_path / "results.json", tmp_path / "tokens"
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
