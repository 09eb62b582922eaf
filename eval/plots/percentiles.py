"""Percentiles of the KLD of single tokens: one row per model, on a logarithmic axis, since KLD spans seven decades."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compare_q.eval.plots import looks, style
from compare_q.eval.plots.points import subtitle_of
from compare_q.eval.plots.style import Theme
from compare_q.eval.results import TextResult

TITLE = "KL divergence of single tokens"
EXPLANATION = "box: median and quartiles; whiskers: 1 to 99 %; marker: mean; tick: maximum"
MOST_DECADES = 4.0
"""With more decades, only powers of ten have a tick."""
ROW, MARGINS = 0.3, 3.0
"""Inches: height of a row, and of everything above and below the rows."""
LABEL_WIDTH, CHARACTERS = 2.3, 80
"""Largest width of the rows' labels (inches), and of a line of the heading (characters)."""
COLUMN = 57
"""Width of a column of numbers (points)."""
SMALLEST = 1e-8
"""Smallest value on an axis (nats); smaller ones are float32 rounding."""


def percentile_plot(text: TextResult, *, title: str | None = None, dark: bool = False) -> Figure:
    """Return the plot: quartiles, whiskers, mean, maximum and their numbers, models by mean; ValueError without KLDs.

    A whisker that begins at 0 or below leaves the axes at the left edge, without a cap.
    """
    rows = []  # (index of the model, which the artists' ids have; model; mean; percentiles), nats
    for number, model in enumerate(text.models):
        against = model.estimates.against if model.estimates else None
        if against and against.kld_percentiles and against.kld.value is not None:
            rows.append((number, model, against.kld.value, against.kld_percentiles))
    rows.sort(key=lambda row: (row[2], row[1].marked_label))
    shown = [x for _, _, mean, p in rows for x in (mean, p["1"], p["max"]) if x >= SMALLEST]
    if not shown:
        raise ValueError("no token has a KLD above 0" if rows else "no model was compared with a reference")
    title, labels = TITLE if title is None else title, [model.marked_label for _, model, _, _ in rows]
    height = MARGINS + ROW * (len(rows) + max(len(textwrap.wrap(title, CHARACTERS // 2)) - 1, 0))
    left, right = min(shown) / 1.5, max(shown) * 1.5
    subtitle = f"{subtitle_of([text], labels)}\n{EXPLANATION}"
    with style.canvas(height, title, subtitle, dark=dark, characters=CHARACTERS) as (figure, axes, theme):
        axes.set(xscale="log", xlabel=f"{TITLE} (nats)", xlim=(left, right))
        style.log_ticks(axes.xaxis, sparse=right / left > 10**MOST_DECADES)
        groups = [looks.split_label(model.marked_label, model.group)[0] for _, model, _, _ in rows]
        styles = looks.group_styles(groups, theme.ink, distinct=False)
        _label_rows(axes, labels)
        for i, (number, _, mean, p) in enumerate(rows):
            colour = style.ink_of(styles[groups[i]][0], theme)
            axes.get_yticklabels()[i].set(color=colour, gid=f"label-{number}")
            _draw_row(axes, i, number, mean, p, styles[groups[i]], theme)
            _write(axes, i, [short(x) for x in (p["50"], mean, p["99"], p["max"])], theme.ink, f"number-{number}")
        _write(axes, -0.9, ["median", "mean", "p99", "max"], theme.muted, "head")
        style.freeze_layout(figure)
        floor = text.noise_floor
        if floor is not None and floor.kld is not None and left <= floor.kld <= right:
            name = looks.short_labels([floor.marked_label, *labels])[0]
            _draw_floor(axes, name, floor.kld, theme)
    return figure


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Write the labels at the left of rows 0, 1, ... downwards, smaller if they need more than ``LABEL_WIDTH``."""
    axes.set_ylim(len(labels) - 0.4, -1.6)
    axes.set_yticks(range(len(labels)), looks.short_labels(labels))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    ticks = axes.get_yticklabels()
    wide = max(tick.get_window_extent().width for tick in ticks) / style.DPI
    axes.tick_params(axis="y", labelsize=float(ticks[0].get_fontsize()) * min(1, LABEL_WIDTH / wide))


def _draw_row(
    axes: Axes, i: int, number: int, mean: float, percentiles: dict[str, float], look: tuple[str, str], theme: Theme
) -> None:
    (colour, marker), left = look, axes.get_xlim()[0]
    at = {name: max(value, left) for name, value in percentiles.items()}
    box: dict[str, Any] = {"color": colour, "alpha": 0.45, "lw": 0, "zorder": 3, "gid": f"box-{number}"}
    axes.barh(i, at["75"] - at["25"], 0.56, at["25"], **box)
    axes.plot([at["1"], at["99"]], [i, i], color=colour, lw=1.3, zorder=2, gid=f"whisker-{number}")
    ends = [at[name] for name in ("1", "99") if at[name] == percentiles[name]]
    caps = axes.plot(ends, [i] * len(ends), "|", color=colour, ms=8, mew=1.3, zorder=2)[0]
    caps.set_gid(f"cap-{number}")
    axes.plot([at["50"]] * 2, [i - 0.28, i + 0.28], color=theme.ink, lw=1.8, zorder=4, gid=f"median-{number}")
    axes.plot(at["max"], i, "|", color=theme.muted, alpha=0.8, ms=6, gid=f"max-{number}")
    point = axes.plot(
        max(mean, left), i, marker, color=colour, ms=7, mec=theme.paper, mew=0.8, zorder=5, clip_on=False
    )[0]
    point.set_gid(f"mean-{number}")


def _write(axes: Axes, y: float, texts: Sequence[str], colour: str, gid: str) -> None:
    """Write texts into the columns right of the axes."""
    for column, text in enumerate(texts):
        place = axes.annotate(text, (1, y), (COLUMN * (column + 1), 0), ("axes fraction", "data"), "offset points",
                              ha="right", va="center", size=10)  # fmt: skip
        place.set(color=colour, gid=f"{gid}-{column}" if gid == "head" else gid)


def _draw_floor(axes: Axes, label: str, mean: float, theme: Theme) -> None:
    """Draw the noise floor's dotted line, named at its top: right or left of it, or without the label if that fits."""
    axes.axvline(mean, color=theme.muted, ls=(0, (1, 2)), lw=1.6, zorder=3.5, gid="level-0")
    name = axes.annotate("", (mean, axes.get_ylim()[1]), (0, -8), textcoords="offset points", va="center")
    name.set(color=theme.muted, size=10.5, gid="level-name-0", in_layout=False)
    places = itertools.product((f"noise floor ({label})", "noise floor"), (("left", 6), ("right", -6)))
    for words, (flush, shift) in places:
        name.set(text=f"{words} {short(mean)}", ha=flush, position=(shift, -8))
        box = name.get_window_extent()
        if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1:
            return


def short(value: float) -> str:
    """Return two or three significant digits, which fit a column: 0.00154, 12.3, -0.0200; 0 for float32 rounding."""
    if abs(value) < SMALLEST:
        return "0"
    if value < 0:
        return f"-{short(-value)}"
    if value < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
