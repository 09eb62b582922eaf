"""A run -> its scatter plot: the values and sizes that are drawn, their errors, lines and words."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from matplotlib.figure import Figure

from eval.plots import front, grouping, measures, scatter, style, y_axis
from eval.plots.measures import BPW, PPL, Measure, Size
from eval.plots.scatter_points import Level, Point, points_within
from eval.results.run_result import MARK, TextResult

TO_SCALE = 1.0
"""Mean KLD (nats) that a plot always shows to scale: 4 bits with ten times the KLD of 8 bits are no outlier."""
MARKED = f" ({MARK}: ran otherwise than its checkpoint asks)"
"""The explanation of marked labels in a subtitle."""
UNQUANTIZED_BITS = 15.5
"""Bits per weight from which a row counts as unquantized; bf16 and float16 have 16."""
EXCESS_AXIS = "Perplexity above the reference's"
NO_BARS = "no error bars: errors of percentiles are not known"


def draw(
    run: TextResult, file: Path, *, size: Size = BPW, measure: Measure = PPL, max_x: float = math.inf,
    max_y: float = math.inf, title: str | None = None, dark: bool = False, log_y: bool | None = None,
    card: bool = False,
) -> None:  # fmt: skip
    """The scatter plot, and one line for each model that is not in it; or one line that says why there is none."""
    for line in scatter_points(run, size, measure)[1]:
        print(line)
    try:
        figure = scatter_figure(
            run, size=size, measure=measure, max_x=max_x, max_y=max_y, title=title, dark=dark, log_y=log_y, card=card
        )
    except ValueError as error:  # nothing to draw, or more groups than can be told apart
        print(f"no plot: {error}")
        return
    style.save_figure(figure, file)
    print(f"plot: {file}")


def scatter_figure(
    run: TextResult, *, size: Size = BPW, measure: Measure = PPL, max_x: float = math.inf, max_y: float = math.inf,
    title: str | None = None, dark: bool = False, log_y: bool | None = None, card: bool = False,
) -> Figure:  # fmt: skip
    """A measure over a size.  ``title`` None: it names the measure; ``log_y`` None: a logarithmic axis for KLD over
    more than a decade and a half, a linear one for less and for accuracy, and for PPL, where the reference's is known,
    one by the excess over it.

    KLD runs over three powers of ten, from rounding to 2 bits: 17 of the 27 rows of results/h200 lie in the lowest
    twentieth of a linear axis.  Their PPL only doubles, with one exception, and 15 of them are within 4 % of the
    reference's, where neither a linear nor a logarithmic axis can tell them apart.
    """
    found = points_within(scatter_points(run, size, measure)[0], max_x, max_y)
    if not found:
        raise ValueError(f"no model has both {measure.name} and {size.name} within the limits")
    reference = finite_reference(run) if measure is PPL and log_y is None else None
    excess = y_axis.excess_over(reference, found) if reference else None
    wide = y_axis.is_wide(point.y for point in found)
    best = front.in_words(front.pareto_front(found), found)
    bold = f"bold: no other row is smaller and better: {best}" if best else ""
    bars = error_note(run, [point.label for point in found if point.error is not None], measure)
    below = (marked_subtitle(run, [point.label for point in found]), bars, bold)
    y_label = measures.kld_axis(run, measure) if measure.kld else measure.axis
    if excess:
        y_label = EXCESS_AXIS if math.isinf(excess.near) else f"{EXCESS_AXIS} (logarithmic; linear near 0)"
    return scatter.scatter_plot(
        found,
        x_label=size.axis.partition(" (" if card else "\n")[0],
        y_label=y_label.partition(" (" if card else "\n")[0],
        title=f"{measure.title} of quantized models" if title is None else title,
        subtitle=run.subtitle if card else "\n".join(filter(None, below)),
        dark=dark,
        levels=[level for level in scatter_levels(run, measure) if level.y <= max_y],
        from_zero=measure.kld,
        to_scale=-math.inf if measure is PPL else TO_SCALE if measure.kld and wide else math.inf,
        log_y=measure.kld and wide if log_y is None else log_y,
        excess=excess,
        card=card,
    )


def marked_subtitle(run: TextResult, labels: Collection[str]) -> str:
    """The run's subtitle, and the meaning of the mark where one of these labels has it."""
    return run.subtitle + (MARKED if any(MARK in label for label in labels) else "")


def scatter_points(run: TextResult, size: Size, measure: Measure) -> tuple[list[Point], list[str]]:
    """(points of the plot of a measure over a size, one line for each model that cannot be drawn)."""
    drawn, left_out = [], []
    for model in run.models:
        x, y = size.of(model.storage), measure.of(model)
        if x is None or y is None:
            missing = size.name if y is not None else measure.name
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
        else:
            error = measures.error_of(run, model, measure)[0]
            shown = "reference: 0" if measure.kld and model.is_reference else measures.value_text(y, error, measure)
            bits = model.storage.bpw_layer
            unquantized = bits is not None and bits >= UNQUANTIZED_BITS
            drawn.append(Point(model.marked_label, x, y, shown, error, model.group, unquantized, measure.more))
    return drawn, left_out


def error_note(run: TextResult, labels: Collection[str], measure: Measure) -> str:
    """What the error bars of these models show; empty if there are no bars, unless the measure has no error.

    The error of a perplexity is mostly the text's, and common to all models: bars of that error would say that no two
    neighbours differ.  So the error of the ratio to the reference's perplexity is drawn where it is known, and for the
    same reason the error of the difference from the reference's accuracy.
    """
    bars = "error bars, where longer than the marker: one standard error of"
    if not labels or measure.percentile:
        return NO_BARS if measure.percentile else ""
    if measure.kld:
        return f"{bars} the mean"
    own = "accuracy" if measure.more else "perplexity"
    alone = [m.label for m in run.models if m.marked_label in labels and not measures.error_of(run, m, measure)[1]]
    if len(alone) == len(labels):
        return f"{bars} the {own} (mostly common to all)"
    apart = f" ({', '.join(alone)}: of the {own})" if alone else ""
    return f"{bars} {measure.distance}{apart}"


def scatter_levels(run: TextResult, measure: Measure) -> list[Level]:
    """The horizontal line at the reference's perplexity or accuracy, or at the noise floor's KLD."""
    if measure.more:
        heights = [measure.of(model) for model in run.models if model.is_reference]
        return [Level(height, f"reference {height:.1f}") for height in heights if height is not None]
    if not measure.kld:
        found = finite_reference(run)
        return [] if found is None else [Level(found, f"reference {found:.2f}")]
    floor = run.noise_floor
    height = measure.of(floor) if floor else None
    if floor is None or not height:
        return []
    name = grouping.short_labels([floor.label, *(model.label for model in run.models)])[0]
    return [Level(height, f"noise floor ({name}) {height:.2g}", dotted=True)]


def finite_reference(run: TextResult) -> float | None:
    """The reference's perplexity; None also where it is infinite, as where it excludes a token of the text."""
    found = run.reference_ppl
    return found if found is not None and math.isfinite(found) else None
