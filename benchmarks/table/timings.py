"""Compute the parts of a table's wall time from its results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

NUMBERS = ("ppl", "kld", "scores_digest")
"""Numbers of a row that must be equal in two versions, in every digit."""
Timing = dict[str, float | None]
"""Seconds of one row's parts, and the unix times of its first and last scored window; None: not in
the results."""
TIMED_PARTS = ("load", "first_step", "scoring", "close")


def timing_of(model: Mapping[str, Any]) -> Timing:
    """Return the parts of one row of results.json."""
    seconds = model.get("seconds") or {}
    moments = model.get("timing") or {}
    timing = {part: seconds.get(part) for part in TIMED_PARTS}
    timing["first_window"] = moments.get("first_window")
    timing["last_window"] = moments.get("last_window")
    return timing


def gaps(timings: Sequence[Timing]) -> list[float | None]:
    """Return the seconds between one row's last scored window and the next row's first one.

    Rows are in the order in which they were scored.  None if the results have no times; below 0 if
    two models were scored at the same time.
    """
    timed = [timing for timing in timings if timing["first_window"] is not None]
    if len(timed) < len(timings):
        return [None] * (len(timings) - 1)
    timed.sort(key=lambda timing: timing["first_window"] or 0.0)
    seconds: list[float | None] = []
    for before, after in pairwise(timed):
        seconds.append((after["first_window"] or 0.0) - (before["last_window"] or 0.0))
    return seconds


def ratio(prefill: Sequence[float | None], wall: float) -> float | None:
    """Return the sum of the rows' prefill times over the table's wall time.

    None if one of them is not known.
    """
    total = 0.0
    for seconds in prefill:
        if seconds is None:
            return None
        total += seconds
    return total / wall


def models_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the models of results.json; before format 9 each text had its own."""
    models: list[dict[str, Any]]
    if "texts" in results:
        models = results["texts"][0]["models"]
    else:
        models = results["models"]
    return models


def ends(timings: Sequence[Timing], began: float, ended: float) -> dict[str, float | None]:
    """Return the seconds before the first scored window and after the last one.

    ``began``, ``ended``: unix times of the whole run.
    """
    first_windows = []
    last_windows = []
    for timing in timings:
        first = timing["first_window"]
        last = timing["last_window"]
        # Neither is known of a row that failed.
        if first is not None and last is not None:
            first_windows.append(first)
            last_windows.append(last)
    if not first_windows:
        return {"until_first_window": None, "after_last_window": None}
    return {
        "until_first_window": min(first_windows) - began,
        "after_last_window": ended - max(last_windows),
    }


def differences(table: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return each number of a row in which another version's table differs, in words."""
    found = []
    rows = table.get("rows", [])
    other_rows = other.get("rows", [])
    if len(rows) != len(other_rows):
        found.append(f"{len(rows)} rows, and {len(other_rows)} in the other version")
    for row, other_row in zip(rows, other_rows, strict=False):
        for key in ("label", *NUMBERS):
            number = row[key]
            other_number = other_row[key]
            if number != other_number:
                found.append(f"{row['label']}: {key} {number}, in the other version {other_number}")
    return found


def rows_of(models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return label, numbers, speed and parts of every model of results.json."""
    rows = []
    for model in models:
        parts = timing_of(model)
        rows.append(
            {
                "label": model["label"],
                "kernel": model.get("kernel"),
                "ppl": model["ppl"],
                "kld": model["kld"],
                "scores_digest": model["scores_digest"],
                "tokens": model.get("tokens"),
                "error": model["error"],
                "from_cache": model["from_cache"],
                "seconds": {name: parts[name] for name in TIMED_PARTS},
                "windows_at": [parts["first_window"], parts["last_window"]],
                "scorer": (model.get("provenance") or {}).get("scorer"),
            }
        )
    return rows


def text_of(table: Mapping[str, Any]) -> str:
    """Return a few lines for the terminal."""
    if "rows" not in table:
        return str(table["error"])
    titles = [f"{part:>12}" for part in (*TIMED_PARTS, "prefill")]
    lines = [f"{'seconds':16}{''.join(titles)}"]
    for row in table["rows"]:
        line = f"{row['label'][:16]:16}"
        for seconds in (*row["seconds"].values(), row.get("prefill_seconds")):
            line += f"{number_text(seconds, 1):>12}"
        lines.append(line)
    gap_texts = [number_text(gap, 1) for gap in table["gaps"]]
    lines.append(f"gaps between rows, s: {', '.join(gap_texts)}")
    first = number_text(table["until_first_window"], 1)
    share = number_text(table.get("prefill_over_wall"), 3)
    wall = f"{table['wall_seconds']:.1f}"
    lines.append(f"wall {wall} s, first window after {first} s, prefill/wall {share}")
    return "\n".join(lines)


def number_text(number: float | None, digits: int) -> str:
    """Return a number with this number of decimals; n/a for None."""
    if number is None:
        return "n/a"
    return f"{number:.{digits}f}"
