"""What an engine process of vLLM prepares for its forks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compare_q.backends.vllm import installed_vllm, vllm_engine


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
