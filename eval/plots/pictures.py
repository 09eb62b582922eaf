"""Results -> the plot that is asked for, or all pictures in a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from compare_q.eval.common.files import Outputs, file_names
from compare_q.eval.plots import curves, measures, scatter, spread, style
from compare_q.eval.plots.dumbbell import dumbbell_plot
from compare_q.eval.plots.measures import ACCURACIES, BPW, FILES, KLD, KLD_VALUES, PPL, VRAM, Measure, Size
from compare_q.eval.plots.points import points_of
from compare_q.eval.results.run_result import Results, TextResult

Picture = Callable[[], Figure]
SCATTER = {
    "ppl_bpw": (BPW, PPL), "ppl_vram": (VRAM, PPL), "ppl_size": (FILES, PPL), "kld_bpw": (BPW, KLD),
    "kld_vram": (VRAM, KLD), "kld_size": (FILES, KLD), "kld_p99.9_size": (FILES, KLD_VALUES["p99.9"]),
}  # fmt: skip
"""Name -> what is drawn over what.  The last one is what people post."""
OF_ANSWERS = {"acc_bpw": (BPW, ACCURACIES["acc"]), "acc_size": (FILES, ACCURACIES["acc"])}
"""And of answers to questions."""


def plot(
    results: Results, measure: Measure, *, size: Size | None = None, title: str | None = None, dark: bool = False,
    card: bool = False, **limits: Any,
) -> Figure:  # fmt: skip
    """The plot of a run: of one text the scatter plot, of several texts how far they differ.

    ``size`` None: bits per weight, beside a label the size of the files where these are not known; ``title`` None: it
    names the measure.  ``limits``: ``max_x``, ``max_y`` and ``log_y``, of the scatter plot alone.  ValueError if there
    is nothing to draw.
    """
    shared: Any = {"title": title, "dark": dark, "card": card}
    if len(results.texts) > 1:
        return dumbbell_plot(results, measure, size=size, **shared)
    return scatter.scatter_figure(results.texts[0], size=size or BPW, measure=measure, **shared, **limits)


def draw(results: Results, file: Path, measure: Measure, *, size: Size | None = None, **options: Any) -> None:
    """``plot`` as a file, or one line that says why there is none; a line for each model that a scatter plot lacks."""
    if len(results.texts) == 1:
        for line in points_of(results.texts[0], size or BPW, measure)[1]:
            print(line)
    try:
        figure = plot(results, measure, size=size, title=results.title, **options)
    except ValueError as error:  # nothing to draw, or more groups than can be told apart
        print(f"no plot: {error}")
        return
    style.save_figure(figure, file)
    print(f"plot: {file}")


def write_all(results: Results, folder: Path, outputs: Outputs, *, dark: bool = False) -> None:
    """The pictures of a run's text; of several texts their plot, and a folder with the pictures of each scored text."""
    if len(results.texts) == 1:
        write_pictures(results.texts[0], folder, outputs, dark=dark, title=results.title or "")
        return
    shared = ["texts.png", "texts.svg"]
    for name in shared:
        with outputs.writing(folder / name):
            folder.mkdir(parents=True, exist_ok=True)
            draw(results, folder / name, measures.chosen(results, None, None), dark=dark)
    names = file_names([*shared, *(text.name for text in results.texts)])[len(shared) :]
    for text, name in zip(results.texts, names, strict=True):
        if text.error:
            print(f"no pictures of {text.name}: {text.error}")
        else:
            write_pictures(text, folder / name, outputs, dark=dark, title=results.title or "")


def write_pictures(text: TextResult, folder: Path, outputs: Outputs, *, dark: bool = False, title: str = "") -> None:
    """Writes every picture as PNG and SVG; prints the files written.

    Prints one line for each model that is not in a plot, and for each picture that cannot be drawn.  ``title`` "":
    each picture has a title of its own.
    """
    plots = [points_of(text, size, measure) for size, measure in scatter_of(text).values()]
    # of a plot without a point one line says why it is missing, and not one for each model
    lines = [line for points, left_out in plots if points for line in left_out]
    for line in dict.fromkeys(lines):
        print(line)
    for name, picture in all_pictures(text, dark=dark, title=title).items():
        try:
            figure = picture()
        except ValueError as error:
            print(f"no {name}: {error}")
            continue
        for suffix in (".png", ".svg"):
            file = folder / f"{name}{suffix}"
            with outputs.writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                style.save_figure(figure, file)
                print(f"plot: {file}")


def all_pictures(text: TextResult, *, dark: bool = False, title: str = "") -> dict[str, Picture]:
    """Name of a picture -> the function that draws it, with a ValueError if the text has nothing to draw."""
    pictures: dict[str, Picture] = {
        name: partial(scatter.scatter_figure, text, size=size, measure=measure, title=title or None, dark=dark)
        for name, (size, measure) in scatter_of(text).items()
    }
    return pictures | {
        "kld_spread": partial(spread.spread_plot, text, title=title, dark=dark),
        "kld_histograms": partial(spread.ridge_plot, text, title=title, dark=dark),
        "loss_by_position": partial(curves.by_position, text, title=title, dark=dark),
        "kld_by_position": partial(curves.by_position, text, kld=True, title=title, dark=dark),
    }


def scatter_of(text: TextResult) -> dict[str, tuple[Size, Measure]]:
    """Which scatter plots a text has."""
    return {**OF_ANSWERS, **SCATTER} if text.is_answers else SCATTER
