"""How far each model in decode is from its own prefill, beside what rounding noise makes of that prefill."""

from __future__ import annotations

from matplotlib.figure import Figure

from compare_q.eval.plots import spread, style
from compare_q.eval.plots.spread import LETTERS, MARGINS, ROW, SMALLEST
from compare_q.eval.results.run_result import TextResult
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table import phases

TITLE = "Decode beside the same model's prefill"
EXPLAINED = (
    "marker: KL divergence of decode from prefill, whiskers: two standard errors; bar: up to what rounding noise makes"
)
MOST_TICKS = 1000.0
"""On an axis that reaches farther only the powers of ten have a tick."""
TOP = -1.6
"""Where the axes end above the first row, which is at 0."""


def phases_plot(text: TextResult, *, title: str = "", dark: bool = False) -> Figure:
    """A row for each model in decode that was compared with its own prefill; ValueError without any."""
    rows = [(text.models.index(decode), decode, decode.own_prefill) for _, decode in phases.compared(text)]
    known = [(number, row, own) for number, row, own in rows if own is not None and value_of(own.kld) is not None]
    shown = [value for _, _, own in known for mean in (own.kld, own.noise) if (value := value_of(mean)) is not None]
    if not shown:
        raise ValueError("no model in decode was compared with its own prefill")
    left, right = min(shown) / 2, max(shown) * 2
    height = MARGINS + ROW * (len(known) + 1)
    with style.canvas(height, title or TITLE, f"{text.subtitle}\n{EXPLAINED}", dark=dark, letters=LETTERS) as (
        figure, axes, theme,
    ):  # fmt: skip
        axes.set(
            xscale="log", xlabel="KL(prefill || decode) of the same model (nats, mean over tokens)", xlim=(left, right)
        )
        style.log_ticks(axes.xaxis, sparse=right / left > MOST_TICKS)
        labels = [(row.marked_label, row.group, number) for number, row, _ in known]
        for i, (colour, marker) in enumerate(spread.label_rows(axes, labels, theme, TOP)):
            number, _, own = known[i]
            value, noise, error = value_of(own.kld) or 0.0, value_of(own.noise), own.kld.stderr or 0.0
            if noise is not None:
                axes.barh(i, noise - left, 0.56, left, color=theme.muted, alpha=0.25, lw=0, gid=f"noise-{number}")
            ends = [max(value - 2 * error, left), min(value + 2 * error, right)]
            axes.plot(ends, [i, i], color=colour, lw=1.3, zorder=2, gid=f"whisker-{number}")
            point = axes.plot(value, i, marker, color=colour, ms=8, mec=theme.paper, mew=0.8, zorder=5)[0]
            point.set_gid(f"point-{number}")
            numbers = [spread.short(value), "n/a" if noise is None else spread.short(noise)]
            spread.write_numbers(axes, i, numbers, theme, number)
        spread.write_numbers(axes, -1, ("decode", "noise"), theme)
        style.freeze_layout(figure)
    return figure


def value_of(mean: Mean | None) -> float | None:
    """A mean that is above the roundings of float32, or their limit; None if it is not known."""
    return None if mean is None or mean.value is None else max(mean.value, SMALLEST)
