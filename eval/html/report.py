"""``--html``: one file that shows a run in a browser, without a network.

The file holds its data as JSON (``{"results": results.json, "inspections": [...]}``, and what the page need not find
again: group styles, schemes, footnotes, the table as text, Student's t) and the JavaScript of ``eval/html/page/``,
which draws everything from these data.  The file's content policy lets nothing be loaded and no other script run,
whatever a label or a token of the text holds.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.common.files import replacing
from eval.plots import front, grouping
from eval.results import flat, results_json
from eval.results.differences import SCORES, best_labels, near_lossless
from eval.results.run_result import Part, Results, TextResult
from eval.stats.uncertainty import FEWEST_WAVES, MEMORY, MOST_WAVES, SHORT, UNIT, student_t
from eval.table import columns, markdown
from eval.table.footnotes import footnotes
from eval.table.registry import COLUMNS

if TYPE_CHECKING:
    from eval.html.inspector import Inspection

FOLDER = Path(__file__).parent / "page"
SCRIPTS = (
    "core", "statistics", "chart", "saving", "table", "selection",
    "drawings/front", "drawings/labels", "drawings/scatter", "drawings/spread", "drawings/position",
    "drawings/confidence", "drawings/dumbbell", "differences", "inspector", "texts", "ran",
)  # fmt: skip
"""In the order in which they need each other; the last one starts it all."""
FOREIGN = re.compile(r" \((?:--[^)]*|\*)\)")
"""In a footnote an option of the command line, and a mark that the page has not."""
BEGIN = 'addEventListener("hashchange", () => textOfHash() >= 0 && start());\nstart();\n'
"""Starts the page, and starts it anew for the text that its address names."""
TITLE = "Quantized models compared"


def write(
    results: Results, inspection: Inspection | Any, file: Path, command: Sequence[str], title: str = TITLE,
    names: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Write the report of one text atomically.  ``inspection``: as made, or as JSON types from an earlier report, or
    None; ``names``: of the table's columns, None for those of a wide table."""
    found = whole_page(page_payload(results, inspection, command, names), title)
    with replacing(file) as part:
        part.write_text(found, encoding="utf-8", errors="backslashreplace")


def page_payload(
    results: Results, inspection: Inspection | Any, command: Sequence[str], chosen: Sequence[str] | None = None
) -> dict[str, Any]:
    """The data that the page draws, JSON types."""
    found = results_json.results_json(results, command)
    of_text = run_data(results, results.texts[0], commands_of(found), chosen)
    return {"results": found, "inspections": [inspection_json(inspection)], **of_text, **shared_data()}


def inspection_json(inspection: Inspection | Any) -> Any:
    """An inspection as JSON types; None stays None."""
    return inspection if isinstance(inspection, dict | None) else dataclasses.asdict(inspection)


def run_data(
    results: Results, run: TextResult, commands: Sequence[Any], chosen: Sequence[str] | None
) -> dict[str, Any]:
    """What the page need not find again of one text of a run, JSON types."""
    alone = replace(results, texts=(run,))
    shown = [each.column.name for each in columns.table_columns(run, chosen)]
    labels = [(model.marked_label, model.group) for model in run.models]
    groups = [grouping.split_label(*each)[0] for each in labels]
    schemes = [front.scheme_of(*grouping.split_label(*each)) for each in labels]
    near = near_lossless(run.models)
    return {
        "names": list(zip(groups, grouping.drawn_names(labels), strict=True)),
        "schemes": [schemes.index(scheme) for scheme in schemes],
        "commands": [shell_command(each) for each in commands],
        "markdown": markdown.markdown_text(alone, chosen).split("\n"),
        "csv": flat.csv_text(alone, columns.fields_of(chosen)).split("\r\n"),
        "shown": shown,
        "chosen": chosen is not None,
        "styles": group_styles(groups),
        "footnotes": page_footnotes(run, results.parts, shown),
        "near": [model.label in near for model in run.models],
        "best": {name: [model.label in best_labels(run.models, name) for model in run.models] for name in SCORES},
    }


def shared_data() -> dict[str, Any]:
    """What the page needs of every run alike, JSON types."""
    return {
        "columns": [dataclasses.asdict(column) | {"field": column.source, "title": column.title} for column in COLUMNS],
        "t975": [student_t(freedom) for freedom in range(1, MOST_WAVES + 1)],
        "rule": {
            "fewest": FEWEST_WAVES, "most": MOST_WAVES, "unit": UNIT, "memory": MEMORY, "short": SHORT,
            "near": front.NEAR, "gap": front.GAP, "range": front.RANGE, "alike": front.ALIKE,
            "wide": front.WIDE,
        },
    }  # fmt: skip


def commands_of(run: dict[str, Any]) -> list[Any]:
    """The command lines of a run (``results_json``): its own, or of each run that was merged."""
    return [each["origin"].get("command") for each in run["parts"]] or [run["command"]]


def shell_command(command: Any) -> str:
    """A command line for a shell; if it names the file of compare_q, for the folder that holds ``eval/``.

    Empty if it is not known, or no list (in results that were read back).
    """
    words = list(map(str, command)) if isinstance(command, list) else []
    start = ["python", "eval/compare_q.py"] if words[:1] == ["compare_q.py"] else words[:1]
    return shlex.join([*start, *words[1:]])


def page_footnotes(run: TextResult, parts: Sequence[Part], shown: Sequence[str]) -> list[str]:
    """The table's footnotes, without what only the command line or the terminal has."""
    notes = [*footnotes(run, parts, letters=False), *columns.column_notes(run, shown)]
    return [FOREIGN.sub("", note) for note in notes]


def group_styles(groups: Sequence[str]) -> grouping.Styles:
    """Colour ("": the ink's) and marker of each group; all alike if there are more than can be told apart."""
    try:
        return grouping.group_styles(groups, "")
    except ValueError:
        return dict.fromkeys(groups, ("", "o"))


def whole_page(data: dict[str, Any], title: str) -> str:
    """The whole HTML."""
    template, sheet = ((FOLDER / f"report.{suffix}").read_text(encoding="utf-8") for suffix in ("html", "css"))
    parts = "".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    begin = (FOLDER / "start.js").read_text(encoding="utf-8")
    script = f'"use strict";\n(() => {{\n{begin}function page(PAYLOAD, SIGNAL) {{\n{parts}}}\n{BEGIN}}})();\n'
    allowed = f"script-src {policy_digest(script)}; style-src {policy_digest(sheet)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return string.Template(template).substitute(
        title=html.escape(title), policy=policy, style=sheet, script=script, payload=embedded_json(data)
    )


def policy_digest(text: str) -> str:
    """The name that a content policy has for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded_json(data: dict[str, Any]) -> str:
    """JSON that no HTML parser mistakes for the end of its script: without any "<"."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")
