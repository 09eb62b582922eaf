"""A run -> its scatter plot: the values and sizes that are drawn, their errors, lines and words."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from matplotlib.figure import Figure

from eval.plots import front, grouping, scatter, style
from eval.plots.scatter_points import Level, Point, points_within
from eval.results.differences import several_references
from eval.results.digits import KLD_DIGITS, PPL_DIGITS, decimals_of_error, number_text
from eval.results.run_result import MARK, ModelResult, RunResult
from eval.stats.estimates import paired_difference
from eval.stats.uncertainty import Mean, Value

BPW_AXIS = "Bits per weight (without embedding and output head)"
VRAM_AXIS = "Stored weights / GiB (without embedding, with output head)"
TO_SCALE = 1.0
"""Mean KLD (nats) that a plot always shows to scale: 4 bits with ten times the KLD of 8 bits are no outlier."""
MARKED = f" ({MARK}: ran otherwise than its checkpoint asks)"
"""The explanation of marked labels in a subtitle."""
UNQUANTIZED_BITS = 15.5
"""Bits per weight from which a row counts as unquantized; bf16 and float16 have 16."""
AXIS_LETTERS = 70
"""Letters that a plot's height has room for."""


def draw(
    run: RunResult, file: Path, *, vram: bool = False, kld: bool = False, max_x: float = math.inf,
    max_y: float = math.inf, title: str | None = None, dark: bool = False, log_y: bool | None = None,
    card: bool = False,
) -> None:  # fmt: skip
    """The scatter plot, and one line for each model that is not in it; or one line that says why there is none."""
    for line in scatter_points(run, vram=vram, kld=kld)[1]:
        print(line)
    try:
        figure = scatter_figure(
            run, vram=vram, kld=kld, max_x=max_x, max_y=max_y, title=title, dark=dark, log_y=log_y, card=card
        )
    except ValueError as error:  # nothing to draw, or more groups than can be told apart
        print(f"no plot: {error}")
        return
    style.save_figure(figure, file)
    print(f"plot: {file}")


def scatter_figure(
    run: RunResult, *, vram: bool = False, kld: bool = False, max_x: float = math.inf, max_y: float = math.inf,
    title: str | None = None, dark: bool = False, log_y: bool | None = None, card: bool = False,
) -> Figure:  # fmt: skip
    """PPL, or KLD, over bits per weight, or GiB.  ``title`` None: it names the measure; ``log_y`` None: for KLD only.

    KLD runs over three powers of ten, from rounding to 2 bits: 17 of the 27 rows of results/h200 lie in the lowest
    twentieth of a linear axis.  Their PPL only doubles, with one exception.
    """
    found = points_within(scatter_points(run, vram=vram, kld=kld)[0], max_x, max_y)
    if not found:
        raise ValueError("no model has both values within the limits")
    measure = "KL divergence" if kld else "Perplexity"
    bars = error_note(run, [point.label for point in found if point.error is not None], kld=kld)
    best = front.in_words(front.pareto_front(found), found)
    bold = f"bold: no other row is smaller and better: {best}" if best else ""
    below = (marked_subtitle(run, [point.label for point in found]), bars, bold)
    return scatter.scatter_plot(
        found,
        x_label=(VRAM_AXIS if vram else BPW_AXIS).partition(" (" if card else "\n")[0],
        y_label=kld_axis(run).partition(" (" if card else "\n")[0] if kld else measure,
        title=f"{measure} of quantized models" if title is None else title,
        subtitle=run.subtitle if card else "\n".join(filter(None, below)),
        dark=dark,
        levels=[level for level in scatter_levels(run, kld=kld) if level.y <= max_y],
        from_zero=kld,
        to_scale=TO_SCALE if kld else -math.inf,
        log_y=kld if log_y is None else log_y,
        card=card,
    )


def marked_subtitle(run: RunResult, labels: Collection[str]) -> str:
    """The run's subtitle, and the meaning of the mark where one of these labels has it."""
    return run.subtitle + (MARKED if any(MARK in label for label in labels) else "")


def scatter_points(run: RunResult, *, vram: bool, kld: bool = False) -> tuple[list[Point], list[str]]:
    """(points of the PPL or KLD plot, one line for each model that cannot be drawn)."""
    drawn, left_out = [], []
    for model in run.models:
        x = model.storage.vram_gib if vram else model.storage.bpw_layer
        ppl = model.ppl.value if model.ppl else None
        y = model.mean_kld if kld else ppl
        if x is None or y is None:
            missing = "size" if y is not None else "KLD" if kld else "PPL"
            left_out.append(f"{model.label}: not in the plot: {missing} unknown")
        else:
            error = ppl_error(run, model)[0] if not kld else model.kld.stderr if model.kld else None
            shown = "reference: 0" if kld and model.is_reference else value_text(y, error, kld=kld)
            bits = model.storage.bpw_layer
            unquantized = bits is not None and bits >= UNQUANTIZED_BITS
            drawn.append(Point(model.marked_label, x, y, shown, error, model.group, unquantized))
    return drawn, left_out


def value_text(value: float, error: float | None, *, kld: bool) -> str:
    """A value with as many decimals as its error has until its first digit: 0.44419 +- 0.0052 is 0.444."""
    usual = KLD_DIGITS if kld else PPL_DIGITS - 1
    return number_text(value, max(decimals_of_error(error) - 1, 0) if error else usual)


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


def error_note(run: RunResult, labels: Collection[str], *, kld: bool) -> str:
    """What the error bars of these models show; empty if there are no bars.

    The error of a perplexity is mostly the text's, and common to all models: bars of that error would say that no two
    neighbours differ.  So the error of the ratio to the reference's perplexity is drawn where it is known.
    """
    bars = "error bars, where longer than the marker: one standard error of"
    if not labels:
        return ""
    if kld:
        return f"{bars} the mean"
    alone = [m.label for m in run.models if m.marked_label in labels and not ppl_error(run, m)[1]]
    if len(alone) == len(labels):
        return f"{bars} the perplexity (about the text, so nearly common to all)"
    return f"{bars} the ratio to the reference's" + (f" ({', '.join(alone)}: of the perplexity)" if alone else "")


def scatter_levels(run: RunResult, *, kld: bool) -> list[Level]:
    """The horizontal line at the reference's perplexity, or at the noise floor's KLD."""
    if kld:
        floor = run.noise_floor
        if floor is None or floor.kld is None or not floor.kld.value:
            return []
        return [
            Level(
                floor.kld.value, f"noise floor ({grouping.short_label(floor.label)}) {floor.kld.value:.2g}", dotted=True
            )
        ]
    found = run.reference_ppl
    return [] if found is None else [Level(found, f"reference {found:.2f}")]


def kld_axis(run: RunResult) -> str:
    """The KLD axis; it names the reference where that fits."""
    axis = "KL divergence (nats, mean over tokens)"
    named = f"{axis} against {run.reference['label']}" if run.reference else axis
    if several_references(run.models):
        named = f"{axis} against its machine's reference"
    return named if len(named) <= AXIS_LETTERS else axis
