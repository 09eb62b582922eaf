"""Plot percentiles of the tokens' KLD: one row per model, on a logarithmic axis, since KLD spans
seven decades.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results import RunResult
from . import picture_style
from .picture_style import Theme
from .points import subtitle_of

TITLE = "KL divergence of single tokens"
EXPLANATION = "box: median and quartiles; whiskers: 1 to 99 %; marker: mean; tick: maximum"
ROW, MARGINS, LABEL_WIDTH = 0.3, 3.0, 2.3
"""Inches: height of a row, of everything above and below the rows, and largest width of the rows'
labels."""
CHARACTERS, COLUMN = 80, 57
"""Longest line of the heading, and width of a column of numbers (points)."""
SMALLEST = 1e-8
"""Smallest value on an axis (nats); smaller ones are float32 rounding."""


def percentile_plot(run: RunResult, *, title: str | None = None, dark: bool = False) -> Figure:
    """Return the plot: quartiles, whiskers, mean, maximum and their numbers, models by mean;
    ValueError without KLDs.

    A whisker that begins at 0 or below leaves the axes at the left edge, without a cap.
    """
    rows = []  # (mean in nats, index of the model, percentiles in nats)
    for number, model in enumerate(run.models):
        if model.kld_percentiles and model.kld is not None:
            rows.append((model.kld, number, model.kld_percentiles))
    rows.sort(key=lambda row: row[:2])
    shown = [x for mean, _, p in rows for x in (mean, p["1"], p["max"]) if x >= SMALLEST]
    if not shown:
        raise ValueError(
            "no token has a KLD above 0" if rows else "no model was compared with a reference"
        )
    title, labels = (
        TITLE if title is None else title,
        [run.models[number].marked_label for _, number, _ in rows],
    )
    height = MARGINS + ROW * (len(rows) + max(len(textwrap.wrap(title, CHARACTERS // 2)) - 1, 0))
    left, right = min(shown) / 1.5, max(shown) * 1.5
    subtitle = f"{subtitle_of(run, labels)}\n{EXPLANATION}"
    with picture_style.canvas(height, title, subtitle, dark=dark, characters=CHARACTERS) as (
        figure,
        axes,
        theme,
    ):
        axes.set(xscale="log", xlabel=f"{TITLE} (nats)", xlim=(left, right))
        picture_style.log_ticks(axes.xaxis, most=12)
        models = picture_style.looks_of(run.models)
        _label_rows(axes, labels)
        for i, (mean, number, p) in enumerate(rows):
            colour = theme.families[models[number].colour]
            axes.get_yticklabels()[i].set(
                color=picture_style.ink_of(colour, theme), gid=f"label-{number}"
            )
            _draw_row(axes, i, f"-{number}", p, colour, theme)
            axes.plot(
                max(mean, left),
                i,
                models[number].marker,
                color=colour,
                ms=7,
                mec=theme.paper,
                mew=0.8,
                zorder=5,
                clip_on=False,
                gid=f"mean-{number}",
            )
            _write(
                axes,
                i,
                [short(x) for x in (p["50"], mean, p["99"], p["max"])],
                theme.ink,
                f"number-{number}",
            )
        picture_style.draw_legend(
            axes, [models[number] for _, number, _ in rows], theme, below=figure
        )
        _write(axes, -0.9, ["median", "mean", "p99", "max"], theme.muted, "head-0")
        picture_style.freeze_layout(figure)
        floor = run.noise_floor
        if floor is not None and floor.kld is not None and left <= floor.kld <= right:
            axes.axvline(
                floor.kld, color=theme.muted, ls=(0, (1, 2)), lw=1.6, zorder=3.5, gid="level-0"
            )
            side, shift = ("right", -6) if floor.kld**2 > left * right else ("left", 6)
            words, at = f"noise floor {short(floor.kld)}", (floor.kld, -1.6)
            name = axes.annotate(
                words, at, (shift, -8), textcoords="offset points", ha=side, va="center", size=10.5
            )
            name.set(color=theme.muted, gid="level-name-0", in_layout=False)
    return figure


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Write the labels at the left of rows 0, 1, ... downwards, smaller if they need more than
    ``LABEL_WIDTH``.
    """
    axes.set_ylim(len(labels) - 0.4, -1.6)
    axes.set_yticks(range(len(labels)), picture_style.names_of(labels))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    ticks = axes.get_yticklabels()
    wide = max(tick.get_window_extent().width for tick in ticks) / picture_style.DPI
    axes.tick_params(
        axis="y", labelsize=float(ticks[0].get_fontsize()) * min(1, LABEL_WIDTH / wide)
    )


def _draw_row(
    axes: Axes, i: int, gid: str, percentiles: dict[str, float], colour: str, theme: Theme
) -> None:
    """Draw box, whiskers, median and maximum of row ``i``."""
    at = {name: max(value, axes.get_xlim()[0]) for name, value in percentiles.items()}
    ends = [at[name] for name in ("1", "99") if at[name] == percentiles[name]]
    axes.barh(
        i,
        at["75"] - at["25"],
        0.56,
        at["25"],
        color=colour,
        alpha=0.45,
        lw=0,
        zorder=3,
        gid=f"box{gid}",
    )
    axes.plot([at["1"], at["99"]], [i, i], color=colour, lw=1.3, zorder=2, gid=f"whisker{gid}")
    axes.plot(ends, [i] * len(ends), "|", color=colour, ms=8, mew=1.3, zorder=2, gid=f"cap{gid}")
    axes.plot(
        [at["50"]] * 2, [i - 0.28, i + 0.28], color=theme.ink, lw=1.8, zorder=4, gid=f"median{gid}"
    )
    axes.plot(at["max"], i, "|", color=theme.muted, alpha=0.8, ms=6, gid=f"max{gid}")


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


def short(value: float) -> str:
    """Return two or three significant digits, which fit a column: 0.00154, 12.3, -0.0200; 0 for
    float32 rounding.
    """
    if abs(value) < SMALLEST:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
