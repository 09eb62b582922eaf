"""Bars of the KLD by slice: a group for each slice of the scored tokens, with a bar for each model.

The models are the quantized ones.
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
from ..table.columns import TOKENS_OF_SLICE
from ..text.slice_names import BEGIN, REST, SPECIAL, SURE, UNSURE
from . import measures, picture_style
from .picture_style import Look, Theme
from .points import subtitle_of

SLICES_TITLE = "KL divergence by slice of the tokens"
MOST_MODELS = 8
"""Maximum number of models: those with the lowest KLD over all tokens."""
MOST_MODELS_IN_HEADING = 6
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
HEIGHT_WITHOUT_BARS = 2.4
"""Height of everything except the groups and the legend (inches)."""
THICK = 0.26
"""Height of a bar if there is one model (inches)."""
THIN = 0.1
"""Height of each of ``MOST_MODELS`` bars (inches)."""
GROUP_GAP = 0.16
"""Space between two groups (inches)."""
SLICE_CHARACTERS = 18
"""Characters of a line of a slice's name."""
SLICE_WIDTH = 1.8
"""Largest width of a slice's name (inches)."""
LONGEST_LINE = 86
"""Characters of the longest line of the heading."""
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oooo", "++++")
"""Patterns of the bars of one family, which share a colour."""
ERROR_BARS = "error bars: ± one standard error"
ARROW = f"arrow: {measures.BOUND_NOTE}"
ARROW_LENGTH = 20.0
"""Length of the arrow at the end of a bound's bar (points)."""
LEFT_MARGIN = 1.6
"""A logarithmic axis begins at the smallest value divided by this."""
RIGHT_MARGIN = 1.15
"""A logarithmic axis ends at the largest value times this."""


@dataclass(frozen=True)
class Row:
    """The bars of one model; ``number``: its index in its run, for the ids of artists."""

    number: int
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
    names = names_of(run, models[:MOST_MODELS])
    if not names:
        raise ValueError("no model has the KLD of a slice")
    rows = rows_of(run, models[:MOST_MODELS])
    bars = bars_of(rows, names)
    is_log = picture_style.is_wide(bar.kld for bar in bars)
    labels = picture_style.names_of([row.model.marked_label for row in rows])
    notes = [subtitle_of(run, labels)]
    notes.append(note_on_missing_models(models[MOST_MODELS:]))
    notes.append("; ".join(meanings(names)))
    if any(bar.stderr for bar in bars):
        notes.append(ERROR_BARS)
    if any(row.model.has_bound for row in rows):
        notes.append(ARROW)
    subtitle = "\n".join(note for note in notes if note)
    if title is None:
        title = SLICES_TITLE
    bar_height = THIN + (THICK - THIN) * (MOST_MODELS - len(rows)) / (MOST_MODELS - 1)
    group_height = len(rows) * bar_height + GROUP_GAP
    height = HEIGHT_WITHOUT_BARS + group_height * len(names)
    with picture_style.canvas(height, title, subtitle, dark=dark, characters=LONGEST_LINE) as (
        figure,
        axes,
        theme,
    ):
        axes.set_xlabel(measures.kld_axis(run))
        if is_log:
            axes.set_xscale("log")
        set_limits(axes, bars, is_log=is_log)
        label_groups(axes, run, names)
        # A unit of the y axis is a group.
        thickness = bar_height / group_height
        for place, name in enumerate(names):
            for at, row in enumerate(rows):
                y = place + (at - (len(rows) - 1) / 2) * bar_height / group_height
                draw_bar(axes, y, thickness, row, place, row.model.slices.get(name), theme)
        if is_log:
            picture_style.log_ticks(axes.xaxis, most=12)
        draw_legend(figure, rows, labels, theme)
    return figure


def models_of(run: RunResult) -> list[ModelResult]:
    """Return the quantized models that have the KLD of a slice, by KLD.

    If none is quantized, return all compared ones.
    """
    compared = []
    for model in run.models:
        has_kld = any(statistics.kld is not None for statistics in model.slices.values())
        if has_kld and not model.reference:
            compared.append(model)
    quantized = [model for model in compared if model.is_quantized and not model.noise_floor]
    if quantized:
        compared = quantized
    return sorted(compared, key=lambda model: (model.kld is None, model.kld or 0.0))


def names_of(run: RunResult, models: Sequence[ModelResult]) -> list[str]:
    """Return the names of the slices that have a KLD in one of the models, in order."""
    names = []
    for name in run.slices:
        if any(name in model.slices and model.slices[name].kld is not None for model in models):
            names.append(name)
    return in_order(names)


def in_order(names: Sequence[str]) -> list[str]:
    """Return names of slices in the order of their groups.

    Texts and roles come before the slices that any run has.
    """
    of_this_run = [name for name in names if name not in TOKENS_OF_SLICE]
    of_any_run = [name for name in TOKENS_OF_SLICE if name in names]
    return of_this_run + of_any_run


def rows_of(run: RunResult, models: Sequence[ModelResult]) -> list[Row]:
    """Return the models with their looks; models of one family differ by their hatches."""
    number_of = {model.label: number for number, model in enumerate(run.models)}
    looks = picture_style.looks_of(run.models)
    rows = []
    rows_of_colour: dict[int, int] = defaultdict(int)
    for model in models:
        number = number_of[model.label]
        look = looks[number]
        hatch = HATCHES[rows_of_colour[look.colour] % len(HATCHES)]
        rows.append(Row(number, model, look, hatch))
        rows_of_colour[look.colour] += 1
    return rows


def bars_of(rows: Sequence[Row], names: Sequence[str]) -> list[Bar]:
    """Return the KLDs of all rows in all slices, as far as they are known."""
    bars = []
    for row in rows:
        for name in names:
            statistics = row.model.slices.get(name)
            if statistics is not None and statistics.kld is not None:
                bars.append(Bar(statistics.kld, statistics.kld_stderr or 0.0))
    return bars


def note_on_missing_models(models: Sequence[ModelResult]) -> str:
    """Return a line that names the models without bars; empty if all have bars."""
    if not models:
        return ""
    if len(models) > MOST_MODELS_IN_HEADING:
        return (
            f"the {MOST_MODELS} models with the lowest KLD; the {len(models)} others are left out"
        )
    labels = ", ".join(picture_style.names_of([model.marked_label for model in models]))
    return f"the {MOST_MODELS} models with the lowest KLD; left out: {labels}"


def meanings(names: Sequence[str]) -> list[str]:
    """Return what the names of slices mean that any run may have."""
    words_of_names = []
    for slices, words in MEANINGS:
        if any(name in slices for name in names):
            words_of_names.append(words)
    return words_of_names


def set_limits(axes: Axes, bars: Sequence[Bar], *, is_log: bool) -> None:
    """Set the ends of the axis of the values.

    Bars begin at 0, or left of the smallest value above 0.
    """
    last = max(bar.kld + bar.stderr for bar in bars)
    if is_log:
        first = min(bar.kld for bar in bars if bar.kld > 0)
        axes.set_xlim(first / LEFT_MARGIN, RIGHT_MARGIN * last)
        return
    right_edge = 1.0
    if last > 0:
        right_edge = 1.05 * last
    axes.set_xlim(min(0.0, *(bar.kld for bar in bars)), right_edge)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: picture_style.tick_text(value))


def label_groups(axes: Axes, run: RunResult, names: Sequence[str]) -> None:
    """Write the name of each slice and its number of tokens at the left of its group.

    The first one is at the top.
    """
    labels = []
    for name, short_name in zip(names, picture_style.names_of(names), strict=True):
        tokens = max(model.slices[name].tokens for model in run.models if name in model.slices)
        wrapped = textwrap.fill(short_name, SLICE_CHARACTERS)
        labels.append(f"{wrapped}\n{amount(tokens, 'token')}")
    axes.set_yticks(range(len(names)), labels)
    ticks = axes.get_yticklabels()
    for place, tick in enumerate(ticks):
        tick.set_gid(f"slice-{place}")
    widest = max(tick.get_window_extent().width for tick in ticks) / picture_style.DPI
    size = float(ticks[0].get_fontsize()) * min(1.0, SLICE_WIDTH / widest)
    axes.tick_params(axis="y", length=0, labelsize=size)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def draw_bar(
    axes: Axes,
    y: float,
    height: float,
    row: Row,
    place: int,
    statistics: Slice | None,
    theme: Theme,
) -> None:
    """Draw a bar with its error, or the number or n/a instead of a bar.

    ``place``: the slice's number.  ``statistics``: of the model in the slice.
    """
    gid = f"-{row.number}.{place}"
    left_edge, _ = axes.get_xlim()
    start = 0.0
    is_log = axes.get_xscale() == "log"
    if is_log:
        start = left_edge
    if statistics is None or statistics.kld is None:
        write_instead(axes, y, "n/a", f"missing{gid}", theme)
        return
    kld = statistics.kld
    if is_log and kld <= 0:
        write_instead(axes, y, f"{kld:.1g}", f"missing{gid}", theme)
        return
    axes.barh(
        y,
        kld - start,
        0.9 * height,
        start,
        color=theme.families[row.look.colour],
        hatch=row.hatch,
        edgecolor=theme.paper,
        lw=0,
        zorder=2,
        gid=f"bar{gid}",
    )
    if row.model.has_bound:
        colour = theme.families[row.look.colour]
        picture_style.draw_arrow(axes, (kld, y), (ARROW_LENGTH, 0), colour, f"bound{gid}")
    if statistics.kld_stderr:
        ends = [max(kld - statistics.kld_stderr, left_edge), kld + statistics.kld_stderr]
        if row.model.has_bound:
            # To its right is the arrow.
            ends[1] = kld
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


def write_instead(axes: Axes, y: float, words: str, gid: str, theme: Theme) -> None:
    """Write words where a bar would begin."""
    left_edge, _ = axes.get_xlim()
    note = axes.annotate(
        words, (left_edge, y), (3, 0), textcoords="offset points", va="center", size=7
    )
    note.set(color=theme.muted, gid=gid)


def draw_legend(figure: Figure, rows: Sequence[Row], labels: Sequence[str], theme: Theme) -> None:
    """Draw which bar is which model, in the order of the bars, below the axes.

    The figure grows by the legend's height.
    """
    handles = []
    for row in rows:
        colour = theme.families[row.look.colour]
        handles.append(Patch(facecolor=colour, edgecolor=theme.paper, hatch=row.hatch, lw=0))
    picture_style.legend_below(figure, handles, labels)
