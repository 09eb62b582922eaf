"""What the demo is made of: the tokenizer and weights from the GGUF, and the checkpoints made from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from backends import storage
from demo import quantize, smollm2


def test_unpermute_by_hand() -> None:
    """llama.cpp stores a head's rows 0, 2, 4, 6 | 1, 3, 5, 7 of the rotary halves interleaved: 0 4 1 5 2 6 3 7."""
    stored = torch.tensor([[0.0], [4.0], [1.0], [5.0], [2.0], [6.0], [3.0], [7.0]])
    assert smollm2.unpermute(stored, 1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    two_heads = torch.cat((stored, stored + 10))
    assert smollm2.unpermute(two_heads, 2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17]


def test_fused_layers_by_name() -> None:
    layer = "model.layers.3.self_attn"
    assert quantize.fused_with(f"{layer}.k_proj") == [f"{layer}.{x}_proj" for x in "qkv"]
    assert quantize.fused_with("model.layers.3.mlp.up_proj") == [
        "model.layers.3.mlp.gate_proj",
        "model.layers.3.mlp.up_proj",
    ]
    assert quantize.fused_with("model.layers.3.mlp.down_proj") == ["model.layers.3.mlp.down_proj"]


@pytest.mark.parametrize(
    ("preset", "group_size", "bpw"),
    [
        ("W4A16", 32, 4 + 16 / 32),  # a bf16 scale for 32 weights
        # q, k, v, gate, up read 64 features and down 128: of 40,960 weights a layer 32,768 and 8,192
        ("W8A8", None, 8 + 16 * (32_768 / 64 + 8_192 / 128) / 40_960),
        # an fp8 scale for 16 weights and one fp32 for each of 7 matrices
        ("NVFP4A16", None, 4 + 8 / 16 + 7 * 32 / 40_960),
    ],
)
def test_stored_bits_of_real_checkpoints(
    toy_model: Path, tmp_path: Path, preset: str, group_size: int | None, bpw: float
) -> None:
    quantize.quantize(toy_model, preset, tmp_path / "q", group_size=group_size)
    found = storage.storage_of(tmp_path / "q")
    assert found.bpw_layer == pytest.approx(bpw, rel=1e-12)
    assert found.bpw_head == 16.0


def test_fused_layers_share_their_global_scale(toy_model: Path, tmp_path: Path) -> None:
    quantize.quantize(toy_model, "NVFP4A16", tmp_path / "q")
    with safe_open(tmp_path / "q" / "model.safetensors", framework="pt") as tensors:
        scales = {name: tensors.get_tensor(name).item() for name in tensors.keys() if "global_scale" in name}  # noqa: SIM118
    assert len(scales) == 14
    for layer in (0, 1):
        prefix = f"model.layers.{layer}"
        fused = [scales[f"{prefix}.self_attn.{x}_proj.weight_global_scale"] for x in "qkv"]
        assert len(set(fused)) == 1
        assert len({scales[f"{prefix}.mlp.{x}_proj.weight_global_scale"] for x in ("gate", "up")}) == 1


def test_rounding_is_to_the_nearest_step(toy_model: Path, tmp_path: Path) -> None:
    """No weight moves by more than half a step, and what bf16 adds to 8 steps (weight / scale, scale: 2^-9 each)."""
    from transformers import AutoModelForCausalLM

    quantize.quantize(toy_model, "W4A16", tmp_path / "q", group_size=32)
    name = "model.layers.0.mlp.down_proj"
    original = AutoModelForCausalLM.from_pretrained(toy_model).get_submodule(name).weight.detach().float()
    with safe_open(tmp_path / "q" / "model.safetensors", framework="pt") as tensors:
        packed = tensors.get_tensor(f"{name}.weight_packed")
        scale = tensors.get_tensor(f"{name}.weight_scale").float().repeat_interleave(32, dim=1)
    nibbles = torch.stack([(packed >> (4 * i)) & 0xF for i in range(8)], dim=-1).reshape(original.shape)
    restored = (nibbles.float() - 8) * scale
    assert ((restored - original).abs() <= (0.5 + 2 * 8 / 2**9) * scale).all()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The rays of light", ["The", "Ġrays", "Ġof", "Ġlight"]),
        ("in 1704", ["in", "Ġ", "1", "7", "0", "4"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_tokens(tmp_path_factory: pytest.TempPathFactory, text: str, pieces: list[str]) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    reader = GGUFReader(str(smollm2.find_gguf()))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    smollm2.save_tokenizer(fields, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == pieces
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
