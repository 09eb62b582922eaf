"""Values of configs and GGUF headers that differ from the reference's.

Other ways to write the same model do not count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compare_q.backends.checkpoint import checkpoint_doctor
from compare_q.backends.checkpoint.model_function import differences, filled_facts, may_differ
from tests.support.checkpoints import ENDS, finish_gguf, write_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
}
# The values of Llama 3.1.
LLAMA_3 = {
    "rope_theta": 500_000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_theta": 500_000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}
LINEAR = {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 2.0}
GEMMA_2: dict[str, Any] = {
    **{key: LLAMA[key] for key in LLAMA if key != "rope_parameters"},
    "model_type": "gemma2",
    "rms_norm_eps": 1e-6,
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 8,
    "rope_theta": 10_000.0,
}
MIXTURE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
}


def folder(path: Path, config: dict[str, Any]) -> Path:
    return write_checkpoint(path, ENDS, config)


def run_differences(mine: Path, reference: Path) -> list[str]:
    """Return the differences as a run does: Transformers reads files only if they may differ."""
    if not may_differ(mine, reference):
        return []
    filled = {}
    for path in (mine, reference):
        if path.is_dir():
            filled[path] = filled_facts(path)
    return differences(mine, reference, filled)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        (LLAMA, {"rope_parameters": {"rope_theta": 10_000.0}}, ["rope_theta 10,000 for 500,000"]),
        # Transformers' default is 10,000, and eps is 1e-6.
        (
            without(LLAMA, "rope_parameters"),
            {"rope_theta": 500_000.0},
            ["rope_theta 500,000 for 10,000"],
        ),
        (LLAMA, {"rms_norm_eps": None}, ["rms_norm_eps 1e-06 for 1e-05"]),
        (LLAMA, {"rope_parameters": YARN}, ["rope scaling yarn (factor 4) for none"]),
        (
            {**LLAMA, "rope_parameters": YARN},
            {"rope_parameters": {**YARN, "factor": 2.0}},
            ["rope factor 2 for 4"],
        ),
        (
            {**LLAMA, "rope_parameters": LLAMA_3},
            {"rope_parameters": LLAMA["rope_parameters"]},
            ["rope scaling none for llama3 (factor 8)"],
        ),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act gelu for silu"]),
        (
            LLAMA,
            {"num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2},
            ["num_attention_heads 4 for 8", "num_key_value_heads 2 for 4", "head_dim 16 for 8"],
        ),
        (GEMMA_2, {"sliding_window": 512}, ["sliding_window 512 for 4,096"]),
        (
            GEMMA_2,
            {"layer_types": ["full_attention"] * 2},
            ["layer_types[0] full_attention for sliding_attention"],
        ),
        (GEMMA_2, {"final_logit_softcapping": None}, ["final_logit_softcapping none for 30"]),
        (GEMMA_2, {"query_pre_attn_scalar": 16}, ["query_pre_attn_scalar 16 for 8"]),
        (MIXTURE, {"num_experts_per_tok": 1}, ["num_experts_per_tok 1 for 2"]),
        (MIXTURE, {"norm_topk_prob": False}, ["norm_topk_prob false for true"]),
    ],
)
def test_one_changed_value(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], expected: list[str]
) -> None:
    """A value of None stands for a key that the copy lacks, if the model has a default for it."""
    copy = {**config, **change}
    if change == {"rms_norm_eps": None}:
        copy = without(copy, "rms_norm_eps")
    mine = folder(tmp_path / "copy", copy)
    assert run_differences(mine, folder(tmp_path / "reference", config)) == expected


OLD = {
    **without(LLAMA, "rope_parameters"),
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "copy"),
    [
        (
            LLAMA,
            {
                **LLAMA,
                "quantization_config": {"quant_method": "gptq", "bits": 4},
                "dtype": "float16",
                "use_cache": False,
                "transformers_version": "4.40.0",
                "max_position_embeddings": 4096,
            },
        ),
        (LLAMA, OLD),
        # A value that went through float32.
        (LLAMA, {**OLD, "rms_norm_eps": float(np.float32(1e-5))}),
        (
            LLAMA,
            {**without(LLAMA, "head_dim", "hidden_act"), "attention_bias": False},
        ),  # the defaults
        (
            {**LLAMA, "rope_parameters": LLAMA_3},
            {
                **OLD,
                "rope_scaling": {"type": "llama3", **without(LLAMA_3, "rope_theta", "rope_type")},
            },
        ),
        (
            {**LLAMA, "rope_parameters": YARN},
            # These are the defaults of YaRN.
            {**LLAMA, "rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1.0}},
        ),
        (
            {
                **LLAMA,
                "rope_parameters": {**YARN, "original_max_position_embeddings": 8192},
            },  # the default: the context
            {**LLAMA, "rope_parameters": without(YARN, "original_max_position_embeddings")},
        ),
        # Linear scaling divides every position, whatever the original context was.
        (
            {**LLAMA, "rope_parameters": LINEAR},
            {**LLAMA, "rope_parameters": {**LINEAR, "original_max_position_embeddings": 2048}},
        ),
        (GEMMA_2, {**GEMMA_2, "layer_types": ["sliding_attention", "full_attention"]}),
        (
            GEMMA_2,
            without(GEMMA_2, "final_logit_softcapping", "rope_theta", "sliding_window"),
        ),  # the defaults
        (
            MIXTURE,
            {
                **MIXTURE,
                "output_router_logits": True,
                "sliding_window": None,
                "use_sliding_window": False,
            },
        ),
        # a model of another size is another model on purpose
        (LLAMA, {**LLAMA, "hidden_size": 32, "rms_norm_eps": 1e-6, "num_attention_heads": 4}),
    ],
)
def test_one_model_in_two_ways(
    tmp_path: Path, config: dict[str, Any], copy: dict[str, Any]
) -> None:
    mine = folder(tmp_path / "copy", copy)
    reference = folder(tmp_path / "reference", config)
    assert (run_differences(mine, reference), run_differences(reference, mine)) == ([], [])


def test_the_language_model_of_a_multimodal_one(tmp_path: Path) -> None:
    text = {**without(LLAMA, "model_type", "architectures"), "model_type": "llama"}
    multimodal = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
    }
    mine = folder(tmp_path / "copy", {**LLAMA, "rms_norm_eps": 1e-6})
    reference = folder(tmp_path / "reference", multimodal)
    assert run_differences(mine, reference) == ["rms_norm_eps 1e-06 for 1e-05"]
    assert run_differences(folder(tmp_path / "same", LLAMA), reference) == []


def test_architectures_that_transformers_lacks_are_compared_by_what_both_state(
    tmp_path: Path,
) -> None:
    config = {**LLAMA, "model_type": "nobody_knows"}
    mine = folder(tmp_path / "copy", {**without(config, "head_dim"), "hidden_act": "gelu"})
    assert run_differences(mine, folder(tmp_path / "reference", config)) == [
        "hidden_act gelu for silu"
    ]


def test_a_head_that_the_copy_lacks(tmp_path: Path) -> None:
    """The reference's head differs from its embedding, in dtype; the copy uses its embedding."""
    reference = folder(tmp_path / "reference", LLAMA)
    without_head = {name: entry for name, entry in ENDS.items() if "lm_head" not in name}
    mine = write_checkpoint(tmp_path / "copy", without_head, {**LLAMA, "tie_word_embeddings": True})
    filled = {path: filled_facts(path) for path in (mine, reference)}
    assert differences(mine, reference, filled) == ["tie_word_embeddings true for false"]
    # A copy may store its head separately.
    assert differences(reference, mine, filled) == []


@pytest.mark.parametrize(
    ("changed_row", "expected"), [(None, []), (0, ["tie_word_embeddings true for false"])]
)
def test_a_stored_head_may_be_a_copy_of_the_embedding(
    tmp_path: Path, changed_row: int | None, expected: list[str]
) -> None:
    """Then a model without a head is the same model; one other row makes it another one."""
    embedding = np.arange(40, dtype=np.float32).reshape(10, 4)
    head = embedding.copy()
    if changed_row is not None:
        head[changed_row] += 1
    entries = dict.fromkeys(ENDS, ("F32", 10, 4))
    values = {"model.embed_tokens.weight": embedding.tobytes(), "lm_head.weight": head.tobytes()}
    reference = write_checkpoint(tmp_path / "reference", entries, LLAMA, values)
    del entries["lm_head.weight"]
    mine = write_checkpoint(
        tmp_path / "copy", entries, {**LLAMA, "tie_word_embeddings": True}, values
    )
    known = {path: filled_facts(path) for path in (mine, reference)}
    assert differences(mine, reference, known) == expected


def header(file: Path, architecture: str = "llama", factors: str = "", **fields: Any) -> Path:
    """Write a GGUF of LLAMA's values; ``fields`` replace them, None leaves one out."""
    values: dict[str, Any] = {
        "block_count": 2,
        "embedding_length": 64,
        "context_length": 8192,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500_000.0,
        "rope.dimension_count": 8,
    }
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in fields.items():
        values[name.replace("__", ".")] = value
    for name, value in values.items():
        if value is None:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        if isinstance(value, float):
            kind = gguf.GGUFValueType.FLOAT32
        writer.add_key_value(f"{architecture}.{name}", value, kind)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((10, 64), np.float16))
    if factors:
        writer.add_tensor(factors, np.ones(4, np.float32))
    finish_gguf(writer)
    return file


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        (LLAMA, {}, []),
        (OLD, {"attention__head_count_kv": [4, 4]}, []),
        # llama.cpp's default, which is the same as that of Transformers
        (LLAMA, {"rope__freq_base": None}, ["rope_theta 10,000 for 500,000"]),
        (without(LLAMA, "rope_parameters"), {"rope__freq_base": None}, []),
        (LLAMA, {"attention__layer_norm_rms_epsilon": 1e-6}, ["rms_norm_eps 1e-06 for 1e-05"]),
        # as many as heads
        (LLAMA, {"attention__head_count_kv": None}, ["num_key_value_heads 8 for 4"]),
        (LLAMA, {"rope__dimension_count": 4}, ["rotary dimensions 4 for 8"]),
        (LLAMA, {"rope__dimension_count": None, "attention__key_length": 8}, []),
        (
            LLAMA,
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            ["rope scaling yarn (factor 4) for none"],
        ),
        (LLAMA, {"rope__scaling__type": "none"}, []),
        ({**LLAMA, "rope_parameters": YARN}, {}, ["rope scaling none for yarn (factor 4)"]),
        (
            {**LLAMA, "rope_parameters": YARN},
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            [],
        ),
        ({**LLAMA, "rope_parameters": LLAMA_3}, {"factors": "rope_freqs.weight"}, []),
        ({**LLAMA, "rope_parameters": LLAMA_3}, {}, ["rope scaling none for llama3 (factor 8)"]),
        # Such factors may have another reason than a scaling.
        (LLAMA, {"factors": "rope_freqs.weight"}, []),
        (
            LLAMA,
            {"factors": "rope_freqs.weight", "rope__freq_base": 1e6},
            ["rope_theta 1,000,000 for 500,000"],
        ),
        (
            GEMMA_2,
            {
                "architecture": "gemma2",
                "attention__layer_norm_rms_epsilon": 1e-6,
                "rope__freq_base": None,
                "attention__sliding_window": 4096,
            },
            [],
        ),  # llama.cpp knows the soft caps of Gemma 2
        (
            GEMMA_2,
            {
                "architecture": "gemma2",
                "attention__layer_norm_rms_epsilon": 1e-6,
                "rope__freq_base": None,
                "final_logit_softcapping": 20.0,
            },
            ["final_logit_softcapping 20 for 30"],
        ),
        (
            MIXTURE,
            {"architecture": "qwen3moe", "expert_used_count": 1},
            ["num_experts_per_tok 1 for 2"],
        ),
        # another model
        (LLAMA, {"embedding_length": 128, "attention__layer_norm_rms_epsilon": 1e-6}, []),
    ],
)
def test_headers(
    tmp_path: Path, config: dict[str, Any], fields: dict[str, Any], expected: list[str]
) -> None:
    """A header is compared with the config; as the reference, it shows the same differences."""
    file = header(tmp_path / "model.gguf", **fields)
    reference = folder(tmp_path / "reference", config)
    assert run_differences(file, reference) == expected
    assert bool(run_differences(reference, file)) is bool(expected)


def test_two_headers(tmp_path: Path) -> None:
    assert run_differences(
        header(tmp_path / "a.gguf"), header(tmp_path / "b.gguf", rope__freq_base=1e6)
    ) == ["rope_theta 500,000 for 1,000,000"]


def test_the_doctor_compares_two_headers(tmp_path: Path) -> None:
    """They need no facts of Transformers; a header and a folder do."""
    file = header(tmp_path / "a.gguf")
    other = header(tmp_path / "b.gguf", rope__freq_base=1e6)
    (finding,) = checkpoint_doctor.differing_function(file, other, None, None)
    assert (finding.severity, finding.where) == ("wrong", "a.gguf")
    assert "rope_theta 500,000 for 1,000,000" in finding.what
    reference = folder(tmp_path / "reference", {**LLAMA, "rms_norm_eps": 1e-6})
    assert list(checkpoint_doctor.differing_function(file, reference, None, None)) == []
