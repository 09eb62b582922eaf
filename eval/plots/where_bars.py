"""Bars of the shares of parts in a KLD, coloured by kind: from the left by layer, or by size."""

from __future__ import annotations

import textwrap
import zlib
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..table.numbers import number_with_error
from ..where.parts import LAYER
from ..where.results import PartRow, WhereResult
from . import picture_style
from .picture_style import Theme

KINDS = ("q", "k", "gate", "v", "o", "up", "down", "experts", "lm_head")
"""Kinds with a fixed colour, in the order of ``picture_style.FAMILIES``."""
MIXED = 2
"""Colour of parts that have modules of several kinds."""
MOST_BARS = 40
"""Maximum number of bars: those with the largest shares."""
HEIGHT_OF_BAR = 0.3
"""Height of a horizontal bar with the gap to the next one (inches)."""
HEIGHT_WITHOUT_BARS = 2.2
"""Height of everything except the bars (inches)."""
HEIGHT_BY_LAYER = 5.6
"""Height of the picture of layers (inches)."""
MOST_TICKS = 36
"""Layers that are all named; of more, every few are."""
NAME_CHARACTERS = 34
"""Characters of a line of a part's name."""
THICKNESS = 0.78
"""Part of the room of a bar that it fills."""
ERROR_BARS = "error bars: ± one standard error"


def where_bars(result: WhereResult, *, title: str | None = None, dark: bool = False) -> Figure:
    """Return the picture; ValueError if no share is known."""
    if not any(row.share is not None for row in result.rows):
        raise ValueError("no share is known")
    if title is None:
        title = result.title or title_of(result)
    rows = rows_of(result)
    height = HEIGHT_WITHOUT_BARS + HEIGHT_OF_BAR * len(rows)
    if is_by_layer(result):
        height = HEIGHT_BY_LAYER
    subtitle = "\n".join(notes_of(result, rows))
    with picture_style.canvas(height, title, subtitle, dark=dark) as (figure, axes, theme):
        colours = colours_of(rows)
        if is_by_layer(result):
            draw_layers(axes, rows, result, theme)
        else:
            draw_parts(axes, rows, colours, result, theme)
            draw_legend(figure, rows, colours, theme)
    return figure


def title_of(result: WhereResult) -> str:
    """Return the title of a picture without the user's title."""
    return f"Where {result.quantized.label} loses"


def axis_of(result: WhereResult) -> str:
    """Return the label of the axis of the values."""
    if result.only:
        return "KLD with this part quantized alone (nats)"
    return "KLD that vanishes with this part restored (nats)"


def is_by_layer(result: WhereResult) -> bool:
    """Return True if parts are layers, which have an order."""
    return result.by == LAYER


def rows_of(result: WhereResult) -> list[PartRow]:
    """Return the parts in the order of the bars: layers as in the model, others by share."""
    rows = [row for row in result.ranked if row.share is not None][:MOST_BARS]
    if is_by_layer(result):
        return [row for row in result.rows if row.share is not None]
    return rows


def notes_of(result: WhereResult, rows: Sequence[PartRow]) -> list[str]:
    """Return the lines below the title."""
    lines = [result.subtitle]
    if result.whole is not None:
        whole = number_with_error(result.whole.value, result.whole.stderr, "nats")
        lines.append(f"KLD from {result.reference.label}: {whole}")
    n_missing = len(result.rows) - len(rows)
    if n_missing:
        lines.append(f"the {len(rows)} largest shares; {n_missing} others are left out")
    if any(row.share is not None and row.share.stderr for row in rows):
        lines.append(ERROR_BARS)
    return lines


def colours_of(rows: Sequence[PartRow]) -> dict[str, int]:
    """Return kind -> place of its colour in ``Theme.families``."""
    colours: dict[str, int] = {}
    for place, kind in enumerate(KINDS):
        if any(row.kind == kind for row in rows):
            colours[kind] = place
    for row in rows:
        if row.kind == "":
            colours[""] = MIXED
        elif row.kind not in colours:
            preferred = zlib.crc32(row.kind.encode()) % len(KINDS)
            colours[row.kind] = picture_style.nearest_free(preferred, colours.values())
    return colours


def draw_parts(
    axes: Axes,
    rows: Sequence[PartRow],
    colours: dict[str, int],
    result: WhereResult,
    theme: Theme,
) -> None:
    """Draw a horizontal bar for each part, the first one at the top."""
    names = picture_style.names_of([row.name for row in rows])
    labels = [textwrap.fill(name, NAME_CHARACTERS) for name in names]
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(axis_of(result))
    for place, row in enumerate(rows):
        assert row.share is not None
        colour = theme.families[colours[row.kind]]
        axes.barh(place, row.share.value, THICKNESS, color=colour, zorder=2, gid=f"bar-{place}")
        stderr = row.share.stderr or 0.0
        end = max(row.share.value + stderr, 0.0)
        if stderr:
            ends = [row.share.value - stderr, row.share.value + stderr]
            draw_error(axes, ends, [place, place], "|", f"error-{place}", theme)
        if row.percent is not None:
            text = axes.annotate(
                f"{row.percent.value:.1f} %", (end, place), (6, 0), textcoords="offset points"
            )
            text.set(va="center", size=10, color=theme.muted)
    # Room for the percentages.
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: picture_style.tick_text(value))
    axes.axvline(0, color=theme.muted, lw=0.8, zorder=1)


def draw_layers(axes: Axes, rows: Sequence[PartRow], result: WhereResult, theme: Theme) -> None:
    """Draw a vertical bar for each layer by its number, and others at the right by their names."""
    step = 1 + len(rows) // MOST_TICKS
    ticks = []
    labels = []
    for place, row in enumerate(rows):
        assert row.share is not None
        colour = theme.families[MIXED]
        axes.bar(place, row.share.value, THICKNESS, color=colour, zorder=2, gid=f"bar-{place}")
        stderr = row.share.stderr or 0.0
        if stderr:
            ends = [row.share.value - stderr, row.share.value + stderr]
            draw_error(axes, [place, place], ends, "_", f"error-{place}", theme)
        if row.layer is None:
            ticks.append(place)
            labels.append(row.name)
        elif row.layer % step == 0:
            ticks.append(place)
            labels.append(str(row.layer))
    axes.set_xticks(ticks, labels)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="x", visible=False)
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("layer")
    axes.set_ylabel(textwrap.fill(axis_of(result), 30))
    axes.yaxis.set_major_formatter(lambda value, _: picture_style.tick_text(value))
    axes.axhline(0, color=theme.muted, lw=0.8, zorder=1)


def draw_error(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    marker: str,
    gid: str,
    theme: Theme,
) -> None:
    """Draw a line from one end of an error to the other."""
    axes.plot(x, y, color=theme.ink, lw=1.1, marker=marker, ms=4, mew=1.1, zorder=3, gid=gid)


def draw_legend(
    figure: Figure, rows: Sequence[PartRow], colours: dict[str, int], theme: Theme
) -> None:
    """Draw which colour is which kind below the axes, unless the names of all parts say it."""
    if all(row.kind in ("", row.name) for row in rows):
        return
    handles = []
    names = []
    for kind, place in colours.items():
        handles.append(Patch(color=theme.families[place]))
        names.append(kind or "several kinds")
    picture_style.legend_below(figure, handles, names)
