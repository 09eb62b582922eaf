"""A finished run for ``show``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.made import FAILED, QUANT, REF, results_of, run_of


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """results.json of a finished run with a failed model."""
    run = results_of(run_of(REF, QUANT, FAILED)).with_origin(["compare_q.py", "-d", "x"])
    run.write(tmp_path / "finished.json")
    return tmp_path / "finished.json"
