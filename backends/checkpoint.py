"""A checkpoint on disk: where it is, what identifies it, and how many bits it stores.  No engine, no torch.

Storage follows one convention for every engine that reads safetensors, and it reads the checkpoint's own headers, so
that neither a decompressed layer (which would read as 16 bits) nor a packed int32 one (32 bits) can mislead it:

- layer bpw = stored bits of the weight matrices outside the embedding and the head, with their scales, zero points,
  group indices, codebooks and global scales, over the number of weights they encode;
- not counted: norms, biases, router gates, activation and KV-cache scales, and the tensors of vision and audio towers;
- head bpw likewise; a tied head has the embedding's;
- VRAM = layer and head bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import InputError, Storage

DTYPES = {
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64",
    "F64",
}  # fmt: skip
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


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header; ``start`` is the absolute offset of its bytes in ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json; InputError if it is missing or no JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: missing; model_dir must be a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: must hold a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (multimodal configs nest it)."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def vocab_size(config: dict[str, Any]) -> int | None:
    """Rows of the head, as the config states them."""
    size = text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def stated_context(config: dict[str, Any]) -> int | None:
    """The config's own maximum of positions, rope scaling left aside; None if it does not say."""
    text = text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    length = next((text[name] for name in names if text.get(name)), None)
    return length if isinstance(length, int) else None


def context_length(config: dict[str, Any]) -> int | None:
    """Longest sequence the config allows, rope scaling included; None if it does not say.

    llama3 and longrope state the scaled length, and so does Gemma 3; yarn may state either.
    """
    length, rope = stated_context(config), rope_scaling(config)
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if length is None or not factor:
        return length
    if rope_type(config) == "yarn" and original:
        return max(length, int(original * factor))
    stated_scaled = str(text_config(config).get("model_type")).startswith("gemma3")
    if rope_type(config) in ("linear", "dynamic") and not stated_scaled:
        return int(length * factor)
    return length


def rope_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """The config's rope scaling under either of its names; empty if there is none."""
    text = text_config(config)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    return rope if isinstance(rope, dict) else {}


def rope_type(config: dict[str, Any]) -> str | None:
    """The kind of rope scaling: "yarn", "llama3", "longrope", ...; None if there is none."""
    rope = rope_scaling(config)
    kind = rope.get("rope_type", rope.get("type"))
    return kind if isinstance(kind, str) else None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index, else all that belong to the HF format."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: not a safetensors index: {error!r}") from None
        if missing:
            raise InputError(f"{folder / missing[0]}: named in {index.name} but missing; download the model again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    # Mistral's repositories hold the same weights twice, as model*.safetensors and as consolidated*.safetensors.
    return [file for file in files if file.name.startswith("model")] or files


def header_bytes(file: Path) -> bytes:
    """The JSON header of a safetensors file, as stored."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            return stream.read(length)
    except (OSError, ValueError, struct.error) as error:
        raise InputError(f"{file}: not a readable safetensors file: {error}") from None


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensor name -> header entry of one safetensors file; reads only the header."""
    raw = header_bytes(file)
    tensors = {}
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + len(raw) + begin, end - begin)
                if 8 + len(raw) + end > file.stat().st_size:
                    raise ValueError(f"cut off before the end of {name}")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{file}: not a readable safetensors file: {error!r}") from None
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, Tensor]:
    """The headers of several files as one; a later file replaces an earlier one's tensors."""
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


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


def stamp(folder: Path, override_tensors: Sequence[Path] = ()) -> str:
    """Hex digest that changes when the model's files do: configs, code, headers, sizes and times of weights.

    Engines take more than sampling defaults from generation_config.json: tokens that Gemma 4 must never score, say.
    Tokenizer, README and other files are left out: editing them must not recompute anything.
    """
    digest = hashlib.sha256()
    patterns = ("config.json", "generation_config.json", "*quant*.json", "params.json", "*.py")
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for file in [*weight_files(folder), *override_tensors]:
        header, stat = header_bytes(file), file.stat()
        digest.update(f"\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode() + header)
    return digest.hexdigest()
