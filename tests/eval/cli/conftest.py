"""A finished run for ``show``."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_q.eval.results import results_json
from tests.support.made import FAILED, QUANT, REF, results_of, run_of


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """results.json of a finished run with a failed model."""
    results_json.write_json(
        results_of(run_of(REF, QUANT, FAILED)), tmp_path / "finished.json", ["compare_q.py", "-d", "x"]
    )
    return tmp_path / "finished.json"
