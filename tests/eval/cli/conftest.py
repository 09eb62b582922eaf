"""A finished run for ``show``, the rows of a run, a text of many windows, and ``where``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q import backends
from tests.support import fake_engine, restoring_engine
from tests.support.made import FAILED, QUANT, REF, run_of
from tests.support.restoring_engine import LOSSES, Where, word
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


@pytest.fixture
def trials_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that gets a line for each trial in each window, of engines that may be used then."""
    locations = f"{fake_engine.LOCATION},{restoring_engine.LOCATION}"
    monkeypatch.setenv(backends.OUTSIDE, locations)
    monkeypatch.setenv(restoring_engine.LOG, str(tmp_path / "trials.log"))
    return tmp_path / "trials.log"


@pytest.fixture
def where(compare_q: Run, toy_model: Path, long_text: Path, trials_log: Path) -> Where:
    """Run ``where`` on windows of 50 tokens, with options of the quantized model."""

    def run(*flags: object, rows: int = 8, **options: Any) -> Ran:
        return compare_q(
            "where",
            word("ref", toy_model),
            word("q4", toy_model, **{"losses": LOSSES, **options}),
            *("-d", long_text, "--eval-len", 50, "-r", rows),
            *flags,
        )

    return run
