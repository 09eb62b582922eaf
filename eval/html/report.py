"""``--html``: one file that shows a run in a browser, without a network.

Python makes everything that the page says: tables, drawings (matplotlib's, ``eval/html/drawings.py``), differences,
colours of tokens.  ``page/report.js`` sorts, selects, fades and shows.  The file holds its data as JSON: ``results`` is
results.json and ``inspections`` has the excerpts of each text, which ``show`` reads back; ``pages`` has what the
script shows of each text, ``overview`` what it copies of all.  The content policy lets nothing be loaded and no other
script run, whatever a label or a token of the text holds; ``blob:`` images are those that it makes of drawings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import string
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

from compare_q.eval.html import inspector, sections
from compare_q.eval.html.drawings import colour_rules, marker_symbols
from compare_q.eval.html.inspector import PASSAGES, WORST
from compare_q.eval.html.sections import tag
from compare_q.eval.results import results_json, run_result
from compare_q.eval.results.run_result import Inspection, Results

FOLDER = Path(__file__).parent / "page"
TITLE = "Quantized models compared"
LARGEST = 2_000_000
"""Bytes that a report takes at most, if leaving out excerpts can keep it below."""
EXCERPTS = ((PASSAGES, WORST), (3, 20), (2, 12), (1, 6), (1, 2), (0, 0))
"""Passages of a text, and damaged tokens of a model: the first that fit are kept."""
CUT = (
    "excerpts of each text: {passages} of {of_passages} passages, and {worst} of {of_worst} damaged tokens a model, so "
    "that this file stays below 2 MB"
)
NONE_LEFT = "no excerpts of the texts, so that this file stays below 2 MB"


def page_of(
    results: Results,
    inspections: Sequence[Inspection | None],
    command: Sequence[str],
    names: Sequence[str] | None = None,
) -> str:
    """The page, with as many excerpts as keep it below ``LARGEST``, and a note where some are left out.

    ``inspections``: one for each text, or None; ``names``: of the tables' columns, None for those of a wide table.
    ValueError if every text failed.
    """
    if not results.scored:
        raise ValueError("every text failed")
    stored = results_json.results_json(results, command)
    results = replace(results, origin={key: stored[key] for key in run_result.ORIGIN})
    pages = [None if text.error else sections.text_data(results, text, names) for text in results.texts]
    overview = sections.overview_data(results)
    body = sections.body(results, inspections, names)
    for passages, worst in EXCERPTS:
        is_whole = (passages, worst) == EXCERPTS[0]
        kept = [own if is_whole else shortened(own, passages, worst) for own in inspections]
        paints = [own and inspector.paints(own, text) for own, text in zip(kept, results.texts, strict=True)]
        payload = {
            "results": stored, "inspections": [own and asdict(own) for own in kept], "overview": overview,
            "chosen": sections.preselected(results.scored[0]),
            "commands": [shell_command(stored["command"])],
            "pages": [page and page | {"paints": paint} for page, paint in zip(pages, paints, strict=True)],
        }  # fmt: skip
        limits = {"passages": passages, "worst": worst, "of_passages": PASSAGES, "of_worst": WORST}
        cut = "" if is_whole else CUT.format_map(limits) if passages else NONE_LEFT
        page = whole_page(payload, body, results.title or TITLE, cut if any(inspections) else "")
        if len(page.encode("utf-8", errors="backslashreplace")) < LARGEST:
            break
    return page


def shortened(inspection: Inspection | None, passages: int, worst: int) -> Inspection | None:
    """An inspection with its first passages, and the most damaged tokens of each model; None if none."""
    if inspection is None or not passages:
        return None
    return Inspection(inspection.passages[:passages], tuple(own and own[:worst] for own in inspection.worst))


def shell_command(words: Sequence[str]) -> str:
    """A command line for a shell; if it names the file of compare_q, for the folder that holds ``eval/``."""
    start = ["python", "eval/compare_q.py"] if words[:1] == ["compare_q.py"] else words[:1]
    return shlex.join([*start, *words[1:]])


def whole_page(payload: dict[str, Any], body: str, title: str, note: str) -> str:
    """The whole HTML."""
    template, sheet, code = ((FOLDER / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    sheet = f"{sheet}{colour_rules()}\n"
    script = f'"use strict";\n(() => {{\n{code}}})();\n'
    allowed = f"script-src {policy_digest(script)}; style-src {policy_digest(sheet)}; img-src blob:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return string.Template(template).substitute(
        title=escape(title), policy=policy, style=sheet, script=script, payload=embedded_json(payload), body=body,
        symbols=marker_symbols(), note=tag("p", escape(note), class_="hint") if note else "",
    )  # fmt: skip


def policy_digest(text: str) -> str:
    """The name that a content policy has for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded_json(data: dict[str, Any]) -> str:
    """JSON that no HTML parser mistakes for the end of its script: without any "<"."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")
