"""Plot percentiles of the tokens' KLD: one row per model, on a logarithmic axis.

KLD spans seven decades.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results import ModelResult, RunResult
from ..table.numbers import rounded_down
from ..table.wording import first_words_and_count
from . import picture_style
from .measures import BOUND_NOTE
from .picture_style import Look, Theme
from .points import subtitle_of

PERCENTILES_TITLE = "KL divergence of single tokens"
EXPLANATION = "box: median and quartiles; whiskers: 1 to 99 %; marker: mean; tick: maximum"
BOUND = "\N{GREATER-THAN OR EQUAL TO}"
"""Before a bound, where the two signs of the table would not fit."""
ARROW = f"arrow, {BOUND}: {BOUND_NOTE}"
ROW_HEIGHT = 0.3
"""Height of a row (inches)."""
HEIGHT_WITHOUT_ROWS = 3.0
"""Height of everything above and below the rows (inches)."""
LINE_HEIGHT = 0.24
"""Height of a line of the heading (inches)."""
ROW_LABEL_WIDTH = 2.3
"""Largest width of the rows' labels (inches)."""
LINE_CHARACTERS = 80
"""Longest line of the heading, which is above the columns of numbers too."""
COLUMN = 57
"""Width of a column of numbers (points)."""
SMALLEST_KLD = 1e-8
"""Smallest value on an axis (nats); smaller ones are float32 rounding."""


class Row(NamedTuple):
    """A model: its mean KLD and percentiles (nats), and its index in the run."""

    mean: float
    number: int
    model: ModelResult
    look: Look
    percentiles: dict[str, float]


def percentile_plot(run: RunResult, *, title: str | None = None, dark: bool = False) -> Figure:
    """Return the plot: quartiles, whiskers, mean, maximum and their numbers, models by mean.

    ValueError without KLDs.  A whisker that begins at 0 or below leaves the axes at the left edge,
    without a cap.
    """
    rows = _rows(run)
    missing = missing_rows(run)
    if not rows and any(_has_kld(model) for model in run.models):
        raise ValueError(f"no row has the KLDs of single tokens: {missing}")
    if not rows:
        raise ValueError("no model was compared with a reference")
    on_axis = _values_on_axis(rows)
    if not on_axis:
        raise ValueError("no token has a KLD above 0")
    if title is None:
        title = PERCENTILES_TITLE
    labels = [row.model.marked_label for row in rows]
    more_title_lines = max(len(textwrap.wrap(title, LINE_CHARACTERS // 2)) - 1, 0)
    height = HEIGHT_WITHOUT_ROWS + ROW_HEIGHT * (len(rows) + more_title_lines)
    missing_line = f"not in the plot: {missing}"
    if missing:
        height += LINE_HEIGHT * len(textwrap.wrap(missing_line, LINE_CHARACTERS))
    smallest = min(on_axis) / 1.5
    largest = max(on_axis) * 1.5
    subtitle = f"{subtitle_of(run, labels)}\n{EXPLANATION}"
    if any(row.model.has_bound for row in rows):
        subtitle += f"\n{ARROW}"
    if missing:
        subtitle += f"\n{missing_line}"
    with picture_style.canvas(height, title, subtitle, dark=dark, characters=LINE_CHARACTERS) as (
        figure,
        axes,
        theme,
    ):
        axes.set(xscale="log", xlabel=f"{PERCENTILES_TITLE} (nats)", xlim=(smallest, largest))
        picture_style.log_ticks(axes.xaxis, most=12)
        _label_rows(axes, labels)
        for place, row in enumerate(rows):
            _draw_row(axes, place, row, theme)
        picture_style.draw_legend(axes, [row.look for row in rows], theme, below=figure)
        _write(axes, -0.9, ["median", "mean", "p99", "max"], theme.muted, "head-0")
        picture_style.freeze_layout(figure)
        floor = run.noise_floor
        if floor is not None and floor.kld is not None and smallest <= floor.kld <= largest:
            _draw_floor(axes, floor.kld, theme)
    return figure


def _rows(run: RunResult) -> list[Row]:
    """Return the models that have percentiles, by mean."""
    rows = []
    looks = picture_style.looks_of(run.models)
    for number, model in enumerate(run.models):
        if model.kld_percentiles and model.kld is not None:
            rows.append(Row(model.kld, number, model, looks[number], model.kld_percentiles))
    rows.sort(key=lambda row: (row.mean, row.number))
    return rows


def _has_kld(model: ModelResult) -> bool:
    """Return True if a model has a KLD from the reference."""
    return model.kld is not None and not model.reference


def missing_rows(run: RunResult) -> str:
    """Return the names of the models without percentiles, with the reasons; empty if all have them.

    The reference is not missing: it has no KLD from itself.
    """
    labels_by_reason: dict[str, list[str]] = {}
    labels = picture_style.names_of([model.marked_label for model in run.models])
    for label, model in zip(labels, run.models, strict=True):
        if model.reference or (model.kld is not None and model.kld_percentiles):
            continue
        labels_by_reason.setdefault(why_missing(model), []).append(label)
    clauses = []
    for reason, labels_of_reason in labels_by_reason.items():
        clauses.append(f"{first_words_and_count(labels_of_reason)} ({reason})")
    return "; ".join(clauses)


def why_missing(model: ModelResult) -> str:
    """Return why a model has no row in the plot."""
    if model.kld is None:
        return "no KLD"
    if model.kld_kind == "estimate":
        return "the KLD is an estimate, not known for single tokens"
    return "percentiles unknown"


def _values_on_axis(rows: Sequence[Row]) -> list[float]:
    """Return the values that the axis must show."""
    values = []
    for row in rows:
        for value in (row.mean, row.percentiles["1"], row.percentiles["max"]):
            if value >= SMALLEST_KLD:
                values.append(value)
    return values


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Write the labels at the left of rows 0, 1, ... downwards.

    They are smaller if they need more than ``ROW_LABEL_WIDTH``.
    """
    axes.set_ylim(len(labels) - 0.4, -1.6)
    axes.set_yticks(range(len(labels)), picture_style.names_of(labels))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    ticks = axes.get_yticklabels()
    width = max(tick.get_window_extent().width for tick in ticks) / picture_style.DPI
    size = float(ticks[0].get_fontsize()) * min(1, ROW_LABEL_WIDTH / width)
    axes.tick_params(axis="y", labelsize=size)


def _draw_row(axes: Axes, place: int, row: Row, theme: Theme) -> None:
    """Draw box, whiskers, median, maximum and mean of a model, and write its numbers."""
    left_edge, _ = axes.get_xlim()
    colour = theme.families[row.look.colour]
    percentiles = row.percentiles
    # Nothing is drawn left of the axes: what ends there has no cap.
    at = {name: max(value, left_edge) for name, value in percentiles.items()}
    caps = []
    for name in ("1", "99"):
        if at[name] == percentiles[name]:
            caps.append(at[name])
    label = axes.get_yticklabels()[place]
    label.set(color=picture_style.ink_of(colour, theme), gid=f"label-{row.number}")
    gid = f"-{row.number}"
    axes.barh(
        place,
        at["75"] - at["25"],
        0.56,
        at["25"],
        color=colour,
        alpha=0.45,
        lw=0,
        zorder=3,
        gid=f"box{gid}",
    )
    whisker = [at["1"], at["99"]]
    axes.plot(whisker, [place, place], color=colour, lw=1.3, zorder=2, gid=f"whisker{gid}")
    axes.plot(
        caps, [place] * len(caps), "|", color=colour, ms=8, mew=1.3, zorder=2, gid=f"cap{gid}"
    )
    median = [at["50"], at["50"]]
    ends = [place - 0.28, place + 0.28]
    axes.plot(median, ends, color=theme.ink, lw=1.8, zorder=4, gid=f"median{gid}")
    axes.plot(at["max"], place, "|", color=theme.muted, alpha=0.8, ms=6, gid=f"max{gid}")
    if row.model.has_bound:
        axes.plot(at["max"], place, ">", color=colour, ms=7, zorder=3, gid=f"bound{gid}")
    axes.plot(
        max(row.mean, left_edge),
        place,
        row.look.marker,
        color=colour,
        ms=7,
        mec=theme.paper,
        mew=0.8,
        zorder=5,
        clip_on=False,
        gid=f"mean{gid}",
    )
    values = (percentiles["50"], row.mean, percentiles["99"], percentiles["max"])
    text_of = short_number
    if row.model.has_bound:
        text_of = short_bound
    numbers = [text_of(value) for value in values]
    _write(axes, place, numbers, theme.ink, f"number{gid}")


def _draw_floor(axes: Axes, kld: float, theme: Theme) -> None:
    """Draw the noise floor's mean KLD as a line, with its name on the side that has more room."""
    dots = (0, (1, 2))
    axes.axvline(kld, color=theme.muted, ls=dots, lw=1.6, zorder=3.5, gid="level-0")
    left_edge, right_edge = axes.get_xlim()
    side = "left"
    shift = 6
    if kld**2 > left_edge * right_edge:
        # It is right of the middle of the logarithmic axis.
        side = "right"
        shift = -6
    name = axes.annotate(
        f"noise floor {short_number(kld)}",
        (kld, -1.6),
        (shift, -8),
        textcoords="offset points",
        ha=side,
        va="center",
        size=10.5,
    )
    name.set(color=theme.muted, gid="level-name-0", in_layout=False)


def _write(axes: Axes, y: float, texts: Sequence[str], colour: str, gid: str) -> None:
    """Write texts into the columns right of the axes."""
    for column, text in enumerate(texts, 1):
        axes.annotate(
            text,
            (1, y),
            (COLUMN * column, 0),
            ("axes fraction", "data"),
            "offset points",
            ha="right",
            va="center",
            size=10,
            color=colour,
            gid=gid,
        )


def short_number(value: float) -> str:
    """Return two or three significant digits, which fit a column: 0.00154, 12.3, -0.0200.

    Float32 rounding is 0.
    """
    if abs(value) < SMALLEST_KLD:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def short_bound(value: float) -> str:
    """Return a bound >= 0 with two significant digits, rounded down, as 0.0015.

    A third one would not fit the column.
    """
    if value < SMALLEST_KLD:
        return f"{BOUND}0"
    decimals = max(0, 1 - math.floor(math.log10(value)))
    lower = rounded_down(value, decimals)
    if value < 1e-4:
        return BOUND + short_number(lower)
    return f"{BOUND}{lower:.{decimals}f}"
