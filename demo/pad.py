"""Pad a Llama folder with zeros to a larger hidden size. Its function is the same, and every kernel accepts its shape.

Machete, Marlin and EXL3 need features in multiples of 128, and llama.cpp's K-quants need rows in multiples of 256.
SmolLM2-135M has a hidden size of 576.  Transformers requires hidden = heads x head size, so heads are added: query
heads of zeros, and enough key/value heads that each query head stays with its own key/value head.

    python -m demo.pad demo/models/smollm2-135m OUT --hidden 768

Why the function is the same: the added features of the residual stream stay zero, so that a mean over the stream is
old/new times the original's. RMSNorm with eps * old/new therefore returns sqrt(new/old) times the original output, and
norm weights times sqrt(old/new) undo this. In bf16, rounding these weights would change the model. The demo therefore
pads in float32, and rounds once (``demo/smollm2.py``).
"""

from __future__ import annotations

import argparse
import copy
import math
import shutil
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def padded_config(config: LlamaConfig, hidden: int) -> LlamaConfig:
    """The config of the padded model; ValueError if its heads cannot be grouped as the original's are."""
    if config.model_type != "llama":
        raise ValueError(f"model_type {config.model_type!r}: only llama is known to be the same function padded")
    step = config.head_dim * config.num_attention_heads // config.num_key_value_heads
    if hidden < config.hidden_size or hidden % step:
        raise ValueError(f"hidden size {hidden}: must be a multiple of {step} and at least {config.hidden_size}")
    padded = copy.deepcopy(config)
    padded.num_attention_heads = hidden // config.head_dim
    padded.num_key_value_heads = hidden // step
    padded.rms_norm_eps = config.rms_norm_eps * config.hidden_size / hidden
    padded.hidden_size = hidden
    return padded


def padded_tensor(name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return ``tensor`` padded with zeros at the end of each axis; a norm's weight is also scaled, in float32."""
    if name.endswith("norm.weight"):
        tensor = (tensor.float() * math.sqrt(tensor.shape[0] / shape[0])).to(tensor.dtype)
    result = torch.zeros(shape, dtype=tensor.dtype)
    result[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return result


def padded(original: LlamaForCausalLM, hidden: int) -> LlamaForCausalLM:
    """Return the model, padded to ``hidden``, in the same dtype; ValueError if it cannot be padded."""
    config = padded_config(original.config, hidden)
    model = LlamaForCausalLM(config).to(original.dtype)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    model.load_state_dict(
        {name: padded_tensor(name, tensor, shapes[name]) for name, tensor in original.state_dict().items()}
    )
    model.tie_weights()
    model.generation_config = original.generation_config
    return model


def pad(source: Path, out: Path, hidden: int) -> None:
    """Write the model of ``source``, padded to ``hidden``, and its tokenizer files to ``out``, in the same dtype."""
    transformers.utils.logging.disable_progress_bar()
    padded(AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map="cpu"), hidden).save_pretrained(out)
    copy_tokenizer(source, out)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files from one model folder to another."""
    for file in [*source.glob("*token*"), *source.glob("chat_template*")]:
        shutil.copy(file, out)


def main() -> None:
    """``python -m demo.pad SRC OUT --hidden N``."""
    parser = argparse.ArgumentParser(description="Pad a Llama folder with zeros to a larger hidden size.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, required=True, help="hidden size of the padded model")
    arguments = parser.parse_args()
    try:
        pad(arguments.source, arguments.out, arguments.hidden)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
