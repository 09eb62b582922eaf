"""The toy model as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from demo.smollm2 import GGUF_TO_HF
from tests.support.toy import TOY_CONTEXT, TOY_VOCAB


def toy_tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The toy model's weights in float32 under GGUF's names; q and k rows interleave the halves of each rotary pair."""
    names = {hf: name for name, hf in GGUF_TO_HF.items()}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight").removeprefix("model.layers.")
        layer, _, kind = module.partition(".")
        weight = tensor.float()
        if kind.endswith(("q_proj", "k_proj")):
            weight = weight.reshape(2, 2, 16, 64).transpose(1, 2).reshape(64, 64)
        key = names.get(module) or f"blk.{layer}.{names[kind]}"
        found[f"{key}.weight"] = weight.numpy()
    return found


@pytest.fixture(scope="session")
def toy_gguf(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model as a float32 GGUF without a tokenizer."""
    file = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(TOY_CONTEXT)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(TOY_VOCAB)
    writer.add_tokenizer_model("none")
    for name, weight in toy_tensors(toy_model).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
