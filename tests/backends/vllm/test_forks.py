"""What an engine process of vLLM prepares for its forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import ScoreRequest, Window
from compare_q.backends.vllm import installed_vllm, vllm_engine
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.toy import ATOL_LOGPROB


@pytest.mark.engine
def test_forks_find_plugins_loaded_and_tritons_key_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.cache import triton_key
    from vllm import plugins

    monkeypatch.setattr(installed_vllm, "is_cpu_build", lambda: False)
    triton_key.cache_clear()
    vllm_engine.prepare_forks()
    assert plugins.plugins_loaded
    misses = triton_key.cache_info().misses
    triton_key()
    assert triton_key.cache_info().misses == misses == 1


@pytest.mark.engine
def test_a_plugin_that_fails_is_loaded_again_with_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import plugins

    def fail() -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.setattr(plugins, "load_plugins_by_group", lambda group: {"mine": fail})
    vllm_engine.load_plugins()
    with pytest.raises(RuntimeError, match="no such device"):
        plugins.load_general_plugins()


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables as in a fresh process with a vLLM for GPUs; they are restored after the test."""
    monkeypatch.setattr(os, "environ", {"HOME": "/home/user"})
    monkeypatch.setattr(Path, "home", lambda: Path("/home/user"))
    monkeypatch.setattr(installed_vllm, "is_cpu_build", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/user/.triton/cache"),
        ({"TRITON_HOME": "/scratch"}, "/scratch/.triton/cache"),
        ({"TRITON_CACHE_DIR": "/mine", "TRITON_HOME": "/scratch"}, "/mine"),
    ],
)
def test_compiled_models_share_tritons_kernels(
    gpu_build: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    """The folder is Triton's default unless the user has named one."""
    os.environ.update(variables)
    vllm_engine.set_environment(verbose=False)
    assert os.environ["TRITON_CACHE_DIR"] == folder


LOAD_IN_STEPS = """
import atexit, json, os, sys
from compare_q.backends.common.process import WORKER
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as in a worker
os.environ[WORKER] = "1"
import numpy as np
from compare_q.backends.base import ScoreRequest, Window
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.vllm_engine import request_for

def imported_by(step):
    before = set(sys.modules)
    step()
    return sorted(name for name in set(sys.modules) - before if name.startswith("vllm."))

VllmEngine.import_engine(verbose=False)
from vllm.triton_utils import dispatcher
from vllm.v1.engine.core import EngineCore

replaced = []
dispatcher.register_kernels = replaced.append
shutdowns = []
EngineCore.shutdown = lambda core: shutdowns.append(1)
engine = VllmEngine(request_for(sys.argv[1]))
by_step = [imported_by(engine.prepare_load), imported_by(engine.load)]
window = Window.scored_from(0, np.arange(64, dtype=np.int32))
[scores] = engine.score([window], ScoreRequest())
engine.close()
del engine
atexit._run_exitfuncs()
counts = [len(shutdowns), len(replaced)]
json.dump([*by_step, scores.logprob.tolist(), *counts], open(sys.argv[2], "w"))
"""
MOST_IMPORTED_BY_LOADING = 20
"""Modules of vLLM that loading may still import; its other 5,000 are imported before the fork."""


@pytest.mark.engine
@pytest.mark.slow
def test_what_loading_needs_is_imported_before_the_fork(
    toy_engine: VllmEngine, tmp_path: Path
) -> None:
    """Otherwise every row of a table imports it again; the scores are those of any load.

    Loading does not replace the Triton kernels of a vLLM for CPUs again.  A worker ends without
    vLLM's shutdown, which takes longer than the scoring of a small model.
    """
    file = tmp_path / "modules.json"
    command = [sys.executable, "-c", LOAD_IN_STEPS, toy_engine.planned.model_dir, str(file)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    by_preparing, by_loading, logprobs, n_shutdowns, n_replaced = json.loads(file.read_text())
    # vLLM's config of the model.
    assert by_preparing == []
    assert len(by_loading) <= MOST_IMPORTED_BY_LOADING, by_loading
    assert (n_shutdowns, n_replaced) == (0, 0)
    window = Window.scored_from(0, np.arange(64, dtype=np.int32))
    [scores] = toy_engine.score([window], ScoreRequest())
    np.testing.assert_allclose(logprobs, scores.logprob, atol=ATOL_LOGPROB)
