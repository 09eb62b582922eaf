"""GGUF files from Hugging Face folders: they have the same tensors, and are the same model in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from demo import gguf_writer
from tests.support import toy
from tests.support.llama_cpp import needs_llama_cpp

VOCAB = 49_152


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with the demo's vocabulary and grouped heads, and rows of 256 weights, which K-quants need."""
    return toy.save_llama(
        tmp_path_factory.mktemp("small") / "small-llama", vocab_size=VOCAB, hidden_size=256, intermediate_size=256,
        num_attention_heads=4, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1,
        rope_theta=5000.0, rms_norm_eps=1e-3,
    )  # fmt: skip


def read(file: Path) -> dict[str, NDArray[np.float32]]:
    """Tensor name -> dequantized array of a GGUF file."""
    return {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(str(file)).tensors}


def llama_logprobs(file: Path, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities [L, V] by llama.cpp on the CPU, with a float32 KV cache."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=len(tokens), logits_all=True, n_gpu_layers=0, n_threads=1, verbose=False, type_k=0, type_v=0
    )
    model.eval(tokens)
    scores = torch.log_softmax(torch.tensor(model.scores[: len(tokens)]), -1)
    model.close()
    return scores


@needs_llama_cpp
@pytest.mark.engine
def test_llama_cpp_computes_the_same_model(small_llama: Path, tmp_path: Path) -> None:
    """With float32 weights and KV cache, and grouped heads, log-probabilities equal Transformers' up to rounding."""
    from transformers import AutoModelForCausalLM

    gguf_writer.write_gguf(small_llama, tmp_path / "f.gguf", "F32")
    tokens = np.random.default_rng(0).integers(0, VOCAB, 100).tolist()
    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    assert expected.std() > 0.5
    assert torch.allclose(llama_logprobs(tmp_path / "f.gguf", tokens), expected, rtol=0, atol=2e-2)


@needs_llama_cpp
@pytest.mark.engine
def test_llama_cpp_quantizes(small_llama: Path, tmp_path: Path) -> None:
    """llama.cpp's Q8_0 equals the gguf package's; a K-quant has its type and small errors; a bad file is one error."""
    from demo.llama_quantize import llama_quantize

    gguf_writer.write_gguf(small_llama, tmp_path / "b.gguf", "BF16")
    gguf_writer.write_gguf(small_llama, tmp_path / "q8.gguf", "Q8_0")
    llama_quantize(tmp_path / "b.gguf", tmp_path / "l8.gguf", "Q8_0", threads=1)
    ours, theirs = read(tmp_path / "q8.gguf"), read(tmp_path / "l8.gguf")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)

    llama_quantize(tmp_path / "b.gguf", tmp_path / "k.gguf", "Q4_K_M", threads=1)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(str(tmp_path / "k.gguf")).tensors}
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    weight, plain = read(tmp_path / "b.gguf")["blk.0.attn_q.weight"], read(tmp_path / "k.gguf")
    assert 0.01 < np.linalg.norm(plain["blk.0.attn_q.weight"] - weight) / np.linalg.norm(weight) < 0.1

    even = np.where(np.arange(256) % 2 == 0, 100.0, 1.0).astype(np.float32)
    llama_quantize(tmp_path / "b.gguf", tmp_path / "i.gguf", "Q4_K_M", threads=1, imatrix={"blk.0.attn_q.weight": even})
    weighed = read(tmp_path / "i.gguf")
    lost = [np.square(found["blk.0.attn_q.weight"] - weight)[:, ::2].mean() for found in (weighed, plain)]
    assert lost[0] < 0.95 * lost[1]  # inputs that weigh more lose less
    assert np.array_equal(weighed["blk.0.attn_k.weight"], plain["blk.0.attn_k.weight"])

    with pytest.raises(RuntimeError, match=r"llama.cpp could not quantize .*missing.gguf to Q4_0: .*No such file"):
        llama_quantize(tmp_path / "missing.gguf", tmp_path / "x.gguf", "Q4_0")
