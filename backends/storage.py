"""How many bits a safetensors checkpoint stores, by one convention for every engine.  No engine, no torch.

It reads the checkpoint's own headers, so that neither a decompressed layer (which would read as 16 bits) nor a packed
int32 one (32 bits) can mislead it:

- layer bpw = stored bits of the weight matrices outside the embedding and the head, with their scales, zero points,
  group indices, codebooks and global scales, over the number of weights they encode;
- not counted: norms, biases, router gates, activation and KV-cache scales, and the tensors of vision and audio towers;
- head bpw likewise; a tied head has the embedding's;
- VRAM = layer and head bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.base import Storage
from backends.checkpoint import DTYPES, Tensor, config_of, read_headers, weight_files

WEIGHT_PARTS = {"weight", "weight_packed", "qweight"}
SCALE_PARTS = {
    "weight_scale", "weight_zero_point", "weight_global_scale", "weight_g_idx", "weight_scale_2", "weight_scale_inv",
    "qzeros", "scales", "g_idx",
}  # fmt: skip
NOT_WEIGHTS = {
    "bias", "weight_shape", "input_scale", "input_global_scale", "k_scale", "v_scale", "q_scale", "A_log", "inv_freq",
}  # fmt: skip
"""Parts that may have two dimensions and are no stored weights."""
EXPERT_PARTS = {
    "_scale_inv": "weight_scale_inv", "_scales": "weight_scale", "_scale": "weight_scale", "_blocks": "weight_packed",
}  # fmt: skip
"""Suffixes of the tensors that hold all experts of a layer at once, and which part of a module they are."""
EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in"}
OTHER_EMBEDDINGS = {"wpe", "embed_positions", "position_embeddings", "embed_tokens_per_layer"}
HEADS = {"lm_head", "embed_out"}
ROUTERS = {"gate", "router", "shared_expert_gate"}
OTHER_TOWERS = {
    "visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "mm_projector",
    "audio_tower", "audio_model", "embed_vision", "embed_audio",
}  # fmt: skip


def _integers(tensor: Tensor) -> tuple[int, ...]:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return struct.unpack(f"<{tensor.numel}{'i' if tensor.dtype == 'I32' else 'q'}", stream.read(tensor.nbytes))


def encoded_weights(module: dict[str, Tensor], quantization: dict[str, Any]) -> int | None:
    """How many weights the parts of one module encode; None if the format is not one that this file reads."""
    if shape := module.get("weight_shape"):  # compressed-tensors, pack-quantized
        return math.prod(_integers(shape))
    if packed := module.get("weight_packed"):  # compressed-tensors, fp4: two weights a byte
        return packed.numel * 2 if packed.dtype == "U8" else None
    if packed := module.get("qweight"):  # GPTQ, AWQ: int32 words full of `bits`-bit weights
        bits = quantization.get("bits", quantization.get("w_bit"))
        return packed.numel * 32 // bits if isinstance(bits, int) and packed.dtype == "I32" else None
    weight = module["weight"]
    if weight.dtype == "U8":  # modelopt's NVFP4 has fp8 scales beside it; bitsandbytes and others do not
        scale = module.get("weight_scale")
        return weight.numel * 2 if scale is not None and scale.dtype == "F8_E4M3" else None
    return weight.numel


def _modules(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Module path -> part name -> tensor, of the modules that hold a weight matrix."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part in WEIGHT_PARTS or part in SCALE_PARTS or part == "weight_shape":
            modules.setdefault(path, {})[part] = tensor
        elif path.endswith("experts") and len(tensor.shape) > 2:  # all experts in one tensor, no ".weight"
            suffix = next((suffix for suffix in EXPERT_PARTS if name.endswith(suffix)), "")
            modules.setdefault(name.removesuffix(suffix), {})[EXPERT_PARTS.get(suffix, "weight")] = tensor
    return {
        path: parts for path, parts in modules.items()
        if any(len(parts[part].shape) > 1 for part in WEIGHT_PARTS & parts.keys())
    }  # fmt: skip


def _unsized(tensors: dict[str, Tensor], modules: dict[str, dict[str, Tensor]]) -> str | None:
    """The first matrix of a layer or head that is in no module and not known to be something else; None: all are."""
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        counted = any(tensor is known for known in modules.get(path, modules.get(name, {})).values())
        if len(tensor.shape) < 2 or counted or part in NOT_WEIGHTS or part.endswith("_bias"):
            continue
        if _role(path) in ("layer", "head") and not any(name.startswith(f"{known}_") for known in modules):
            return name
    return None


def _role(path: str) -> str:
    """Where a module's bits belong: "layer", "head", "embedding", or "" for nowhere."""
    steps = path.split(".")
    if OTHER_TOWERS & set(steps) or ROUTERS & set(steps[-2:]) or steps[-1] in OTHER_EMBEDDINGS:
        return ""
    if steps[-1] in HEADS or path in ("output", "model.output"):
        return "head"
    return "embedding" if steps[-1] in EMBEDDINGS else "layer"


def storage_of(folder: Path, override_tensors: Sequence[Path] = ()) -> Storage:
    """Storage of the checkpoint in ``folder`` by the convention above; unknown formats give ``None`` and a note."""
    config = config_of(folder)
    quantization = config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    tensors = read_headers([*weight_files(folder), *override_tensors])
    bits = {"layer": 0, "head": 0, "embedding": 0, "": 0}
    numel = dict(bits)
    modules = _modules(tensors)
    if strange := _unsized(tensors, modules):
        return Storage(note=f"{strange}: stored in a format that compare_q cannot size")
    for path, parts in modules.items():
        role = _role(path)
        weights = encoded_weights(parts, quantization)
        unknown = [tensor.dtype for tensor in parts.values() if tensor.dtype not in DTYPES]
        if role and (weights is None or unknown):
            return Storage(note=f"{path}: stored in a format that compare_q cannot size ({', '.join(sorted(parts))})")
        bits[role] += sum(part.nbytes * 8 for name, part in parts.items() if name != "weight_shape")
        numel[role] += weights or 0
    head = "head" if numel["head"] else "embedding"
    if not numel["layer"] or not numel[head]:
        return Storage(note=f"{folder}: no weight matrices found in its safetensors headers")
    return Storage(bits["layer"] / numel["layer"], bits[head] / numel[head], bits["layer"] + bits[head])
