"""The estimates of four tokens, which most tests of this folder work out by hand."""

from __future__ import annotations

import pytest

from compare_q.eval.stats.estimates import Estimates, summarize
from tests.support.four_tokens import QUARTERS, four_tokens


@pytest.fixture
def four() -> Estimates:
    """16 bytes, 2 words."""
    return summarize(four_tokens(), QUARTERS, QUARTERS, (16.0, 2.0))
