"""A run -> its scatter plot: the values and sizes that are drawn, their errors, lines and words."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from matplotlib.figure import Figure

from eval.plots import front, grouping, scatter, style, y_axis
from eval.plots.measures import BPW, KLD, PPL, Measure, Size
from eval.plots.scatter_points import Level, Point, points_within
from eval.results.digits import KLD_DIGITS, PPL_DIGITS, decimals_of_error, number_text
from eval.results.run_result import MARK, ModelResult, RunResult, several_references
from eval.stats.estimates import paired_difference
from eval.stats.uncertainty import Mean, Value

TO_SCALE = 1.0
"""Mean KLD (nats) that a plot always shows to scale: 4 bits with ten times the KLD of 8 bits are no outlier."""
MARKED = f" ({MARK}: ran otherwise than its checkpoint asks)"
"""The explanation of marked labels in a subtitle."""
UNQUANTIZED_BITS = 15.5
"""Bits per weight from which a row counts as unquantized; bf16 and float16 have 16."""
AXIS_LETTERS = 70
"""Letters that a plot's height has room for."""
EXCESS_AXIS = "Perplexity above the reference's (logarithmic; linear near 0)"
NO_BARS = "no error bars: errors of percentiles are not known"


def draw(
    run: RunResult, file: Path, *, size: Size = BPW, measure: Measure = PPL, max_x: float = math.inf,
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
    run: RunResult, *, size: Size = BPW, measure: Measure = PPL, max_x: float = math.inf, max_y: float = math.inf,
    title: str | None = None, dark: bool = False, log_y: bool | None = None, card: bool = False,
) -> Figure:  # fmt: skip
    """A measure over a size.  ``title`` None: it names the measure; ``log_y`` None: a logarithmic axis for KLD, and for
    PPL, where the reference's is known, one by the excess over it.

    KLD runs over three powers of ten, from rounding to 2 bits: 17 of the 27 rows of results/h200 lie in the lowest
    twentieth of a linear axis.  Their PPL only doubles, with one exception, and 15 of them are within 4 % of the
    reference's, where neither a linear nor a logarithmic axis can tell them apart.
    """
    found = points_within(scatter_points(run, size, measure)[0], max_x, max_y)
    if not found:
        raise ValueError(f"no model has both {measure.name} and {size.name} within the limits")
    reference = None if measure.kld or log_y is not None else finite_reference(run)
    best = front.in_words(front.pareto_front(found), found)
    bold = f"bold: no other row is smaller and better: {best}" if best else ""
    bars = error_note(run, [point.label for point in found if point.error is not None], measure)
    below = (marked_subtitle(run, [point.label for point in found]), bars, bold)
    y_label = kld_axis(run, measure) if measure.kld else EXCESS_AXIS if reference else measure.axis
    return scatter.scatter_plot(
        found,
        x_label=size.axis.partition(" (" if card else "\n")[0],
        y_label=y_label.partition(" (" if card else "\n")[0],
        title=f"{measure.title} of quantized models" if title is None else title,
        subtitle=run.subtitle if card else "\n".join(filter(None, below)),
        dark=dark,
        levels=[level for level in scatter_levels(run, measure) if level.y <= max_y],
        from_zero=measure.kld,
        to_scale=TO_SCALE if measure.kld else -math.inf,
        log_y=measure.kld if log_y is None else log_y,
        excess=y_axis.excess_over(reference, found) if reference else None,
        card=card,
    )


def marked_subtitle(run: RunResult, labels: Collection[str]) -> str:
    """The run's subtitle, and the meaning of the mark where one of these labels has it."""
    return run.subtitle + (MARKED if any(MARK in label for label in labels) else "")


def scatter_points(run: RunResult, size: Size, measure: Measure) -> tuple[list[Point], list[str]]:
    """(points of the plot of a measure over a size, one line for each model that cannot be drawn)."""
    drawn, left_out = [], []
    for model in run.models:
        x, y = size.of(model.storage), measure.of(model)
        if x is None or y is None:
            missing = size.name if y is not None else measure.name
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
        else:
            error = measure.error(model) if measure.kld else ppl_error(run, model)[0]
            shown = "reference: 0" if measure.kld and model.is_reference else value_text(y, error, measure)
            bits = model.storage.bpw_layer
            unquantized = bits is not None and bits >= UNQUANTIZED_BITS
            drawn.append(Point(model.marked_label, x, y, shown, error, model.group, unquantized))
    return drawn, left_out


def value_text(value: float, error: float | None, measure: Measure) -> str:
    """A value with as many decimals as its error has until its first digit: 0.44419 +- 0.0052 is 0.444.

    Without an error: with the measure's significant digits, or as in the table.
    """
    if error:
        return number_text(value, max(decimals_of_error(error) - 1, 0))
    if measure.digits:
        size = int(f"{value:.{measure.digits - 1}e}".partition("e")[2])  # of the rounded value: 0.999 is 1.0
        return number_text(value, max(measure.digits - 1 - size, 0))
    return number_text(value, KLD_DIGITS if measure.kld else PPL_DIGITS - 1)


def ppl_error(run: RunResult, model: ModelResult) -> tuple[float | None, bool]:
    """(PPL(model) * standard error of ln(PPL(model) / PPL(reference)), True); (its own error, False) if unpaired.

    This error says how far the point would move if the reference stayed in place.  The error of the difference of both
    perplexities does not: it grows with the text's own error times (ratio - 1), and is 1.4 for a perplexity of 34 where
    the error returned here is 0.14.  The reference has no error.  A model that was not scored beside the reference (a
    server) is paired with it by blocks of the text.
    """
    if model.is_reference or model.estimates is None or model.ppl is None or model.ppl.value is None:
        return None, True
    ratio: Mean | Value | None = model.estimates.against.ln_ppl_ratio if model.estimates.against else None
    for other in run.models if ratio is None else ():
        if other.is_reference and other.estimates is not None:
            ratio = paired_difference(model.estimates.blocks, other.estimates.blocks, "nll")
    if ratio is None:
        return model.ppl.stderr, False
    return None if ratio.stderr is None else model.ppl.value * ratio.stderr, True


def error_note(run: RunResult, labels: Collection[str], measure: Measure) -> str:
    """What the error bars of these models show; empty if there are no bars, unless the measure has no error.

    The error of a perplexity is mostly the text's, and common to all models: bars of that error would say that no two
    neighbours differ.  So the error of the ratio to the reference's perplexity is drawn where it is known.
    """
    bars = "error bars, where longer than the marker: one standard error of"
    if not labels or measure.percentile:
        return NO_BARS if measure.percentile else ""
    if measure.kld:
        return f"{bars} the mean"
    alone = [m.label for m in run.models if m.marked_label in labels and not ppl_error(run, m)[1]]
    if len(alone) == len(labels):
        return f"{bars} the perplexity (mostly common to all)"
    return f"{bars} the ratio to the reference's" + (f" ({', '.join(alone)}: of the perplexity)" if alone else "")


def scatter_levels(run: RunResult, measure: Measure) -> list[Level]:
    """The horizontal line at the reference's perplexity, or at the noise floor's KLD."""
    if not measure.kld:
        found = finite_reference(run)
        return [] if found is None else [Level(found, f"reference {found:.2f}")]
    floor = run.noise_floor
    height = measure.of(floor) if floor else None
    if floor is None or not height:
        return []
    return [Level(height, f"noise floor ({grouping.short_label(floor.label)}) {height:.2g}", dotted=True)]


def finite_reference(run: RunResult) -> float | None:
    """The reference's perplexity; None also where it is infinite, as where it excludes a token of the text."""
    found = run.reference_ppl
    return found if found is not None and math.isfinite(found) else None


def kld_axis(run: RunResult, measure: Measure = KLD) -> str:
    """The KLD axis; it names the reference where that fits."""
    named = f"{measure.axis} against {run.reference['label']}" if run.reference else measure.axis
    if several_references(run.models):
        named = f"{measure.axis} against its machine's reference"
    return named if len(named) <= AXIS_LETTERS else measure.axis
