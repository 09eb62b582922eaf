"""A gate that is ended or killed: its exit status, and what it leaves in the cache."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compare_q import backends
from compare_q.eval.common.cache import Cache
from tests.support import ROOT, fake_engine
from tests.support.processes import processes_of, users_environment, wait_until
from tests.support.texts import tokenize
from tests.support.toy import FAKE, Specs

pytestmark = pytest.mark.engine


def entries(cache: Path) -> list[Path]:
    """Return the entries of scores and reference stores in a cache."""
    folders = [*(cache / "scores").iterdir(), *(cache / "references").iterdir()]
    return [folder for folder in folders if folder.is_dir()]


def start_gate(err: Path, *words: object, engines: str = "") -> subprocess.Popen[bytes]:
    """Start a gate of two variants in another process, which prints into ``err``.

    ``engines``: replaces the fake engine.
    """
    command = [sys.executable, ROOT / "eval" / "compare_q.py", "gate", "-r", "4", *words]
    environment = users_environment()
    if engines:
        environment[backends.OUTSIDE] = engines
    command += ["--variant", "old:", "--variant", "new:engine.shift=0.5"]
    with err.open("w") as stream:
        return subprocess.Popen(
            list(map(str, command)), stderr=stream, stdout=stream, env=environment
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_gate_leaves_nothing(
    tmp_path: Path, write_specs: Specs, own_cache: Path, number: signal.Signals
) -> None:
    """After SIGKILL the next run or gate that opens the cache deletes what the gate has left."""
    data, models = write_specs(
        [{**FAKE, "label": "fake", "engine": {"vocab_size": 400, "seconds": 0.2}}]
    )
    tokenize(data, own_cache)
    err = tmp_path / "err"
    process = start_gate(err, "-m", models, "-d", data, "-o", tmp_path / "gate.json")
    wait_until(lambda: "scoring old | roundings 1" in err.read_text() or process.poll() is not None)
    entries_of_gate = entries(own_cache)
    process.send_signal(number)
    status = process.wait(timeout=300)
    wait_until(lambda: not processes_of(own_cache))
    assert entries_of_gate
    assert not (tmp_path / "gate.json").exists()
    if number == signal.SIGTERM:
        assert status == 128 + number, err.read_text()
    else:
        assert entries(own_cache)
        Cache(own_cache).check_writable()
    assert entries(own_cache) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_gate_deletes_outputs_of_modules(
    tmp_path: Path, write_specs: Specs, own_cache: Path, number: signal.Signals
) -> None:
    """After SIGKILL the next run deletes them."""
    data, models = write_specs([{**FAKE, "label": "fake"}])
    tokenize(data, own_cache)
    err = tmp_path / "err"
    process = start_gate(err, "-m", models, "-d", data, "--where", engines=fake_engine.ENDLESS)

    def files_of_outputs() -> list[Path]:
        files = own_cache.glob(".compare_q.*")
        return [file for file in files if file.read_bytes() == fake_engine.OUTPUTS]

    wait_until(lambda: bool(files_of_outputs()) or process.poll() is not None)
    assert files_of_outputs(), err.read_text()
    process.send_signal(number)
    process.wait(timeout=300)
    wait_until(lambda: not processes_of(own_cache))
    if number == signal.SIGKILL:
        Cache(own_cache).check_writable()
    assert list(own_cache.glob(".compare_q.*")) == []
    assert entries(own_cache) == []
