"""Four tokens whose estimates are worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from compare_q.eval.stats.uncertainty import Mean, Value

LN2 = math.log(2)
QUARTERS = np.arange(1, 5)
"""Places in the text of four tokens, which make three blocks, {1, 2}, {3}, {4}, and so two waves.

Of sums off by u, v, w the first wave is cos 30° (u - w), the second u / 2 - v + w / 2 = -3/2 v; weighted by 1 + 0.6 and
1 + 0.6 * 4 (12,000 / 20,000): error^2 = 1/2 (2 * 3/4 (u - w)^2 * 1.6 + 2 * 9/4 v^2 * 3.4) / 4^2, that is
(1.2 (u - w)^2 + 7.65 v^2) / 16."""


def four_tokens() -> dict[str, np.ndarray]:
    """Probabilities 1/2, 1/4, 1/8, 1/4 of the model and 1/2, 1/2, 1/4, 1/8 of the reference: in units of ln 2, losses
    1, 2, 3, 2 (mean 2) and 1, 1, 2, 3 (mean 7/4)."""
    return {
        "logprob": np.log(np.array([1 / 2, 1 / 4, 1 / 8, 1 / 4])).astype(np.float32),
        "entropy": np.array([0.5, 1.0, 1.5, 1.0], np.float32),
        "top1": np.array([True, False, False, True]),
        "ref_logprob": np.log(np.array([1 / 2, 1 / 2, 1 / 4, 1 / 8])).astype(np.float32),
        "ref_top1_logprob": np.log(np.array([0.6, 0.6, 0.3, 0.97])).astype(np.float32),
        "kld": np.array([0.25, 0.5, 1.0, 0.25], np.float32),
        "same_top": np.array([True, False, True, True]),
    }


def near(found: Mean | Value | Any, value: float, stderr: float | None, independent: float | None) -> bool:
    """Whether an estimate and both errors are those, to the seven digits of float32."""
    pairs = ((found.value, value), (found.stderr, stderr), (found.stderr_independent, independent))
    return all(a == b if b is None else a == pytest.approx(b, rel=1e-6, abs=1e-7) for a, b in pairs)
