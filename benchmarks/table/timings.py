"""Compute the parts of a table's wall time from its results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Timing = dict[str, float | None]
"""Seconds of one row's parts, and the unix times of its first and last scored window; None: not in
the results."""
PARTS = ("load", "first_step", "scoring", "close")


def timing_of(model: Mapping[str, Any]) -> Timing:
    """Return the parts of one row of results.json."""
    seconds = model.get("seconds") or {}
    moments = model.get("timing") or {}
    return {
        **{part: seconds.get(part) for part in PARTS},
        **{moment: moments.get(moment) for moment in ("first_window", "last_window")},
    }


def gaps(timings: Sequence[Timing]) -> list[float | None]:
    """Seconds between one row's last scored window and the next row's first, in the order in which
    they were scored.

    None if the results have no times; below 0 if two models were scored at the same time.
    """
    known = [timing for timing in timings if timing["first_window"] is not None]
    if len(known) < len(timings):
        return [None] * (len(timings) - 1)
    known.sort(key=lambda timing: timing["first_window"] or 0.0)
    return [
        (after["first_window"] or 0.0) - (before["last_window"] or 0.0)
        for before, after in pairwise(known)
    ]


def ratio(prefill: Sequence[float | None], wall: float) -> float | None:
    """Sum of the rows' prefill times over the table's wall time; None if one is not known."""
    known = [seconds for seconds in prefill if seconds is not None]
    return sum(known) / wall if len(known) == len(prefill) else None


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For every row of results.json: label, numbers, speed and parts."""
    rows = []
    for model in results["models"]:
        parts, tokens, kernel = timing_of(model), model.get("tokens"), model.get("kernel")
        rows.append(
            {
                "label": model["label"],
                "kernel": kernel,
                "ppl": model["ppl"],
                "kld": model["kld"],
                "tokens": tokens,
                "error": model["error"],
                "from_cache": model["from_cache"],
                "seconds": {name: parts[name] for name in PARTS},
                "windows_at": [parts["first_window"], parts["last_window"]],
                "scorer": (model.get("provenance") or {}).get("scorer"),
            }
        )
    return rows


def text_of(found: Mapping[str, Any]) -> str:
    """A few lines for the terminal."""
    if "rows" not in found:
        return str(found["error"])
    lines = [f"{'seconds':16}" + "".join(f"{part:>12}" for part in (*PARTS, "prefill"))]
    for row in found["rows"]:
        seconds = [*row["seconds"].values(), row.get("prefill_seconds")]
        lines.append(
            f"{row['label'][:16]:16}"
            + "".join(f"{'n/a' if s is None else f'{s:.1f}':>12}" for s in seconds)
        )
    share = found.get("prefill_over_wall")
    between = ", ".join("n/a" if gap is None else f"{gap:.1f}" for gap in found["gaps"])
    lines.append(f"gaps between rows, s: {between}")
    lines.append(
        f"wall {found['wall_seconds']:.1f} s, prefill/wall {'n/a' if share is None else f'{share:.3f}'}"
    )
    return "\n".join(lines)
