"""Private names of vLLM that compare_q uses, and that vLLM may change without notice.

They are looked up where vLLM is imported: in the worker before a model loads, in each rank when the
hooks are set.  The worker does not import the modules of the ranks: an import that touches CUDA
would prevent forks.  A missing name ends the model's row.  Signatures of hooked methods are checked
by ``hooks.check_signature``.

Class names that ``loaded_layers.py`` compares are not listed here: it reports unknown classes as
unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import installed_vllm

MOST_MISSING_NAMES = 3
"""Number of missing names in a message."""


class PrivateName(NamedTuple):
    """A name below a module of vLLM."""

    module: str  # below vllm: "v1.engine.core_client"
    name: str  # "SyncMPClient.call_utility"
    used_for: str
    on: str = ""  # "cpu" or "gpu": the platform where it is used; "": both


QUEUEING = "holding the scheduler while windows are queued"
EMULATION = "vLLM's own emulation of NVFP4"
INSPECTION = "inspecting a model without a further process"
WORKER_NAMES = (
    # driver.py, vllm_scores.py
    PrivateName("v1.engine.core_client", "SyncMPClient.call_utility", QUEUEING),
    PrivateName("v1.engine.core", "EngineCore.pause_scheduler", QUEUEING),
    PrivateName("v1.engine.core", "EngineCore.resume_scheduler", QUEUEING),
    PrivateName(
        "v1.engine.llm_engine", "LLMEngine.abort_request", "ending requests that are not needed"
    ),
    PrivateName("logprobs", "FlatLogprobs.start_indices", "vLLM's own scores in the probe"),
    # vllm_engine.py, extension.py
    PrivateName(
        "engine.arg_utils",
        "EngineArgs.worker_extension_cls",
        "running compare_q in vLLM's workers",
    ),
    PrivateName("model_executor.models.registry", "ModelRegistry.register_model", INSPECTION),
    PrivateName("model_executor.kernels.linear", "_POSSIBLE_NVFP4_KERNELS", EMULATION, on="cpu"),
    PrivateName("model_executor.kernels.linear", "EmulationNvFp4LinearKernel", EMULATION, on="cpu"),
)
"""Names that the worker uses, and the ranks before a model loads."""

V2_ROWS = "whose rows a step has (V2 runner)"
SHARDS = "what each rank scores"
ENTRIES = "vocabulary entries of one rank"
RANK_NAMES = (
    # hooks.py, decode_steps.py
    PrivateName("v1.worker.gpu.input_batch", "InputBatch.idx_mapping_np", V2_ROWS, on="gpu"),
    PrivateName("v1.worker.gpu.input_batch", "InputBatch.query_start_loc_np", V2_ROWS, on="gpu"),
    PrivateName(
        "v1.worker.gpu.input_batch",
        "InputBatch.num_computed_prefill_tokens_np",
        V2_ROWS,
        on="gpu",
    ),
    PrivateName("model_executor.layers.mamba.abstract", "MambaBase", "models that keep a state"),
    # extension.py
    PrivateName("v1.sample.sampler", "batched_count_greater_than", "a faster probe"),
    PrivateName("config", "set_current_vllm_config", "asking attention what it can read"),
    PrivateName("distributed", "get_tp_group", SHARDS),
    PrivateName("distributed", "get_pp_group", SHARDS),
    # logits.py
    PrivateName(
        "model_executor.layers.logits_processor",
        "LogitsProcessor._gather_logits",
        "logits of one rank",
    ),
    PrivateName(
        "model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices.org_vocab_start_index",
        ENTRIES,
    ),
)
"""Names that each rank uses while it scores."""


def check_names(names: Sequence[PrivateName]) -> None:
    """Raise RuntimeError if the installed vLLM lacks one of the names that its platform needs."""
    platform = "gpu"
    if installed_vllm.is_cpu_build():
        platform = "cpu"
    lacking = missing(names, platform)
    if not lacking:
        return
    described = [f"{name.name!r} in {name.module} ({name.used_for})" for name in lacking]
    raise RuntimeError(lacking_text(described))


def check_attributes(owner: Any, names: Sequence[str], used_for: str) -> None:
    """Raise RuntimeError if an object of vLLM lacks an attribute."""
    place = type(owner).__name__
    described = []
    for name in names:
        if not hasattr(owner, name):
            described.append(f"{name!r} in {place} ({used_for})")
    if described:
        raise RuntimeError(lacking_text(described))


def missing(names: Sequence[PrivateName], platform: str) -> list[PrivateName]:
    """Return the names that do not exist, of those that are used on a platform."""
    used = [name for name in names if name.on in ("", platform)]
    return [name for name in used if not exists(name)]


def exists(name: PrivateName) -> bool:
    """Return True if the installed vLLM has a name; its module is imported.

    ImportError if the module needs something that cannot be imported.
    """
    module = f"vllm.{name.module}"
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Another missing module is a fault of the installation, not a change of vLLM.
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return False
        raise
    for step in name.name.split("."):
        # A dataclass has no attribute for a field without a default.
        fields = getattr(owner, "__dataclass_fields__", {})
        if not hasattr(owner, step) and step not in fields:
            return False
        owner = getattr(owner, step, None)
    return True


def lacking_text(described: Sequence[str]) -> str:
    """Return the message about missing names: the version, the first names, and the fix."""
    package = "vllm"
    version = "of an unknown version"
    vllm = installed_vllm.installed()
    if vllm is not None:
        package = vllm[0]
        version = str(vllm[1])
    first = ", ".join(described[:MOST_MISSING_NAMES])
    more = ""
    if len(described) > MOST_MISSING_NAMES:
        more = f" and {len(described) - MOST_MISSING_NAMES} more"
    fix = installed_vllm.fix_of(package)
    return f"{package} {version} lacks {first}{more}, which compare_q needs: {fix}"
