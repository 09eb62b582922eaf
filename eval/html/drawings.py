"""matplotlib's figures as SVG that stands in the page: text as text, colours of either theme, marks that name a model.

matplotlib writes ``style`` attributes, which the page's content policy forbids; they become SVG's own attributes.
Coordinates have one decimal (of 756 across), and lines between them are written in their shortest form: a scatter plot
of 41 rows takes 25 kB and not 73.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from functools import cache
from html import escape

import matplotlib.style
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.markers import MarkerStyle
from matplotlib.text import Text

from compare_q.eval.plots import looks, style
from compare_q.eval.plots.style import DARK, LIGHT

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
KEPT = re.compile(
    r"(fill|stroke|stroke-width|stroke-dasharray|stroke-dashoffset|stroke-linecap|stroke-linejoin|opacity|fill-opacity|"
    r"stroke-opacity|text-anchor|font-size|font-weight): ([^;]+)"
)
"""What of a style is kept; the page has one family of letters."""
MARKED = re.compile(r"([a-z]+)-(\d+)$")
"""The ids (gid) of artists that belong to a model."""
UNSHARED = ("level", "edge", "break", "note", "head", "name", "share")
"""Kinds of numbered artists that belong to no model."""
SHARED_ID = re.compile(r"[mp][0-9a-f]{10}$")
"""The ids that matplotlib makes for markers and clip paths, which other elements name."""
MARKS = ("point", "mean", "line")
"""Kinds that the keyboard reaches, one of each model in a drawing."""


@cache
def themed_colours() -> dict[str, str]:
    """The colours of a light drawing, and what they are in a dark one, where that is another colour."""
    pairs = dict(zip(LIGHT, DARK, strict=True))
    for colour in (*filter(None, looks.COLOURS), LIGHT.ink, LIGHT.muted):
        dark = pairs.get(colour, colour)
        for mixed in (style.ink_of, style.paper_of):
            pairs[to_hex(mixed(colour, LIGHT))] = to_hex(mixed(dark, DARK))
        for count in range(1, looks.MOST_OF_SCHEME + 1):
            pairs |= zip(looks.shades(colour, count, LIGHT), looks.shades(dark, count, DARK), strict=True)
    groups = {colour.lower() for colour in looks.COLOURS}  # a marker has one colour in both
    return {light: dark for light, dark in pairs.items() if light != dark and light not in groups}


def colour_rules() -> str:
    """CSS: the variables by which drawings name the colours that differ between light and dark."""
    rules = (f"--{light[1:]}:light-dark({light},{dark})" for light, dark in themed_colours().items())
    return f":root{{{';'.join(rules)}}}"


def in_theme(colour: str) -> str:
    """A colour for an attribute, by its variable where the themes differ; "" is the ink's."""
    return f"var(--{colour[1:]})" if colour in themed_colours() else colour or "currentColor"


def embedded(figure: Figure, name: str, title: str, words: Mapping[int, str], marks_of_model: int = 1) -> str:
    """A figure as an SVG element.

    ``name``: tells its ids from those of other drawings; ``title``: for those who do not see it; ``words``: what each
    model's marks say to them, by its number.  ``marks_of_model``: so many numbers of "point" and "whisker" are one
    model's, and ``words`` are theirs.
    """
    for text in figure.findobj(Text):
        text.set_path_effects([])  # a rim would turn letters into paths; the page draws it (paint-order)
    file = io.BytesIO()
    with matplotlib.style.context(["default", {"svg.hashsalt": "report", "svg.fonttype": "none"}]):
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ET.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{SVG}style" or not child.tag.startswith(SVG) or child.tag == f"{SVG}metadata":
                parent.remove(child)
    for element in root.iter():
        simplify(element, name, marks_of_model, words)
    unwrap(root)
    attributes = {"role": "group", "aria-label": title, "stroke-linejoin": "round", "viewBox": root.get("viewBox", "")}
    root.attrib.clear()
    root.attrib.update(attributes)
    ET.register_namespace("", SVG[1:-1])
    return ET.tostring(root, encoding="unicode")


def simplify(element: ET.Element, name: str, marks_of_model: int, words: Mapping[int, str]) -> None:
    """Make an element's style attributes, its id the number of a model, and its coordinates short."""
    element.attrib |= dict(KEPT.findall(element.attrib.pop("style", "")))
    for key in ("fill", "stroke"):
        if key in element.attrib:
            element.set(key, in_theme(element.attrib[key]))
    own = element.attrib.pop("id", "")
    if SHARED_ID.match(own):
        element.set("id", name + own)
    elif own.startswith("series-"):
        element.set("class", "series")
    elif (marked := MARKED.match(own)) and marked[1] not in UNSHARED:
        kind, number = marked[1], int(marked[2])
        several = marks_of_model > 1 and kind in ("point", "whisker")
        element.attrib |= {"class": kind, "data-model": str(number // marks_of_model if several else number)}
        if several:
            element.set("data-text", str(number % marks_of_model))
        if kind in MARKS and (several or marks_of_model == 1) and number in words:
            element.attrib |= {"tabindex": "0", "role": "button", "aria-label": words[number]}
    if HREF in element.attrib:
        element.set("href", f"#{name}{element.attrib.pop(HREF)[1:]}")
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("#", f"#{name}"))
    for key in ("x", "y", "transform", "stroke-width", "stroke-dasharray"):
        if key in element.attrib:
            element.set(key, rounded(element.attrib[key]))
    if element.get("transform", "").startswith("rotate(-0"):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.set("d", short_path(element.attrib["d"]))
    element.tail = None
    if not (element.text or "").strip():
        element.text = None


def rounded(numbers: str) -> str:
    """A text with its numbers rounded to one decimal."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):z.1f}".removesuffix(".0"), numbers)


def short_path(path: str) -> str:
    """A path with rounded coordinates, its level and upright lines as H and V."""
    parts, last = [], ("", "")
    for command, coordinates in re.findall(r"([A-Za-z])([^A-Za-z]*)", rounded(path)):
        x, y = [*last, *coordinates.split()][-2:]
        if command == "L" and (x, y) == last:
            continue
        line = f"H{x}" if y == last[1] else f"V{y}" if x == last[0] else f"L{x} {y}"
        parts.append(line if command == "L" else command + " ".join(coordinates.split()))
        last = x, y
    return "".join(parts)


def unwrap(element: ET.Element) -> None:
    """Replace groups that have no attributes by what they hold, and leave out those that hold nothing."""
    children = []
    for child in element:
        unwrap(child)
        bare = child.tag in (f"{SVG}g", f"{SVG}defs") and not child.attrib
        children += list(child) if bare and child.tag == f"{SVG}g" else [] if bare and not len(child) else [child]
    element[:] = children


@cache
def marker_symbols() -> str:
    """An SVG element with a symbol for each marker, 14 units wide, which swatches use."""
    symbols = []
    for marker in dict.fromkeys(looks.MARKERS):
        drawn = MarkerStyle(marker)
        outline = np.array(drawn.get_path().transformed(drawn.get_transform()).to_polygons()[0]) * (10, -10)
        points = " ".join(f"{x:z.1f},{y:z.1f}" for x, y in outline[:-1])
        symbols.append(f'<symbol id="marker-{ord(marker)}" viewBox="-7 -7 14 14"><polygon points="{points}"/></symbol>')
    return f'<svg class="symbols" aria-hidden="true">{"".join(symbols)}</svg>'


def swatch(colour: str, marker: str) -> str:
    """A marker in its colour ("": the ink's), as it stands before a label."""
    use = f'<use href="#marker-{ord(marker)}" fill="{escape(in_theme(colour))}"/>'
    return f'<svg class="swatch" width="14" height="14" aria-hidden="true">{use}</svg>'
