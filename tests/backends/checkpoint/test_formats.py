"""Stored bits and weights, computed by hand.

Of one matrix in every format, of downloads, of unknown formats, and of files from real writers;
and which tensors of a checkpoint count for its layers and its head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint.folder import Checkpoint, storage_of
from compare_q.backends.checkpoint.formats import layout_of
from compare_q.backends.layers.module_names import role_of
from compare_q.backends.layers.schemes import declared, kv_cache
from tests.support import DATA
from tests.support.checkpoints import ENDS, LAYER, Entries, Q, write_checkpoint
from tests.support.downloads import DOWNLOADS
from tests.support.format_table import PAGE, TABLE, look, table
from tests.support.stored_formats import CASES, EXL3, HEADS, SIZES, Case, entries_of


def stored(folder: Path, case: Case, entries: Entries, module: str) -> Storage:
    """The storage of a model with these tensors."""
    values = {f"{module}.{part}": value for part, value in case.values.items()}
    config = dict(case.config)
    if case.quantization:
        config["quantization_config"] = case.quantization
    return storage_of(write_checkpoint(folder, entries, config, values))


@pytest.mark.parametrize("name", CASES)
def test_layer(tmp_path: Path, name: str) -> None:
    """The layer with other tensors.

    A bf16 head (640 bits), a tied float32 embedding (1,280), or another layer in bf16 (512 / 32).
    """
    case = CASES[name]
    layer = entries_of(case, Q)
    tied = {"model.embed_tokens.weight": ENDS["model.embed_tokens.weight"]}
    bpw = case.bits / case.weights
    assert stored(tmp_path, case, {**ENDS, **layer}, Q) == Storage(bpw, 16.0, case.bits + 640)
    assert stored(tmp_path, case, {**tied, **layer}, Q) == Storage(bpw, 32.0, case.bits + 1280)
    both = {**ENDS, **layer, f"{LAYER}.self_attn.o_proj.weight": ("BF16", 8, 4)}
    gold = Storage((case.bits + 512) / (case.weights + 32), 16.0, case.bits + 512 + 640)
    assert stored(tmp_path, case, both, Q) == gold


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("exl3 2.5 bits", "exl3 signs", "exl3 unpadded")]
)
def test_head(tmp_path: Path, name: str) -> None:
    """A quantized head, and a head tied to a quantized embedding.

    The layer has 512 bits for 32 weights.
    """
    case = HEADS.get(name, CASES[name])
    layer = {
        f"{Q}.weight": ("BF16", 8, 4),
        "model.embed_tokens.weight": ENDS["model.embed_tokens.weight"],
    }
    gold = Storage(16.0, case.bits / case.weights, case.bits + 512)
    assert stored(tmp_path, case, {**layer, **entries_of(case, "lm_head")}, "lm_head") == gold
    if not name.startswith("exl"):
        del layer["model.embed_tokens.weight"]
        module = "model.embed_tokens"
        assert stored(tmp_path, case, {**layer, **entries_of(case, module)}, module) == gold


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_that_nobody_knows(tmp_path: Path, name: str) -> None:
    """Another vector of the weight's module may be part of the weight: the size is unknown."""
    entries = {**ENDS, **entries_of(CASES[name], Q), f"{Q}.zeta": ("F16", 4)}
    storage = stored(tmp_path, CASES[name], entries, Q)
    assert storage == Storage(note=f"{Q}.zeta: stored in a format that compare_q cannot size")


@pytest.mark.parametrize(
    ("config", "rows", "columns", "weights"),
    [
        (
            # SmolLM2-135M's k: 576 pads to 640, and 3 heads of 576 / 9 = 64 numbers, 192, to 256.
            {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
            640,
            256,
            576 * 192,
        ),
        (
            {
                "hidden_size": 2048,
                "num_attention_heads": 16,
                # 512 + 64 = 576 pads to 640.
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
            },
            2048,
            640,
            2048 * 576,
        ),
        # Queries with a gate: 2 * 3 * 90 = 540 pads to 640.
        ({"hidden_size": 256, "num_attention_heads": 3, "head_dim": 90}, 256, 640, 256 * 540),
        (
            {
                "hidden_size": 256,
                # Qwen3-Next's q, k, v and z as one: 2 * 2 * 50 + 2 * 2 * 60 = 440 pads to 512.
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 50,
                "linear_num_value_heads": 2,
                "linear_value_head_dim": 60,
            },
            256,
            512,
            256 * 440,
        ),
        ({"text_config": {"hidden_size": 200}, "hidden_size": 256}, 256, 256, 200 * 200),
        # Both sizes pad to 640.
        ({"hidden_size": 600, "intermediate_size": 620}, 640, 640, None),
        ({}, 640, 640, None),
    ],
)
def test_exl3_sizes(
    tmp_path: Path, config: dict[str, Any], rows: int, columns: int, weights: int | None
) -> None:
    """A trellis has only the padded size; the true one is a size in the config that pads to it."""
    layer = {
        "trellis": ("I16", rows // 16, columns // 16, 16),
        "suh": ("F16", rows),
        "svh": ("F16", columns),
    }
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in layer.items()}}
    folder = write_checkpoint(tmp_path, entries, {**config, "quantization_config": EXL3})
    storage = storage_of(folder)
    # 16 words of 16 bits per tile of 16 x 16 are one bit per weight; the vectors are float16.
    bits = rows * columns + 16 * (rows + columns)
    if weights is None:
        assert storage == Storage(
            note=f"{Q}.trellis: padded, and config.json does not say from which size"
        )
    else:
        assert storage == Storage(bits / weights, 16.0, bits + 640)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (
            {"weight": ("U8", 16, 1), "weight.absmax": ("F32", 1), "weight.quant_map": ("F32", 16)},
            "weight",
        ),
        ({"weight": ("U8", 16, 16), "weight_scale": ("F32", 16, 1)}, "weight"),
        ({"weight": ("I8", 8, 64), "weight_scale_inv": ("BF16", 8, 1)}, "weight"),
        ({"weight": ("I8", 8, 32), "scale": ("F32", 8, 2)}, "weight"),
        ({"weight_packed": ("I32", 64, 8), "weight_scale": ("BF16", 64, 2)}, "weight_packed"),
        # AutoGPTQ's Marlin.
        ({"B": ("I32", 4, 128), "s": ("F16", 1, 64)}, "B"),
        (
            {"compressed": ("BF16", 8, 32), "bitmask": ("U8", 8, 8), "shape": ("I64", 2, 1)},
            "bitmask",
        ),  # 2:4
        (
            {
                "weight_packed": ("I32", 4, 128),
                "scale_packed": ("F16", 1, 64),
                "meta": ("I16", 4, 128),
            },
            "meta",
        ),
        (
            {
                "qweight": ("U8", 256, 128),
                "scales": ("U8", 256, 8),
                "weight_global_scale": ("F32", 1),
            },
            "weight_global_scale",
        ),  # FP-Quant
        (
            {"_weight_qdata": ("I32", 1, 8, 32, 4), "_weight_scale_and_zero": ("BF16", 8, 8, 2)},
            "_weight_scale_and_zero",
        ),
        ({"qweight": ("I32", 8, 64), "scales": ("F16", 2, 64)}, "qweight"),
        ({"q_weight": ("I32", 7, 224), "q_scale": ("I32", 2, 28)}, "q_weight"),
        ({"codes": ("I16", 8, 4)}, "codes"),
        ({"weight": ("U8", 2, 64), "weight_scale": ("BF16", 1)}, "weight"),
        ({"weight": ("I8", 256, 256), "weight_scale_inv": ("F32", 2, 2)}, "weight"),
    ],
)
def test_unknown_formats_are_not_guessed(tmp_path: Path, parts: Entries, named: str) -> None:
    entries = {**ENDS, **{f"{Q}.{part}": entry for part, entry in parts.items()}}
    storage = storage_of(write_checkpoint(tmp_path, entries, SIZES))
    assert storage == Storage(note=f"{Q}.{named}: stored in a format that compare_q cannot size")


@pytest.mark.parametrize("name", DOWNLOADS)
def test_sizes_schemes_and_kv_cache(name: str) -> None:
    """The checkpoint also has a head of 640 bits, 16 bits per weight."""
    download = DOWNLOADS[name]
    storage, config = look(download)
    assert storage == Storage(download.bits / download.weights, 16.0, download.bits + 640)
    schemes = declared(config.quantization)
    assert tuple(schemes.of(layer) for layer in download.layers) == download.schemes
    assert kv_cache(config.quantization) == download.kv


def test_page_has_this_table() -> None:
    """If this test fails, ``python -m tests.support.format_table`` writes the table."""
    match = TABLE.search(PAGE.read_text("utf-8"))
    assert match is not None
    assert match[0] == table()


def test_real_bitsandbytes_header(tmp_path: Path) -> None:
    """Two matrices of a model that bitsandbytes 0.50.2 quantized, with the header of its file.

    nf4, with nested scales.  64 x 64: 16,384 bits, 64 scales of 8, codes 16 * 32 and 256 * 32, one
    scale of 32: 25,632.  64 x 128: 32,768 + 128 * 8 + 8,736 = 42,528.  Head 320 x 64 of 16 bits.
    """
    entries = {}
    values = {}
    for name, entry in json.loads((DATA / "bitsandbytes_nf4.json").read_text()).items():
        if ".quant_state." in name:
            entries[name] = entry[:2]
            values[name] = entry[2].encode()
        else:
            entries[name] = entry
    storage = storage_of(write_checkpoint(tmp_path, entries, {}, values))
    assert storage == Storage((25632 + 42528) / (4096 + 8192), 16.0, 25632 + 42528 + 327680)


# Each of the toy's 2 layers has 4 matrices 64 x 64, 2 of 128 x 64, 1 of 64 x 128: 81,920 weights,
# 1,152 rows in all.
# 81,920 / 32 = 2,560 and 81,920 / 16 = 5,120 groups, 2 * 7 = 14 matrices.
WRITERS = {
    "W4A16": 81_920 * 4 + 2_560 * 16,
    "W4A16_ASYM": 81_920 * 4 + 2_560 * 16 + 2_560 * 4,
    "W8A8": 81_920 * 8 + 1_152 * 16,
    "FP8_DYNAMIC": 81_920 * 8 + 1_152 * 16,
    "NVFP4A16": 81_920 * 4 + 5_120 * 8 + 14 * 32,
    "NVFP4": 81_920 * 4 + 5_120 * 8 + 14 * 32,
    "MXFP4A16": 81_920 * 4 + 2_560 * 8,
    "MXFP8A16": 81_920 * 8 + 2_560 * 8,
}


@pytest.mark.engine
@pytest.mark.parametrize("preset", WRITERS)
def test_real_compressed_tensors(quantized: Callable[..., Path], preset: str) -> None:
    """Files that compressed-tensors wrote.

    Groups of 32 (NVFP4: 16), one global scale per matrix, a head in 16 bits.
    """
    bits = WRITERS[preset]
    assert storage_of(quantized(preset)) == Storage(bits / 81_920, 16.0, bits + 20_480 * 16)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.input_layernorm.weight 8",
        f"{Q}.bias 8",
        f"{Q}.input_global_scale 1",
        f"{LAYER}.self_attn.k_scale 1",
        f"{Q}.k_scale 1",
        f"{LAYER}.mlp.experts.gate_up_proj_bias 2 2",
        f"{LAYER}.mixer.A_log 2 2",
        f"{LAYER}.mlp.gate.weight 4 8",
        f"{LAYER}.mlp.gate.e_score_correction_bias 4",
        f"{LAYER}.mlp.shared_expert_gate.weight 1 8",
        f"{LAYER}.mlp.router.weight 4 8",
        f"{LAYER}.block_sparse_moe.router.layer.weight 4 8",
        "model.visual.blocks.0.attn.qkv.weight 8 8",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight 8 8",
        "model.multi_modal_projector.linear_1.weight 8 8",
        "mlp1.1.weight 8 8",
        "vpm.encoder.layers.0.mlp.fc1.weight 8 8",
        "patch_merger.merging_layer.weight 8 8",
        "model.connector.modality_projection.proj.weight 8 8",
        "model.sam_model.blocks.0.attn.qkv.weight 8 8",
        "model.qwen2_model.model.model.layers.0.mlp.up_proj.weight 8 8",
        "vision.blocks.0.attn.qkv.weight 8 8",
        "projector.layers.0.weight 8 8",
        "aligner.layers.0.weight 8 8",
        "gen_head.output_mlp_projector.weight 8 8",
        "model.vit_large_projector.weight 8 8",
        "vte.weight 8 8",
        "visual_tokenizer.head.0.weight 8 8",
        "score.weight 2 8",
        "model.mtp.layers.0.mlp.up_proj.weight 8 8",
        "model.mtp_layers.0.eh_proj.weight 8 8",
        "mtp.lm_head.weight 8 8",
        "transformer.wpe.weight 16 4",
    ],
)
def test_left_out(tmp_path: Path, name: str) -> None:
    """Norms, biases, scales of activations and caches, routers, towers, drafts, positions, ..."""
    name, *shape = name.split()
    entries = {**ENDS, f"{Q}.weight": ("BF16", 8, 4), name: ("F32", *map(int, shape))}
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(16.0, 16.0, 512 + 640)


@pytest.mark.parametrize(
    ("embedding", "layer", "head"),
    [
        ("model.embed_tokens", Q, "lm_head"),
        (
            "transformer.embedding.word_embeddings",
            "transformer.encoder.layers.0.mlp.dense_h_to_4h",
            "transformer.output_layer",
        ),  # ChatGLM
        (
            "language_model.model.tok_embeddings",
            "language_model.model.layers.0.feed_forward.w1",
            "language_model.output",
        ),  # InternLM2 in InternVL
        # Mistral's own names.
        ("tok_embeddings", "layers.0.feed_forward.w1", "output"),
        ("transformer.embd.wte", "transformer.h.0.mlp.fc1", "lm_head.linear"),  # Phi
        ("gpt_neox.embed_in", "gpt_neox.layers.0.mlp.dense_h_to_4h", "embed_out"),
        (
            "model.transformer.wte",
            "model.transformer.blocks.0.ff_out",
            "model.transformer.ff_out",
        ),  # OLMo
        ("rwkv.embeddings", "rwkv.blocks.0.attention.output", "head"),
        ("rwkv.embeddings", "rwkv.blocks.0.attention.gate", "head"),
        # DeepSeek-V4.
        ("embed", "layers.0.attn.wq_a", "head"),
        ("biogpt.embed_tokens", "biogpt.layers.0.fc1", "output_projection"),
        ("model.language_model.embed_tokens", f"{LAYER}.mlp.up_proj", "thinker.lm_head"),
        ("transformer.tokens_embed", "transformer.h.0.attn.c_attn", "lm_head"),
        ("backbone.embedding", "backbone.layers.0.mixer.in_proj", "lm_head"),
    ],
)
def test_names_of_ends(tmp_path: Path, embedding: str, layer: str, head: str) -> None:
    """A layer of 9 bits per weight, and a bf16 head of 40 weights or a tied embedding in F32.

    The layer has 32 int8 weights with a scale of 32 bits.
    """
    quantized = {f"{layer}.weight": ("I8", 8, 4), f"{layer}.weight_scale": ("F32", 1)}
    entries = {**quantized, f"{embedding}.weight": ("F32", 10, 4)}
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(9.0, 32.0, 288 + 1280)
    entries[f"{head}.weight"] = ("BF16", 10, 4)
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(9.0, 16.0, 288 + 640)
    assert role_of(embedding, None) == "embedding"
    assert role_of(layer, None) == "layer"
    assert role_of(head, None) == "head"


@pytest.mark.parametrize(
    ("embedding", "layer", "outside"),
    [
        (
            "decoder.model.embed_tokens",
            "decoder.model.layers.0.mlp.up_proj",
            "encoder.blocks.0.mlp.fc1",
        ),  # MiDashengLM
        (
            "language_model.model.embed_tokens",
            "language_model.model.layers.0.mlp.up_proj",
            "encoder.layers.0.ff1.up_proj",
        ),  # Granite Speech
        (
            "language_model.model.decoder.embed_tokens",
            "language_model.model.decoder.layers.0.fc1",
            "qformer.encoder.layer.0.attention.attention.query",
        ),  # BLIP-2 with OPT
        (
            "language_model.model.embed_tokens",
            "language_model.model.layers.0.fc1",
            "language_projection",
        ),
        (
            "model.embed_tokens",
            "model.layers.0.mlp.up_proj",
            "model.encoder.layers.0.fc1",
        ),  # Kimi-Audio
        ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.vq_adaptor.layers.0"),
        ("model.embed_tokens", "model.layers.0.mlp.up_proj", "model.vision_embedding.1"),  # Isaac
        (
            "model.language_model.embed_tokens",
            "model.language_model.layers.0.mlp.up_proj",
            "model.merger.mlp.0",
        ),
        (
            "transformer.embedding.word_embeddings",
            "transformer.encoder.layers.0.mlp.dense_h_to_4h",
            "transformer.vision.transformer.layers.0.mlp.fc1",
        ),  # GLM-4V
        (
            "model.transformer.wte.embedding",
            "model.transformer.blocks.0.ff_out",
            "model.image.blocks.0.feed_forward.w1",
        ),  # as Molmo
        ("word_embeddings", "h.0.mlp.dense_4h_to_h", "encoder.layers.0.fc1"),
        (
            "mm_whisper_embeddings.tok_embeddings",
            "layers.0.feed_forward.w1",
            "mm_whisper_embeddings.whisper_encoder.transformer.layers.0.feed_forward.w1",
        ),  # Voxtral
    ],
)
def test_what_lies_outside_the_text_model(
    tmp_path: Path, embedding: str, layer: str, outside: str
) -> None:
    """A layer of 9 bits per weight, and a bf16 head of 40 weights.

    The layer has 32 int8 weights with a scale of 32 bits.
    """
    entries: Entries = {f"{layer}.weight": ("I8", 8, 4), f"{layer}.weight_scale": ("F32", 1)}
    entries |= {f"{embedding}.weight": ("F32", 10, 4), "lm_head.weight": ("BF16", 10, 4)}
    more: Entries = {
        f"{outside}.weight": ("BF16", 4, 4),
        "encoder.embed_tokens.weight": ("BF16", 5, 4),
    }
    assert storage_of(write_checkpoint(tmp_path, entries | more)) == Storage(9.0, 16.0, 288 + 640)
    del more["encoder.embed_tokens.weight"], entries["lm_head.weight"]
    assert storage_of(write_checkpoint(tmp_path, entries | more)) == Storage(9.0, 32.0, 288 + 1280)


@pytest.mark.parametrize("part", ["shared_head.head", "eh_proj", "mlp.up_proj", "lm_head"])
def test_layers_past_the_last_are_left_out(tmp_path: Path, part: str) -> None:
    """DeepSeek and GLM number multi-token-prediction modules after the last layer.

    The config counts only layers.
    """
    # The text model's own count decides.
    config = {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 11}}
    layers = "model.language_model.layers"
    entries = {
        **ENDS,
        f"{Q}.weight": ("BF16", 8, 4),
        f"{layers}.10.mlp.up_proj.weight": ("F32", 8, 4),
    }
    gold = Storage((512 + 1024) / 64, 16.0, 512 + 1024 + 640)
    assert storage_of(write_checkpoint(tmp_path, entries, config)) == gold
    entries[f"{layers}.11.{part}.weight"] = ("F32", 8, 8)
    assert storage_of(write_checkpoint(tmp_path, entries, config)) == gold
    # Without a count of layers, none is left out.
    if part == "eh_proj":
        assert storage_of(write_checkpoint(tmp_path, entries)).vram_bits == 512 + 1024 + 640 + 2048


@pytest.mark.parametrize(
    ("tensors", "bits", "weights"),
    [
        # 64 weights of 32 bits
        ({"gate_up_proj": ("F32", 2, 8, 4)}, 2048, 64),
        # 64 of 8 bits and two scales of 32; scales of activations do not count
        ({"down_proj": ("F8_E4M3", 2, 8, 4), "down_proj_scale_inv": ("F32", 2, 1, 1)}, 576, 64),
        (
            {
                "down_proj": ("F8_E4M3", 2, 8, 4),
                "down_proj_weight_scale": ("F32", 2),
                "down_proj_input_scale": ("F32", 2),
            },
            576,
            64,
        ),
        # gpt-oss: 2 experts of 4 x 64: 2 * 4 * 2 blocks of 16 bytes = 2,048, and one byte per block
        # = 128: 4.25
        (
            {
                "gate_up_proj_blocks": ("U8", 2, 4, 2, 16),
                "gate_up_proj_scales": ("U8", 2, 4, 2),
                "gate_up_proj_bias": ("BF16", 2, 4),
            },
            2176,
            512,
        ),
        # Llama 4 by modelopt: 2 experts of 4 x 32: 128 bytes = 1,024, 16 scales of 8 = 128, 2 of 32
        (
            {
                "down_proj": ("U8", 2, 4, 16),
                "down_proj_weight_scale": ("F8_E4M3", 2, 4, 2),
                "down_proj_weight_scale_2": ("F32", 2),
            },
            1216,
            256,
        ),
        # DeepSeek-V4 in Transformers' names: 2 experts of 8 x 64: 512 bytes = 4,096, 32 powers of
        # two = 256
        (
            {"gate_up_proj": ("I8", 2, 8, 32), "gate_up_proj_scale_inv": ("F8_E8M0", 2, 8, 2)},
            4352,
            1024,
        ),
        # one module per expert: 2 * 8 * 4 of 16 bits
        ({"0.w1.weight": ("BF16", 8, 4), "1.w1.weight": ("BF16", 8, 4)}, 1024, 64),
    ],
)
def test_experts(tmp_path: Path, tensors: Entries, bits: int, weights: int) -> None:
    """The checkpoint also has a bf16 layer of 32 weights (512 bits) and a head (640 bits)."""
    experts = {f"{LAYER}.mlp.experts.{name}": entry for name, entry in tensors.items()}
    router = {f"{LAYER}.mlp.router.weight": ("BF16", 2, 4)}
    entries = {**ENDS, **experts, **router, f"{Q}.weight": ("BF16", 8, 4)}
    assert storage_of(write_checkpoint(tmp_path, entries)) == Storage(
        (bits + 512) / (weights + 32), 16.0, bits + 512 + 640
    )


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((), "fp8 tensor"),
        # One scale for each of two matrices that are stored as one.
        ((2,), "fp8 tensor"),
        ((8,), "fp8 channel"),
        ((8, 1), "fp8 channel"),
        ((2, 2), "fp8 block 4x2"),
        ((1, 4), "fp8 block 8x1"),
    ],
)
def test_words_for_the_scales_of_a_matrix(
    tmp_path: Path, shape: tuple[int, ...], words: str
) -> None:
    """8 x 4 weights in FP8; the shape of the scales decides which weights share one."""
    entries = {**ENDS, f"{Q}.weight": ("F8_E4M3", 8, 4), f"{Q}.weight_scale": ("F32", *shape)}
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model", entries, {}))
    assert layout_of(checkpoint.quantized[Q], checkpoint.config).words == words


def test_a_matrix_that_may_be_a_head_leaves_the_size_unknown(tmp_path: Path) -> None:
    entries = {f"{Q}.weight": ("BF16", 8, 4), "model.words.weight": ("BF16", 10, 4)}
    folder = write_checkpoint(tmp_path / "model", entries, {"vocab_size": 10, "hidden_size": 4})
    storage = storage_of(folder)
    assert (storage.bpw_layer, storage.bpw_head) == (None, None)
    assert storage.note.startswith("model.words: ")
