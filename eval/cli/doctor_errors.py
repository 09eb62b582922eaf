"""``--doctor --against``: the relative errors of matrices, as tables in a terminal and as a picture (``-p``)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from compare_q.backends.checkpoint.doctor.comparison import LayerError, worst_first
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.backends.layers.names import NUMBER

WORST = 10
"""Matrices in the table; the picture has all."""
HEIGHT = 6.5
IN_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.(.+)$")
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
MARKERS = "osD^vP*X<>"
SPREAD = 5
"""From this ratio of largest to smallest error on the y axis is logarithmic."""
NUMBERED = 3
"""How many of the worst matrices have their layer's number beside them."""


def show(errors: Sequence[LayerError], console: Console) -> None:
    """Print the worst matrices, the kinds of layers (the worst median first), and what was not compared.

    InputError if nothing was compared.
    """
    ranked = worst_first(errors)
    if ranked:
        worst = [
            (printable(layer.name), layer.stored, f"{layer.error:.5f}", f"{layer.scale:.5f}")
            for layer in ranked[:WORST]
        ]
        console.print(table(("worst matrices", "stored", "relative error", "scale"), worst))
        kinds: dict[str, list[float]] = {}
        for layer in ranked:
            kinds.setdefault(NUMBER.sub("*", layer.name), []).append(layer.error or 0.0)
        rows = [
            (printable(kind), f"{len(values):,}", f"{median(values):.5f}", f"{max(values):.5f}")
            for kind, values in sorted(kinds.items(), key=lambda item: -median(item[1]))
        ]
        console.print(table(("kind of layer", "matrices", "median error", "largest"), rows))
    left_out = Counter(layer.note for layer in errors if layer.error is None)
    for note, count in left_out.items():
        name = next(layer.name for layer in errors if layer.note == note)
        more = f" (and {count - 1:,} more)" if count > 1 else ""
        console.print(f"{printable(name)}{more}: {printable(note)}", markup=False, highlight=False, soft_wrap=True)
    if not ranked:
        raise InputError("--against: no matrix of the model could be compared with the reference's")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=None)
    made.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        made.add_column(name, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def draw(errors: Sequence[LayerError], file: Path, title: str, *, dark: bool = False) -> None:
    """Draw the errors above zero over the number of the decoder layer, kinds of layers in colours."""
    from matplotlib.ticker import MaxNLocator

    from compare_q.eval.plots import style

    shown = [(layer.name, layer.error) for layer in worst_first(errors) if layer.error and math.isfinite(layer.error)]
    points = [(match[1], match[2], error) for name, error in shown if (match := IN_LAYER.search(name))]
    kinds: dict[str, list[tuple[int, float]]] = {}
    for number, rest, error in points:  # the experts of a layer are one kind
        kinds.setdefault(re.sub(r"\.\d+(?=\.)", ".*", rest), []).append((int(number), error))
    subtitle = "relative error of each dequantized matrix, ||W_q - W|| / ||W||"
    with style.canvas(HEIGHT, title, subtitle, dark=dark) as (figure, axes, theme):
        for at, (kind, line) in enumerate(sorted(kinds.items())):
            axes.plot(
                *zip(*sorted(line), strict=True), label=kind, color=COLOURS[at % len(COLOURS)], linewidth=1,
                marker=MARKERS[at % len(MARKERS)], markersize=5,
            )  # fmt: skip
        if shown and shown[0][1] > SPREAD * shown[-1][1]:
            axes.set_yscale("log")
            style.log_ticks(axes.yaxis)
        for number, _, error in points[:NUMBERED]:
            axes.annotate(
                number, (int(number), error), (0, 7), textcoords="offset points", ha="center", size=11,
                color=theme.ink, path_effects=style.halo(theme),
            )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("relative error")
        if kinds:
            figure.legend(loc="outside right upper")
        style.save_figure(figure, file)
