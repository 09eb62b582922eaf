"""A model as a Hugging Face folder of safetensors: config, headers, bits per weight.

Only ``HuggingFaceFolder.fetch``, ``cached`` and ``would_fetch`` use the hub.  No engine and no
torch is imported.

Bits per weight are read from the checkpoint's headers, by one convention for every engine (in an
engine's memory, a decompressed layer would have 16 bits, and a layer packed in int32 would have
32):

- layer bpw: the stored bits of all weight matrices outside embedding and head, including everything
  that decoding needs (scales, zero points, group indices, permutations, codebooks, global scales),
  divided by the number of weights.  Padding that a format adds counts as bits, but not as weights.
- Experts count.  Router gates, norms, biases, scales of activations and KV caches, and descriptions
  do not.  Neither do parts outside the text model (other modalities and their projectors), a
  classifier's head, and multi-token-prediction modules (``mtp*``, and layers beyond the config's
  ``num_hidden_layers``): these do not run in scoring.
- head bpw: the same for the head; a tied head has the embedding's.
- VRAM: layer and head bits.
- If a tensor has an unknown format, or a matrix outside all layers has the vocabulary's size but
  not the name of a head or an embedding, the size is n/a and the note names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import hub
from ..base import ModelFacts, ModelFiles, PlannedModel, ServingFacts, Storage, TensorBytes
from ..common.errors import InputError
from ..common.json_files import exists, read_object
from ..common.message_text import printable
from ..hub import SILENT, Watch
from ..layers.module_names import (
    IN_LAYER,
    Role,
    by_module,
    is_left_by_quantizer,
    outside_text_model,
    role_of,
)
from . import formats, safetensors_files
from .checkpoint_config import CheckpointConfig
from .formats import Parts, UnsizedError, main_part, stored_weights
from .safetensors_files import Tensor, read_headers, weight_files

PADDED_TO = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Multiples to which the rows of heads and embeddings are padded."""
Modules = dict[str, Parts]


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder.  Properties raise InputError for files that cannot be read."""

    folder: Path
    override_tensors: tuple[Path, ...] = ()  # files whose tensors replace those of the same name

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its config.json."""
        return CheckpointConfig.read(self.folder)

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files that engines load."""
        files = weight_files(self.folder)
        if not files:
            raise InputError(safetensors_files.no_weights(self.folder))
        return files

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> header entry."""
        return read_headers(weight_files(self.folder)) | read_headers(self.override_tensors)

    @cached_property
    def modules(self) -> dict[str, Parts]:
        """Module path -> its tensors."""
        return by_module(self.tensors)

    @cached_property
    def matrices(self) -> dict[str, Parts]:
        """The modules whose weights have two dimensions or more."""
        matrices = {}
        for module, parts in self.modules.items():
            if main_part(parts) is not None:
                matrices[module] = parts
        return matrices

    @cached_property
    def quantized(self) -> dict[str, Parts]:
        """The modules whose weights are stored in less than 16 bits."""
        quantized = {}
        for module, parts in self.matrices.items():
            if formats.is_quantized(parts):
                quantized[module] = parts
        return quantized

    @property
    def is_tied(self) -> bool:
        """True if the head is the embedding."""
        if self.config.text.get("tie_word_embeddings") is not True:
            return False
        return not any(self.role(module) == "head" for module in self.modules)

    def role(self, module: str) -> Role:
        """The role of a module: "layer", "head", "embedding", or "" if its bits do not count."""
        return role_of(module, self.config.hidden_layers)

    def described(self, module: str) -> str:
        """The format of a module with a main part: "int4 g128", or "unknown (why)"."""
        parts = self.modules[module]
        main = main_part(parts)
        assert main is not None
        words = formats.layout_of(parts, self.config).words
        if words:
            return words
        return f"unknown (format {main} of dtype {parts[main].dtype})"

    def placed(self) -> list[TensorBytes]:
        """The stored tensors, and where their bytes are."""
        return [
            TensorBytes(name, tensor.file, tensor.start, tensor.nbytes, tensor.shape)
            for name, tensor in self.tensors.items()
        ]

    def json(self, name: str) -> dict[str, Any]:
        """One of its JSON files; empty if there is none."""
        file = self.folder / name
        if not exists(file):
            return {}
        return read_object(file, strict=False)

    def where(self, name: str) -> str:
        """File and name of a tensor or a module, for messages."""
        tensor = self.tensors.get(name)
        if tensor is None:
            tensor = next(iter(self.modules[name].values()))
        return f"{tensor.file.name}: {name}"


def storage_of(folder: Path, override_tensors: Sequence[Path] = ()) -> Storage:
    """Return the stored size of the checkpoint; unknown formats give ``None`` and a note."""
    checkpoint = Checkpoint(folder, tuple(override_tensors))
    config = checkpoint.config
    by_role = modules_by_role(checkpoint)
    name = unexplained(by_role, config)
    if name:
        return Storage(note=f"{name}: {formats.UNEXPLAINED}")
    n_bytes = {}
    for name, parts in checkpoint.modules.items():
        n_bytes[name] = sum(tensor.nbytes for tensor in parts.values())
    for name in outside_text_model(n_bytes, config.hidden_layers):
        by_role[checkpoint.role(name)].pop(name, None)
    try:
        layer_bits, layer_weights = total(by_role["layer"], config, "layer")
        head_bits, head_weights = total(by_role["head"], config, "head")
        # A tied head is not stored; it has the bits of the embedding.
        if not head_bits and not head_weights:
            head_bits, head_weights = total(by_role["embedding"], config, "embedding")
    except UnsizedError as error:
        return Storage(note=str(error))
    if not layer_weights or not head_weights:
        return Storage(note=f"{folder}: no weight matrices found in its safetensors headers")
    return Storage(layer_bits / layer_weights, head_bits / head_weights, layer_bits + head_bits)


def modules_by_role(checkpoint: Checkpoint) -> dict[Role, Modules]:
    """Return role -> modules, without what quantizers left next to layers of a known format."""
    by_role: dict[Role, Modules] = {"layer": {}, "head": {}, "embedding": {}, "": {}}
    for name, parts in checkpoint.modules.items():
        if not is_quantizer_of_known_layer(name, checkpoint):
            by_role[checkpoint.role(name)][name] = parts
    return by_role


def is_quantizer_of_known_layer(module: str, checkpoint: Checkpoint) -> bool:
    """Return True for left-over numbers of a quantizer that its layer's format does not need."""
    layer = checkpoint.modules.get(module.rpartition(".")[0], {})
    if not is_left_by_quantizer(module) or main_part(layer) is None:
        return False
    return bool(formats.layout_of(layer, checkpoint.config).words)


def total(modules: Modules, config: CheckpointConfig, role: Role) -> tuple[int, int]:
    """Return (bits, weights) of all ``modules``, which have one role.

    UnsizedError for the first module of unknown size.
    """
    total_bits = 0
    total_weights = 0
    for name, parts in modules.items():
        bits, weights = stored_weights(name, parts, role, config)
        total_bits += bits
        total_weights += weights
    return total_bits, total_weights


def unexplained(by_role: Mapping[Role, Modules], config: CheckpointConfig) -> str:
    """Return the first matrix outside all layers that has the size of a head, but not the name."""
    rows = config.vocab_size or 0
    columns = config.hidden_size or 0
    sizes = set()
    for multiple in PADDED_TO:
        padded_rows = -(-rows // multiple) * multiple
        sizes.add(padded_rows * columns)
    for role in ("head", "embedding"):
        for name, parts in by_role[role].items():
            with suppress(UnsizedError):
                sizes.add(stored_weights(name, parts, role, config)[1])
    sizes.discard(0)
    for name, parts in by_role["layer"].items():
        if IN_LAYER.search(name):
            continue
        with suppress(UnsizedError):
            _, weights = stored_weights(name, parts, "head", config)
            if weights in sizes:
                return name
    return ""


class HuggingFaceFolder(ModelFiles):
    """A model in a folder, on disk or on the hub.

    Engines whose options change the stored model derive a class.
    """

    @property
    def other_config(self) -> str:
        """Why the loaded model differs from the one in config.json; empty if it does not."""
        return ""

    @property
    def is_remote(self) -> bool:
        return hub.is_hub_id(self.planned.model_dir)

    @cached_property
    def folder(self) -> Path:
        """The folder of the model on this machine; InputError if there is none."""
        return hub.local_folder(self.planned.model_dir)

    @cached_property
    def config(self) -> CheckpointConfig:
        """The folder's config.json; InputError if it is missing or damaged."""
        return CheckpointConfig.read(self.folder)

    def fetch(self, watch: Watch = SILENT) -> PlannedModel:
        folder = hub.resolve(self.planned.model_dir, self.planned.revision, watch=watch)
        return self.planned.updated(model_dir=str(folder), revision=None)

    def cached(self) -> PlannedModel | None:
        with suppress(InputError):
            folder = hub.resolve(self.planned.model_dir, self.planned.revision, download=False)
            return self.planned.updated(model_dir=str(folder), revision=None)
        return None

    def would_fetch(self) -> str:
        return hub.would_fetch(self.planned.model_dir, self.planned.revision)

    def facts(self) -> ModelFacts:
        config = self.config
        options = self.planned.options
        if not weight_files(self.folder):
            raise InputError(f"model_dir: {safetensors_files.no_weights(self.folder)}")
        code = config.foreign_code
        if options.get("trust_remote_code") and code:
            raise InputError(
                f"model_dir: {self.folder}: auto_map names code of another repository, "
                f"{printable(code)}, which may change; copy its .py files into the folder and "
                "leave its name out"
            )
        dtype: str | None = str(options.get("dtype", "auto"))
        if dtype == "auto":
            dtype = config.dtype
        return ModelFacts(config.vocab_size, config.context, self.folder, dtype=dtype)

    def stamp(self) -> str:
        return safetensors_files.stamp(self.folder, self.planned.override_tensors)

    def content(self) -> str:
        return safetensors_files.stamp(self.folder, self.planned.override_tensors, times=False)

    def weight_files(self) -> tuple[Path, ...]:
        return (*weight_files(self.folder), *self.planned.override_tensors)

    @cached_property
    def headers(self) -> Checkpoint:
        """The headers of the weight files, read once."""
        return Checkpoint(self.folder, self.planned.override_tensors)

    def placed(self) -> list[TensorBytes]:
        return self.headers.placed()

    def storage(self) -> Storage:
        return storage_of(self.folder, self.planned.override_tensors)

    def serving(self) -> ServingFacts:
        if self.other_config:
            return ServingFacts()
        return self.config.serving
