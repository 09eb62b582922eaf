"""The memory of a GPU that a model needs in vLLM, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import SHAPES, make
from compare_q.backends.base import Decode
from compare_q.backends.common import machine
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.toy import planned, with_config

LENGTH = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers: 256 numbers in a state, and a vocabulary of 49,152."""
    return make(tmp_path_factory.mktemp("shape"), SHAPES["toy"])["bf16"]


def test_the_parts_of_the_memory(model: Path) -> None:
    # 2 layers x 2 heads x 64 numbers, keys and values, in two steps of 16,384 tokens, in bf16; but
    # a cache has at least 256 MiB.
    assert 2 * (2 * 2 * 64 * 2) * 2 * 16384 < 256 * 2**20
    cache = 256 * 2**20
    head_of_reference = 2 * 256 * 49152
    # The layer's input, output and two copies, and three times the MLP's 512 numbers.
    step = 2 * (4 * 256 + 3 * 512) * 16384
    weights = (model / "model.safetensors").stat().st_size
    gold = int(1.15 * weights) + cache + head_of_reference + step + 4 * 2**30
    assert VllmEngine.gpu_bytes(planned("m", "vllm_score", str(model), LENGTH)) == gold


@pytest.mark.parametrize(
    "options",
    [
        # vLLM takes what it finds, or another size than expected.
        {"gpu_memory_utilization": 0.5},
        {"num_gpu_blocks_override": 100},
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"hf_overrides": {"num_hidden_layers": 1}},
        # Several GPUs, or compiled.
        {"tensor_parallel_size": 2},
        {"enforce_eager": False},
    ],
)
def test_an_unknown_size(model: Path, options: dict[str, Any]) -> None:
    assert VllmEngine.gpu_bytes(planned("m", "vllm_score", str(model), LENGTH, options)) is None


def test_decode_and_unknown_caches(model: Path, tmp_path: Path) -> None:
    decoding = planned("m", "vllm_score", str(model), LENGTH, decode=Decode(1, 32))
    assert VllmEngine.gpu_bytes(decoding) is None
    latent = with_config(model, tmp_path / "latent", num_key_value_heads=None, kv_lora_rank=64)
    assert VllmEngine.gpu_bytes(planned("m", "vllm_score", str(latent), LENGTH)) is None


@pytest.mark.parametrize(
    ("capability", "keys", "is_known"),
    [
        (9.0, {}, True),
        # Blackwell, or not known.
        (10.0, {}, False),
        (0.0, {}, False),
        (9.0, {"num_experts": 8}, False),
    ],
)
def test_kernels_that_vllm_may_choose_by_their_times(
    capability: float,
    keys: dict[str, int],
    is_known: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "compute_capability", lambda: capability)
    models = make(tmp_path / "shape", SHAPES["toy"], ("fp8", "w4a16"))
    fp8 = with_config(models["fp8"], tmp_path / "fp8", **keys)
    n_bytes = VllmEngine.gpu_bytes(planned("m", "vllm_score", str(fp8), LENGTH))
    assert (n_bytes is not None) is is_known
    # Only their weights are quantized.
    w4a16 = str(models["w4a16"])
    assert VllmEngine.gpu_bytes(planned("m", "vllm_score", w4a16, LENGTH)) is not None
