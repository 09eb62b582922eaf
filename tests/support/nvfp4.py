"""NVFP4 by its definition: values of packed weights, and activations rounded to it."""

from __future__ import annotations

import numpy as np
import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EVEN_FIRST = np.array([*E2M1[::2], *E2M1[1::2]])
"""The values that win ties come first: those whose last bit is 0."""


def unpacked(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Weights [out, in] in float64 of packed ones, uint8 [out, in / 2], the low four bits first: sign, E2M1."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    values = torch.tensor(E2M1, dtype=torch.float64)[codes & 7] * (1 - 2 * (codes >> 3))
    groups = values.unflatten(1, (-1, 16)) * scale.double()[:, :, None] / global_scale.double()
    return groups.flatten(1)


def rounded(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Activations [n, in] rounded to NVFP4: FP8 scales of groups of 16 under the global one, then the nearest E2M1."""
    groups = x.double().unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True) / 6 * global_scale
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn).double() / global_scale
    ratios = torch.where(scale > 0, groups / scale, 0).numpy()
    nearest = EVEN_FIRST[np.abs(np.abs(ratios)[..., None] - EVEN_FIRST).argmin(-1)]
    return (torch.from_numpy(nearest * np.sign(ratios)) * scale).flatten(-2).to(x.dtype)
