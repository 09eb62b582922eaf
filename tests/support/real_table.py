"""The published table of 41 rows on an H200, for what must hold of pictures of a real table."""

from __future__ import annotations

import functools

from compare_q.eval.results import RunResult, TextResult
from tests.support import ROOT

FLOOR = "bf16 vLLM, noise"
MARKED = "NVFP4 W4A4 as run"


@functools.cache
def real_text() -> TextResult:
    """The whole table."""
    return RunResult.read(ROOT / "results" / "h200" / "table" / "results.json").texts[0]
