"""How far several texts differ: a row a model with a marker a text, its 95 % interval, and the mean over the texts."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from compare_q.backends.common.messages import unicode
from compare_q.eval.plots import looks, measures, spread, style
from compare_q.eval.plots.measures import BPW, FILES, Measure, Size
from compare_q.eval.plots.points import MARKED
from compare_q.eval.plots.style import Theme
from compare_q.eval.results.run_result import MARK, ModelResult, Results, macro_mean
from compare_q.eval.stats.estimates import n_blocks
from compare_q.eval.stats.uncertainty import Value, interval_95, n_waves
from compare_q.eval.table import columns
from compare_q.eval.table.columns import FLOOR

ROW, MARGINS, LINE = 0.36, 3.3, 0.19
"""Inches: height of a row, of what is above and below all rows, and of a further line of words."""
LETTERS, NOTE_LETTERS = 80, 125
"""Letters of a line of the heading, and of the small lines below the axes."""
CARD_ROWS, CARD_LETTERS = 8, 62
"""Rows that a card has room for, and letters of a line on it."""
LEAST_LOG = {"kld": style.WIDE, "ppl": 3.0}
"""The axis of KLD, and of PPL, is logarithmic if the largest value is so many times the smallest; accuracy's never."""
MOST_DECADES = 3.2
"""With more, only the powers of ten have a tick."""
MARKER, NAME_SIZE, NAME_GAP = 8.5, 11.0, 36.0
"""Points: markers, the names of the texts, and what a marker and the gap to the next name take."""
TOP = -1.5
"""Where the axes end above the first row, which is at 0."""
APART, SPAN = 0.13, 0.44
"""Markers of a row stand so far above each other, and all of them together no farther: whiskers stay apart."""
LEGEND = 48.0
"""Points from the axes to the legend: ticks, and the axis' name."""
BARS, MEANS = "bar: from the least to the largest of the texts", "line across it: macro mean"
MOST_NOTES = 6
"""Values that are named as missing; of more their number is told."""
NORMAL = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Spot:
    """A model's value for text number ``text``, its standard error and its 95 % interval where these are known."""

    text: int
    value: float
    error: float | None
    limits: tuple[float, float] | None


@dataclass(frozen=True)
class Row:
    """One model: its size in words, its macro mean, and what is known of its texts, one spot at least.

    ``number``: of the model in its run, which the artists' ids have, those of a text's marker with the text's number.
    """

    label: str
    group: str
    size: str
    mean: Value
    spots: tuple[Spot, ...]
    more: bool = False
    number: int = 0

    @property
    def place(self) -> tuple[int, float, str]:
        """Rows are sorted by this: by macro mean, and below these the rows of which texts are missing."""
        known = statistics.fmean(spot.value for spot in self.spots) if self.mean.value is None else self.mean.value
        return -len(self.spots), -known if self.more else known, self.label


def dumbbell_plot(
    results: Results, measure: Measure, *, size: Size | None = None, title: str | None = None, dark: bool = False,
    card: bool = False,
) -> Figure:  # fmt: skip
    """A row a model, the best macro mean first, and on it a marker a text; ValueError if there is no value."""
    # A name may hold a byte that is not UTF-8, which no font can draw.
    results = replace(results, texts=tuple(replace(text, name=unicode(text.name)) for text in results.texts))
    every = sorted(rows_of(results, measure, size), key=lambda row: row.place)
    if not every:
        raise ValueError(f"no model has a {measure.name} of any text")
    rows = every[:CARD_ROWS] if card else every
    letters = CARD_LETTERS if card else LETTERS
    title = title or f"{measure.title} on {len(results.texts)} texts"
    note = textwrap.fill(missing_note(results, measure), 92 if card else NOTE_LETTERS)
    lines = max(len(textwrap.wrap(title, letters // 2)) - 1, 0) + len(note.splitlines())
    width, height = style.CARD if card else (style.WIDTH, MARGINS + ROW * len(rows) + LINE * lines)
    subtitle = explanation(results, rows, measure)
    if card:
        subtitle = f"the first {len(rows)} of {len(every)} models" if len(rows) < len(every) else BARS
    with style.canvas(height, title, subtitle, dark=dark, letters=letters, width=width) as (figure, axes, theme):
        names = [text.name for text in results.texts]
        styles = looks.text_styles(names, theme.ink)
        axes.set(xlabel=axis_name(results, measure).partition(" (" if card else "\n")[0])
        set_axis(axes, rows, measure, sparse=card)
        floor = floor_of(results) if measure.kld else None
        rows_and_groups = [(row.label, row.group, row.number) for row in rows]
        spread.label_rows(axes, rows_and_groups, theme, TOP)
        draw_sizes(axes, rows, theme)
        for i, row in enumerate(rows):
            draw_row(axes, i, row, [styles[name] for name in names], theme)
        write_means(axes, rows, measure, theme)
        if note:
            figure.supxlabel(note, x=0.015, ha="left", fontsize=8.5 if card else 10, color=theme.muted)
        shown = sorted({spot.text for row in rows for spot in row.spots})
        words = looks.short_labels(names)
        figure.draw_without_rendering()  # the legend's columns follow from the place of the axes
        draw_legend(axes, [words[i] for i in shown], [styles[names[i]] for i in shown])
        style.freeze_layout(figure)
        if floor:
            spread.draw_floor(axes, *floor, theme, [row.label for row in rows])
    return figure


def write_means(axes: Axes, rows: Sequence[Row], measure: Measure, theme: Theme) -> None:
    """The macro means right of the rows, with as many digits as their errors bear; nothing if none is known."""
    means = [(row.mean.value, row.mean.stderr) for row in rows]
    if any(value is not None for value, _ in means):
        spread.write_numbers(axes, -1, ["mean"], theme)
        for i, (value, error) in enumerate(means):
            text = "n/a" if value is None else measures.value_text(value, error, measure)
            spread.write_numbers(axes, i, [text], theme, rows[i].number)


def explanation(results: Results, rows: Sequence[Row], measure: Measure) -> str:
    """What the plot shows, for its heading."""
    words = [BARS, MEANS] if any(row.mean.value is not None for row in rows) else [BARS]
    if any(spot.limits for row in rows for spot in row.spots):
        paired = any(text.reference for text in results.scored)
        of = "" if measure.kld else f" of {measure.distance}" if paired else " (mostly common to all models)"
        words.append(f"whiskers: 95 % interval{of}")
    if any(spot.value <= 0 for row in rows for spot in row.spots):
        words.append("hollow: not above 0")
    if any(row.label.endswith(FLOOR) for row in rows):
        words.append(f"{FLOOR}: noise floor")
    marked = MARKED if any(MARK in row.label for row in rows) else ""
    return "; ".join(words) + marked


def axis_name(results: Results, measure: Measure) -> str:
    """The axis; it names the reference of a KLD where all texts have the same."""
    names = {measures.kld_axis(text) for text in results.scored if text.reference} if measure.kld else set()
    return names.pop() if len(names) == 1 else measure.axis


def set_axis(axes: Axes, rows: Sequence[Row], measure: Measure, *, sparse: bool) -> None:
    """Limits that hold all values and their intervals; logarithmic where the values differ that much."""
    spots = [spot for row in rows for spot in row.spots]
    values = [spot.value for spot in spots if spot.value > 0]
    ends = [end for spot in spots for end in (spot.value, *(spot.limits or ()))]
    if values and max(values) > LEAST_LOG.get(measure.kind, math.inf) * min(values):
        low = max(min([end for end in ends if end > 0]), min(values) / 2)  # an interval may reach down to 0
        axes.set(xscale="log", xlim=(low / 1.3, max(ends) * 1.3))
        style.log_ticks(axes.xaxis, sparse=sparse or max(ends) / low > 10**MOST_DECADES)
        return
    low = min(0.0, *ends) if measure.kld else min(ends)
    room = 0.04 * ((max(ends) - low) or 1.0)
    axes.set_xlim(low - room, max(ends) + room)
    axes.locator_params(axis="x", nbins=4 if sparse else 8)


def draw_sizes(axes: Axes, rows: Sequence[Row], theme: Theme) -> None:
    """The sizes between the labels and the axes."""
    wide = 0.0
    for i, row in enumerate(rows):
        text = axes.annotate(
            row.size, (0, i), (-8, 0), ("axes fraction", "data"), "offset points", ha="right", va="center"
        )
        text.set(color=theme.muted, fontsize=9.5, gid=f"size-{row.number}")
        wide = max(wide, text.get_window_extent().width * 72 / style.DPI if row.size else 0.0)
    axes.tick_params(axis="y", pad=8 + (wide + 10 if wide else 0))


def draw_row(axes: Axes, i: int, row: Row, styles: Sequence[tuple[str, str]], theme: Theme) -> None:
    """The bar from least to largest, its macro mean, and the markers with their whiskers."""
    left, right = axes.get_xlim()
    at = {spot.text: max(spot.value, left) for spot in row.spots}
    bar = axes.plot([min(at.values()), max(at.values())], [i, i], color=theme.muted, alpha=0.35, lw=5, zorder=2)[0]
    bar.set(solid_capstyle="round", gid=f"range-{row.number}")
    if row.mean.value is not None and row.mean.value >= left:
        mean = axes.plot([row.mean.value] * 2, [i - 0.33, i + 0.33], color=theme.ink, lw=1.6, zorder=3)[0]
        mean.set_gid(f"mean-{row.number}")
    step = min(APART, SPAN / max(len(styles) - 1, 1))
    for spot in row.spots:
        colour, marker = styles[spot.text]
        y = i + step * (spot.text - (len(styles) - 1) / 2)
        name = f"{row.number * len(styles) + spot.text}"
        if spot.limits:
            ends = [min(max(end, left), right) for end in spot.limits]
            axes.plot(ends, [y, y], color=colour, lw=1.2, marker="|", ms=5, mew=1.2, zorder=3.2, gid=f"whisker-{name}")
        face, edge, width = (theme.paper, colour, 1.6) if spot.value <= 0 else (colour, theme.paper, 0.8)
        point = axes.plot(at[spot.text], y, marker, ms=MARKER, mfc=face, mec=edge, mew=width, zorder=4)[0]
        point.set(color=colour, markerfacecolor=face, markeredgecolor=edge, clip_on=False, gid=f"point-{name}")


def draw_legend(axes: Axes, words: Sequence[str], styles: Sequence[tuple[str, str]]) -> None:
    """Markers and names of the texts below the axes, in as many columns as there is room for, smaller if need be."""
    figure = axes.figure.get_figure(root=True)
    measured = [axes.text(0, 0, word, size=NAME_SIZE, in_layout=False) for word in words]
    wide = max(text.get_window_extent().width for text in measured) + NAME_GAP * style.DPI / 72
    for text in measured:
        text.remove()
    room = figure.bbox.width - axes.bbox.x0
    handles = [Line2D([], [], ls="", marker=marker, color=colour, ms=MARKER) for colour, marker in styles]
    legend = axes.legend(
        handles, ["-"] * len(words), loc="upper left", bbox_to_anchor=(0.0, 0.0), borderaxespad=0.0, handletextpad=0.2,
        bbox_transform=axes.transAxes + ScaledTranslation(0, -LEGEND / 72, figure.dpi_scale_trans),
        ncols=max(min(int(room // wide), len(words)), 1), fontsize=NAME_SIZE * min(1, room / wide),
    )  # fmt: skip
    for text, word in zip(legend.get_texts(), words, strict=True):
        text.set_text(word)  # not passed above, as a legend hides labels that start with "_"


def rows_of(results: Results, measure: Measure, size: Size | None) -> list[Row]:
    """The models that have a value, in a plot of KLD without the reference."""
    rows = []
    for number, label in enumerate(results.labels):
        models = [model for model in results.of_label(label) if model is not None]
        spots = spots_of(results, label, measure)
        if spots:
            marked = next((model for model in models if model.deviations), models[0])
            words = next(filter(None, (size_words(model, size) for model in models)), "")
            shown = mean_of(results, label, measure)
            own = columns.label_of(marked), marked.group, words, shown, tuple(spots), measure.more, number
            rows.append(Row(*own))
    return rows


def mean_of(results: Results, label: str, measure: Measure) -> Value:
    """A model's mean over the texts, of accuracy over the texts of answers; unknown unless each of them has a value."""
    if not measure.more:
        return results.mean_kld(label) if measure.kld else paired_mean(results, label)
    asked = [
        (text, model)
        for text, model in zip(results.texts, results.of_label(label), strict=True)
        if text.error or text.is_answers
    ]
    values = [measure.of(model) if model else None for _, model in asked]
    errors = [measures.error_of(text, model, measure)[0] if model else None for text, model in asked]
    return macro_mean(values, errors)


def paired_mean(results: Results, label: str) -> Value:
    """The geometric mean of a model's perplexities, with the error of its ratio to the reference's if that is known."""
    errors = [
        measures.ppl_error(text, model)[0] if model else None
        for text, model in zip(results.texts, results.of_label(label), strict=True)
    ]
    ppls = [model.ppl.value if model and model.ppl else None for model in results.of_label(label)]
    relative = [error / ppl if error and ppl else None for error, ppl in zip(errors, ppls, strict=True)]
    logs = [math.log(ppl) if ppl else None for ppl in ppls]
    mean, stderr = results.mean_ppl(label).value, macro_mean(logs, relative).stderr
    return Value(mean, None if mean is None or stderr is None else mean * stderr)


def spots_of(results: Results, label: str, measure: Measure) -> list[Spot]:
    """What is known of a model, text by text, with the errors that ``measures.error_of`` gives."""
    spots = []
    for i, (text, model) in enumerate(zip(results.texts, results.of_label(label), strict=True)):
        value = None if model is None or left_out(model, measure) else measure.of(model)
        if model is not None and value is not None and math.isfinite(value):
            error = measures.error_of(text, model, measure)[0]
            spots.append(Spot(i, value, error, limits_of(model, value, error, measure)))
    return spots


def left_out(model: ModelResult, measure: Measure) -> bool:
    """Whether a model has no marker by definition: the reference in a plot of KLD."""
    return measure.kld and model.is_reference and not model.error


def limits_of(model: ModelResult, value: float, error: float | None, measure: Measure) -> tuple[float, float] | None:
    """The 95 % interval of a value of a model with this standard error; None if it is not known."""
    if error and measure.more:  # of many independent questions
        return value - NORMAL * error, value + NORMAL * error
    blocks = model.estimates.blocks if model.estimates else None
    if not error or blocks is None or n_blocks(blocks) < 2:
        return None
    return interval_95(value, error, n_waves(n_blocks(blocks), blocks.length))


def size_words(model: ModelResult, size: Size | None) -> str:
    """The size as it stands beside the label; empty if it is not known."""
    for each in (BPW, FILES) if size is None else (size,):
        if (value := each.of(model)) is not None:
            return f"{value:.2f} {each.unit}"
    return ""


def floor_of(results: Results) -> tuple[str, float] | None:
    """Label and macro mean of the KLD of the noise floor."""
    for text in results.scored:
        if text.noise_floor is not None:
            mean = results.mean_kld(text.noise_floor.label).value
            return None if mean is None or mean <= 0 else (text.noise_floor.label, mean)
    return None


def missing_note(results: Results, measure: Measure) -> str:
    """What the plot cannot show, and why: texts that failed, models, and values of one text."""
    missing = [f"{text.name} ({text.error})" for text in results.texts if text.error]
    gone: dict[tuple[str, str], list[str]] = {}
    shown = [text for text in results.scored if text.is_answers or not measure.more]
    for text in shown:
        if measure.kld and text.reference is None and not any(model.mean_kld for model in text.models):
            missing.append(f"{text.name} (no reference)")
            continue
        for model in text.models:
            if not left_out(model, measure) and measure.of(model) is None:
                reason = model.error or f"{measure.name} not known"
                gone.setdefault((model.label, reason), []).append(text.name)
    for (label, reason), names in gone.items():
        where = "" if len(names) == len(shown) else f" on {', '.join(names)}"
        missing.append(f"{label}{where} ({reason})")
    more = f"; and {len(missing) - MOST_NOTES} more" if len(missing) > MOST_NOTES else ""
    return f"n/a: {'; '.join(missing[:MOST_NOTES])}{more}" if missing else ""
