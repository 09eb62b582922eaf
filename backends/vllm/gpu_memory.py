"""The memory of a GPU that a model needs in vLLM, so that others may be loaded beside it.

The number is an upper bound, since a model that lacks memory would be scored with smaller products,
which round otherwise.
"""

from __future__ import annotations

from ..base import PlannedModel
from ..checkpoint.folder import HuggingFaceFolder
from .kv_cache import BATCHED_TOKENS_GPU, cache_arguments
from .llm_arguments import ranks

LOADED_SIZE = 1.15
"""Bytes on the GPU for each byte of the files: vLLM packs quantized weights anew for kernels."""
BYTES = 2
"""Bytes of a number in bf16 or float16."""
PROCESS_BYTES = 4 << 30
"""CUDA's context, workspaces of kernels, logits of a chunk, and what torch keeps free."""


def bytes_needed(model: PlannedModel, files: HuggingFaceFolder) -> int | None:
    """Return the memory that is enough to load and score a model in prefill on one GPU.

    None if it is not known, and if vLLM compiles the model: a model could then use code that one of
    the same shape has compiled, if it waited.
    """
    options = model.options
    is_eager = options.get("enforce_eager", True) is True
    is_float32 = options.get("dtype") in ("float", "float32")
    if model.decode is not None or not is_eager or is_float32 or ranks(options) != 1:
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
