"""Which tensors of a checkpoint count for its layers and its head, by the convention of stored bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint.folder import storage_of
from compare_q.backends.layers.names import role_of
from tests.support.checkpoints import ENDS, LAYER, Entries, Q, write_checkpoint


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.input_layernorm.weight 8", f"{Q}.bias 8", f"{Q}.input_global_scale 1",
        f"{LAYER}.self_attn.k_scale 1", f"{Q}.k_scale 1", f"{LAYER}.mlp.experts.gate_up_proj_bias 2 2",
        f"{LAYER}.mixer.A_log 2 2", f"{LAYER}.mlp.gate.weight 4 8", f"{LAYER}.mlp.gate.e_score_correction_bias 4",
        f"{LAYER}.mlp.shared_expert_gate.weight 1 8", f"{LAYER}.mlp.router.weight 4 8",
        f"{LAYER}.block_sparse_moe.router.layer.weight 4 8", "model.visual.blocks.0.attn.qkv.weight 8 8",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight 8 8",
        "model.multi_modal_projector.linear_1.weight 8 8", "mlp1.1.weight 8 8",
        "vpm.encoder.layers.0.mlp.fc1.weight 8 8", "patch_merger.merging_layer.weight 8 8",
        "model.connector.modality_projection.proj.weight 8 8", "model.sam_model.blocks.0.attn.qkv.weight 8 8",
        "model.qwen2_model.model.model.layers.0.mlp.up_proj.weight 8 8", "vision.blocks.0.attn.qkv.weight 8 8",
        "projector.layers.0.weight 8 8", "aligner.layers.0.weight 8 8", "gen_head.output_mlp_projector.weight 8 8",
        "model.vit_large_projector.weight 8 8", "vte.weight 8 8", "visual_tokenizer.head.0.weight 8 8",
        "score.weight 2 8", "model.mtp.layers.0.mlp.up_proj.weight 8 8", "model.mtp_layers.0.eh_proj.weight 8 8",
        "mtp.lm_head.weight 8 8", "transformer.wpe.weight 16 4",
    ],
)  # fmt: skip
def test_left_out(tmp_path: Path, name: str) -> None:
    """Norms, biases, scales of activations and caches, routers, towers, classifiers, what drafts tokens, positions."""
    name, *shape = name.split()
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), name: ("F32", *map(int, shape))}
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(16.0, 16.0, 512 + 640)


@pytest.mark.parametrize(
    ("embedding", "layer", "head"),
    [
        ("model.embed_tokens", Q, "lm_head"),
        ("transformer.embedding.word_embeddings", "transformer.encoder.layers.0.mlp.dense_h_to_4h",
         "transformer.output_layer"),  # ChatGLM
        ("language_model.model.tok_embeddings", "language_model.model.layers.0.feed_forward.w1",
         "language_model.output"),  # InternLM2 in InternVL
        ("tok_embeddings", "layers.0.feed_forward.w1", "output"),  # Mistral's own
        ("transformer.embd.wte", "transformer.h.0.mlp.fc1", "lm_head.linear"),  # Phi
        ("gpt_neox.embed_in", "gpt_neox.layers.0.mlp.dense_h_to_4h", "embed_out"),
        ("model.transformer.wte", "model.transformer.blocks.0.ff_out", "model.transformer.ff_out"),  # OLMo
        ("rwkv.embeddings", "rwkv.blocks.0.attention.output", "head"),
        ("rwkv.embeddings", "rwkv.blocks.0.attention.gate", "head"),
        ("embed", "layers.0.attn.wq_a", "head"),  # DeepSeek-V4
        ("biogpt.embed_tokens", "biogpt.layers.0.fc1", "output_projection"),
        ("model.language_model.embed_tokens", f"{LAYER}.mlp.up_proj", "thinker.lm_head"),
        ("transformer.tokens_embed", "transformer.h.0.attn.c_attn", "lm_head"),
        ("backbone.embedding", "backbone.layers.0.mixer.in_proj", "lm_head"),
    ],
)  # fmt: skip
def test_names_of_ends(tmp_path: Path, embedding: str, layer: str, head: str) -> None:
    """An int8 layer of 32 weights with a scale of 32 bits: 9; a bf16 head of 40; the same tied, where it is F32."""
    quantized = {f"{layer}.weight": ("I8", 8, 4), f"{layer}.weight_scale": ("F32", 1)}
    entries = {**quantized, f"{embedding}.weight": ("F32", 10, 4)}
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(9.0, 32.0, 288 + 1280)
    entries[f"{head}.weight"] = ("BF16", 10, 4)
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(9.0, 16.0, 288 + 640)
    roles = {role: [each for each in (embedding, layer, head) if role_of(each, None) == role]
             for role in ("embedding", "layer", "head")}  # fmt: skip
    assert roles == {"embedding": [embedding], "layer": [layer], "head": [head]}


@pytest.mark.parametrize(
    ("embedding", "layer", "outside"),
    [
        ("decoder.model.embed_tokens", "decoder.model.layers.0.mlp.up_proj", "encoder.blocks.0.mlp.fc1"),  # MiDashengLM
        ("language_model.model.embed_tokens", "language_model.model.layers.0.mlp.up_proj",
         "encoder.layers.0.ff1.up_proj"),  # Granite Speech
        ("language_model.model.decoder.embed_tokens", "language_model.model.decoder.layers.0.fc1",
         "qformer.encoder.layer.0.attention.attention.query"),  # BLIP-2 with OPT
        ("language_model.model.embed_tokens", "language_model.model.layers.0.fc1", "language_projection"),
        ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.encoder.layers.0.fc1"),  # Kimi-Audio
        ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.vq_adaptor.layers.0"),
        ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.vision_embedding.1"),  # Isaac
        ("model.language_model.embed_tokens", "model.language_model.layers.0.mlp.up_proj", "model.merger.mlp.0"),
        ("transformer.embedding.word_embeddings", "transformer.encoder.layers.0.mlp.dense_h_to_4h",
         "transformer.vision.transformer.layers.0.mlp.fc1"),  # GLM-4V
        ("model.transformer.wte.embedding", "model.transformer.blocks.0.ff_out",
         "model.image.blocks.0.feed_forward.w1"),  # as Molmo
        ("word_embeddings", "h.0.mlp.dense_4h_to_h", "encoder.layers.0.fc1"),
        ("mm_whisper_embeddings.tok_embeddings", "layers.0.feed_forward.w1",
         "mm_whisper_embeddings.whisper_encoder.transformer.layers.0.feed_forward.w1"),  # Voxtral
    ],
)  # fmt: skip
def test_what_lies_outside_the_text_model(tmp_path: Path, embedding: str, layer: str, outside: str) -> None:
    """An int8 layer of 32 weights with a scale of 32 bits: 9; a bf16 head of 40."""
    entries: Entries = {f"{layer}.weight": ("I8", 8, 4), f"{layer}.weight_scale": ("F32", 1)}
    entries |= {f"{embedding}.weight": ("F32", 10, 4), "lm_head.weight": ("BF16", 10, 4)}
    more: Entries = {f"{outside}.weight": ("BF16", 4, 4), "encoder.embed_tokens.weight": ("BF16", 5, 4)}
    assert storage_of(write_checkpoint(tmp_path, entries | more)) == Storage(9.0, 16.0, 288 + 640)
    del more["encoder.embed_tokens.weight"], entries["lm_head.weight"]
    assert storage_of(write_checkpoint(tmp_path, entries | more)) == Storage(9.0, 32.0, 288 + 1280)


@pytest.mark.parametrize("part", ["shared_head.head", "eh_proj", "mlp.up_proj", "lm_head"])
def test_layers_past_the_last_are_left_out(tmp_path: Path, part: str) -> None:
    """DeepSeek and GLM number their multi-token-prediction modules on; the config counts the model's own layers."""
    config = {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 11}}
    layers = "model.language_model.layers"
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), f"{layers}.10.mlp.up_proj.weight": ("F32", 8, 4)}
    gold = Storage((512 + 1024) / 64, 16.0, 512 + 1024 + 640)
    assert storage_of(write_checkpoint(tmp_path, entries, config)) == gold
    entries[f"{layers}.11.{part}.weight"] = ("F32", 8, 8)
    assert storage_of(write_checkpoint(tmp_path, entries, config)) == gold
    if part == "eh_proj":  # a config that does not count them leaves none out
        assert storage_of(write_checkpoint(tmp_path, entries)).vram_bits == 512 + 1024 + 640 + 2048


@pytest.mark.parametrize(
    ("tensors", "bits", "weights"),
    [
        # 64 weights of 32 bits
        ({"gate_up_proj": ("F32", 2, 8, 4)}, 2048, 64),
        # 64 of 8 bits and two scales of 32; the activations' are not counted
        ({"down_proj": ("F8_E4M3", 2, 8, 4), "down_proj_scale_inv": ("F32", 2, 1, 1)}, 576, 64),
        ({"down_proj": ("F8_E4M3", 2, 8, 4), "down_proj_weight_scale": ("F32", 2), "down_proj_input_scale": ("F32", 2)},
         576, 64),
        # gpt-oss: 2 experts of 4 x 64: 2 * 4 * 2 blocks of 16 bytes = 2,048, a byte each = 128: 4.25
        ({"gate_up_proj_blocks": ("U8", 2, 4, 2, 16), "gate_up_proj_scales": ("U8", 2, 4, 2),
          "gate_up_proj_bias": ("BF16", 2, 4)}, 2176, 512),
        # Llama 4 by modelopt: 2 experts of 4 x 32: 128 bytes = 1,024, 16 scales of 8 = 128, 2 of 32
        ({"down_proj": ("U8", 2, 4, 16), "down_proj_weight_scale": ("F8_E4M3", 2, 4, 2),
          "down_proj_weight_scale_2": ("F32", 2)}, 1216, 256),
        # DeepSeek-V4 in Transformers' names: 2 experts of 8 x 64: 512 bytes = 4,096, 32 powers of two = 256
        ({"gate_up_proj": ("I8", 2, 8, 32), "gate_up_proj_scale_inv": ("F8_E8M0", 2, 8, 2)}, 4352, 1024),
        # one module an expert: 2 * 8 * 4 of 16 bits
        ({"0.w1.weight": ("BF16", 8, 4), "1.w1.weight": ("BF16", 8, 4)}, 1024, 64),
    ],
)  # fmt: skip
def test_experts(tmp_path: Path, tensors: Entries, bits: int, weights: int) -> None:
    """Beside a bf16 layer of 32 weights (512 bits) and the head (640)."""
    experts = {f"{LAYER}.mlp.experts.{name}": entry for name, entry in tensors.items()}
    router = {f"{LAYER}.mlp.router.weight": ("BF16", 2, 4)}
    found = storage_of(write_checkpoint(tmp_path, {**ENDS, **experts, **router, f"{Q}.weight": ("BF16", 8, 4)}))
    assert found == Storage((bits + 512) / (weights + 32), 16.0, bits + 512 + 640)
