"""A Hugging Face folder on this machine: its config, its headers, its tensors by module.  No engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.checkpoint.files import Tensor, read_headers, weight_files
from compare_q.backends.checkpoint.formats import Parts, is_quantized, layout_of, main_part
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, read_object
from compare_q.backends.layers.names import Role, by_module, role_of


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder; InputError, when it is first asked for, for what of it cannot be read.

    ``override_tensors``: files whose tensors replace those of the same name.
    """

    folder: Path
    override_tensors: tuple[Path, ...] = ()

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its config.json."""
        return CheckpointConfig.read(self.folder)

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files that engines load."""
        files = weight_files(self.folder)
        if not files:
            raise InputError(f"{self.folder}: no .safetensors files; compare_q loads no pickled weights")
        return files

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> header entry."""
        return read_headers([*weight_files(self.folder), *self.override_tensors])

    @cached_property
    def modules(self) -> dict[str, Parts]:
        """Module path -> its tensors."""
        return by_module(self.tensors)

    @cached_property
    def matrices(self) -> dict[str, Parts]:
        """The modules whose weights have two dimensions or more."""
        return {
            module: parts
            for module, parts in self.modules.items()
            if (main := main_part(parts)) and len(parts[main].shape) > 1
        }

    @cached_property
    def quantized(self) -> dict[str, Parts]:
        """The modules whose weights are stored in less than 16 bits."""
        return {module: parts for module, parts in self.matrices.items() if is_quantized(parts)}

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        stated = self.config.text.get("tie_word_embeddings") is True
        return stated and not any(self.role(module) == "head" for module in self.modules)

    def role(self, module: str) -> Role:
        """What a module is: "layer", "head", "embedding", or "" where its bits are not counted."""
        return role_of(module, self.config.hidden_layers)

    def described(self, module: str) -> str:
        """What a module with a main part stores: "int4 g128"; "unknown (why)" where that is not known."""
        parts = self.modules[module]
        main = main_part(parts) or ""
        return layout_of(parts, self.config).words or f"unknown (format {main} of dtype {parts[main].dtype})"

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
