"""A checkpoint as the doctor looks at it: its config, its headers, its tensors by module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.checkpoint.config import CheckpointConfig
from backends.checkpoint.files import Tensor, read_headers, weight_files
from backends.checkpoint.stored_bits import role_of
from backends.common.errors import InputError
from backends.common.json_files import exists, read_object

Parts = dict[str, Tensor]
"""Part name ("weight", "weight_scale", ...) -> tensor, of one module."""
MAIN = ("weight_packed", "qweight", "weight", "q_weight", "trellis", "_weight_qdata", "bitmask", "B")
"""Names of the parts that hold weights; a module has the first of them that it has.

``bitmask`` says where compressed-tensors' sparse weights lie; ``B`` is Marlin's, with scales called ``s`` beside it.
"""
STACKED = re.compile(r"(.*experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w[123]))(?:_(\w+))?")
"""All experts of a layer in one tensor: ``experts.down_proj``, ``experts.down_proj_scales``."""
STACKED_PARTS = {None: "weight", "blocks": "weight_packed", "scales": "weight_scale"}
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder; InputError, when it is first asked for, for what of it cannot be read."""

    folder: Path

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its config.json."""
        return CheckpointConfig.read(self.folder)

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files that engines load."""
        found = weight_files(self.folder)
        if not found:
            raise InputError(f"{self.folder}: no .safetensors files; compare_q loads no pickled weights")
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> header entry."""
        return read_headers(self.files)

    @cached_property
    def modules(self) -> dict[str, Parts]:
        """Module path -> its tensors."""
        found: dict[str, Parts] = {}
        for name, tensor in self.tensors.items():
            module, part = module_and_part(name)
            found.setdefault(module, {})[part] = tensor
        return found

    @property
    def matrices(self) -> Iterator[tuple[str, Parts]]:
        """The modules whose weights have two dimensions or more."""
        for module, parts in self.modules.items():
            main = main_of(parts)
            if main and len(parts[main].shape) > 1:
                yield module, parts

    @cached_property
    def quantized(self) -> dict[str, Parts]:
        """The modules whose weights are stored in less than 16 bits."""
        return {module: parts for module, parts in self.matrices if is_quantized(parts)}

    @property
    def quantization(self) -> dict[str, Any]:
        """Its quantization config; empty if it states none."""
        return self.config.quantization

    def role(self, module: str) -> str:
        """What a module is: "layer", "head", "embedding", or "" where its bits are not counted."""
        return role_of(module, self.config.hidden_layers)

    def json(self, name: str) -> dict[str, Any]:
        """One of its JSON files; empty if there is none."""
        file = self.folder / name
        return read_object(file, strict=False) if exists(file) else {}

    def where(self, name: str) -> str:
        """File and name of a tensor, as findings say it."""
        return f"{self.tensors[name].file.name}: {name}"

    def where_module(self, module: str) -> str:
        """File and name of a module, as findings say it."""
        return f"{next(iter(self.modules[module].values())).file.name}: {module}"


def module_and_part(name: str) -> tuple[str, str]:
    """A tensor's module, and which part of the module it is."""
    if stacked := STACKED.fullmatch(name):
        return stacked[1], STACKED_PARTS.get(stacked[2], f"weight_{stacked[2]}")
    module, below, part = name.partition(".weight.")
    if below:  # bitsandbytes: "weight.absmax"
        return module, f"weight.{part}"
    module, _, part = name.rpartition(".")
    return module, part


def main_of(parts: Parts) -> str | None:
    """The part of a module that holds its weights; None if it has none."""
    return next((part for part in MAIN if part in parts and (part != "B" or "s" in parts)), None)


def is_quantized(parts: Parts) -> bool:
    """Whether a module's weights are stored in less than 16 bits."""
    main = main_of(parts)
    return main is not None and (main not in ("weight",) or parts[main].dtype not in FLOATS)
