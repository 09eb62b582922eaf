"""A run -> all its pictures in a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.common.outputs import Outputs
from eval.plots import curves, figures, front, measures, spread, style, y_axis
from eval.plots.curves import Line
from eval.plots.measures import ACCURACIES, BPW, FILES, KLD, KLD_VALUES, PPL, VRAM, Measure, Size
from eval.plots.spread import Divergence
from eval.results.run_result import ModelResult, TextResult
from eval.run import token_scores

Picture = Callable[[], Figure]
SCATTER = {
    "ppl_bpw": (BPW, PPL), "ppl_vram": (VRAM, PPL), "ppl_size": (FILES, PPL), "kld_bpw": (BPW, KLD),
    "kld_vram": (VRAM, KLD), "kld_size": (FILES, KLD), "kld_p99.9_size": (FILES, KLD_VALUES["p99.9"]),
}  # fmt: skip
"""Name -> what is drawn over what.  The last one is what people post."""
OF_ANSWERS = {"acc_bpw": (BPW, ACCURACIES["acc"]), "acc_size": (FILES, ACCURACIES["acc"])}
"""And of answers to questions."""


def write_all(run: TextResult, folder: Path, outputs: Outputs, *, dark: bool = False, title: str = "") -> None:
    """Writes every picture as PNG and SVG, and a PNG histogram of KLD for each model; prints the files written.

    Prints one line for each model that is not in a plot, and for each picture that cannot be drawn.  ``title`` "":
    each picture has a title of its own.
    """
    found = [figures.scatter_points(run, size, measure) for size, measure in scatter_of(run).values()]
    # of a plot without a point one line says why it is missing, and not one for each model
    lines = [line for points, left_out in found if points for line in left_out]
    for line in dict.fromkeys(lines):
        print(line)
    for name, picture in all_pictures(run, dark=dark, title=title).items():
        try:
            figure = picture()
        except ValueError as error:
            print(f"no {name}: {error}")
            continue
        for suffix in (".png",) if name.startswith("histograms/") else (".png", ".svg"):
            file = folder / f"{name}{suffix}"
            with outputs.writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                style.save_figure(figure, file)
                print(f"plot: {file}")


def all_pictures(run: TextResult, *, dark: bool = False, title: str = "") -> dict[str, Picture]:
    """Name of a picture -> the function that draws it; ValueError from that function if the run has nothing to draw."""
    found: dict[str, Picture] = {
        name: partial(figures.scatter_figure, run, size=size, measure=measure, title=title or None, dark=dark)
        for name, (size, measure) in scatter_of(run).items()
    }
    models = [model for model in run.models if has_spread(model)]
    divergences = [divergence(model) for model in models]
    floor = divergence(run.noise_floor) if run.noise_floor and has_spread(run.noise_floor) else None
    tokens: Callable[..., Any] = partial(dict, title=title or "KL divergence of single tokens", floor=floor, dark=dark)
    both = tokens(subtitle=figures.marked_subtitle(run, [model.marked_label for model in models]))
    found["kld_spread"] = partial(spread.spread_plot, divergences, **both)
    found["kld_histograms"] = partial(spread.ridge_plot, divergences, **both)
    for name, one in zip(token_scores.file_names([model.label for model in models]), divergences, strict=True):
        alone = tokens(subtitle=figures.marked_subtitle(run, [one.label]))
        found[f"histograms/{name}"] = partial(spread.histogram_plot, one, **alone)
    return found | {
        "loss_by_position": partial(by_position, run, title=title, dark=dark),
        "kld_by_position": partial(by_position, run, kld=True, title=title, dark=dark),
    }


def scatter_of(run: TextResult) -> dict[str, tuple[Size, Measure]]:
    """Which scatter plots a run has."""
    return {**OF_ANSWERS, **SCATTER} if measures.has_answers(run) else SCATTER


def has_spread(model: ModelResult) -> bool:
    """Whether it is known how the KLD of its tokens is spread, and not only its mean (results of older programs)."""
    return bool(model.estimates and model.estimates.against and model.estimates.against.kld_percentiles)


def divergence(model: ModelResult) -> Divergence:
    """How the KLD of a model that has one is spread; ValueError if it has none."""
    against = model.estimates.against if model.estimates else None
    if against is None or against.kld.value is None:
        raise ValueError(f"{model.label}: has no KLD")
    kld = against.kld.value, against.kld_percentiles, against.kld_histogram
    return Divergence(model.marked_label, *kld, model.group)


def by_position(run: TextResult, *, kld: bool = False, title: str = "", dark: bool = False) -> Figure:
    """Loss, or KLD, over the position in the window; a model has one style in both."""
    points = [figures.scatter_points(run, BPW, measure)[0] for measure in (KLD, PPL)]
    best = {point.label for point in front.pareto_front(points[0] or points[1])}
    lines = []
    for model in run.models:
        curve = model.estimates.curve if model.estimates else None
        values = None if curve is None else curve.kld if kld else curve.nll
        if curve is not None:
            look = model.is_reference, model.group, model.storage.bpw_layer
            matters = model.marked_label in best or model is run.noise_floor
            lines.append(Line(model.marked_label, curve.edges, values or (), *look, matters))
    grey = curves.count_of_grey(lines)
    others = f"in colour: the reference, the noise floor, and rows that no other row beats; grey: the {grey} others"
    return curves.over_position(
        lines,
        y_label=measures.kld_axis(run) if kld else "Loss (nats, mean over tokens)",
        title=title or f"{'KL divergence' if kld else 'Loss'} by position in the window",
        subtitle=figures.marked_subtitle(run, [line.label for line in lines]) + (f"\n{others}" if grey else ""),
        dark=dark,
        log_y=kld and y_axis.is_wide(value for line in lines for value in line.values if value is not None),
        from_zero=kld,
    )
