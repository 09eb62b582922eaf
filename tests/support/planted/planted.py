"""Faults in vLLM's CPU kernels, which a plugin of vLLM adds: ``$PLANTED`` names one of ``FAULTS``."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch

FROM = int(os.environ.get("PLANTED_FROM", "256"))
"""First position at which ``late_attention`` is wrong."""


def positions(metadata: Any) -> torch.Tensor:
    """The positions of a step's tokens in their windows."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    return torch.cat(
        [torch.arange(n - count, n) for n, count in zip(lengths, counts, strict=False)]
    )


def late_attention(output: torch.Tensor, metadata: Any) -> None:
    output[: metadata.num_actual_tokens][positions(metadata) >= FROM] *= 0.5


def alone(output: torch.Tensor, metadata: Any) -> None:
    if len(metadata.seq_lens) == 1:
        output.mul_(0.8)


def noise(output: torch.Tensor, metadata: Any) -> None:
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    output.mul_(1 + 0.1 * torch.randn(output.shape, generator=generator))


def decoded_values(output: torch.Tensor, metadata: Any) -> None:
    if metadata.max_query_len == 1:
        output.mul_(0.5)


FAULTS = {
    "late_attention": late_attention,
    "alone": alone,
    "noise": noise,
    "decoded_values": decoded_values,
}


def plant() -> None:
    """Patch vLLM in this process."""
    fault = os.environ.get("PLANTED", "")
    if fault in FAULTS:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Attention

        right = Attention.forward

        def wrong(*given: Any, **keys: Any) -> Any:
            found = right(*given, **keys)
            metadata = keys.get("attn_metadata", given[6] if len(given) > 6 else None)
            if metadata is not None:
                output = keys.get("output", given[7] if len(given) > 7 else None)
                FAULTS[fault](output.view(output.shape[0], -1), metadata)
            return found

        Attention.forward = wrong
    if fault == "scale":
        from vllm.model_executor.kernels.linear.mixed_precision.cpu import (
            CPUWNA16LinearKernel as Kernel,
        )

        process = Kernel.process_weights_after_loading

        def dropped(self: Any, layer: Any) -> None:
            layer.weight_scale.data[:, -1] = 1.0 / 64  # the last group's scale is a constant
            process(self, layer)

        Kernel.process_weights_after_loading = dropped
