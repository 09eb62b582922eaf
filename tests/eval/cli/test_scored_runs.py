"""Runs of the command line: scores that are known in advance, the cache, and failing models."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest

from compare_q.backends.worker import worker
from tests.support.fake_engine import FakeEngine
from tests.support.toy import FAKE, Models, Ran, Run, Specs


def shown_ppl(ran: Ran, label: str) -> float:
    """Return the PPL in the printed row of a model whose stored size is n/a."""
    match = re.search(rf"^ ?{label} +closed form +n/a +n/a +★?([\d,.]+)±", ran.out, re.MULTILINE)
    assert match, ran.out
    return float(match[1].replace(",", ""))


def test_results_json_says_what_ran(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, spec = write_specs([FAKE], dataset_display_name="letters")
    monkeypatch.setattr(FakeEngine.files, "weight_files", lambda _: (data, spec))
    assert compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json").status == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["format"] == 10
    assert "python" in written["versions"]
    assert "cpu" in written["hardware"] or "gpus" in written["hardware"]
    assert written["data"]["windows"] == 9
    assert written["data"]["scored_tokens"] == 891
    (text,) = written["data"]["texts"]
    assert (text["windows"], text["scored_tokens"]) == (9, 891)
    assert text["spec"]["dataset_display_name"] == "letters"
    assert len(written["models"][0]["spec_sha256"]) == 64
    assert written["models"][0]["bpw_layer"] is None
    assert written["models"][0]["storage_note"] == "this model has no files"
    assert written["models"][0]["file_bytes"] == data.stat().st_size + spec.stat().st_size


def test_an_interrupt_while_a_row_is_made_does_not_lose_the_row(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is made when its scores are complete; the first model is stored, but has no row yet."""
    data, spec = write_specs([{**FAKE, "label": "first"}, {**FAKE, "label": "second"}])
    storage = FakeEngine.files.storage
    interrupts = [KeyboardInterrupt]

    def interrupted(files: object) -> object:
        if interrupts:
            raise interrupts.pop()
        return storage(files)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine.files, "storage", interrupted)
    ran = compare_q("-d", data, "-m", spec, "-o", tmp_path / "r.json")
    assert ran.status == 130, ran.err
    assert not interrupts
    first, _ = json.loads((tmp_path / "r.json").read_text())["models"]
    assert first["ppl"] > 1
    assert first["error"] is None


def test_cleared_scores_are_gone(
    run_models: Models, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One segment, even on a slow machine.
    monkeypatch.setattr(worker, "COMMIT_S", math.inf)
    models = [
        {**FAKE, "label": "a", "reference": True},
        {**FAKE, "label": "b", "engine": {"boost": 2.0}},
    ]
    records = []
    for flags in ([], ["-cc"]):
        run_models(models, *flags)
        records.append(set((own_cache / "scores").glob("*/*")))
    # A segment and a record of each.
    assert [len(files) for files in records] == [4, 4]
    assert not records[0] & records[1]


def test_a_failure_or_a_bug_does_not_lose_the_others(run_models: Models, tmp_path: Path) -> None:
    """The bug is not a CompareQError: the logits do not have a row for a token id."""
    models = [
        {**FAKE, "label": "bad", "engine": {"fail": 2}},
        {**FAKE, "label": "good"},
        {**FAKE, "label": "small", "engine": {"vocab_size": 5}},
    ]
    # The plot has nothing to draw, which is status 2.
    ran, (bad, good, _) = run_models(models, "-pf", tmp_path / "p.png", status=2)
    assert "bad: failed: told to fail after 2 windows" in ran.out
    assert "small: failed: IndexError: " in ran.out
    assert "Traceback" not in ran.out + ran.err
    assert shown_ppl(ran, "good") == pytest.approx(1000, rel=1e-5)
    assert (bad["ppl"], bad["error"]) == (None, "told to fail after 2 windows")
    assert good["error"] is None
    assert "bad: not in the plot" in ran.out


@pytest.mark.parametrize(
    ("options", "gold"),
    [
        ({"nan_windows": [0]}, "no perplexity: none of 1 positions is finite"),
        ({"fail": 0}, "told to fail after 0 windows"),
    ],
)
def test_nothing_measured_is_status_2(
    compare_q: Run, write_specs: Specs, options: dict[str, object], gold: str
) -> None:
    # A window of two tokens has one scored position.
    data, spec = write_specs([{**FAKE, "engine": options}], eval_len=2, eval_stride=2, max_rows=1)
    ran = compare_q("-d", data, "-m", spec)
    assert ran.status == 2
    assert ran.err.splitlines()[-1] == f"error: fake: {gold}"


def test_kld_against_a_reference(run_models: Models, tmp_path: Path) -> None:
    """PPL = V for uniform logits; with boost b, PPL = (e^b + V - 1) / e^b: (e^3 + 499) / e^3 =
    25.844.

    The real token has p = e^3 / (e^3 + 499), the others q = 1 / (e^3 + 499): p ln 500p + 499 q ln
    500q = 0.07862.
    """
    uniform = {"label": "uniform", "engine": {"vocab_size": 500}, "override_bpw_layer": 4.0}
    boosted = {
        "label": "boosted",
        "engine": {"vocab_size": 500, "boost": 3.0},
        "override_bpw_layer": 16.0,
    }
    models = [{**FAKE, **uniform}, {**FAKE, **boosted, "reference": True}]
    files = ("-pf", tmp_path / "p.svg", "--csv", tmp_path / "r.csv")
    ran, (alone, marked) = run_models(models, "-kld", *files)
    first, second = (
        line.split() for line in ran.out.splitlines() if line.startswith((" uniform", " boosted"))
    )
    assert (first[5].partition("±")[0], first[7].partition("±")[0]) == ("500.0000", "0.07862")
    assert (second[5].partition("±")[0], second[6:8]) == ("25.8437", ["ref", "ref"])
    assert "the most probable tokens of boosted (" in ran.out
    # As soon as it is scored.
    assert "\nuniform: PPL 500.0000, KLD 0.07862\n" in ran.err
    assert (alone["reference"], marked["reference"]) == (False, True)
    assert alone["kld"] == pytest.approx(0.078622, abs=1e-6)
    assert (alone["ppl"], alone["tokens"]) == (pytest.approx(500.0, rel=1e-6), 9 * 99)
    assert marked["ppl"] == pytest.approx(25.8437, abs=1e-3)
    with (tmp_path / "r.csv").open() as stream:
        assert [float(row["ppl"]) for row in csv.DictReader(stream)] == [
            alone["ppl"],
            marked["ppl"],
        ]
    assert (tmp_path / "p.svg").is_file()


def test_an_engine_that_cannot_describe_itself_loses_no_score(
    run_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an engine cannot describe or close itself, its scores and the reference store are kept."""

    def broken(self: FakeEngine) -> None:
        raise RuntimeError("cannot copy out of meta")

    monkeypatch.setattr(FakeEngine, "layers", broken)
    monkeypatch.setattr(FakeEngine, "close", broken)
    models = [
        {**FAKE, "label": "ref", "reference": True},
        {**FAKE, "label": "other", "engine": {"boost": 1.0}},
    ]
    ran, (ref, other) = run_models(models)
    assert (ref["error"], ref["kernel"]) == (None, None)
    assert other["kld_tokens"] == other["tokens"] == 891
    assert "ref, other: what ran is not known: RuntimeError: cannot copy out of meta" in ran.out
