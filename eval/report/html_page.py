"""The report of ``--html``: one file that shows a run in a browser without a network.

jinja2 renders it.  All content is static HTML.  The script sorts tables and switches between plots;
without it, all plots are shown.  Labels and token texts come from strangers: jinja2 escapes them,
and the content policy allows no other script.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.style
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.text import Text

from ...backends.common.message_text import printable
from ..plots import measures, picture_style, pictures, slice_bars
from ..plots.picture_style import DARK, LIGHT
from ..plots.pictures import Picture
from ..results import ModelResult, RunResult
from ..table import tables
from ..table.numbers import AT_LEAST, significant_text
from ..table.tables import Cell, FilledColumn

FOLDER = Path(__file__).parent / "page"
PAGE_TITLE = "Quantized models compared"
TITLE_WORDS = {
    "kld": "KLD",
    "ppl": "PPL",
    "bpw": "over bits per weight",
    "size": "over file size",
    "slices": "KLD by slice",
}
"""Parts of the names of pictures, and how the page spells them."""
SPACES = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
"""White space and the sign that the page shows for it, so that a token takes one line."""
HTML_TAG = re.compile(r"<[^>]*>")
UNUSED_PARTS = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
UNUSED_ID = re.compile(r' id="(?![hmp][0-9a-f]{10}")[^"]*"')
"""Ids of an SVG that nothing refers to."""
LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
COLOUR = re.compile('#[0-9a-f]{6}(?=[;"])')


def page_of(
    results: RunResult, names: Sequence[str] | None = None, stored: RunResult | None = None
) -> str:
    """Return the page.

    ``names``: names of the table's columns, None for all informative ones; ``stored``: the run that
    ``show`` reads back from the page, if its rows have another order.
    """
    script = (FOLDER / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    if stored is None:
        stored = results
    # Without any "<", so that no HTML parser mistakes a part of it for the end of the script
    # element.
    json_text = stored.model_dump_json().replace("<", "\\u003c")
    return (
        environment()
        .get_template("report.html")
        .render(
            title=results.title or PAGE_TITLE,
            policy=(
                f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
                "base-uri 'none'"
            ),
            style=style(),
            script=Markup(script),
            figures=figures_of_run(results),
            table=tables.table_of(results, names),
            slices=columns_of_slices(results),
            command=shell_command(results.command),
            run=results,
            results=Markup(json_text),
        )
    )


def environment() -> jinja2.Environment:
    """Return what renders the pages of this folder."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=on_one_line,
    )
    pages.filters |= {
        "percent": percent,
        "significant": significant_text,
        "signs": lambda text: text.translate(SPACES),
    }
    pages.globals["sort_key"] = sort_key
    return pages


def style() -> Markup:
    """Return the style sheet of all pages."""
    return Markup((FOLDER / "report.css").read_text(encoding="utf-8"))


def on_one_line(value: Any) -> Any:
    """Return a text with its control characters escaped; markup stays unchanged."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def shell_command(words: Sequence[str]) -> str:
    """Return a command line for a shell.

    It starts from the checkout if ``words`` begins with the file of compare_q.
    """
    start = words[:1]
    if "compare_q.py" in start:
        start = ["python", "eval/compare_q.py"]
    return shlex.join([*start, *words[1:]])


def figures_of_run(results: RunResult) -> list[dict[str, Any]]:
    """Return the pictures of a run; its usual measure over bits per weight comes first."""
    first = f"{measures.measure_of_flags(results, None, None).field}_bpw"
    drawn = pictures.pictures_of(results)
    names = [name for name in drawn if not name.endswith("_vram")]
    pictures_by_title = {}
    for name in sorted(names, key=lambda name: name != first):
        title = " ".join(TITLE_WORDS.get(word, word) for word in name.split("_"))
        pictures_by_title[title] = drawn[name]
    return figures_of(pictures_by_title)


def columns_of_slices(results: RunResult) -> list[FilledColumn]:
    """Return the columns of the small table of slices; empty without slices.

    They are the KLD in each slice, or the PPL without a reference.
    """
    models = [model for model in results.models if model.slices]
    if not models:
        return []
    measure = "kld"
    if not has_kld_of_slice(models):
        measure = "ppl"
        if results.reference is not None:
            return []
    names = [f"{measure}:{name}" for name in slice_bars.in_order(results.slices)]
    return tables.columns_of(results.updated(models=tuple(models)), ["label", *names])


def has_kld_of_slice(models: Sequence[ModelResult]) -> bool:
    """Return True if a model has a KLD of one of its slices."""
    for model in models:
        for part in model.slices.values():
            if part.kld is not None:
                return True
    return False


def sort_key(filled: FilledColumn, cell: Cell) -> str:
    """Return what a column sorts a cell by; empty for a missing value, which is sorted last."""
    column = filled.column
    if column.digits is None:
        if cell.value == "n/a":
            return ""
        return cell.value
    if cell.value == "ref":
        return str(column.times * (column.of_reference or 0) + column.plus)
    try:
        return str(float(cell.value.removeprefix(AT_LEAST).replace(",", "")))
    except ValueError:
        return ""


def percent(logprob: float | None) -> str:
    """Return a probability in percent, with two significant digits from 0.0001 % on."""
    if logprob is None:
        return ""
    value = 100 * math.exp(min(logprob, 0.0))
    if value < 1e-4:
        return "<0.0001 %"
    if value < 99.5:
        return f"{value:.2g} %"
    return "100 %"


def figures_of(drawn: dict[str, Picture]) -> list[dict[str, Any]]:
    """Return the pictures that can be drawn, each with its title and SVG."""
    figures = []
    for title, draw in drawn.items():
        try:
            figure = draw()
        except ValueError:  # nothing to draw
            continue
        figures.append({"title": title, "svg": svg_of(figure, title)})
    return figures


def svg_of(figure: Figure, title: str) -> Markup:
    """Return a figure as an SVG element with text as text, in the colours of either theme.

    ``title``: also a salt for the ids of its markers, clip paths and hatches, so that they differ
    from other pictures'.
    """
    # The page's paper and the shadow of its scrolling box show through.
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_visible(False)
    picture_style.escape_controls(figure)
    # Effects would draw texts as paths; the page's style has a rim for texts.
    for text in figure.findobj(Text):
        text.set_path_effects([])
    file = io.StringIO()
    with matplotlib.style.context(["default", {"svg.hashsalt": title, "svg.fonttype": "none"}]):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = UNUSED_PARTS.sub("", file.getvalue())
    element = HTML_TAG.sub(lambda tag: short_tag(tag[0]), svg[svg.index("<svg") :])
    element = element.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
    return Markup(element)


def short_tag(tag: str) -> str:
    """Return an SVG tag with rounded coordinates, used ids only, and colours of both themes."""
    tag = UNUSED_ID.sub("", tag)
    tag = LONG_NUMBER.sub(lambda number: f"{float(number[0]):z.1f}", tag)
    return COLOUR.sub(lambda colour: themed_colours().get(colour[0], colour[0]), tag)


@cache
def themed_colours() -> dict[str, str]:
    """Return the colours of light pictures that differ in dark ones, each with CSS for both."""
    light_colours = (*LIGHT[:4], *LIGHT.families)
    dark_colours = (*DARK[:4], *DARK.families)
    pairs = dict(zip(light_colours, dark_colours, strict=True))
    for light, dark in list(pairs.items()):
        pairs[picture_style.ink_of(light, LIGHT)] = picture_style.ink_of(dark, DARK)
    return {light: f"light-dark({light}, {dark})" for light, dark in pairs.items()}
