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

from backends import layers
from eval import machine
from eval.files import replacing
from eval.plot import Point
from eval.results import MARK, ModelResult, RunResult

FORMAT = 3
"""Version of the layout of results.json."""
BPW_AXIS = "Bits per weight (without embedding and output head)"
VRAM_AXIS = "Stored weights / GiB (without embedding, with output head)"
KLD_DIGITS = 5
"""Decimals of KLD, for values of 0.0004 (an 8-bit format) to 0.5: four would leave the smallest one digit."""


def cell(value: float | None, digits: int) -> str:
    """A number with thousands separators, or n/a; never "-0.0", as rounding can take a KLD just below 0."""
    return "n/a" if value is None else f"{value:z,.{digits}f}"


def table(run: RunResult) -> Table:
    """The terminal table; at 80 columns only long labels wrap."""
    gap = 1 if run.reference is None else 0  # beside the one of the box; labels need the room that KLD takes
    drawn = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0), title=Text(run.subtitle), title_justify="left"
    )
    drawn.add_column("label", overflow="fold")
    drawn.add_column("kernel", overflow="fold")
    for header in headers(run):
        drawn.add_column(header, justify="right", no_wrap=True)
    for model in run.models:
        row = cells(model)
        kernel = "" if model.error else layers.kernel_of(model.layers) or "n/a"
        drawn.add_row(model.marked_label, kernel, *(row.get(header, "") for header in headers(run)))
    return drawn


def headers(run: RunResult) -> list[str]:
    """The table's columns of numbers: KLD with a reference, non-finite positions where there are any."""
    against = ["KLD", "same\ntop %"] if run.reference is not None else []
    holes = ["non-\nfinite"] if any(model.ppl and model.ppl.non_finite for model in run.models) else []
    return ["layer\nbpw", "head\nbpw", "VRAM\nGiB", "PPL", *against, *holes, "seconds"]


def cells(model: ModelResult) -> dict[str, str]:
    """Header -> one model's text, for every column there can be; a failed model has one text."""
    if model.error or model.ppl is None:
        return {"PPL": "failed"}
    same = None if model.same_top is None or model.same_top.value is None else 100 * model.same_top.value
    return {
        "layer\nbpw": cell(model.storage.bpw_layer, 2),
        "head\nbpw": cell(model.storage.bpw_head, 2),
        "VRAM\nGiB": cell(model.storage.vram_gib, 2),
        "PPL": cell(model.ppl.value, 4),
        "KLD": "ref" if model.is_reference else cell(kld_of(model), KLD_DIGITS),
        "same\ntop %": "ref" if model.is_reference else cell(same, 2),
        "non-\nfinite": f"{model.ppl.non_finite:,}",
        "seconds": cell(model.score_seconds, 1) + ("*" if model.cached else ""),
    }


def kld_of(model: ModelResult) -> float | None:
    """Mean KLD in nats; the reference's is 0 by definition; None for a failed model and where it is not known."""
    if model.error:
        return None
    if model.is_reference:
        return 0.0
    return model.kld.value if model.kld else None


def footnotes(run: RunResult) -> list[str]:
    """What the table needs said: the reference, stored results, and each model's own."""
    notes = [
        f"{MARK} {model.label}: {clause} on {machine_name(model)}"
        for model in run.models for clause in model.deviations
    ]  # fmt: skip
    scored = {(model.rows, model.ppl.tokens + model.ppl.non_finite) for model in run.models if model.ppl}
    notes += [f"{rows:,} windows, {tokens:,} scored tokens" for rows, tokens in sorted(scored)]
    if run.reference is not None:
        notes.append(f"KLD (nats, mean over tokens) and same top: against {run.reference['label']}{reference_ppl(run)}")
    if any(model.cached for model in run.models):
        notes.append("* from the cache; seconds are those of the run that measured it")
    return notes + [f"{model.label}: {note}" for model in run.models for note in model_notes(model, run)]


def machine_name(model: ModelResult) -> str:
    """The GPU or CPU that a model ran on."""
    gpus = model.provenance.get("gpus")
    return str(gpus[0] if gpus else model.provenance.get("cpu", "an unknown machine"))


def reference_ppl(run: RunResult) -> str:
    """The perplexity of a reference that has no row, so that a store of another text shows at once."""
    found = [model.ref_ppl.value for model in run.models if model.ref_ppl and model.ref_ppl.value is not None]
    if not found or any(model.is_reference for model in run.models):
        return ""
    return f", whose own PPL on these tokens is {cell(found[0], 4)}"


def model_notes(model: ModelResult, run: RunResult) -> list[str]:
    """One model's footnotes: failure, unknown size, non-finite scores, missing KLD, and what the run noted."""
    notes = []
    if model.error:
        notes.append(f"failed: {model.error}")
    elif model.storage.note:
        notes.append(f"size n/a: {model.storage.note}")
    if not (model.error or model.layers):
        notes.append("kernel n/a: this engine does not say what it runs")
    if model.ppl is not None and model.ppl.non_finite:
        notes.append(f"{model.ppl.non_finite} positions had no finite log-probability; PPL leaves them out")
    if model.kld is not None and model.kld.non_finite:
        notes.append(f"{model.kld.non_finite} positions had no finite KL divergence; KLD leaves them out")
    unexplained = not (model.error or model.is_reference or model.kld or model.notes)
    if run.reference is not None and unexplained:
        notes.append("KLD n/a: this engine measured none")
    return [*notes, *model.notes]


def show(run: RunResult, console: Console) -> None:
    """Print the table and its footnotes."""
    console.print(table(run))
    for note in footnotes(run):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def model_json(model: ModelResult) -> dict[str, Any]:
    """One model for results.json; upstream's names where upstream has one (``vram_gb`` is GiB there too)."""
    ppl, kld = model.ppl, model.kld
    return {
        "label": model.label,
        "engine": model.engine,
        "kernel": layers.kernel_of(model.layers) or None,
        "deviations": "; ".join(model.deviations) or None,
        "layer_bpw": model.storage.bpw_layer,
        "head_bpw": model.storage.bpw_head,
        "vram_gb": model.storage.vram_gib,
        "vram_bits": model.storage.vram_bits,
        "storage_note": model.storage.note or None,
        "ppl": ppl.value if ppl else None,
        "logprob_sum": ppl.logprob_sum if ppl else None,
        "tokens": ppl.tokens if ppl else None,
        "non_finite": ppl.non_finite if ppl else None,
        "reference": model.is_reference,
        "kld": kld_of(model),
        "kld_sum": kld.total if kld else None,
        "kld_tokens": kld.tokens if kld else None,
        "kld_non_finite": kld.non_finite if kld else None,
        "same_top": model.same_top.value if model.same_top else None,
        "top1": model.top1.value if model.top1 else None,
        "entropy": model.entropy.value if model.entropy else None,
        "rows": model.rows,
        "load_seconds": model.load_seconds,
        "score_seconds": model.score_seconds,
        "from_cache": model.cached,
        "notes": list(model.notes),
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
        "reference": run.reference,
        "models": [model_json(model) for model in run.models],
    }


def write_json(run: RunResult, file: Path, command: Sequence[str]) -> None:
    """Write results.json atomically."""
    with replacing(file) as part:
        part.write_text(json.dumps(run_json(run, command), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(run: RunResult, file: Path) -> None:
    """Write the flat fields of every model as CSV, and its notes as one text, atomically."""
    rows = [
        {key: value for key, value in model_json(model).items() if not isinstance(value, dict)}
        | {"notes": "; ".join(model.notes)}
        for model in run.models
    ]
    with replacing(file) as part, part.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def points(run: RunResult, *, vram: bool, kld: bool = False) -> tuple[list[Point], list[str]]:
    """(points of the PPL or KLD plot, one line for each model that cannot be drawn)."""
    drawn, left_out = [], []
    for model in run.models:
        x = model.storage.vram_gib if vram else model.storage.bpw_layer
        ppl = model.ppl.value if model.ppl else None
        y = kld_of(model) if kld else ppl
        if x is None or y is None:
            missing = "size" if y is not None else "KLD" if kld else "PPL"
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
        else:
            shown = "reference" if model.is_reference else cell(y, KLD_DIGITS)
            drawn.append(Point(model.marked_label, x, y, shown if kld else ""))
    return drawn, left_out
