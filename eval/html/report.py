"""``--html``: one file that shows a run in a browser, without a network: all it needs is in it.

The file holds its data as JSON (``{"run": results.json, "inspection": ...}``, and what the page needs of our rules:
group styles, footnotes, Student's t) and the plain JavaScript of ``eval/html/page/``, which draws everything from
that.  Its content policy lets nothing be loaded and no other script run, whatever a label or a token of the text holds.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.common.files import replacing
from eval.html.inspector import Inspection
from eval.plots import style as look
from eval.results import results_json
from eval.results.differences import LEAST
from eval.results.run_result import RunResult
from eval.stats.uncertainty import FEWEST_WAVES, MEMORY, MOST_WAVES, SHORT, T975, UNIT
from eval.table.footnotes import footnotes

FOLDER = Path(__file__).parent / "page"
SCRIPTS = (
    "core", "statistics", "chart", "table", "labels", "scatter", "spread", "position", "confidence", "differences",
    "inspector", "ran",
)  # fmt: skip
"""In the order in which they need each other; the last one starts it all."""
TITLE = "Quantized models compared"


def write(run: RunResult, inspection: Inspection | Any, file: Path, command: Sequence[str], title: str = TITLE) -> None:
    """Write the report atomically.  ``inspection``: as made, or as JSON types from an earlier report, or None."""
    found = page(payload(run, inspection, command), title)
    with replacing(file) as part:
        part.write_text(found, encoding="utf-8")


def payload(run: RunResult, inspection: Inspection | Any, command: Sequence[str]) -> dict[str, Any]:
    """What the page draws, JSON types."""
    names = [look.split_label(model.label, model.group) for model in run.models]
    return {
        "run": results_json.run_json(run, command),
        "inspection": dataclasses.asdict(inspection) if isinstance(inspection, Inspection) else inspection,
        "names": names,
        "styles": group_styles([group for group, _ in names]),
        "footnotes": notes(run),
        "quantized": [model.is_quantized for model in run.models],
        "t975": T975,
        "rule": {
            "fewest": FEWEST_WAVES, "most": MOST_WAVES, "unit": UNIT, "memory": MEMORY, "short": SHORT, "least": LEAST,
        },
    }  # fmt: skip


def notes(run: RunResult) -> list[str]:
    """The table's footnotes, without what only the terminal has: an option, and stars on seconds."""
    return [note.replace(" (--pairs)", "").replace(" (*)", "") for note in footnotes(run, letters=False)]


def group_styles(groups: Sequence[str]) -> look.Styles:
    """Colour ("": the ink's) and marker of each group; all alike if there are more than can be told apart."""
    try:
        return look.group_styles(groups, "")
    except ValueError:
        return dict.fromkeys(groups, ("", "o"))


def page(data: dict[str, Any], title: str) -> str:
    """The whole HTML."""
    template, style = ((FOLDER / f"report.{suffix}").read_text(encoding="utf-8") for suffix in ("html", "css"))
    parts = "".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    allowed = f"script-src {digest(script)}; style-src {digest(style)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return string.Template(template).substitute(
        title=html.escape(title), policy=policy, style=style, script=script, payload=embedded(data)
    )


def digest(text: str) -> str:
    """The name that a content policy has for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(data: dict[str, Any]) -> str:
    """JSON that no HTML parser mistakes for the end of its script: without any "<"."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")
