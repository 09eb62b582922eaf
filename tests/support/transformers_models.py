"""Models for Transformers: the engine with one loaded, and changed copies of a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from compare_q.backends.hf.transformers_engine import TransformersEngine
from tests.support.toy import planned


def loaded(folder: Path, load_fn: str = "transformers", **options: Any) -> TransformersEngine:
    """Return the model in ``folder``, loaded with these ``engine`` options."""
    engine = TransformersEngine(planned("toy", load_fn, str(folder), 100, options))
    engine.load()
    return engine


def changed(
    source: Path, folder: Path, quantization: dict[str, Any], **tensors: torch.Tensor | None
) -> Path:
    """Write a copy of a model with this ``quantization_config``, unless it is empty.

    Tensors are replaced, added or (None) omitted.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    contents = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            contents.pop(name, None)
        else:
            contents[name] = tensor
    save_file(contents, folder / "model.safetensors", {"format": "pt"})
    return folder
