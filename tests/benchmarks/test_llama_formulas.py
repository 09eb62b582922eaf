"""What stands for the tool in the comparison with llama-perplexity, and what for float64."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.llama_formulas import percentile


def test_a_percentile_lies_where_its_dtype_puts_it() -> None:
    """0.999 of 2,039 gaps: the tool's float32 is 6e-5 of a gap too high."""
    values = np.arange(2040.0)
    assert percentile(values, "99.9") == pytest.approx(2036.961, abs=1e-9)
    assert percentile(values.astype(np.float32), "99.9") == 2036.9610595703125
    assert percentile(values, "50") == 1019.5
    assert (percentile(values, "min"), percentile(values, "max")) == (0.0, 2039.0)
