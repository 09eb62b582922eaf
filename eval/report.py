"""Results -> a table for the terminal, JSON, CSV, and the points of a plot."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval import machine
from eval.files import replacing
from eval.plot import Point
from eval.results import ModelResult, RunResult

FORMAT = 1
"""Version of the layout of results.json."""
BPW_AXIS = "Bits per weight (without embedding and output head)"
VRAM_AXIS = "Stored weights / GiB (without embedding, with output head)"


def cell(value: float | None, digits: int) -> str:
    """A number with thousands separators, or n/a."""
    return "n/a" if value is None else f"{value:,.{digits}f}"


def table(run: RunResult) -> Table:
    """The terminal table; at 80 columns only long labels wrap."""
    drawn = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=Text(run.subtitle), title_justify="left"
    )
    drawn.add_column("label", overflow="fold")
    for header in ("layer\nbpw", "head\nbpw", "VRAM\nGiB", "PPL", "rows", "tokens", "non-\nfinite", "seconds"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for model in run.models:
        drawn.add_row(model.label, *cells(model))
    return drawn


def cells(model: ModelResult) -> list[str]:
    """One model's row, the label left out."""
    if model.error or model.ppl is None:
        return ["", "", "", "failed", "", "", "", ""]
    return [
        cell(model.storage.bpw_layer, 2),
        cell(model.storage.bpw_head, 2),
        cell(model.storage.vram_gib, 2),
        cell(model.ppl.value, 4),
        f"{model.rows:,}",
        f"{model.ppl.tokens:,}",
        f"{model.ppl.non_finite:,}",
        cell(model.score_seconds, 1) + ("*" if model.cached else ""),
    ]


def footnotes(run: RunResult) -> list[str]:
    """What the table needs said: stored results, unknown sizes, non-finite scores, failures."""
    notes = (
        ["* from the cache; seconds are those of the run that measured it"] if any(m.cached for m in run.models) else []
    )
    for model in run.models:
        if model.error:
            notes.append(f"{model.label}: failed: {model.error}")
        elif model.storage.note:
            notes.append(f"{model.label}: size n/a: {model.storage.note}")
        if model.ppl is not None and model.ppl.non_finite:
            notes.append(
                f"{model.label}: {model.ppl.non_finite} positions had no finite log-probability; PPL leaves them out"
            )
    return notes


def show(run: RunResult, console: Console) -> None:
    """Print the table and its footnotes."""
    console.print(table(run))
    for note in footnotes(run):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def model_json(model: ModelResult) -> dict[str, Any]:
    """One model for results.json; upstream's names where upstream has one (``vram_gb`` is GiB there too)."""
    ppl = model.ppl
    return {
        "label": model.label,
        "engine": model.engine,
        "layer_bpw": model.storage.bpw_layer,
        "head_bpw": model.storage.bpw_head,
        "vram_gb": model.storage.vram_gib,
        "vram_bits": model.storage.vram_bits,
        "storage_note": model.storage.note or None,
        "ppl": ppl.value if ppl else None,
        "logprob_sum": ppl.logprob_sum if ppl else None,
        "tokens": ppl.tokens if ppl else None,
        "non_finite": ppl.non_finite if ppl else None,
        "rows": model.rows,
        "load_seconds": model.load_seconds,
        "score_seconds": model.score_seconds,
        "from_cache": model.cached,
        "error": model.error or None,
        "spec": model.spec,
        "spec_sha256": model.spec_sha256,
        "provenance": model.provenance,
    }


def run_json(run: RunResult, command: Sequence[str]) -> dict[str, Any]:
    """results.json: everything needed to check or repeat the run."""
    return {
        "format": FORMAT,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "commit": machine.commit(),
        "versions": machine.versions(),
        "hardware": {**machine.hardware(), **machine.threads()},
        "data": run.data,
        "models": [model_json(model) for model in run.models],
    }


def write_json(run: RunResult, file: Path, command: Sequence[str]) -> None:
    """Write results.json atomically."""
    with replacing(file) as part:
        part.write_text(json.dumps(run_json(run, command), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(run: RunResult, file: Path) -> None:
    """Write the flat fields of every model as CSV, atomically."""
    rows = [{key: value for key, value in model_json(m).items() if not isinstance(value, dict)} for m in run.models]
    with replacing(file) as part, part.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def points(run: RunResult, *, vram: bool) -> tuple[list[Point], list[str]]:
    """(points of the PPL plot, one line for each model that cannot be drawn)."""
    drawn, left_out = [], []
    for model in run.models:
        x = model.storage.vram_gib if vram else model.storage.bpw_layer
        y = model.ppl.value if model.ppl else None
        if x is None or y is None:
            left_out.append(f"{model.label}: not in the plot: {'PPL' if y is None else 'size'} unknown")
        else:
            drawn.append(Point(model.label, x, y))
    return drawn, left_out
