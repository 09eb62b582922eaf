"""Faults in vLLM's CPU kernels, which a plugin of vLLM adds.

A model's ``planted`` in ``hf_overrides`` names one of ``FAULTS``, or "scale".  ``planted_layer``:
number of the only layer whose attention has the fault; without it, all have.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch

FROM = 64
"""First position at which ``late_attention`` is wrong."""


def positions(metadata: Any) -> torch.Tensor:
    """Return the positions of a step's tokens in their windows."""
    starts = metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens.tolist()
    parts = []
    # A step computes the last tokens of each window's ``length`` so far.
    for (begin, end), length in zip(itertools.pairwise(starts), lengths, strict=False):
        count = end - begin
        parts.append(torch.arange(length - count, length))
    return torch.cat(parts)


def late_attention(output: torch.Tensor, metadata: Any) -> None:
    output[: metadata.num_actual_tokens][positions(metadata) >= FROM] *= 0.5


def alone(output: torch.Tensor, metadata: Any) -> None:
    if len(metadata.seq_lens) == 1:
        output.mul_(0.8)


def noise(output: torch.Tensor, metadata: Any) -> None:
    # vLLM seeds torch's own generator, and this noise must differ between runs.
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    output.mul_(1 + 0.1 * torch.randn(output.shape, generator=generator))


def decoded_values(output: torch.Tensor, metadata: Any) -> None:
    # Steps of decode have one new token per sequence.
    if metadata.max_query_len == 1:
        output.mul_(0.5)


FAULTS = {
    "late_attention": late_attention,
    "alone": alone,
    "noise": noise,
    "decoded_values": decoded_values,
}


def of_model(key: str) -> str:
    """Return a key of ``hf_overrides`` of the model that vLLM builds now; "" if it has none."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config().model_config.hf_config
    return str(getattr(config, key, ""))


def plant() -> None:
    """Patch vLLM in this process."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    for patched in (CPUAttentionBackendImpl, CPUInt8ScaledMMLinearKernel):
        note_fault(patched)
    plant_in_attention(CPUAttentionBackendImpl)
    plant_in_kernel(CPUInt8ScaledMMLinearKernel)


def note_fault(patched: Any) -> None:
    """Store the model's fault and its layer in each new object of a class."""
    original_init = patched.__init__

    def init_with_fault(self: Any, *positional: Any, **keys: Any) -> None:
        original_init(self, *positional, **keys)
        self.planted = of_model("planted")
        self.planted_layer = of_model("planted_layer")

    patched.__init__ = init_with_fault


def plant_in_attention(attention: Any) -> None:
    """Change the output of attention by the function in ``FAULTS``, if its model has one."""
    original_forward = attention.forward

    def faulty_forward(*positional: Any, **keys: Any) -> Any:
        result = original_forward(*positional, **keys)
        attention_of_layer = positional[0]
        fault = FAULTS.get(attention_of_layer.planted)
        # forward(self, layer, query, key, value, kv_cache, attn_metadata, output)
        metadata = keys.get("attn_metadata")
        if metadata is None and len(positional) > 6:
            metadata = positional[6]
        layer = keys.get("layer")
        if layer is None:
            layer = positional[1]
        number = attention_of_layer.planted_layer
        is_chosen_layer = not number or f".layers.{number}." in layer.layer_name
        if fault is not None and metadata is not None and is_chosen_layer:
            output = keys.get("output")
            if output is None and len(positional) > 7:
                output = positional[7]
            fault(output.view(output.shape[0], -1), metadata)
        return result

    attention.forward = faulty_forward


def plant_in_kernel(kernel: Any) -> None:
    """Make the last channel's scale a constant, if the model has the fault "scale"."""
    original_process = kernel.process_weights_after_loading

    def faulty_process(self: Any, layer: Any) -> None:
        if self.planted == "scale":
            layer.weight_scale.data[-1] = 1.0 / 64
        original_process(self, layer)

    kernel.process_weights_after_loading = faulty_process
