"""Where a row's seconds went: parts that add up, by hand, and there and back through results.json and the tables."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compare_q.backends.common.errors import InputError
from compare_q.eval.results import flat, results_json
from compare_q.eval.results.run_result import Part, with_parts
from compare_q.eval.results.timing import Timing, of_records
from compare_q.eval.table import markdown, terminal
from tests.support.made import BASE, FAILED, QUANT, results_of, run_of

TIMED = Timing(110.0, 115.0, 116.0, 117.5, 127.5, 129.0)
PARTS = {"load": 5.0, "waiting": 1.0, "first_step": 1.5, "scoring": 10.0, "close": 1.5}


def test_the_parts_are_all_of_a_workers_life() -> None:
    assert TIMED.seconds == PARTS
    assert sum(PARTS.values()) == 129.0 - 110.0
    assert replace(TIMED, closed=None).seconds == {**PARTS, "close": None}


def test_of_replicas_the_first_begins_and_the_last_ends() -> None:
    one: dict[str, Any] = vars(TIMED)
    other = {**one, "started": 111.0, "loaded": 116.0, "first_window": 118.0, "last_window": 130.0, "closed": 131.0}
    assert of_records([one]) == TIMED
    assert of_records([one, other]) == replace(TIMED, loaded=116.0, last_window=130.0, closed=131.0)
    open_still = {name: at for name, at in other.items() if name != "closed"}
    assert of_records([one, open_still]) == replace(TIMED, loaded=116.0, last_window=130.0, closed=None)
    assert of_records([one, {}]) is of_records([]) is None  # records of compare_q 0.2


def test_a_second_text_waits_for_no_load() -> None:
    """Of replicas, one of which was ready earlier than the other one."""
    found = [{**vars(TIMED), "started": at, "loaded": at} for at in (112.0, 115.0)]
    assert of_records(found) == replace(TIMED, started=115.0)


def test_results_there_and_back(tmp_path: Path) -> None:
    run = run_of(replace(BASE, timing=TIMED), replace(QUANT, timing=None), FAILED)
    results_json.write_json(results_of(run), tmp_path / "r.json", [])
    found, _ = results_json.load(tmp_path / "r.json")
    assert [model.timing for model in found.texts[0].models] == [TIMED, None, None]
    raw = json.loads((tmp_path / "r.json").read_text())
    (first, *_) = raw["texts"][0]["models"]
    assert first["seconds"] == PARTS
    first["timing"] = {**vars(TIMED), "loaded": 99.0}
    with pytest.raises(InputError, match=r"^damaged results: base: timing: is not in order$"):
        results_json.from_json(raw)


def test_what_ran_beside_a_row() -> None:
    """Scored from 116 to 127.5: half of it beside another row's scoring, some beside a load."""
    other = Timing(92.0, 93.0, 94.0, 95.0, 121.75, 122.0)
    late = Timing(124.05, 140.0, 141.0, 142.0, 143.0, 144.0)
    models = [replace(BASE, label=label, timing=timing) for label, timing in
              (("mine", TIMED), ("other", other), ("late", late), ("untimed", None))]  # fmt: skip
    run = run_of(*models, FAILED)
    words = [flat.concurrent_rows_text(model, run.models) for model in run.models]
    assert words[0] == "other scored 50 %, late loading 30 %"
    assert words[1:] == ["mine scored 21 %, mine loading 18 %", "", "", ""]
    there = replace(models[1], provenance={**models[1].provenance, "cpu": "another"})
    assert flat.concurrent_rows_text(models[0], [models[0], there]) == ""
    parts = tuple(Part(f"{label}.json", (label,), {}) for label in ("mine", "other"))
    first, second = with_parts(models[:2], parts)
    assert flat.concurrent_rows_text(first, [first, second]) == ""


def test_tables() -> None:
    run = results_of(
        run_of(replace(BASE, timing=TIMED), replace(QUANT, timing=replace(TIMED, started=100.0), cached=True), FAILED)
    )
    console = Console(width=100, file=io.StringIO(), record=True)
    terminal.show_timing(run, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["base", "5.0", "1.0", "1.5", "10.0", "1.5"] in lines
    assert ["W4A16*", "15.0", "1.0", "1.5", "10.0", "1.5"] in lines
    assert markdown.markdown_text(run, timing=True).splitlines()[-4:] == [
        "| label | load s | waiting s | first step s | scoring s | close s |",
        "| :-- | --: | --: | --: | --: | --: |",
        "| base | 5.0 | 1.0 | 1.5 | 10.0 | 1.5 |",
        "| W4A16\\* | 15.0 | 1.0 | 1.5 | 10.0 | 1.5 |",
    ]
