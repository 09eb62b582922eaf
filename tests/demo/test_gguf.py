"""GGUF files from Hugging Face folders are the same model in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from demo import gguf_writer
from tests.support import toy
from tests.support.llama_cpp import needs_llama_cpp

VOCAB = 49_152


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the demo's vocabulary and grouped heads."""
    return toy.save_llama(
        tmp_path_factory.mktemp("small") / "small-llama",
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
        rope_theta=5000.0,
        rms_norm_eps=1e-3,
    )


def llama_logprobs(file: Path, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities [L, V] by llama.cpp on the CPU, with a float32 KV cache."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(file),
        n_ctx=len(tokens),
        logits_all=True,
        n_gpu_layers=0,
        n_threads=1,
        verbose=False,
        type_k=0,
        type_v=0,
    )
    model.eval(tokens)
    scores = torch.log_softmax(torch.tensor(model.scores[: len(tokens)]), -1)
    model.close()
    return scores


@needs_llama_cpp
@pytest.mark.engine
def test_llama_cpp_computes_the_same_model(small_llama: Path, tmp_path: Path) -> None:
    """With float32 weights and KV cache, and grouped heads, log-probabilities equal Transformers'
    up to rounding.
    """
    from transformers import AutoModelForCausalLM

    gguf_writer.write_gguf(small_llama, tmp_path / "f.gguf", "F32")
    tokens = np.random.default_rng(0).integers(0, VOCAB, 100).tolist()
    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    assert expected.std() > 0.5
    assert torch.allclose(llama_logprobs(tmp_path / "f.gguf", tokens), expected, rtol=0, atol=2e-2)
