"""Stored bits of files that real writers wrote, worked out by hand and counted in the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint import files
from compare_q.backends.checkpoint.stored_bits import storage_of
from tests.support import DATA
from tests.support.checkpoints import write_checkpoint


def test_real_bitsandbytes_header(tmp_path: Path) -> None:
    """Two matrices of a model that bitsandbytes 0.50.2 quantized (nf4, nested scales), as its file describes them.

    64 x 64: 16,384 bits, 64 scales of 8, codes 16 * 32 and 256 * 32, one scale of 32: 25,632.  64 x 128: 32,768 + 128
    * 8 + 8,736 = 42,528.  Head 320 x 64 of 16 bits.
    """
    listed = json.loads((DATA / "bitsandbytes_nf4.json").read_text())
    entries = {name: entry[:2] if ".quant_state." in name else entry for name, entry in listed.items()}
    values = {name: entry[2].encode() for name, entry in listed.items() if ".quant_state." in name}
    found = storage_of(write_checkpoint(tmp_path, entries, {}, values))
    assert found == Storage((25632 + 42528) / (4096 + 8192), 16.0, 25632 + 42528 + 327680)


def test_a_real_exl3_header(tmp_path: Path) -> None:
    """Layer 0 and head of SmolLM2-135M padded to 768, by exllamav3 1.6.5's converter at 3.5 and 6 bits.

    Weights: q, o 768 x 768, k, v 768 x 256, gate, up, down 768 x 1536: 5,111,808; 3.5 bits each: 17,891,328.  Of 16
    bits each, their inputs and outputs: 2 * 1,536 + 2 * 1,024 + 3 * 2,304 = 12,032.  Seven marks of 32 bits.  Head: 768
    x 49,152 weights of 6 bits, 768 + 49,152 numbers of 16, one mark.
    """
    listed = json.loads((DATA / "exl3_3.5bpw.json").read_text())
    folder = write_checkpoint(tmp_path, listed["tensors"], listed["config"])
    layer, head = 17_891_328 + 12_032 * 16 + 7 * 32, 768 * 49_152 * 6 + 49_920 * 16 + 32
    assert storage_of(folder) == Storage(layer / 5_111_808, head / (768 * 49_152), layer + head)
    norms = 3 * 768 * 16
    on_disk = sum(tensor.nbytes for tensor in files.read_headers([folder / "model.safetensors"]).values())
    assert on_disk * 8 == layer + head + norms


# The toy model has 2 layers: 64 x 64 four times, 128 x 64 twice, 64 x 128: 81,920 weights, 1,152 rows, 14 matrices.
WRITERS = {
    "W4A16": (81_920 * 4 + 2_560 * 16, "weight_packed weight_scale"),
    "W4A16_ASYM": (81_920 * 4 + 2_560 * 16 + 2_560 * 4, "weight_packed weight_scale weight_zero_point"),
    "W8A8": (81_920 * 8 + 1_152 * 16, "weight weight_scale"),
    "FP8_DYNAMIC": (81_920 * 8 + 1_152 * 16, "weight weight_scale"),
    "NVFP4A16": (81_920 * 4 + 5_120 * 8 + 14 * 32, "weight_packed weight_scale weight_global_scale"),
    "NVFP4": (81_920 * 4 + 5_120 * 8 + 14 * 32, "weight_packed weight_scale weight_global_scale"),
    "MXFP4A16": (81_920 * 4 + 2_560 * 8, "weight_packed weight_scale"),
    "MXFP8A16": (81_920 * 8 + 2_560 * 8, "weight weight_scale"),
}


def bytes_in(folder: Path, parts: str) -> int:
    """Bytes of the layers' tensors of these names, as safetensors itself reads them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = [name for name in file.keys() if "_proj." in name and name.rpartition(".")[2] in parts.split()]  # noqa: SIM118
        return sum(file.get_tensor(name).nbytes for name in found)


@pytest.mark.engine
@pytest.mark.parametrize("preset", WRITERS)
def test_real_compressed_tensors(tmp_path: Path, toy_model: Path, preset: str) -> None:
    """Files that compressed-tensors wrote; groups of 32 (of 16 in NVFP4), 1 global scale a matrix, head 16 bits."""
    from demo.quantize import quantize

    bits, parts = WRITERS[preset]
    quantize(toy_model, preset, tmp_path / "q", group_size=32 if preset.startswith("W4") else None)
    assert storage_of(tmp_path / "q") == Storage(bits / 81_920, 16.0, bits + 20_480 * 16)
    assert bytes_in(tmp_path / "q", parts) * 8 == bits


@pytest.mark.engine
def test_real_mixed_precision(tmp_path: Path, toy_model: Path) -> None:
    """int4 g32 down_proj, packed int8 q_proj with a scale a row, the rest bf16.

    down_proj 2 * 8,192 * 4 + 512 * 16 = 73,728; q_proj 2 * 4,096 * 8 + 128 * 16 = 67,584; the other 57,344 * 16.
    """
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor
    from transformers import AutoModelForCausalLM

    from demo.quantize import round_to_nearest

    network, groups = AutoModelForCausalLM.from_pretrained(toy_model, dtype="bfloat16"), {}
    for target, bits, keys in (("down", 4, {"strategy": "group", "group_size": 32}), ("q", 8, {"strategy": "channel"})):
        weights = quantization.QuantizationArgs(num_bits=bits, **keys)
        groups[target] = {"targets": [f"re:.*{target}_proj"], "weights": weights, "format": "pack-quantized"}
    config = quantization.QuantizationConfig(
        config_groups=groups, ignore=["lm_head"], quantization_status="calibration"
    )
    quantization.apply_quantization_config(network, config)
    for layer in network.modules():
        if hasattr(layer, "quantization_scheme"):
            round_to_nearest(layer, layer.quantization_scheme.weights, None)
    compressor = ModelCompressor.from_pretrained_model(network)
    compressor.compress_model(network)
    network.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    stored = 73_728 + 67_584 + 57_344 * 16
    assert storage_of(tmp_path) == Storage(stored / 81_920, 16.0, stored + 20_480 * 16)
    assert bytes_in(tmp_path, "weight weight_packed weight_scale") * 8 == stored


@pytest.mark.engine
def test_real_gpt_oss(tmp_path: Path) -> None:
    """Attention 64 x 64 twice and 32 x 64 twice, 2 experts of 64 x 96 and 48 x 64, tied: router and biases left out.

    2 * 4,096 + 2 * 2,048 + 2 * (6,144 + 3,072) = 30,720 weights of 16 bits; the embedding 40 x 64.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, tie_word_embeddings=True,
        layer_types=["full_attention"],
    )  # fmt: skip
    GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    assert storage_of(tmp_path) == Storage(16.0, 16.0, (30_720 + 2_560) * 16)
