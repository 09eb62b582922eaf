"""Bars of the KLD by slice: a group for each slice of the scored tokens, with a bar for each
quantized model.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...backends.common.message_text import amount
from ..results import ModelResult, RunResult
from ..stats.slices import BEGIN_LENGTH, Slice
from ..table.columns import SLICES
from ..text.slice_names import BEGIN, REST, SPECIAL, SURE, UNSURE
from . import measures, picture_style
from .picture_style import Look, Theme
from .points import subtitle_of

TITLE = "KL divergence by slice of the tokens"
MOST = 8
"""Maximum number of models: those with the lowest KLD over all tokens."""
MOST_NAMED = 6
"""Maximum number of models left out that the heading names."""
MEANINGS = (
    ((SPECIAL,), "special: the tokenizer's special tokens"),
    (
        (SURE, UNSURE),
        "sure: the reference's highest probability is at least 0.9; unsure: below 0.5",
    ),
    ((BEGIN, REST), f"begin: a window's first {BEGIN_LENGTH} tokens; rest: the others"),
)
"""Slices, and the words that explain them."""
MARGINS = 2.4
"""Inches: height of everything except the groups and the legend."""
THICK, THIN, GAP = 0.26, 0.1, 0.16
"""Inches: heights of a bar if there is one, and of each of ``MOST`` bars; space between two groups.
"""
LABEL_CHARACTERS, LABEL_WIDTH = 18, 1.8
"""Characters of a line of a slice's name, and its largest width (inches)."""
CHARACTERS = 86
"""Longest line of the heading."""
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oooo", "++++")
"""Patterns of the bars of one family, which share a colour."""
ERROR_BARS = "error bars: ± one standard error"
LEFT, RIGHT = 1.6, 1.15
"""A logarithmic axis begins at the smallest value divided by ``LEFT`` and ends at the largest one
times ``RIGHT``."""


@dataclass(frozen=True)
class Row:
    """The bars of one model."""

    number: int  # index of the model in its run, for the ids of artists
    model: ModelResult
    look: Look
    hatch: str


class Bar(NamedTuple):
    """The KLD of a row in a slice and its error, 0 if that is not known; nats."""

    kld: float
    stderr: float


def slice_bars(run: RunResult, *, title: str | None = None, dark: bool = False) -> Figure:
    """Return the plot; ValueError if no model has the KLD of a slice.

    The axis is logarithmic if values span more than a decade and a half, as in the scatter plots;
    then a value that is not above 0 has no bar, but its number.
    """
    models = models_of(run)
    names = names_of(run, models[:MOST])
    if not names:
        raise ValueError("no model has the KLD of a slice")
    rows = rows_of(run, models[:MOST])
    shown = shown_of(rows, names)
    is_log = picture_style.is_wide(each.kld for each in shown)
    labels = picture_style.names_of([row.model.marked_label for row in rows])
    notes = [subtitle_of(run, labels), *left_out(models[MOST:]), "; ".join(meanings(names))]
    if any(each.stderr for each in shown):
        notes.append(ERROR_BARS)
    bar = THIN + (THICK - THIN) * (MOST - len(rows)) / (MOST - 1)
    group = len(rows) * bar + GAP
    height = MARGINS + group * len(names)
    subtitle = "\n".join(note for note in notes if note)
    if title is None:
        title = TITLE
    with picture_style.canvas(height, title, subtitle, dark=dark, characters=CHARACTERS) as (
        figure,
        axes,
        theme,
    ):
        axes.set(xlabel=measures.kld_axis(run), xscale="log" if is_log else "linear")
        set_limits(axes, shown, is_log=is_log)
        label_groups(axes, run, names)
        for place, name in enumerate(names):
            for at, row in enumerate(rows):
                y = place + (at - (len(rows) - 1) / 2) * bar / group
                draw_bar(axes, y, bar / group, row, place, row.model.slices.get(name), theme)
        if is_log:
            picture_style.log_ticks(axes.xaxis, most=12)
        draw_legend(figure, rows, labels, theme)
    return figure


def models_of(run: RunResult) -> list[ModelResult]:
    """Return the quantized models that have the KLD of a slice, or all compared ones if none is
    quantized, by KLD.
    """
    compared = []
    for model in run.models:
        has_kld = any(each.kld is not None for each in model.slices.values())
        if has_kld and not model.reference:
            compared.append(model)
    quantized = [model for model in compared if model.is_quantized and not model.noise_floor]
    return sorted(quantized or compared, key=lambda model: (model.kld is None, model.kld or 0.0))


def names_of(run: RunResult, models: Sequence[ModelResult]) -> list[str]:
    """Return the names of the slices that have a KLD in one of the models, in the order of their
    groups.
    """
    known = []
    for name in run.slices:
        if any(name in model.slices and model.slices[name].kld is not None for model in models):
            known.append(name)
    return in_order(known)


def in_order(names: Sequence[str]) -> list[str]:
    """Return names of slices in the order in which they are shown: texts, roles, and then those of
    any run.
    """
    return [name for name in names if name not in SLICES] + [
        name for name in SLICES if name in names
    ]


def rows_of(run: RunResult, models: Sequence[ModelResult]) -> list[Row]:
    """Return the models with their looks; models of one family differ by their hatches."""
    number_of = {model.label: number for number, model in enumerate(run.models)}
    looks = picture_style.looks_of(run.models)
    rows = []
    used: dict[int, int] = defaultdict(int)  # colour -> number of bars that have it
    for model in models:
        number = number_of[model.label]
        look = looks[number]
        rows.append(Row(number, model, look, HATCHES[used[look.colour] % len(HATCHES)]))
        used[look.colour] += 1
    return rows


def shown_of(rows: Sequence[Row], names: Sequence[str]) -> list[Bar]:
    """Return the KLDs of all rows in all slices, as far as they are known."""
    shown = []
    for row in rows:
        for name in names:
            found = row.model.slices.get(name)
            if found is not None and found.kld is not None:
                shown.append(Bar(found.kld, found.kld_stderr or 0.0))
    return shown


def left_out(models: Sequence[ModelResult]) -> list[str]:
    """Return a line that names the models without bars; nothing if all have bars."""
    if not models:
        return []
    if len(models) > MOST_NAMED:
        return [f"the {MOST} models with the lowest KLD; the {len(models)} others are left out"]
    labels = ", ".join(picture_style.names_of([model.marked_label for model in models]))
    return [f"the {MOST} models with the lowest KLD; left out: {labels}"]


def meanings(names: Sequence[str]) -> list[str]:
    """Return what the names of slices mean that any run may have."""
    return [words for own, words in MEANINGS if any(name in own for name in names)]


def set_limits(axes: Axes, shown: Sequence[Bar], *, is_log: bool) -> None:
    """Set the ends of the axis of the values: bars begin at 0, or left of the smallest value above
    0.
    """
    values = [each.kld for each in shown]
    last = max(each.kld + each.stderr for each in shown)
    if is_log:
        axes.set_xlim(min(value for value in values if value > 0) / LEFT, RIGHT * last)
        return
    axes.set_xlim(min(0.0, *values), 1.05 * last if last > 0 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: picture_style.tick_text(value))


def label_groups(axes: Axes, run: RunResult, names: Sequence[str]) -> None:
    """Write the name of each slice and its number of tokens at the left of its group; the first one
    is at the top.
    """
    labels = []
    for name, short in zip(names, picture_style.names_of(names), strict=True):
        tokens = max(model.slices[name].tokens for model in run.models if name in model.slices)
        labels.append(f"{textwrap.fill(short, LABEL_CHARACTERS)}\n{amount(tokens, 'token')}")
    axes.set_yticks(range(len(names)), labels)
    ticks = axes.get_yticklabels()
    for place, tick in enumerate(ticks):
        tick.set_gid(f"slice-{place}")
    widest = max(tick.get_window_extent().width for tick in ticks) / picture_style.DPI
    size = float(ticks[0].get_fontsize()) * min(1.0, LABEL_WIDTH / widest)
    axes.tick_params(axis="y", length=0, labelsize=size)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def draw_bar(
    axes: Axes, y: float, height: float, row: Row, place: int, found: Slice | None, theme: Theme
) -> None:
    """Draw a bar with its error, or the number or n/a instead of a bar; ``place``: the slice's
    number.
    """
    gid = f"-{row.number}.{place}"
    left, _ = axes.get_xlim()
    kld = None if found is None else found.kld
    is_log = axes.get_xscale() == "log"
    if found is None or kld is None or (is_log and kld <= 0):
        words = "n/a" if kld is None else f"{kld:.1g}"
        note = axes.annotate(
            words, (left, y), (3, 0), textcoords="offset points", va="center", size=7
        )
        note.set(color=theme.muted, gid=f"missing{gid}")
        return
    start = left if is_log else 0.0
    colour = theme.families[row.look.colour]
    axes.barh(
        y,
        kld - start,
        0.9 * height,
        start,
        color=colour,
        hatch=row.hatch,
        edgecolor=theme.paper,
        lw=0,
        zorder=2,
        gid=f"bar{gid}",
    )
    if found.kld_stderr:
        ends = [max(kld - found.kld_stderr, left), kld + found.kld_stderr]
        axes.plot(
            ends,
            [y, y],
            color=theme.ink,
            lw=1.1,
            marker="|",
            ms=4,
            mew=1.1,
            zorder=3,
            gid=f"error{gid}",
        )


def draw_legend(figure: Figure, rows: Sequence[Row], labels: Sequence[str], theme: Theme) -> None:
    """Draw which bar is which model, in the order of the bars, below the axes; the figure grows by
    its height.
    """
    handles = []
    for row in rows:
        colour = theme.families[row.look.colour]
        handles.append(Patch(facecolor=colour, edgecolor=theme.paper, hatch=row.hatch, lw=0))
    picture_style.legend_below(figure, handles, labels)
