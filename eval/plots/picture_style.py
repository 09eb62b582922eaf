"""Look of all pictures: themes, colours, markers, names, canvas with heading, ticks, saving."""

from __future__ import annotations

import math
import re
import textwrap
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from matplotlib.ticker import FixedLocator, Locator, MaxNLocator, NullLocator

from ...backends import ENGINES
from ...backends.layers.groups import UNQUANTIZED_FORMATS
from ..common.output_files import replacing
from ..results import MARK, ModelResult
from .fonts import harmless
from .measures import SUFFIXES

DPI = 160
"""Pixels per inch."""
WIDTH = 10.5
"""Width of a picture (inches).  A wider one would have smaller characters on a phone."""
CHARACTERS = 105
"""Characters of a line of a picture's heading."""
CARD_SIZE = 7.5, 4.21875
"""Width and height (inches) of a picture for social media: 1,200 x 675 pixels."""
LOG_AXIS_RATIO = 10**1.5
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
LEGEND_CHARACTERS = 24
"""Characters of a line of the legend."""
LEGEND_ROWS = 30
"""Maximum number of rows of a legend right of the axes."""
NAME_CHARACTERS = 40
"""Maximum characters of a model's name."""
NAME_TAIL = 17
"""Characters at the end of a name that stay if its middle is left out."""


class Family(NamedTuple):
    """Formats that share a colour.

    Attributes:
        weights: pattern of the beginning of their weights' names, as "int4 g128"
        groups: other values of a spec's ``group``, in capitals, with spaces between them
        light: colour on white
        dark: colour on black
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


LIGHT = Theme(
    "#ffffff", "#1b1f24", "#5b6470", "#e9ebee", tuple(family.light for family in FAMILIES)
)
DARK = Theme("#14171c", "#e8eaed", "#9aa3ad", "#2a2f37", tuple(family.dark for family in FAMILIES))


class Look(NamedTuple):
    """Look of a model; ``colour``: its place in ``Theme.families``."""

    family: str = ""
    engine: str = ""
    colour: int = 0
    marker: str = "o"


def family_of(model: ModelResult) -> str:
    """Return the group that a model's spec names, or the family of its weights' format.

    Without both it is the first word of the label.
    """
    group = str(model.spec.get("group") or "").strip()
    if group:
        return group
    if not model.is_quantized:
        return "unquantized"
    quantized = [layer for layer in model.layers if layer.weights not in UNQUANTIZED_FORMATS]
    weights = ""
    if quantized:
        weights = max(quantized, key=lambda layer: layer.count).weights
    for family in FAMILIES:
        if re.match(family.weights, weights):
            return family.name
    words = model.label.split()
    if not words:
        return "?"
    return words[0]


def looks_of(models: Sequence[ModelResult]) -> list[Look]:
    """Return the look of each model of a run.

    Families share a colour only if there are more than ``FAMILIES``.
    """
    families = [family_of(model) for model in models]
    colours = colours_of(families)
    # The registry's engines come first, so that an engine has one marker in all pictures.
    engines = list(dict.fromkeys([*ENGINES, *sorted(model.engine for model in models)]))
    looks = []
    for family, model in zip(families, models, strict=True):
        marker = MARKERS[engines.index(model.engine) % len(MARKERS)]
        looks.append(Look(family, model.engine, colours[family], marker))
    return looks


def colours_of(families: Sequence[str]) -> dict[str, int]:
    """Return family -> place of its colour in ``Theme.families``."""
    colour_of_family = {}
    for place, family in enumerate(FAMILIES):
        for name in (family.name.upper(), *family.groups.split()):
            colour_of_family[name] = place
    # Those with a fixed colour come first, so that no other family takes it.
    in_order = sorted(set(families), key=lambda name: (name.upper() not in colour_of_family, name))
    colours: dict[str, int] = {}
    for name in in_order:
        colour = colour_of_family.get(name.upper())
        if colour is None:
            # The name decides, so that a family has mostly the same colour in all pictures.
            colour = zlib.crc32(name.upper().encode()) % len(FAMILIES)
        colours[name] = nearest_free(colour, colours.values())
    return colours


def nearest_free(colour: int, used: Collection[int]) -> int:
    """Return this colour, or the next one that is not used; this colour if all are."""
    for step in range(len(FAMILIES)):
        candidate = (colour + step) % len(FAMILIES)
        if candidate not in used:
            return candidate
    return colour


def names_of(labels: Sequence[str]) -> list[str]:
    """Return each label in its shortest form that no other label has (``forms_of``)."""
    forms_of_labels = [forms_of(harmless(label)) for label in labels]
    owners = defaultdict[str, set[str]](set)
    for forms in forms_of_labels:
        for form in forms:
            owners[form].add(forms[-1])
    return [shortest_unique(forms, owners) for forms in forms_of_labels]


def shortest_unique(forms: Sequence[str], owners: Mapping[str, Collection[str]]) -> str:
    """Return the first of a label's forms that no other label has; if there is none, the label.

    ``forms``: as ``forms_of`` returns them.  ``owners``: form -> the labels that have it.
    """
    for form in forms:
        if len(owners[form]) == 1:
            return form
    return forms[-1]


def forms_of(label: str) -> tuple[str, str, str, str]:
    """Return the forms of a label, the shortest first and the label itself last.

    The third is on one line, the second also has no brackets at its end, and the first is also cut
    in the middle if it is long.
    """
    one_line = " ".join(label.split()) or "?"
    without_brackets = re.sub(rf"(?<=.)\s*\[[^\[\]]*\](?= {MARK}$|$)", "", one_line)
    cut = without_brackets
    if len(cut) > NAME_CHARACTERS:
        cut = f"{cut[: NAME_CHARACTERS - 3 - NAME_TAIL]}...{cut[-NAME_TAIL:]}"
    return cut, without_brackets, one_line, label


def ink_of(colour: str, theme: Theme) -> str:
    """Return a family's colour for text: half way to the ink, so that it can be read."""
    channels = zip(to_rgb(colour), to_rgb(theme.ink), strict=True)
    return to_hex([(family + ink) / 2 for family, ink in channels])


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
    theme = LIGHT
    if dark:
        theme = DARK
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
    """Draw which colour is which family and which marker is which engine.

    Each is left out if there is only one.  The legend is right of the axes.  ``below``: the figure,
    for a legend below the axes; it grows by its height.  ``markers``: False if the picture has
    none.
    """
    colour_of_family = {}
    marker_of_engine = {}
    for look in looks:
        colour_of_family[look.family] = theme.families[look.colour]
        marker_of_engine[look.engine] = look.marker
    names: list[str] = []
    handles: list[Artist] = []
    if len(colour_of_family) > 1:
        for family in sorted(colour_of_family, key=str.casefold):
            names.append(family)
            handles.append(Patch(color=colour_of_family[family]))
    if markers and len(marker_of_engine) > 1:
        for engine in sorted(marker_of_engine):
            marker = Line2D([], [], ls="", marker=marker_of_engine[engine], ms=9, color="none")
            marker.set_markeredgecolor(theme.muted)
            names.append(engine)
            handles.append(marker)
    if not names:
        return
    if below:
        legend_below(below, handles, names)
        return
    columns = math.ceil(len(names) / LEGEND_ROWS)
    legend = axes.legend(
        handles, ["-"] * len(names), loc="upper left", bbox_to_anchor=(1.01, 1.01), ncols=columns
    )
    _write_legend(legend, names)


def legend_below(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Draw a legend below the axes; the figure grows by its height."""
    longest = min(max(len(name) for name in names), LEGEND_CHARACTERS)
    # A handle and the space between columns take about seven characters.
    columns = CHARACTERS // (longest + 7)
    # The names are written afterwards: Matplotlib would leave out those that start with "_".
    legend = figure.legend(
        handles, ["-"] * len(names), loc="outside lower left", ncols=columns, borderaxespad=1.2
    )
    _write_legend(legend, names)
    figure.set_figheight(figure.get_figheight() + legend.get_window_extent().height / DPI)


def _write_legend(legend: Legend, names: Sequence[str]) -> None:
    """Write the names into a legend that was made with other ones."""
    # Matplotlib leaves out entries of a legend whose names start with "_".
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(textwrap.fill(name, LEGEND_CHARACTERS))


def freeze_layout(figure: Figure) -> None:
    """Fix the figure's layout, so that artists placed to the pixel afterwards do not move."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)


def is_wide(values: Iterable[float]) -> bool:
    """Return True if the values above 0 need a logarithmic axis."""
    above = [value for value in values if value > 0]
    return bool(above) and max(above) > LOG_AXIS_RATIO * min(above)


def tick_text(value: float) -> str:
    """Return the text of a tick: 0.0001, but 1e-5; 1,000."""
    return f"{value:,.8g}".replace("e-0", "e-")


def log_ticks(
    axis: Axis,
    *,
    linear_below: float = 0.0,
    most: int = 14,
    text: Callable[[float], str] = tick_text,
) -> None:
    """Set ticks at 1, 2 and 5 times the powers of ten, or only at the powers.

    The latter if the former are more than ``most``.  ``linear_below``: where a symmetric axis
    becomes linear; it has no tick nearer to 0, except at 0.
    """
    low, high = sorted(axis.get_view_interval())
    ticks = _ticks_between(low, high, (1, 2, 5), linear_below)
    if len(ticks) > most:
        ticks = _ticks_between(low, high, (1,), linear_below)
    locator: Locator = FixedLocator(ticks)
    if len(ticks) <= 2:
        # Such a short axis has too few powers of ten.
        locator = MaxNLocator(8)
    axis.set_major_locator(locator)
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())


def _ticks_between(
    low: float, high: float, factors: Sequence[int], linear_below: float
) -> list[float]:
    """Return the products of factors and powers of ten between the ends of an axis.

    ``linear_below``: an axis with values on both sides of 0 is linear between minus this and this;
    0 for an axis of values above 0.
    """
    smallest = linear_below or low
    first_decade = math.floor(math.log10(smallest))
    last_decade = math.ceil(math.log10(max(high, -low)))
    steps = []
    for decade in range(first_decade, last_decade + 1):
        for factor in factors:
            step = factor * 10.0**decade
            # 0.99: the tick at the limit itself stays if rounding has made it smaller.
            if step > 0.99 * linear_below:
                steps.append(step)
    ticks = steps
    if linear_below:
        ticks = [*(-step for step in steps), 0.0, *steps]
    return [tick for tick in ticks if low <= tick <= high]


def escape_controls(figure: Figure) -> None:
    """Escape the control characters in all texts of a figure, which come from labels and paths."""
    for text in figure.findobj(Text):
        text.set_text(harmless(text.get_text()))


def save_figure(figure: Figure, path: Path) -> None:
    """Write PNG, SVG or PDF by suffix, whole or not at all.

    The same figure gives the same bytes.
    """
    escape_controls(figure)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"cannot write {path.name}: its suffix must be one of {', '.join(SUFFIXES)}"
        )
    # Without a salt, the ids in an SVG are random.
    with replacing(path) as part, style.context(["default", {"svg.hashsalt": "plot"}]):
        figure.savefig(part, format=suffix[1:], dpi=DPI, metadata=SUFFIXES[suffix])


def _settings(theme: Theme) -> dict[str, Any]:
    return {
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.labelcolor": theme.ink,
        "text.color": theme.ink,
        "axes.edgecolor": theme.muted,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "grid.color": theme.grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 18,
        "axes.titleweight": "bold",
        "axes.labelsize": 13,
        "xtick.labelsize": 11.5,
        "ytick.labelsize": 11.5,
        "legend.fontsize": 11.5,
        "axes.labelpad": 9,
        "axes.xmargin": 0.08,
        "axes.ymargin": 0.1,
        "figure.constrained_layout.w_pad": 0.2,
        "figure.constrained_layout.h_pad": 0.2,
        "legend.frameon": False,
        "legend.handlelength": 1.5,
        "legend.handleheight": 0.8,
        # An offset above the axis would have to be added to each tick.
        "axes.formatter.useoffset": False,
        # Labels may have dollars, which would begin a formula: "$x$".
        "text.parse_math": False,
    }


def draw_arrow(
    axes: Axes, start: tuple[float, float], way: tuple[float, float], colour: str, gid: str
) -> None:
    """Draw an arrow from a bound to larger values.

    ``start``: in data coordinates; ``way``: from there to the tip, in points.
    """
    arrow = axes.annotate(
        "",
        start,
        way,
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0},
        zorder=3.5,
    )
    arrow.set(gid=gid, in_layout=False)
