"""A finished run for ``show``, the rows of a run, and a text of many windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.made import FAILED, QUANT, REF, run_of
from tests.support.toy import Models, Ran, Run, Specs


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """results.json of a finished run with a failed model."""
    run = run_of(REF, QUANT, FAILED).with_origin(["compare_q.py", "-d", "x"])
    run.write(tmp_path / "finished.json")
    return tmp_path / "finished.json"


@pytest.fixture
def run_models(compare_q: Run, write_specs: Specs, tmp_path: Path) -> Models:
    """Run models on the toy text, and assert the exit status; return (the outcome, the rows of
    results.json).
    """

    def run(
        models: list[dict[str, Any]], *flags: object, status: int = 0
    ) -> tuple[Ran, list[dict[str, Any]]]:
        data, spec = write_specs(models)
        ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json", *flags)
        assert ran.status == status, ran.err
        rows: list[dict[str, Any]] = json.loads((tmp_path / "r.json").read_text())["models"]
        return ran, rows

    return run


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """A text of 624 windows of 8 tokens."""
    file = tmp_path / "letters.txt"
    # 5,000 / 8 are 625 windows, but the last one would need a token after the text.
    file.write_text(
        "".join(np.random.default_rng(0).choice(list("abcdefgh \n"), 5_000)), encoding="utf-8"
    )
    return file
