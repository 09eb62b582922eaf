"""Look of all pictures: themes, colours and markers of models, canvas with its heading, ticks,
saving.
"""

from __future__ import annotations

import math
import re
import textwrap
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from ...backends import ENGINES
from ...backends.layers.groups import PLAIN
from ..common.output_files import replacing
from ..results import MARK, ModelResult
from .fonts import harmless
from .measures import SUFFIXES

DPI, WIDTH, CHARACTERS = 160, 10.5, 105
"""Pixels per inch; width of a picture (inches) and of a line of its heading (characters)."""
CARD = 7.5, 4.21875
"""Width and height (inches) of a picture for social media: 1,200 x 675 pixels."""
WIDE = 10**1.5
"""An axis is logarithmic if the largest value above 0 is more than this many times the smallest."""
MARKERS = "soD^vPX<>p"
"""Markers of engines, in the order of the registry."""
DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (6, 2),
    (1, 1.5),
    (6, 2, 1, 2),
    (12, 3),
    (3, 1.5),
    (6, 2, 1, 2, 1, 2),
    (12, 3, 2, 3),
)
"""Dashes and gaps of the lines of one family, in widths of the line."""
LEGEND = 24
"""Characters of a line of the legend."""
NAME_CHARACTERS, TAIL = 40, 17
"""Maximum characters of a model's name, and how many characters at its end are kept."""


class Family(NamedTuple):
    """Formats that share a colour: name, pattern of their weights ("int4 g128"), other names of
    ``group``, colours.
    """

    name: str
    weights: str
    groups: str
    light: str
    dark: str


FAMILIES = (
    Family("EXL3", "exl3", "", "#be719b", "#d289b1"),
    Family("GGUF", r"(i?q|tq)\d", "", "#c25600", "#d15c00"),
    Family("INT ≤ 4 bits", r"int[1-4]\b", "INT INT4 W4A16 GPTQ AWQ", "#005585", "#0575b4"),
    Family("INT > 4 bits", "int", "INT8 W8A8 W8A16", "#004a36", "#0ca279"),
    Family("FP4", r"\w*fp4", "NVFP4 MXFP4", "#d09000", "#f2cd7b"),
    Family("FP8", r"\w*fp8", "MXFP8", "#63baeb", "#61b9ea"),
    Family("EXL2", "exl2", "", "#520a60", "#913d78"),
    Family("NF4", "nf4", "BNB", "#636363", "#c0c0c0"),
    Family("unquantized", "(?!)", "BF16 FP16", "#1b1f24", "#e8eaed"),
)
"""Families of formats, which always have these colours.

The colours are those of Okabe and Ito (2008, "Color Universal Design") with plum and grey instead
of yellow, and with other lightness (CIE L*), which differs by 6 or more, so that all differ in
grey.  Seen without red, green or blue cones they are at least 0.06 apart in Oklab.
"""


class Theme(NamedTuple):
    """Colours of a picture; ``families``: of ``FAMILIES``."""

    paper: str
    ink: str
    muted: str
    grid: str
    families: tuple[str, ...]


LIGHT = Theme("#ffffff", "#1b1f24", "#5b6470", "#e9ebee", tuple(each.light for each in FAMILIES))
DARK = Theme("#14171c", "#e8eaed", "#9aa3ad", "#2a2f37", tuple(each.dark for each in FAMILIES))


class Look(NamedTuple):
    """Family and engine of a model, the place of its colour in ``Theme.families``, and its marker."""

    family: str = ""
    engine: str = ""
    colour: int = 0
    marker: str = "o"


def family_of(model: ModelResult) -> str:
    """Return the group that a model's spec names, or the family of its weights' format, or its
    label's first word.
    """
    if group := str(model.spec.get("group") or "").strip():
        return group
    if not model.is_quantized:
        return "unquantized"
    quantized = [layer for layer in model.layers if layer.weights not in PLAIN]
    most = max(quantized, key=lambda layer: layer.count).weights if quantized else ""
    first_word = (model.label.split() or ["?"])[0]
    return next((each.name for each in FAMILIES if re.match(each.weights, most)), first_word)


def looks_of(models: Sequence[ModelResult]) -> list[Look]:
    """Return the look of each model of a run.  Families share a colour only if there are more than
    ``FAMILIES``.
    """
    own = {
        name: place
        for place, each in enumerate(FAMILIES)
        for name in (each.name.upper(), *each.groups.split())
    }
    families = [family_of(model) for model in models]
    colours: dict[str, int] = {}
    for family in sorted(set(families), key=lambda each: (each.upper() not in own, each)):
        first = own.get(family.upper(), zlib.crc32(family.upper().encode()) % len(FAMILIES))
        ring = [(first + step) % len(FAMILIES) for step in range(len(FAMILIES))]
        colours[family] = next((each for each in ring if each not in colours.values()), first)
    engines = list(dict.fromkeys([*ENGINES, *sorted(model.engine for model in models)]))
    marks = [MARKERS[engines.index(model.engine) % len(MARKERS)] for model in models]
    return [
        Look(family, model.engine, colours[family], mark)
        for family, model, mark in zip(families, models, marks, strict=True)
    ]


def names_of(labels: Sequence[str]) -> list[str]:
    """Return the labels without brackets at their end, cut in the middle; longer if two would
    become equal.
    """
    forms = []
    for label in map(harmless, labels):
        whole = " ".join(label.split()) or "?"
        short = re.sub(rf"(?<=.)\s*\[[^\[\]]*\](?= {MARK}$|$)", "", whole)
        cut = (
            short
            if len(short) <= NAME_CHARACTERS
            else f"{short[: NAME_CHARACTERS - 3 - TAIL]}...{short[-TAIL:]}"
        )
        forms.append((cut, short, whole, label))
    owners = defaultdict(set)
    for each in forms:
        for form in each:
            owners[form].add(each[-1])
    return [next((form for form in each if len(owners[form]) == 1), each[-1]) for each in forms]


def ink_of(colour: str, theme: Theme) -> str:
    """Return a family's colour for text: half way to the ink, so that it can be read."""
    return to_hex([(a + b) / 2 for a, b in zip(to_rgb(colour), to_rgb(theme.ink), strict=True)])


def halo(theme: Theme) -> list[withStroke]:
    """Return the rim of paper that keeps text readable on a line."""
    return [withStroke(linewidth=2.5, foreground=theme.paper)]


@contextmanager
def canvas(
    height: float,
    title: str,
    subtitle: str,
    *,
    dark: bool,
    characters: int = CHARACTERS,
    width: float = WIDTH,
) -> Iterator[tuple[Figure, Axes, Theme]]:
    """Yield a figure with one pair of axes and a heading; draw everything within the block.

    ``height``, ``width``: inches.  ``characters``: longest line of the subtitle.
    """
    theme = DARK if dark else LIGHT
    below = "\n".join(textwrap.fill(line, characters) for line in subtitle.splitlines())
    with style.context(["default", _settings(theme)]):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(
            textwrap.fill(title, characters // 2), loc="left", pad=16 + 17 * len(below.splitlines())
        )
        axes.annotate(
            below,
            (0, 1),
            (0, 12),
            "axes fraction",
            "offset points",
            va="bottom",
            size=12,
            color=theme.muted,
        )
        yield figure, axes, theme


def draw_legend(
    axes: Axes,
    looks: Sequence[Look],
    theme: Theme,
    *,
    below: Figure | None = None,
    markers: bool = True,
) -> None:
    """Draw which colour is which family and which marker is which engine, each only where there are
    several.

    The legend is right of the axes.  ``below``: the figure, for a legend below the axes; it grows
    by its height.
    """
    families = {look.family: theme.families[look.colour] for look in looks}
    engines = {look.engine: look.marker for look in looks if markers}
    entries: list[tuple[str, Artist]] = []
    if len(families) > 1:
        entries += [
            (name, Patch(color=families[name])) for name in sorted(families, key=str.casefold)
        ]
    if len(engines) > 1:
        entries += [
            (name, Line2D([], [], ls="", marker=engines[name], ms=9, color="none", mec=theme.muted))
            for name in sorted(engines)
        ]
    if not entries:
        return
    names = [name for name, _ in entries]
    handles = [artist for _, artist in entries]
    if below:
        legend_below(below, handles, names)
        return
    columns = math.ceil(len(entries) / 30)
    legend = axes.legend(
        handles, ["-"] * len(names), loc="upper left", bbox_to_anchor=(1.01, 1.01), ncols=columns
    )
    _write_legend(legend, names)


def legend_below(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Draw a legend below the axes; the figure grows by its height."""
    longest = min(max(map(len, names)), LEGEND)
    columns = CHARACTERS // (longest + 7)
    legend = figure.legend(
        handles, ["-"] * len(names), loc="outside lower left", ncols=columns, borderaxespad=1.2
    )
    _write_legend(legend, names)
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / DPI)


def _write_legend(legend: Legend, names: Sequence[str]) -> None:
    """Write the names, which are not given to the legend, since it hides those that start with "_"."""
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(textwrap.fill(name, LEGEND))


def freeze_layout(figure: Figure) -> None:
    """Fix the figure's layout, so that artists placed to the pixel afterwards do not move."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)


def is_wide(values: Iterable[float]) -> bool:
    """Return True if the values above 0 need a logarithmic axis."""
    above = [value for value in values if value > 0]
    return bool(above) and max(above) > WIDE * min(above)


def tick_text(value: float) -> str:
    """Return the text of a tick: 0.0001, but 1e-5; 1,000."""
    return f"{value:,.8g}".replace("e-0", "e-")


def log_ticks(
    axis: Axis, *, near: float = 0.0, most: int = 14, text: Callable[[float], str] = tick_text
) -> None:
    """Set ticks at 1, 2 and 5 times the powers of ten, or only at the powers if these are more than
    ``most``.

    ``near``: where a symmetric axis becomes linear; it has no tick nearer to 0, except at 0.
    """
    low, high = sorted(axis.get_view_interval())
    decades = range(math.floor(math.log10(near or low)), math.ceil(math.log10(max(high, -low))) + 1)
    for factors in (1, 2, 5), (1,):
        steps = [f * 10.0**decade for decade in decades for f in factors]
        steps = [step for step in steps if step > 0.99 * near]
        around = [*(-step for step in steps), 0.0, *steps] if near else steps
        ticks = [tick for tick in around if low <= tick <= high]
        if len(ticks) <= most:
            break
    axis.set_major_locator(FixedLocator(ticks) if len(ticks) > 2 else MaxNLocator(8))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())


def escape_controls(figure: Figure) -> None:
    """Escape the control characters in all texts of a figure, which come from labels and paths."""
    for text in figure.findobj(Text):
        text.set_text(harmless(text.get_text()))


def save_figure(figure: Figure, path: Path) -> None:
    """Write PNG, SVG or PDF by suffix, whole or not at all; the same figure gives the same bytes."""
    escape_controls(figure)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"cannot write {path.name}: its suffix must be one of {', '.join(SUFFIXES)}"
        )
    with replacing(path) as part, style.context(["default", {"svg.hashsalt": "plot"}]):
        figure.savefig(part, format=suffix[1:], dpi=DPI, metadata=SUFFIXES[suffix])


def _settings(theme: Theme) -> dict[str, Any]:
    off = (
        "axes.spines.top",
        "axes.spines.right",
        "axes.formatter.useoffset",
        "legend.frameon",
        "text.parse_math",
    )
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.paper),
        **dict.fromkeys(("axes.labelcolor", "text.color"), theme.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.muted),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 11.5),
        **dict.fromkeys(
            ("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.2
        ),
        **dict.fromkeys(off, False),
        **{
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": theme.grid,
            "axes.labelsize": 13,
        },
        **{"axes.titlesize": 18, "axes.titleweight": "bold", "axes.labelpad": 9},
        **{
            "axes.xmargin": 0.08,
            "axes.ymargin": 0.1,
            "legend.handlelength": 1.5,
            "legend.handleheight": 0.8,
        },
    }
