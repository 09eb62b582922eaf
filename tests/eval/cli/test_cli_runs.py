"""Runs of several models on the command line: what is said before they start, and what is scored again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.worker import worker
from tests.support.command_line import Run, Specs
from tests.support.fake_engine import FakeEngine
from tests.support.toy import Ran

HOW_TO = 'no KL divergence: no model is the reference; mark one, best the unquantized one, with "reference": true'


def fake(label: str, boost: float = 0.0, **keys: Any) -> dict[str, Any]:
    return {
        "load_fn": "fake",
        "label": label,
        "model_dir": "none",
        "engine": {"vocab_size": 500, "boost": boost},
        **keys,
    }


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the models that were loaded, in order."""
    found: list[str] = []
    load = FakeEngine.load

    def counted(self: FakeEngine) -> None:
        found.append(self.planned.label)
        load(self)

    monkeypatch.setattr(FakeEngine, "load", counted)
    return found


def test_three_models_without_a_reference_and_then_with_one(
    compare_q: Run, write_specs: Specs, loads: list[str], tmp_path: Path
) -> None:
    """KLD needs each model once more, beside the reference; a run without one needs nothing, whatever was there before.

    With b as the reference after a: a and c are compared anew, and b leaves its store; then with a again: nothing.
    """

    def run(reference: str = "") -> tuple[list[str], Ran]:
        loads.clear()
        models = [fake(label, boost) for label, boost in (("a", 0.0), ("b", 2.0), ("c", 3.0))]
        data, spec = write_specs([{**each, "reference": each["label"] == reference} for each in models])
        ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json")
        assert ran.status == 0, ran.err
        return list(loads), ran

    def ppl() -> list[float]:
        return [model["ppl"] for model in json.loads((tmp_path / "r.json").read_text())["texts"][0]["models"]]

    scored, ran = run()
    assert scored == ["a", "b", "c"]
    assert HOW_TO in ran.err
    alone = ppl()
    scored, ran = run("a")
    assert scored == ["a", "b", "c"]
    assert HOW_TO not in ran.err
    assert ppl() == alone
    assert run("b")[0] == ["b", "a", "c"]
    assert run("a")[0] == run("b")[0] == run()[0] == []
    assert ppl() == alone


def test_what_is_cleared_is_not_shown_by_a_later_run(
    compare_q: Run, write_specs: Specs, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the user in a reference's folder stay."""
    monkeypatch.setattr(worker, "COMMIT_S", math.inf)  # one segment, however slow the machine is
    data, spec = write_specs([fake("a", reference=True), fake("b", 2.0)])
    words, notes = ("-d", data, "-m", spec, "-lf", tmp_path / "kept"), tmp_path / "kept" / "notes.txt"
    assert compare_q(*words).status == 0
    notes.write_text("mine")
    before = set((own_cache / "scores").glob("*/*"))
    assert len(before) == 4  # a segment and a record of each
    assert compare_q(*words, "-cc").status == 0
    after = set((own_cache / "scores").glob("*/*"))
    assert len(after) == 4
    assert not before & after
    assert compare_q(*words).status == 0
    assert notes.read_text() == "mine"
