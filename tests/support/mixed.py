"""Quantized checkpoints of which some modules are the unquantized model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import torch


def save_mixed(quantized: Path, source: Path, folder: Path, modules: Collection[str]) -> Path:
    """Write a copy of a checkpoint of compressed-tensors whose ``ignore`` names these modules.

    ``source``: the model that was quantized, with the weights of these modules.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(quantized, folder)
    original = load_file(source / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(quantized / "model.safetensors").items():
        if name.rpartition(".")[0] not in modules:
            tensors[name] = tensor
    for module in modules:
        tensors[f"{module}.weight"] = original[f"{module}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += modules
    (folder / "config.json").write_text(json.dumps(config))
    return folder
