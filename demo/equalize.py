"""Write the same Llama with other weights: norms folded into the next matrices, channels equalized
across layers.

The demo's weights come from a Q4_1 file, so that they lie on its grid. A format with a similar grid
would therefore look better than it is. These changes move every weight, but do not change the
model's function in exact arithmetic:

- RMSNorm multiplies by its weights.  The matrices that read its output absorb these weights, and
  the norm's weights become 1.  The last norm keeps its weights, since the tied head is also the
  embedding.
- If one matrix writes a channel and another matrix reads it, the writer may be divided by a factor
  and the reader multiplied by it.  Such pairs are up and down, and v and o (attention averages v,
  head by head).  With the factor sqrt(r1 / r2), the largest weight r1 of the channel's row becomes
  equal to the largest weight r2 of its column (Nagel et al. 2019, arXiv 1906.04721, equation 11).
"""

from __future__ import annotations

from typing import Any

import torch

Weights = dict[str, torch.Tensor]


def equalized(weights: Weights, config: Any) -> Weights:
    """The weights of a Llama without biases, rewritten in float32 as described at the top; the
    input is not changed.
    """
    found = {name: weight.float().clone() for name, weight in weights.items()}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {
            name.removeprefix(prefix): weight
            for name, weight in found.items()
            if name.startswith(prefix)
        }
        if biases := [name for name in own if name.endswith(".bias")]:
            raise ValueError(
                f"{prefix}{biases[0]}: only Llamas without biases are known to stay the same function"
            )
        fold(
            own["input_layernorm.weight"], *(own[f"self_attn.{name}_proj.weight"] for name in "qkv")
        )
        fold(
            own["post_attention_layernorm.weight"],
            own["mlp.gate_proj.weight"],
            own["mlp.up_proj.weight"],
        )
        equalize(
            own["mlp.up_proj.weight"],
            own["mlp.down_proj.weight"],
            groups=1,
            width=config.intermediate_size,
        )
        equalize(
            own["self_attn.v_proj.weight"],
            own["self_attn.o_proj.weight"],
            groups=config.num_attention_heads // config.num_key_value_heads,
            width=config.head_dim,
        )
    return found


def fold(norm: torch.Tensor, *readers: torch.Tensor) -> None:
    """Move a norm's weights [H] into the columns of matrices [*, H] that read its output, in place."""
    for reader in readers:
        reader *= norm
    norm.fill_(1.0)


def equalize(writer: torch.Tensor, reader: torch.Tensor, *, groups: int, width: int) -> None:
    """Divide the rows of ``writer`` [C, *] and multiply the columns of ``reader`` [*, C * groups]
    that read them.

    Channels come in runs of ``width``. The reader has ``groups`` consecutive copies of each run in
    its input, because several query heads share one key/value head. Works in place; a channel of
    zeros is not changed.
    """
    read = reader.abs().amax(0).view(-1, groups, width).amax(1).flatten()
    factors = torch.sqrt(writer.abs().amax(1) / read)
    factors[~(factors.isfinite() & (factors > 0))] = 1.0
    writer /= factors[:, None]
    reader *= factors.view(-1, 1, width).expand(-1, groups, -1).flatten()
