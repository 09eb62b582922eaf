"""The ``engine`` object of a ``llamacpp`` spec, and the parameters of llama.cpp that it becomes."""

from __future__ import annotations

import ctypes
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BATCH = 512
"""Tokens of a batch: llama.cpp's own default for the physical one."""

Positive = Annotated[int, Field(gt=0)]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]


class LlamacppOptions(BaseModel):
    """The parameters of llama.cpp that change what runs; those that a spec leaves out are llama.cpp's defaults."""

    model_config = ConfigDict(extra="forbid")

    n_gpu_layers: Annotated[int, Field(ge=-1)] = -1
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    main_gpu: Annotated[int, Field(ge=0)] = 0
    tensor_split: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1, max_length=16)] | None = None
    n_batch: Positive = BATCH
    n_ubatch: Positive = BATCH
    n_threads: Positive | None = None
    flash_attn: bool | None = None
    use_extra_bufts: bool | None = None
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"


def model_parameters(library: Any, options: LlamacppOptions, *, repacks: bool) -> Any:
    """``llama_model_params`` of the module ``llama_cpp``; ``repacks``: whether ggml may repack the weights."""
    parameters = library.llama_model_default_params()
    parameters.n_gpu_layers, parameters.main_gpu = options.n_gpu_layers, options.main_gpu
    parameters.split_mode = getattr(library, f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}")
    if split := options.tensor_split:
        parameters.tensor_split = (ctypes.c_float * max(library.llama_max_devices(), 16))(*split)
    parameters.use_extra_bufts = repacks
    return parameters


def context_parameters(library: Any, options: LlamacppOptions, *, max_tokens: int, threads: int) -> Any:
    """``llama_context_params`` of the module ``llama_cpp`` for windows of at most ``max_tokens`` tokens."""
    from gguf import GGMLQuantizationType as Types  # llama-cpp-python 0.3.36 has no name for bf16

    parameters = library.llama_context_default_params()
    parameters.n_ctx = max_tokens
    parameters.n_batch, parameters.n_ubatch = options.n_batch, options.n_ubatch
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.type_k, parameters.type_v = (Types[name.upper()].value for name in (options.type_k, options.type_v))
    if options.flash_attn is not None:
        parameters.flash_attn_type = int(options.flash_attn)
    return parameters
