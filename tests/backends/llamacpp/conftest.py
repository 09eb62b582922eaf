"""The toy model as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from demo.gguf_writer import gguf_tensors
from tests.support.checkpoints import finish_gguf
from tests.support.toy import TOY_CONTEXT, TOY_VOCAB


def toy_tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The toy model's weights in float32 under GGUF's names."""
    return dict(gguf_tensors(folder, json.loads((folder / "config.json").read_text())))


@pytest.fixture(scope="session")
def toy_gguf(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model as a float32 GGUF without a tokenizer."""
    return write_gguf(toy_model, tmp_path_factory.mktemp("gguf") / "toy.gguf")


def write_gguf(model: Path, file: Path, *, vocab_size: int = TOY_VOCAB, context: int = TOY_CONTEXT) -> Path:
    """A model of the toy's shape as a float32 GGUF without a tokenizer."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("none")
    for name, weight in toy_tensors(model).items():
        writer.add_tensor(name, weight)
    finish_gguf(writer)
    return file
