"""matplotlib's figures as the page holds them: no style, no glyph, a model's number on each of its marks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter

from matplotlib.colors import to_hex

from compare_q.eval.html import drawings
from compare_q.eval.plots import looks, measures, percentiles, position, scatter, style
from tests.support.real_table import real_text

TEXT = real_text()


def test_every_mark_names_its_model() -> None:
    """In each kind of drawing; the labels of a mark are those of its model; ids and colours are the page's own."""
    names = {number: model.label for number, model in enumerate(TEXT.models)}
    figures = {
        "point": scatter.scatter_figure(TEXT, measure=measures.KLD),
        "mean": percentiles.percentile_plot(TEXT),
        "line": position.by_position(TEXT, kld=True),
    }
    for kind, figure in figures.items():
        svg = drawings.embedded(figure, "a-", "A <title>", names)
        root = ET.fromstring(svg)
        marks = [each for each in root.iter() if each.get("class") == kind]
        compared = {n for n, model in enumerate(TEXT.models) if kind == "point" or not model.is_reference}
        assert {int(mark.get("data-model", -1)) for mark in marks} == compared
        assert all(mark.get("aria-label") == names[int(mark.get("data-model", -1))] for mark in marks)
        assert root.get("aria-label") == "A <title>"
        assert not re.findall(r" style=|<style|font-family|<metadata", svg)
        assert all(each.get("id", "a-").startswith("a-") for each in root.iter())
        labels = {int(each.get("data-model", -1)): "".join(each.itertext()) for each in root.iter()
                  if each.get("class") == "label"}  # fmt: skip
        assert labels
        for number, text in labels.items():
            assert names[number].split()[-1] in text or "..." in text


def test_a_drawing_is_a_third_of_matplotlibs() -> None:
    svg = drawings.embedded(scatter.scatter_figure(TEXT, measure=measures.KLD), "a-", "title", {})
    assert len(svg) < 40_000
    assert Counter(re.findall(r"<(\w+)", svg))["text"] > 2 * len(TEXT.models)


def test_colours_of_both_themes() -> None:
    """A drawing's light colours are names of pairs; a group's own colour is the same in both."""
    pairs = drawings.themed_colours()
    assert (pairs[style.LIGHT.ink], pairs[style.LIGHT.paper]) == (style.DARK.ink, style.DARK.paper)
    assert not {colour.lower() for colour in looks.COLOURS} & pairs.keys()
    for colour in filter(None, looks.COLOURS):
        assert pairs[to_hex(style.ink_of(colour, style.LIGHT))] == to_hex(style.ink_of(colour, style.DARK))
    assert drawings.in_theme(style.LIGHT.ink) == f"var(--{style.LIGHT.ink[1:]})"
    assert (drawings.in_theme("#0072B2"), drawings.in_theme("")) == ("#0072B2", "currentColor")


def test_paths_are_short_and_the_same() -> None:
    path = "M 10.04 20 \nL 10.04 30.55 \nL 12.5 30.55 \nL 12.5 30.55 \nL 14 40 \nC 1 2 3 4 5.55 6 \nz\n"
    assert drawings.short_path(path) == "M10 20V30.6H12.5L14 40C1 2 3 4 5.5 6z"
