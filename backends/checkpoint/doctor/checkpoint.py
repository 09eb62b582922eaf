"""A checkpoint as the doctor looks at it (config, headers, tensors by module), and what it finds: one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from compare_q.backends.checkpoint import formats
from compare_q.backends.checkpoint.config import CheckpointConfig, ConfigHints, config_hints
from compare_q.backends.checkpoint.files import Tensor, read_headers, weight_files
from compare_q.backends.checkpoint.formats import Parts, is_quantized, main_part
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, read_object
from compare_q.backends.layers.names import Role, by_module, role_of

Severity = Literal["wrong", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "warning", "note")
"""``wrong``: a number or an answer would be wrong; ``warning``: it may be; ``note``: good to know."""


@dataclass(frozen=True)
class Finding:
    """One finding.

    ``where``: a file, and the first tensor or layer that it is about; ``what``: what is wrong there; ``cure``: what to
    do; ``more``: how many others are like it.
    """

    severity: Severity
    where: str
    what: str
    cure: str
    more: int = 0

    def __str__(self) -> str:
        others = f" (and {self.more:,} more like it)" if self.more else ""
        return f"{self.severity}: {self.where}: {self.what}{others}; {self.cure}"


def one_finding(severity: Severity, places: Sequence[str], what: str, cure: str) -> list[Finding]:
    """One finding for all places that have the same fault, which names the first; none where there is no place."""
    return [Finding(severity, places[0], what, cure, len(places) - 1)] if places else []


def by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, the worst first, else in their order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder; InputError, when it is first asked for, for what of it cannot be read."""

    folder: Path

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its config.json."""
        return CheckpointConfig.read(self.folder)

    @cached_property
    def hints(self) -> ConfigHints:
        """What its config says of stored weights that headers do not."""
        return config_hints(self.config)

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
        return read_headers(self.files)

    @cached_property
    def modules(self) -> dict[str, Parts]:
        """Module path -> its tensors."""
        return by_module(self.tensors)

    @cached_property
    def matrices(self) -> dict[str, Parts]:
        """The modules whose weights have two dimensions or more."""
        mains = {module: main_part(parts) for module, parts in self.modules.items()}
        return {
            module: self.modules[module]
            for module, main in mains.items()
            if main and len(self.modules[module][main].shape) > 1
        }

    @cached_property
    def quantized(self) -> dict[str, Parts]:
        """The modules whose weights are stored in less than 16 bits."""
        return {module: parts for module, parts in self.matrices.items() if is_quantized(parts)}

    @property
    def quantization(self) -> dict[str, Any]:
        """Its quantization config; empty if it states none."""
        return self.config.quantization

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        stated = self.config.text.get("tie_word_embeddings") is True
        return stated and not any(self.role(module) == "head" for module in self.modules)

    def role(self, module: str) -> Role:
        """What a module is: "layer", "head", "embedding", or "" where its bits are not counted."""
        return role_of(module, self.config.hidden_layers)

    def described(self, module: str) -> str:
        """What the matrix of a module is stored in, in words."""
        return formats.described(self.modules[module], self.hints)

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

    def where_modules(self, modules: Iterator[str] | Sequence[str]) -> list[str]:
        """The same of several modules."""
        return [self.where_module(module) for module in modules]
