"""Toys as GGUF files, written with the package gguf as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from demo.gguf_writer import add_shape, permute
from tests.support.checkpoints import finish_gguf

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Architecture in GGUF -> the beginning of the names of its classes in Transformers."""
ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def save_gguf(
    source: Path,
    file: Path,
    weight_type: str = "Q8_0",
    *,
    architecture: str = "llama",
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    types: Mapping[str, str] | None = None,
) -> Path:
    """Write a folder's model as GGUF.

    ``weight_type``: of its matrices.  ``types``: other types, by the names in GGUF.  ``fields``:
    more numbers of the architecture.  ``tensors``: more tensors, by the names in GGUF.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("toy")
    add_shape(writer, config)
    for name, value in (fields or {}).items():
        writer.add_float32(f"{architecture}.{name}", value)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    heads = {}
    if architecture == "llama":
        heads["q_proj"] = config["num_attention_heads"]
        heads["k_proj"] = config["num_key_value_heads"]
    contents = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.float()
        module = name.split(".")[-2]
        if module in heads:
            weight = permute(weight, heads[module])
        contents[names.get_name(name, (".weight", ".bias"))] = weight
    contents |= tensors or {}
    for name, weight in contents.items():
        stored = gguf.GGMLQuantizationType[(types or {}).get(name, weight_type)]
        if weight.ndim == 1:
            stored = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weight.numpy(), stored), raw_dtype=stored)
    finish_gguf(writer)
    return file
