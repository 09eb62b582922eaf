"""Where a row's seconds went: parts that add up, by hand, and there and back through results.json and the tables."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backends.common.errors import InputError
from eval.results import beside, results_json
from eval.results.run_result import Part, StoredRun
from eval.results.timing import Timing, of_records
from eval.table import markdown, terminal
from tests.support.made import BASE, FAILED, QUANT, run_of

SPARE = Timing(100.0, 103.0, 110.0, 115.0, 116.0, 117.5, 127.5, 129.0)
FRESH = replace(SPARE, prepared=None, load_began=100.0)
PARTS = {"spare": 3.0, "waiting": 8.0, "load": 5.0, "first_step": 1.5, "scoring": 10.0, "close": 1.5}


def test_the_parts_are_all_of_a_workers_life() -> None:
    assert SPARE.seconds == PARTS
    assert sum(PARTS.values()) == 129.0 - 100.0
    assert FRESH.seconds == {**PARTS, "spare": 0.0, "waiting": 1.0, "load": 15.0}
    assert replace(SPARE, closed=None).seconds["close"] is None


def test_of_replicas_the_first_begins_and_the_last_ends() -> None:
    one: dict[str, Any] = {
        "started": 100.0, "prepared": 103.0, "load_began": 110.0, "loaded": 115.0, "score_began": 116.0,
        "first_window": 117.5, "last_window": 127.5, "closed": 129.0,
    }  # fmt: skip
    other = {**one, "started": 101.0, "loaded": 116.0, "first_window": 118.0, "last_window": 130.0, "closed": 131.0}
    assert of_records([one]) == SPARE
    assert of_records([one, other]) == replace(SPARE, loaded=116.0, last_window=130.0, closed=131.0)
    fresh = {name: at for name, at in other.items() if name not in ("prepared", "closed")}
    assert of_records([fresh]) == replace(SPARE, started=101.0, prepared=None, loaded=116.0, first_window=118.0,
                                          last_window=130.0, closed=None)  # fmt: skip
    assert of_records([one, {}]) is of_records([]) is None  # records of compare_q 0.2


def test_results_there_and_back(tmp_path: Path) -> None:
    run = run_of(replace(BASE, timing=SPARE), replace(QUANT, timing=None), FAILED)
    results_json.write_json(run, tmp_path / "r.json", [])
    found, _ = results_json.load(tmp_path / "r.json")
    assert [model.timing for model in found.models] == [SPARE, None, None]
    raw = json.loads((tmp_path / "r.json").read_text())
    assert raw["models"][0]["seconds"] == PARTS
    for model in raw["models"]:  # as compare_q 0.2 wrote it
        del model["seconds"], model["timing"]
    assert [model.timing for model in results_json.from_json(raw).models] == [None] * 3
    raw["models"][0]["timing"] = {**vars(SPARE), "loaded": 99.0}
    with pytest.raises(InputError, match=r"^damaged results: base: timing: is not in order$"):
        results_json.from_json(raw)


def test_what_ran_beside_a_row() -> None:
    """Scored from 116 to 127.5: half of it beside another row's scoring, some beside an import and a load."""
    other = Timing(90.0, 91.0, 92.0, 93.0, 94.0, 95.0, 121.75, 122.0)
    late = Timing(115.0, 116.575, 124.625, 140.0, 141.0, 142.0, 143.0, 144.0)
    models = [replace(BASE, label=label, timing=timing) for label, timing in
              (("mine", SPARE), ("other", other), ("late", late), ("untimed", None))]  # fmt: skip
    run = run_of(*models, FAILED)
    words = [beside.words_beside(model, run) for model in run.models]
    assert words[0] == "other scored 50 %, late loading 30 %"
    assert words[1:] == ["mine scored 21 %, mine loading 29 %, late loading 6 %", "", "", ""]
    there = replace(models[1], provenance={**models[1].provenance, "cpu": "another"})
    assert beside.words_beside(models[0], run_of(models[0], there)) == ""
    parts = tuple(Part(f"{label}.json", (label,), {}) for label in ("mine", "other"))
    merged = StoredRun({}, "", (models[0], models[1]), parts=parts)
    assert beside.words_beside(models[0], merged) == ""


def test_tables() -> None:
    run = run_of(replace(BASE, timing=SPARE), replace(QUANT, timing=FRESH, cached=True), FAILED)
    console = Console(width=100, file=io.StringIO(), record=True)
    terminal.show_timing(run, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["base", "3.0", "8.0", "5.0", "1.5", "10.0", "1.5"] in lines
    assert ["W4A16*", "0.0", "1.0", "15.0", "1.5", "10.0", "1.5"] in lines
    assert markdown.markdown_text(run, timing=True).splitlines()[-4:] == [
        "| label | spare s | waiting s | load s | first step s | scoring s | close s |",
        "| :-- | --: | --: | --: | --: | --: | --: |",
        "| base | 3.0 | 8.0 | 5.0 | 1.5 | 10.0 | 1.5 |",
        "| W4A16\\* | 0.0 | 1.0 | 15.0 | 1.5 | 10.0 | 1.5 |",
    ]
