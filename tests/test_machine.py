"""Versions and hardware without engines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from eval import machine


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    machine.gpus.cache_clear()
    yield
    machine.gpus.cache_clear()


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "NVIDIA H200, 580.159.04\nNVIDIA H200, 580.159.04\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, output, ""))
    assert machine.hardware() == {"gpus": ["NVIDIA H200", "NVIDIA H200"], "driver": "580.159.04"}


def test_no_nvidia_smi_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert machine.hardware() == {"cpu": machine.cpu()}
    assert machine.cpu()


def test_versions_name_what_is_installed() -> None:
    found = machine.versions()
    assert {"python", "torch", "transformers"} <= found.keys()
    assert all(found.values())
