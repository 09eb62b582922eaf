"""``--doctor --against -p``: the relative error of every matrix over the number of its decoder layer."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from backends.checkpoint.doctor.comparison import LayerError, worst_first
from eval.plots import style

HEIGHT = 6.5
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.(.+)$")
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
MARKERS = "osD^vP*X<>"
SPREAD = 5
"""From this ratio of largest to smallest error on the y axis is logarithmic."""
NAMED = 3
"""How many of the worst matrices have their number beside them."""


def draw(errors: Sequence[LayerError], file: Path, title: str, *, dark: bool = False) -> None:
    """Draw the matrices with an error above zero, kinds of layers in colours."""
    shown = [each for each in worst_first(errors) if each.error and math.isfinite(each.error)]
    kinds: dict[str, list[tuple[int, float]]] = {}
    for each in shown:
        kind, number = kind_and_layer(each.name)
        if number is not None:
            kinds.setdefault(kind, []).append((number, each.error or 0.0))
    subtitle = "relative error of each dequantized matrix, ||W_q - W|| / ||W||"
    with style.canvas(HEIGHT, title, subtitle, dark=dark) as (figure, axes, theme):
        for at, (kind, points) in enumerate(sorted(kinds.items())):
            points.sort()
            axes.plot(
                *zip(*points, strict=True), label=kind, color=COLOURS[at % len(COLOURS)], linewidth=1,
                marker=MARKERS[at % len(MARKERS)], markersize=5,
            )  # fmt: skip
        if shown and (shown[0].error or 0.0) > SPREAD * (shown[-1].error or 0.0):
            axes.set_yscale("log")
            style.log_ticks(axes.yaxis)
        for each in shown[:NAMED]:
            kind, number = kind_and_layer(each.name)
            if number is not None:
                axes.annotate(
                    f"{number}", (number, each.error or 0.0), (0, 7), textcoords="offset points", ha="center", size=11,
                    color=theme.ink, path_effects=style.halo(theme),
                )  # fmt: skip
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("relative error")
        if kinds:
            figure.legend(loc="outside right upper")
        style.save_figure(figure, file)


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """(kind, number of the decoder layer) of a matrix; experts of a layer are one kind, None outside the layers."""
    found = LAYER.search(name)
    if found is None:
        return name, None
    return re.sub(r"\.\d+(?=\.)", ".*", found[2]), int(found[1])
