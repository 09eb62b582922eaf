"""Compute the parts of a table's wall time from its results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

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


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return label, numbers, speed and parts of every row of results.json."""
    rows = []
    for model in results["models"]:
        parts = timing_of(model)
        rows.append(
            {
                "label": model["label"],
                "kernel": model.get("kernel"),
                "ppl": model["ppl"],
                "kld": model["kld"],
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
    share = number_text(table.get("prefill_over_wall"), 3)
    lines.append(f"wall {table['wall_seconds']:.1f} s, prefill/wall {share}")
    return "\n".join(lines)


def number_text(number: float | None, digits: int) -> str:
    """Return a number with this number of decimals; n/a for None."""
    if number is None:
        return "n/a"
    return f"{number:.{digits}f}"
