"""Check that decode computes the same scores as prefill: both score short windows, once per model.

The mean difference of their log-probabilities, in nats, is compared with the largest difference
that rounding explains.  Correct models differ by 0.0001 in float32 on a CPU, 0.05 to 0.07 in
bfloat16 (SmolLM2-135M).  If activations or cached keys are rounded to few bits, a different
rounding anywhere moves them by a whole step; the difference is then 0.44 with W8A8 and 1.33 with
NVFP4 and 4-bit activations.  This check does not find a smaller fault, or a fault that begins
later; such a fault appears in the row's KLD.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ROUNDED, SIXTEEN_BITS, TENSOR_FLOAT, FLOAT32 = 2.0, 0.25, 0.05, 0.001
"""Limits in nats: for rounded activations, 16-bit dtypes, float32 on a GPU (whose products may have
10 bits), and float32 on a CPU."""


def limit(formats: Iterable[str], *, on_gpu: bool) -> float:
    """Return the largest mean difference that rounding explains, in nats.

    ``formats``: number formats of the layers' activations and of cached keys, as in ``Layer`` and
    ``KVCache``.
    """
    kinds = set(formats)
    if any(not each.startswith(("bfloat", "float")) for each in kinds):
        return ROUNDED
    return SIXTEEN_BITS if kinds != {"float32"} else TENSOR_FLOAT if on_gpu else FLOAT32


def difference(decoded: NDArray[np.floating], prefill: NDArray[np.floating]) -> float:
    """Return the mean |decoded - prefill| of log-probabilities [T], nats; tokens that prefill
    excludes do not count.
    """
    there = np.isfinite(prefill)
    return (
        float(np.abs(np.asarray(decoded - prefill, np.float64)[there]).mean())
        if there.any()
        else 0.0
    )


def fault(found: float, most: float) -> str:
    """Return how decode differs from prefill, from their ``difference``; empty if ``limit``
    explains it.
    """
    if found <= most:
        return ""
    return (
        f"phase: the log-probabilities of a short text differ by {found:.3g} nats on average between decode and "
        f"prefill, and roundings explain {most:g}: this engine does not decode this model right"
    )
