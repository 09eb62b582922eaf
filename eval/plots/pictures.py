"""Pictures of a run: the plot of ``-p`` and ``--card``, and all pictures of ``--plots``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from compare_q.backends.common import machine
from compare_q.eval.common.files import Outputs, file_names
from compare_q.eval.common.terminal import say
from compare_q.eval.plots import measures, percentiles, position, scatter, style
from compare_q.eval.plots.measures import BPW, FILES, KLD, KLD_VALUES, PPL, VRAM, Measure, Size
from compare_q.eval.plots.points import points_of
from compare_q.eval.results import RunResult, TextResult

Picture = Callable[[], Figure]
SCATTER = {
    "ppl_bpw": (BPW, PPL), "ppl_vram": (VRAM, PPL), "ppl_size": (FILES, PPL), "kld_bpw": (BPW, KLD),
    "kld_vram": (VRAM, KLD), "kld_size": (FILES, KLD), "kld_p99.9_size": (FILES, KLD_VALUES["p99.9"]),
}  # fmt: skip
"""Name -> axes of the scatter plots of every text."""


def draw(
    results: RunResult, file: Path, outputs: Outputs, measure: Measure, *, size: Size = BPW, **options: Any
) -> None:
    """Write the scatter plot of a run; ``options``: of ``scatter.scatter_figure``."""
    options |= {"origin": origin_of(results)} if options.get("card") else {}
    say(*points_of(results.texts, size, measure)[1])
    same = {"size": size, "measure": measure, "title": results.title, **options}
    write("plot", partial(scatter.scatter_figure, *results.texts, **same), [file], outputs)


def origin_of(results: RunResult) -> str:
    """Return the machines, the date and the version of compare_q of a run, for a card."""
    ran = [model.provenance for text in results.scored for model in text.models]
    machines = dict.fromkeys(machine.words({"gpus": each["gpus"]} if each.get("gpus") else each) for each in ran)
    version = results.versions.get("compare-q", "")
    return ", ".join(filter(None, [*machines, results.created[:10], f"compare_q {version}" if version else ""]))


def write_all(results: RunResult, folder: Path, outputs: Outputs, *, dark: bool = False) -> None:
    """Write all pictures of a run's text; with several texts, pictures of their means, and one folder per text."""
    folders = [folder]
    if len(results.texts) > 1:
        measure = measures.chosen(results, None, None)
        mean = partial(scatter.scatter_figure, *results.texts, measure=measure, title=results.title, dark=dark)
        write("texts", mean, [folder / "texts.png", folder / "texts.svg"], outputs)
        names = file_names(["texts.png", "texts.svg", *(text.name for text in results.texts)])[2:]
        folders = [folder / name for name in names]
    for text, place in zip(results.texts, folders, strict=True):
        if text.error:
            say(f"no pictures of {text.name}: {text.error}")
            continue
        plots = [points_of([text], size, measure) for size, measure in SCATTER.values()]
        for line in dict.fromkeys(line for points, left_out in plots if points for line in left_out):
            say(line)
        for name, picture in pictures_of(text, dark=dark, title=results.title).items():
            write(name, picture, [place / f"{name}.png", place / f"{name}.svg"], outputs)


def write(name: str, picture: Picture, files: Sequence[Path], outputs: Outputs) -> None:
    """Write a picture to files and print one line per file, or print one line with the reason if drawing fails."""
    try:
        figure = picture()
    except ValueError as error:
        say(f"no {name}: {error}")
        return
    for file in files:
        with outputs.writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            style.save_figure(figure, file)
            say(f"plot: {file}")


def pictures_of(text: TextResult, *, dark: bool = False, title: str | None = None) -> dict[str, Picture]:
    """Return the name of each picture of a text with the function that draws it, or raises ValueError.

    ``title`` None: each picture has its own title.
    """
    same: dict[str, Any] = {"title": title, "dark": dark}
    return {
        **{name: partial(scatter.scatter_figure, text, size=size, measure=measure, **same)
           for name, (size, measure) in SCATTER.items()},
        "kld_percentiles": partial(percentiles.percentile_plot, text, **same),
        "loss_by_position": partial(position.by_position, text, **same),
        "kld_by_position": partial(position.by_position, text, kld=True, **same),
    }  # fmt: skip
