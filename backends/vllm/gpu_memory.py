"""The memory of a GPU that a model needs in vLLM, so that others may be loaded beside it.

The number is an upper bound, since a model that lacks memory would be scored with smaller products,
which round otherwise.
"""

from __future__ import annotations

from ..base import PlannedModel
from ..checkpoint.checkpoint_config import CheckpointConfig
from ..checkpoint.folder import HuggingFaceFolder
from ..common import machine
from ..layers.schemes import declared
from .kv_cache import BATCHED_TOKENS_GPU, cache_arguments
from .llm_arguments import ranks

LOADED_SIZE = 1.15
"""Bytes on the GPU for each byte of the files: vLLM packs quantized weights anew for kernels."""
BYTES = 2
"""Bytes of a number in bf16 or float16."""
BLACKWELL = 10.0
"""Compute capability."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
"""Keys of a mixture's config."""
PROCESS_BYTES = 4 << 30
"""CUDA's context, workspaces of kernels, logits of a chunk, and what torch keeps free."""


def bytes_needed(model: PlannedModel, files: HuggingFaceFolder) -> int | None:
    """Return the memory that is enough to load and score a model in prefill on one GPU.

    None if it is not known, and if other loads could change the model: vLLM compiles it, and would
    use the code of a model of the same shape, if it waited; or it chooses kernels by their times.
    """
    options = model.options
    is_eager = options.get("enforce_eager", True) is True
    is_float32 = options.get("dtype") in ("float", "float32")
    if model.decode is not None or not is_eager or is_float32 or ranks(options) != 1:
        return None
    if may_time_kernels(files.config):
        return None
    cache: int | None = cache_arguments(model, files.config.raw, cpu=False).get(
        "kv_cache_memory_bytes"
    )
    facts = files.serving()
    vocab_size = facts.vocab_size
    hidden_size = files.config.hidden_size
    step_numbers = facts.step_numbers
    # A note says that the loaded weights have another size than the files.
    if cache is None or files.storage().note:
        return None
    if vocab_size is None or hidden_size is None or step_numbers is None:
        return None
    n_tokens: int = options.get("max_num_batched_tokens", BATCHED_TOKENS_GPU)
    head_of_reference = BYTES * vocab_size * hidden_size
    step = BYTES * step_numbers * n_tokens
    file_bytes = sum(file.stat().st_size for file in files.weight_files())
    weights = int(LOADED_SIZE * file_bytes)
    return weights + cache + head_of_reference + step + PROCESS_BYTES


def may_time_kernels(config: CheckpointConfig) -> bool:
    """Return True if vLLM may choose kernels by their times while it loads (FlashInfer).

    It does so for experts, and since Blackwell for products of quantized activations.
    """
    if any(config.text.get(key) for key in EXPERTS):
        return True
    if not config.quantization:
        return False
    schemes = declared(config.quantization).schemes()
    quantizes_activations = not schemes or any(scheme.activations for scheme in schemes)
    return quantizes_activations and not 0 < machine.compute_capability() < BLACKWELL
