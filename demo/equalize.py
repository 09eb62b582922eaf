"""Write the same Llama with other weights.

The demo's weights come from a Q4_1 file, so that they lie on its grid. A format with a similar grid
would therefore look better than it is. Norms are folded into the next matrices, and channels are
equalized across layers. These changes move every weight, but do not change the model's function in
exact arithmetic:

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
    """Return the weights of a Llama without biases, rewritten in float32 as described at the top.

    The input is not changed.  ValueError for a Llama with biases.
    """
    equalized_weights = {name: weight.float().clone() for name, weight in weights.items()}
    for layer in range(config.num_hidden_layers):
        equalize_layer(equalized_weights, f"model.layers.{layer}.", config)
    return equalized_weights


def equalize_layer(weights: Weights, prefix: str, config: Any) -> None:
    """Rewrite the weights whose names begin with ``prefix``, in place."""
    layer = {}
    for name, weight in weights.items():
        if name.startswith(prefix):
            if name.endswith(".bias"):
                raise ValueError(
                    f"{name}: only Llamas without biases are known to stay the same function"
                )
            layer[name.removeprefix(prefix)] = weight
    up = layer["mlp.up_proj.weight"]
    v = layer["self_attn.v_proj.weight"]
    q = layer["self_attn.q_proj.weight"]
    k = layer["self_attn.k_proj.weight"]
    # Folded first: equalizing reads the largest weights of the folded matrices.
    fold(layer["input_layernorm.weight"], q, k, v)
    fold(layer["post_attention_layernorm.weight"], layer["mlp.gate_proj.weight"], up)
    equalize(up, layer["mlp.down_proj.weight"], groups=1, width=config.intermediate_size)
    query_heads_per_kv_head = config.num_attention_heads // config.num_key_value_heads
    equalize(
        v,
        layer["self_attn.o_proj.weight"],
        groups=query_heads_per_kv_head,
        width=config.head_dim,
    )


def fold(norm: torch.Tensor, *readers: torch.Tensor) -> None:
    """Move a norm's weights [H] into the matrices [*, H] that read its output, in place."""
    for reader in readers:
        reader *= norm
    norm.fill_(1.0)


def equalize(writer: torch.Tensor, reader: torch.Tensor, *, groups: int, width: int) -> None:
    """Divide the rows of ``writer`` [C, *] and multiply the columns of ``reader`` [*, C * groups].

    Channels come in runs of ``width``. The reader has ``groups`` consecutive copies of each run in
    its input, because several query heads share one key/value head. Works in place; a channel of
    zeros is not changed.
    """
    # All query heads of a key/value head read the same channel: their largest weight counts.
    read = reader.abs().amax(0).view(-1, groups, width).amax(1).flatten()
    factors = torch.sqrt(writer.abs().amax(1) / read)
    # A channel of zeros has a factor of 0, infinity or NaN.
    factors[~(factors.isfinite() & (factors > 0))] = 1.0
    writer /= factors[:, None]
    reader *= factors.view(-1, 1, width).expand(-1, groups, -1).flatten()
