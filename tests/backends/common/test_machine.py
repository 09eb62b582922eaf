"""Versions and hardware without engines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from backends.common import machine


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    machine.gpus.cache_clear()
    yield
    machine.gpus.cache_clear()


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "NVIDIA H200, 580.159.04\nNVIDIA H200, 580.159.04\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, output, ""))
    monkeypatch.setattr(machine, "installed_versions", lambda _: {"torch": "2.13.0"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = {"gpus": ["NVIDIA H200", "NVIDIA H200"], "driver": "580.159.04"}
    assert machine.hardware() == two
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machine.hardware() == {**two, "CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setattr(machine, "installed_versions", lambda _: {"torch": "2.13.0+cpu"})
    assert machine.hardware() == {"cpu": machine.cpu()}
    both = {"cpu": machine.cpu(), **two, "CUDA_VISIBLE_DEVICES": "1"}
    assert machine.hardware(torch=False) == both  # llama.cpp, say, may use the GPU beside a CPU build of torch


def test_variables_that_change_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(machine.SETTINGS)]:
        monkeypatch.delenv(name)
    assert machine.settings() == {}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert machine.settings() == {"NVIDIA_TF32_OVERRIDE": "0"}


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


def test_commit_of_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.delenv("COMPARE_Q_COMMIT", raising=False)
    assert machine.commit() is None
    monkeypatch.setenv("COMPARE_Q_COMMIT", "abc")
    assert machine.commit() == "abc"


@pytest.mark.parametrize(("edited", "gold"), [("", "abc"), (" M eval/cli/main.py", "abc+changes")])
def test_commit_says_whether_files_were_edited(monkeypatch: pytest.MonkeyPatch, edited: str, gold: str) -> None:
    def git(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "abc\n" if "rev-parse" in command else edited, "")

    monkeypatch.setattr(subprocess, "run", git)
    assert machine.commit() == gold
