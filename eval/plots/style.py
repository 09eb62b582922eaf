"""What all pictures share: light and dark theme, colour and marker of each group of models, headings, saving."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from eval.common.files import replacing

DPI = 160
WIDTH = 13.0
"""Inches."""
NAME_LETTERS = 40
"""Letters of a label beside the axes or in the name of a line: 40 W take 6 of the 13 inches."""
SUFFIXES: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Formats that can be written, each with the metadata that would change with the time of day."""

# Okabe-Ito, but grey for its yellow, which vanishes on white, and ink ("") for its black; the groups that prefer each.
# Without red or green sight a lighter grey (#8C8C8C) is as good as the green beside it: 0.08 apart, this one 0.12.
COLOURS = ("#CC79A7", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#6B6B6B", "")
KNOWN = ("EXL3", "GGUF", "VLLM W4A16", "EXL2 FP8", "AWQ NVFP4", "GPTQ W8A8", "BNB MXFP4", "BF16 FP16")
MARKERS = "os^DvPXp<>"

Styles = dict[str, tuple[str, str]]  # group -> colour, marker


class Theme(NamedTuple):
    """Colours of a picture."""

    paper: str
    ink: str
    muted: str
    grid: str


LIGHT = Theme("#ffffff", "#1b1f24", "#5b6470", "#e9ebee")
DARK = Theme("#14171c", "#e8eaed", "#9aa3ad", "#2a2f37")


def split_label(label: str, group: str = "") -> tuple[str, str]:
    """(group, point text): "EXL3 4.0 [h8]" -> ("EXL3", "4.0"), "bf16" -> ("bf16", "bf16").

    A ``group`` that the spec names takes the place of the first word; the text keeps that word unless it is the group.
    """
    words = re.sub(r"\s*\[[^\[\]]*\]\s*$", "", label).split() or label.split() or ["?"]
    text = " ".join(words)
    start = group.strip() or words[0]
    return start, text.removeprefix(start).strip() if text.startswith(f"{start} ") else text


def short_label(label: str) -> str:
    """A label of at most ``NAME_LETTERS``, cut in its middle: models differ in the last words, and a mark is last."""
    label = " ".join(label.split())
    tail = NAME_LETTERS // 2 - 3
    return label if len(label) <= NAME_LETTERS else f"{label[: NAME_LETTERS - 3 - tail]}...{label[-tail:]}"


def group_styles(groups: Sequence[str], ink: str, *, distinct: bool = True) -> Styles:
    """Colour and marker of each group: no pair twice, and no colour twice before all of them are taken.

    More groups than there are pairs: ValueError, or, not ``distinct`` (each line has its name), pairs that repeat.
    """
    known = {name: place for place, names in enumerate(KNOWN) for name in names.split()}
    ranked = sorted(set(groups), key=lambda group: (group.upper() not in known, group))
    if distinct and len(ranked) > len(COLOURS) * len(MARKERS):
        raise ValueError(f"{len(ranked)} groups, but only {len(COLOURS) * len(MARKERS)} can be told apart")
    styles, used = {}, [0] * len(COLOURS)
    for group in ranked:
        place = min(range(len(COLOURS)), key=lambda i: (used[i], i != known.get(group.upper())))
        styles[group] = (COLOURS[place] or ink, MARKERS[(place + used[place]) % len(MARKERS)])
        used[place] += 1
    return styles


def ink_of(colour: str, theme: Theme) -> tuple[float, ...]:
    """A group's colour for text: half way to the ink, so that it can be read."""
    return _between(colour, theme.ink)


def paper_of(colour: str, theme: Theme) -> tuple[float, ...]:
    """A group's colour for surfaces: half way to the paper."""
    return _between(colour, theme.paper)


def _between(one: str, other: str) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(to_rgb(one), to_rgb(other), strict=True))


def halo(theme: Theme) -> list[withStroke]:
    """The rim of paper that keeps text readable on a line."""
    return [withStroke(linewidth=2.5, foreground=theme.paper)]


@contextmanager
def canvas(
    height: float, title: str, subtitle: str, *, dark: bool, letters: int = 130
) -> Iterator[tuple[Figure, Axes, Theme]]:
    """A figure of that height (inches) with one pair of axes and its heading; all is to be drawn within the block.

    ``letters``: at most in a line of the subtitle, which begins where the axes do.
    """
    theme = DARK if dark else LIGHT
    below = "\n".join(textwrap.fill(line, letters) for line in subtitle.splitlines())
    with style.context(["default", _settings(theme)]):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(
            textwrap.fill(title, round(0.54 * letters)), loc="left", pad=16 + 17 * len(below.splitlines())
        )  # points
        axes.annotate(below, (0, 1), (0, 12), "axes fraction", "offset points", va="bottom", size=12, color=theme.muted)
        yield figure, axes, theme


def freeze_layout(figure: Figure) -> None:
    """Lays the figure out once and for all: artists that are placed to the pixel afterwards keep their places.

    Without an engine saving draws once and not twice; all pictures of 27 models take 8.5 s of a core instead of 10.3.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)


def tick_text(value: float) -> str:
    """A tick: 0.0001, but 1e-5; 1,000."""
    return f"{value:,.8g}".replace("e-0", "e-")


def log_ticks(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 times the powers of ten of a log axis, fewer over many decades, more within one."""
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 5 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=50) if decades > 1 else MaxNLocator(8))
    axis.set_major_formatter(lambda value, _: tick_text(value))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Figure, path: Path) -> None:
    """Writes PNG, SVG or PDF by suffix, whole or not at all, the same bytes for the same figure."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"cannot write {path.name}: its suffix must be one of {', '.join(SUFFIXES)}")
    with replacing(path) as part, style.context(["default", {"svg.hashsalt": "plot"}]):
        figure.savefig(part, format=suffix[1:], dpi=DPI, metadata=SUFFIXES[suffix])


def _settings(theme: Theme) -> dict[str, Any]:
    off = "axes.spines.top", "axes.spines.right", "axes.formatter.useoffset", "legend.frameon", "text.parse_math"
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.paper),
        **dict.fromkeys(("axes.labelcolor", "text.color"), theme.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.muted),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 11.5),
        **dict.fromkeys(("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.2),
        **dict.fromkeys(off, False),
        **{"axes.grid": True, "axes.axisbelow": True, "grid.color": theme.grid, "axes.labelsize": 13},
        **{"axes.titlesize": 18, "axes.titleweight": "bold", "axes.labelpad": 9},
        **{"axes.xmargin": 0.07, "axes.ymargin": 0.1},
    }
