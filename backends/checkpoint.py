"""A checkpoint on disk: where it is, what identifies it, what its headers say.  No engine, no torch."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import InputError


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


def strays(folder: Path) -> list[Path]:
    """Other safetensors files in the folder: engines that load every one of them would load another model."""
    known = set(weight_files(folder))
    return [file for file in sorted(folder.glob("*.safetensors")) if file not in known]


def quantization(folder: Path) -> dict[str, Any]:
    """The checkpoint's quantization config, wherever it is kept; empty if it is not quantized."""
    config = text_config(config_of(folder)).get("quantization_config")
    if isinstance(config, dict) and config:
        return config
    legacy = folder / "hf_quant_config.json"  # ModelOpt's, up to 0.29
    if not legacy.is_file():
        return {}
    try:
        return {"quant_method": "modelopt", **json.loads(legacy.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{legacy}: cannot be read: {error}") from None


def sampled(file: Path) -> bytes:
    """SHA-256 of 64 blocks of 4 KiB, evenly spread over a file: weights that were replaced keep size and header."""
    size, block = file.stat().st_size, 4096
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for part in range(64):
            stream.seek(max(size - block, 0) * part // 63)
            digest.update(stream.read(block))
    return digest.digest()


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


def stamp(folder: Path, override_tensors: Sequence[Path] = (), *, times: bool = True) -> str:
    """Hex digest that changes when the model's files do: configs, code, headers, sizes, times and samples of weights.

    Engines take more than sampling defaults from generation_config.json: tokens that Gemma 4 must never score, say.
    Tokenizer, README and other files are left out: editing them must not recompute anything.  ``times`` off: the same
    for a copy of the folder on another machine.
    """
    digest = hashlib.sha256()
    patterns = ("config.json", "generation_config.json", "*quant*.json", "params.json", "*.py")
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for file in [*weight_files(folder), *override_tensors]:
        header, stat = header_bytes(file), file.stat()
        when = stat.st_mtime_ns if times else ""
        digest.update(f"\0{file.name}\0{stat.st_size}\0{when}\0".encode() + header + sampled(file))
    return digest.hexdigest()
