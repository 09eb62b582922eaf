"""``--html`` of several texts: one file with the table and the drawing of all texts, and below these one text's report.

The file holds ``{"results": results.json, "inspections": [...]}`` and what the page need not find again: ``pages`` (of
each text what ``report.run_data`` has of a run), ``shared``, and ``overview``, the values that the drawing shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eval.common.files import replacing
from eval.html import report
from eval.html.inspector import PASSAGES, WORST
from eval.plots import grouping, measures
from eval.plots.measures import Measure
from eval.plots.texts.rows import Row, floor_of, missing_note, rows_of
from eval.results.results_json import results_json
from eval.results.run_result import Results, TextResult
from eval.table import columns

LARGEST = 2_000_000
"""Bytes that a report takes at most, if leaving out excerpts can keep it below."""
EXCERPTS = ((PASSAGES, WORST), (3, 20), (2, 12), (1, 6), (1, 2), (0, 0))
"""Passages of a text, and damaged tokens of a model: the first that fit are kept."""
CUT = (
    "excerpts of each text: {passages} of {of_passages} passages, and {worst} of {of_worst} damaged tokens a model, so "
    "that this file stays below 2 MB; a report of one text has them all"
)
NONE_LEFT = "no excerpts of the texts, so that this file stays small; a report of one text has them"
NOTES = (
    "mean of the texts: each text counts alike; of KLD the mean of the texts' means, of PPL their geometric mean, "
    "without answers; n/a or left out where a text lacks the value",
    "±: one standard error; the error of PPL is mostly the text's, and nearly common to all models",
)
DRAWN = (measures.KLD, measures.PPL, *measures.ACCURACIES.values())
"""The drawings of all texts that there are, each where a model has a value."""
LISTS = ("names", "schemes", "shown", "footnotes", "near", "commands", "markdown", "csv")
NO_MEANS = "no mean of the texts: every model lacks one of them"
EMPTY: dict[str, Any] = {**dict.fromkeys(LISTS, ()), "styles": {}, "best": {}, "chosen": False}
"""What stands in the place of ``report.run_data`` for a text that failed."""


def write_report(
    result: Results, inspections: Sequence[Any], file: Path, command: Sequence[str],
    names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Write the report atomically.

    ``inspections``: one for each text, as made, or as JSON types from an earlier report, or None; ``names``: the
    columns of each text's table, None for those of a wide table.  ValueError if every text failed.
    """
    page = small_page(page_payload(result, inspections, command, names), result.title or report.TITLE)
    with replacing(file) as part:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")


def small_page(payload: dict[str, Any], title: str) -> str:
    """The page with as many excerpts as keep it below ``LARGEST``, and a note where some are left out."""
    whole = payload["inspections"]
    for passages, worst in EXCERPTS:
        kept = [shortened(each, passages, worst) for each in whole]
        of = {"passages": passages, "worst": worst, "of_passages": PASSAGES, "of_worst": WORST}
        words = CUT.format_map(of) if passages else NONE_LEFT
        cut = [words] if (passages, worst) != EXCERPTS[0] and any(whole) else []
        overview = payload["overview"] | {"notes": [*payload["overview"]["notes"], *cut]}
        page = report.whole_page(payload | {"inspections": kept, "overview": overview}, title)
        if len(page.encode("utf-8", errors="backslashreplace")) < LARGEST:
            break
    return page


def shortened(inspection: Any, passages: int, worst: int) -> Any:
    """An inspection (JSON types) with its first passages, and the most damaged tokens of each model; None if none."""
    if inspection is None or not passages:
        return None
    tokens = [None if each is None else each[:worst] for each in inspection["worst"]]
    return {"passages": inspection["passages"][:passages], "worst": tokens}


def page_payload(
    result: Results, inspections: Sequence[Any], command: Sequence[str], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The data that the page draws, JSON types; ValueError if every text failed."""
    if not result.scored:
        raise ValueError("every text failed")
    found = results_json(result, command)
    commands = [found["command"]]
    compared = any(text.reference for text in result.scored)
    return {
        "results": found,
        "inspections": [report.inspection_json(each) for each in inspections],
        "pages": [
            EMPTY if text.error else report.run_data(result, text, commands, names) for text in result.texts
        ],
        "shared": report.shared_data(),
        "overview": {
            "styles": grouping.text_styles([text.name for text in result.texts], ""),
            "drawings": [
                drawing(result, measure) for measure in DRAWN if rows_of(result, measure, None)
            ],
            "columns": [of_text(text, compared=compared) for text in result.texts],
            "notes": [NOTES[0] if any(mean_is_known(result)) else NO_MEANS, NOTES[1]],
        },
    }  # fmt: skip


def of_text(text: TextResult, *, compared: bool) -> list[str]:
    """The columns of a text in the table of all; on a phone the first ones are seen, and so PPL comes last."""
    return sorted(columns.columns_of(text, compared=compared), key="ppl".__eq__)


def mean_is_known(result: Results) -> Iterator[bool]:
    """Of each model whether it has a macro mean."""
    return (result.mean_ppl(label).value is not None for label in result.labels)


def drawing(result: Results, measure: Measure) -> dict[str, Any]:
    """One drawing of all texts, its rows from above."""
    rows = sorted(rows_of(result, measure, None), key=lambda row: row.place)
    paired = any(text.reference for text in result.scored)
    of = "" if measure.kld else f" of {measure.distance}" if paired else ", mostly common to all models"
    caption = (
        f"Bar: from the least to the largest of the texts; line across it: their mean; whiskers: 95 % intervals{of}."
    )
    missing = missing_note(result, measure, reasons=True)
    return {
        "key": measure.kind,
        "name": measure.name,
        "title": f"{measure.title} on {len(result.texts)} texts",
        "axis": measure.axis,
        "floor": floor_of(result) if measure.kld else None,
        "rows": [row_json(row, measure) for row in rows],
        "caption": f"{caption} {missing}".strip(),
    }


def row_json(row: Row, measure: Measure) -> dict[str, Any]:
    """A row with its values as they are written."""
    value, stderr = row.mean.value, row.mean.stderr
    spots = [
        dataclasses.asdict(spot) | {"shown": measures.value_text(spot.value, spot.error, measure)} for spot in row.spots
    ]
    shown = "n/a" if value is None else measures.value_text(value, stderr, measure)
    return dataclasses.asdict(row) | {"spots": spots, "shown": shown}
