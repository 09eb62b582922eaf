"""The models and the rows of the GPU table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HIDDEN = 768
WINDOW, STRIDE = 2048, 512
CHECKPOINTS: dict[str, tuple[str, int | None]] = {
    "w4a16-g128": ("W4A16", 128),
    "w4a16-g32": ("W4A16", 32),
    "w8a16-g128": ("W8A16", 128),
    "w8a8": ("W8A8", None),
    "fp8": ("FP8_DYNAMIC", None),
    "fp8-block": ("FP8_BLOCK", None),
    "nvfp4a16": ("NVFP4A16", None),
    "nvfp4": ("NVFP4", None),
    "mxfp4a16": ("MXFP4A16", None),
}
"""Name -> preset and group size of ``demo/quantize.py``."""
GPTQ = "gptq-w4a16-g128"
"""A checkpoint of llm-compressor's GPTQ (``demo/h200/gptq.py``); it is made beforehand, since it takes minutes."""
GGUF_WRITTEN = ("BF16", "F16")
GGUF_QUANTIZED = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
GGUF_WITH_IMATRIX = ("Q2_K", "Q3_K_M", "Q4_K_M")
EXL3_BITS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
KINDS = {"W4A16": "INT", "W8A16": "INT", "W8A8": "INT", "NVFP4": "FP4", "MXFP4": "FP4"}
"""First word of a label -> number format of the weights."""
VLLM = {"enforce_eager": True}
FP8_CACHE = {"kv_cache_dtype": "fp8"}


@dataclass(frozen=True)
class Row:
    """One row of the table: ``model`` is a name in the folder of models."""

    label: str
    load_fn: str
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    noise_floor: bool = False

    @property
    def group(self) -> str:
        """Name of the rows that share a colour in the plot: the kind of number, or else the first word of the label."""
        first = self.label.split()[0]
        return KINDS.get(first, first)


def table_rows() -> list[Row]:
    """Every row, the reference first."""
    return [
        Row("bf16 vLLM", "vllm_score", "bf16", VLLM),
        Row("bf16 Transformers", "transformers_auto_bf16", "bf16"),
        Row("bf16 ExLlamaV3", "exllamav3", "bf16"),
        Row("bf16 llama.cpp", "llamacpp", "BF16.gguf"),
        Row("bf16 vLLM, noise", "vllm_score", "bf16", {**VLLM, "noise": "bf16"}, noise_floor=True),
        Row("bf16 Transformers, noise", "transformers_auto_bf16", "bf16", {"noise": "bf16"}, noise_floor=True),
        Row("bf16 vLLM, FP8 KV", "vllm_score", "bf16", {**VLLM, **FP8_CACHE}),
        Row("W4A16 g128", "vllm_score", "w4a16-g128", VLLM),
        Row("W4A16 g128, FP8 KV", "vllm_score", "w4a16-g128", {**VLLM, **FP8_CACHE}),
        Row("W4A16 g128 GPTQ", "vllm_score", GPTQ, VLLM),
        Row("W4A16 g32", "vllm_score", "w4a16-g32", VLLM),
        Row("W8A16 g128", "vllm_score", "w8a16-g128", VLLM),
        Row("W8A8 int8", "vllm_score", "w8a8", VLLM),
        Row("FP8 dynamic", "vllm_score", "fp8", VLLM),
        Row("FP8 block", "vllm_score", "fp8-block", VLLM),
        Row("NVFP4 W4A16", "vllm_score", "nvfp4a16", VLLM),
        Row("NVFP4 W4A4 as run", "vllm_score", "nvfp4", VLLM),
        Row("NVFP4 W4A4 emulated", "vllm_score", "nvfp4", {**VLLM, "linear_backend": "emulation"}),
        Row("MXFP4 W4A16", "vllm_score", "mxfp4a16", VLLM),
        *(Row(f"EXL3 {bits} bpw", "exllamav3", f"exl3-{bits}") for bits in EXL3_BITS),
        *(Row(f"GGUF {name}", "llamacpp", f"{name}.gguf") for name in (*GGUF_QUANTIZED, "F16")),
        *(Row(f"GGUF {name} imatrix", "llamacpp", f"{name}-imatrix.gguf") for name in GGUF_WITH_IMATRIX),
    ]
