"""Checkpoints made by hand, whose headers hold any dtype and shape."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

BITS = {
    "I64": 64,
    "F32": 32,
    "I32": 32,
    "BF16": 16,
    "F16": 16,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4": 4,
}
LAYER = "model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"
Entry = tuple[Any, ...]  # dtype, then the shape
Entries = dict[str, Entry]
# The embedding has 40 weights of 32 bits and the head has 40 weights of 16 bits, so that a test can
# distinguish them.
ENDS: Entries = {"model.embed_tokens.weight": ("F32", 10, 4), "lm_head.weight": ("BF16", 10, 4)}


def safetensors_bytes(entries: Entries, values: dict[str, bytes] | None = None) -> bytes:
    """Return the bytes of a safetensors file with any dtype of the format.

    Tensors that are not in ``values`` are zeros.
    """
    described = {}
    body = b""
    for name, (dtype, *shape) in entries.items():
        data = (values or {}).get(name, bytes(math.prod(shape) * BITS[dtype] // 8))
        described[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    raw = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def finish_gguf(writer: Any, *, tensors: bool = True) -> None:
    """Write the file of a ``gguf.GGUFWriter``, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if tensors:
        writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(
    folder: Path,
    entries: Entries,
    config: dict[str, Any] | None = None,
    values: dict[str, bytes] | None = None,
) -> Path:
    """Write a folder with config.json and one safetensors file.

    Tensors that are not in ``values`` are zeros.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(entries, values))
    return folder
