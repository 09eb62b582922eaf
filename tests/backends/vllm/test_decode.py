"""Which differences between decode and prefill are accepted, and which are an error."""

from __future__ import annotations

import numpy as np
import pytest

from compare_q.backends.vllm import decode


@pytest.mark.parametrize(
    ("formats", "on_gpu", "expected"),
    [
        (["float32"], False, decode.FLOAT32),
        (["float32", "float32"], True, decode.TENSOR_FLOAT),
        (["bfloat16", "float32"], False, decode.SIXTEEN_BITS),
        ([], False, decode.SIXTEEN_BITS),
        (["bfloat16", "int8 token"], True, decode.ROUNDED),
        (["bfloat16", "fp8"], True, decode.ROUNDED),
    ],
)
def test_limits(formats: list[str], on_gpu: bool, expected: float) -> None:
    assert decode.limit(formats, on_gpu=on_gpu) == expected


def test_faults_by_hand() -> None:
    """0.1 and 0.3 nats are 0.2 on average.

    A token that prefill excludes does not count; a token with NaN counts.
    """
    prefill = np.array([-1.0, -2.0, -np.inf], np.float32)
    decoded = np.array([-1.1, -1.7, -3.0], np.float32)
    mean_difference = decode.difference(decoded, prefill)
    assert mean_difference == pytest.approx(0.2)
    assert decode.fault(mean_difference, 0.21) == ""
    assert "0.2 nats" in decode.fault(mean_difference, 0.19)
    assert decode.fault(decode.difference(np.array([np.nan, -2.0, 0.0], np.float32), prefill), 1.0)
