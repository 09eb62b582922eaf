"""A GGUF file in Transformers, which dequantizes its weights while loading.

Transformers renames the tensors, makes a config from the header's fields, and then computes in
floats.  llama.cpp multiplies the stored blocks instead, and rounds activations.

Transformers 5.19 ignores tensors and fields that it does not know, without a warning: biases of a
Llama, the factors of Llama 3's rope, a rope scaling, the size of Qwen3's heads.  The model then
computes another function than llama.cpp's.  Therefore only known architectures are loaded, and
only if every tensor and every field of the architecture is known here.  After loading, every
tensor is compared with the file, and the config with the header.

``GgufCheckpoint`` gives the tensors the names that a folder of safetensors would have, so that the
rest of the engine sees an ordinary checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import PlannedModel
from ..checkpoint import formats, model_function
from ..checkpoint.checkpoint_config import CheckpointConfig
from ..checkpoint.folder import Checkpoint
from ..checkpoint.gguf import BLOCK_PREFIX, GgufFiles, GgufModel, GgufTensor, read_model
from ..checkpoint.safetensors_files import Tensor
from ..common.errors import InputError, ModelError
from ..common.json_files import is_folder
from ..common.message_text import and_more, printable
from ..common.packages import check_installed
from ..layers.module_names import bare, module_and_part
from ..layers.schemes import Declared, Scheme
from .verify import are_wrong

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIX = ".gguf"
INSTALL = "pip install 'gguf>=0.17'"
ADVICE = "name a folder of safetensors, or score it in llama.cpp (@llamacpp)"
NOTE = (
    "a GGUF file, whose weights Transformers dequantizes; llama.cpp also rounds activations, which "
    "these numbers do not contain"
)
OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Name in GGUF -> name in Transformers, outside the decoder layers."""
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""The same in a decoder layer, after ``blk.N.`` and ``model.layers.N.``."""
MORE_LAYER_TENSORS: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "qwen2": {
        "attn_q.bias": "self_attn.q_proj.bias",
        "attn_k.bias": "self_attn.k_proj.bias",
        "attn_v.bias": "self_attn.v_proj.bias",
    },
    "qwen3": {
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
    },
}
"""Architecture -> its other tensors of a decoder layer.

Toys of these architectures give the same logits in Transformers and in llama.cpp.
"""
FIELDS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
"""Fields of an architecture that Transformers reads, or whose values are checked here."""
QWEN3_HEAD_DIM = 128
"""Size of a head that Transformers 5.19 assumes for every Qwen3; it does not read the field."""
FLOATS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
"""ggml's name of a type -> its name in headers of safetensors."""
QUANTIZED = {
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_nl", "iq4_xs"),
    *("tq1_0", "tq2_0", "mxfp4"),
}
"""ggml's types that the package gguf dequantizes."""
ROWS = 8
"""Number of rows of a matrix that are compared, spread over all of them."""


def is_gguf_file(model: PlannedModel) -> bool:
    """Return True if a model is a GGUF file, here or on the hub."""
    name = model.model_dir
    return name.lower().endswith(SUFFIX) and not is_folder(Path(name))


def name_in_transformers(architecture: str, name: str) -> str | None:
    """Return the name of a GGUF tensor in the loaded model; None if it is not known here."""
    block = BLOCK_PREFIX.match(name)
    if block is None:
        return OUTER_TENSORS.get(name)
    name_in_layer = name.removeprefix(block[0])
    tensors = {**LAYER_TENSORS, **MORE_LAYER_TENSORS.get(architecture, {})}
    if name_in_layer not in tensors:
        return None
    return f"model.layers.{block[1]}.{tensors[name_in_layer]}"


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A GGUF file under Transformers' names; ``folder`` is the path of the file.

    A tied head is listed too: it is a module of its own, with the bits of the embedding.
    """

    @cached_property
    def model(self) -> GgufModel:
        """The header."""
        return read_model(self.folder)

    @cached_property
    def config(self) -> CheckpointConfig:
        """The sizes in the header, as config.json would state them."""
        facts = model_function.of_gguf(self.model)
        facts["vocab_size"] = self.model.facts.vocab_size
        return CheckpointConfig(facts)

    @cached_property
    def files(self) -> list[Path]:
        return list(self.model.files)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> entry; tensors without a known name are left out, which ``check`` refuses."""
        file = self.model.files[0]
        architecture = self.model.architecture
        tensors = {}
        for tensor in self.model.tensors:
            name = name_in_transformers(architecture, tensor.name)
            if name is not None:
                tensors[name] = as_entry(tensor, file)
        embedding = tensors.get(OUTER_TENSORS["token_embd.weight"])
        if embedding is not None:
            tensors.setdefault(OUTER_TENSORS["output.weight"], embedding)
        return tensors

    @cached_property
    def schemes(self) -> Declared:
        """The formats of the quantized modules."""
        by_name = {}
        for module in self.quantized:
            by_name[bare(module)] = Scheme(self.described(module))
        return Declared(exact=by_name)


def as_entry(tensor: GgufTensor, file: Path) -> Tensor:
    """Return a tensor as an entry of a safetensors header, with rows before columns."""
    dtype = FLOATS.get(tensor.type_name, f"{formats.GGML}{tensor.type_name}")
    return Tensor(file, dtype, tensor.shape[::-1], tensor.start, tensor.nbytes or 0)


class GgufFile(GgufFiles):
    """A GGUF file that Transformers loads, with the attributes of a folder."""

    @property
    def folder(self) -> Path:
        """The path of the file, for messages."""
        return Path(self.planned.model_dir)

    @property
    def config(self) -> CheckpointConfig:
        """The sizes in the header, as config.json would state them."""
        return self.headers.config

    @cached_property
    def headers(self) -> GgufCheckpoint:
        """The tensors under Transformers' names."""
        return GgufCheckpoint(self.folder)


# Before loading.


def check(model: PlannedModel) -> None:
    """InputError for a GGUF file, or options for it, with which Transformers would compute wrong.

    A file that is still on the hub is checked when it is loaded.
    """
    check_installed("gguf", INSTALL)
    if model.load_fn == "transformers_mm":
        raise InputError(f"load_fn: transformers_mm does not load a GGUF file; {ADVICE}")
    for option in ("streaming", "quantization_config", "trust_remote_code"):
        if model.options.get(option):
            raise InputError(f"engine.{option}: is not for a GGUF file; leave it out")
    file = GgufFile(model)
    if not file.is_remote:
        check_content(file.model)


def check_content(model: GgufModel) -> None:
    """InputError with the first reason why Transformers would compute another function."""
    file = printable(model.files[0])
    if len(model.files) > 1:
        raise InputError(
            f"model_dir: {file}: is one of {len(model.files)} shards, and Transformers loads one "
            "file; merge them with llama-gguf-split --merge"
        )
    for fault in faults(model):
        raise InputError(f"model_dir: {file}: {fault}; {ADVICE}")


def faults(model: GgufModel) -> Iterator[str]:
    """Yield what Transformers does not read, or reads wrongly, in a header."""
    architecture = model.architecture
    if architecture not in MORE_LAYER_TENSORS:
        known = ", ".join(MORE_LAYER_TENSORS)
        yield (
            f"has the architecture {printable(architecture)}, whose GGUF files compare_q does not "
            f"load in Transformers; known are {known}"
        )
        return
    unknown = unknown_fields(model, architecture)
    if unknown:
        field = f"{printable(unknown[0])}{and_more(unknown)}"
        yield f"has the field {field}, which Transformers ignores"
    for tensor in model.tensors:
        name = printable(tensor.name)
        if name_in_transformers(architecture, tensor.name) is None:
            yield f"has the tensor {name}, which Transformers ignores"
        if tensor.type_name not in FLOATS and tensor.type_name not in QUANTIZED:
            yield f"{name}: Transformers does not dequantize {tensor.type_name}"
    yield from faults_of_heads(model, architecture)


def unknown_fields(model: GgufModel, architecture: str) -> list[str]:
    """Return the fields of the architecture that are not known here."""
    prefix = f"{architecture}."
    unknown = []
    for name in model.fields:
        if name.startswith(prefix) and name.removeprefix(prefix) not in FIELDS:
            unknown.append(name)
    return unknown


def faults_of_heads(model: GgufModel, architecture: str) -> Iterator[str]:
    """Yield how the heads of attention differ from those that Transformers would compute."""
    facts = model_function.heads_of(model)
    stored = facts.get("head_dim")
    rotary = facts.get("rotary dimensions")
    values = model.field("{}.attention.value_length", int) or stored
    if stored is None or "num_key_value_heads" not in facts:
        yield "does not state one number and one size of heads for all layers"
        return
    sizes = {stored, rotary, values}
    sizes.add(head_dim_in_transformers(model, architecture, facts["num_attention_heads"]))
    if len(sizes) > 1:
        yield (
            f"has heads of {stored} numbers ({rotary} rotary, {values} of values), and "
            "Transformers would compute with another size"
        )


def head_dim_in_transformers(model: GgufModel, architecture: str, heads: int) -> int:
    """Return the size of a head in the config that Transformers 5.19 makes of a header."""
    if architecture == "qwen3":
        return QWEN3_HEAD_DIM
    hidden = model.field("{}.embedding_length", int) or 0
    size = hidden // heads
    if architecture == "llama":
        size = model.field("{}.rope.dimension_count", int) or size
    return size


# Loading.


def loading_arguments(file: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained``, which is called with the folder of the file."""
    return {**arguments, "dtype": dtype_of(arguments["dtype"]), "gguf_file": file.name}


def dtype_of(dtype: str) -> str:
    """Return the dtype of the dequantized weights.

    A file does not state one: "auto" is float32, in which llama.cpp adds its products.
    """
    if dtype == "auto":
        return "float32"
    return dtype


# After loading.


def check_loaded(checkpoint: GgufCheckpoint, model: Any) -> None:
    """ModelError if a loaded model has other weights, or computes otherwise, than the file states.

    ``model``: an object of Transformers with all its weights in memory.
    """
    differences = other_function(checkpoint.model, model.config.to_dict())
    if differences:
        raise ModelError(
            f"{checkpoint.folder}: Transformers computes with {differences[0]}"
            f"{and_more(differences)}; {ADVICE}"
        )
    loaded = model.state_dict()
    stored = checkpoint.tensors
    different = sorted(loaded.keys() ^ stored.keys())
    if different:
        raise ModelError(
            f"{checkpoint.folder}: {different[0]}{and_more(different)} is only in the file or only "
            f"in the model that Transformers made of it; {ADVICE}"
        )
    for name, entry in stored.items():
        if loaded[name].is_meta:
            raise ModelError(
                f"{checkpoint.folder}: {name} did not fit into the device's memory, and weights "
                "outside it are not compared with the file; use a device with more memory"
            )
        if not is_as_stored(checkpoint, name, entry, loaded[name]):
            raise ModelError(
                f"{checkpoint.folder}: {name}: Transformers loaded other weights than the file "
                f"holds; {ADVICE}"
            )


def is_as_stored(checkpoint: GgufCheckpoint, name: str, entry: Tensor, loaded: Any) -> bool:
    """Return True if some rows of a loaded tensor are those of the file, in their places."""
    import torch

    if tuple(loaded.shape) != entry.shape:
        return False
    if len(entry.shape) == 1:
        entry = entry._replace(shape=(1, *entry.shape))
        loaded = loaded[None]
    count = entry.shape[0]
    rows = np.unique(np.linspace(0, count - 1, ROWS).round().astype(np.intp))
    places = loaded_rows(checkpoint.model, name, count)[rows]
    stored = torch.from_numpy(rows_of(entry, rows)).to(loaded.device)
    found = loaded[torch.from_numpy(places).to(loaded.device)].float()
    return not bool(are_wrong(stored, found, loaded.dtype).any())


def loaded_rows(model: GgufModel, name: str, count: int) -> NDArray[np.intp]:
    """Return the place in the loaded matrix of each stored row.

    llama.cpp's converter interleaves the two halves of each head in q and k of a Llama.
    """
    rows = np.arange(count)
    facts = model_function.heads_of(model)
    module = module_and_part(name)[0].rpartition(".")[2]
    heads = None
    if model.architecture == "llama":
        by_module = {
            "q_proj": facts["num_attention_heads"],
            "k_proj": facts["num_key_value_heads"],
        }
        heads = by_module.get(module)
    if heads is None:
        return rows
    return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def rows_of(entry: Tensor, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return rows of a stored matrix as float32, dequantized by the package gguf."""
    if entry.dtype in formats.FLOAT_DTYPES:
        return formats.as_float32(formats.stored(entry)[rows], entry.dtype)
    import gguf

    ggml_type = gguf.GGMLQuantizationType[entry.dtype.removeprefix(formats.GGML).upper()]
    count = entry.shape[0]
    blocks = np.memmap(entry.file, np.uint8, "r", entry.start, (count, entry.nbytes // count))
    numbers: NDArray[np.float32] = gguf.quants.dequantize(blocks[rows], ggml_type)
    return numbers


def other_function(model: GgufModel, config: Mapping[str, Any]) -> list[str]:
    """Return the values of a loaded config that differ from the header's: rope, eps, heads, ..."""
    facts = model_function.of_config(config, hints=False)
    loaded = model_function.as_header(facts, defaults=True)
    return list(model_function.differing(loaded, model_function.of_gguf(model)))
