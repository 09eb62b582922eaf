"""Pictures of a run: the plot of ``-p`` and ``--card``, and all pictures of ``--plots``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ...backends.common import machine
from ..common.output_files import Outputs
from ..common.terminal import say
from ..results import RunResult
from . import percentiles, picture_style, position, scatter, slice_bars
from .measures import BPW, FILE_SIZE, KLD, KLD_VALUES, PPL, VRAM, Measure, Size
from .points import points_of

Picture = Callable[[], Figure]
SCATTER = {
    "ppl_bpw": (BPW, PPL),
    "ppl_vram": (VRAM, PPL),
    "ppl_size": (FILE_SIZE, PPL),
    "kld_bpw": (BPW, KLD),
    "kld_vram": (VRAM, KLD),
    "kld_size": (FILE_SIZE, KLD),
    "kld_p99.9_size": (FILE_SIZE, KLD_VALUES["p99.9"]),
}
"""Name -> axes of a scatter plot."""


def draw(
    results: RunResult,
    file: Path,
    outputs: Outputs,
    measure: Measure,
    *,
    size: Size = BPW,
    **options: Any,
) -> None:
    """Write the scatter plot of a run; ``options``: of ``scatter.scatter_figure``."""
    if options.get("card"):
        options["origin"] = origin_of(results)
    _, left_out = points_of(results, size, measure)
    say(*left_out)
    picture = partial(
        scatter.scatter_figure, results, size=size, measure=measure, title=results.title, **options
    )
    if not write("plot", picture, [file], outputs):
        outputs.failures.append(f"{file}: nothing was drawn")


def origin_of(results: RunResult) -> str:
    """Return the machines, the date and the version of compare_q of a run, for a card."""
    parts = []
    for model in results.models:
        hardware = model.provenance
        if hardware.get("gpus"):
            # A card names the GPUs alone, without driver and processor.
            hardware = {"gpus": hardware["gpus"]}
        parts.append(machine.hardware_text(hardware))
    parts.append(results.created[:10])
    version = results.versions.get("compare-q")
    if version:
        parts.append(f"compare_q {version}")
    return ", ".join(part for part in dict.fromkeys(parts) if part)


def write_all(results: RunResult, folder: Path, outputs: Outputs, *, dark: bool = False) -> None:
    """Write all pictures of a run into a folder.

    Missing models and pictures are printed with the reasons.
    """
    lines = []
    for size, measure in SCATTER.values():
        points, left_out = points_of(results, size, measure)
        # A picture without a point is missing as a whole, which ``write`` prints.
        if points:
            lines += left_out
    for line in dict.fromkeys(lines):
        say(line)
    is_any_drawn = False
    for name, picture in pictures_of(results, dark=dark, title=results.title).items():
        files = [folder / f"{name}.png", folder / f"{name}.svg"]
        if write(name, picture, files, outputs):
            is_any_drawn = True
    if not is_any_drawn:
        outputs.failures.append(f"{folder}: nothing was drawn")


def write(name: str, picture: Picture, files: Sequence[Path], outputs: Outputs) -> bool:
    """Write a picture to files and print one line per file; return True.

    If there is nothing to draw, print one line with the reason and return False.
    """
    try:
        figure = picture()
    except ValueError as error:
        say(f"no {name}: {error}")
        return False
    for file in files:
        with outputs.writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            picture_style.save_figure(figure, file)
            say(f"plot: {file}")
    return True


def pictures_of(
    run: RunResult, *, dark: bool = False, title: str | None = None
) -> dict[str, Picture]:
    """Return the name of each picture of a run with the function that draws it.

    The function raises ValueError if there is nothing to draw.  ``title`` None: each picture has
    its own title.
    """
    options: dict[str, Any] = {"title": title, "dark": dark}
    pictures: dict[str, Picture] = {}
    for name, (size, measure) in SCATTER.items():
        pictures[name] = partial(scatter.scatter_figure, run, size=size, measure=measure, **options)
    pictures["slices"] = partial(slice_bars.slice_bars, run, **options)
    pictures["kld_percentiles"] = partial(percentiles.percentile_plot, run, **options)
    pictures["loss_by_position"] = partial(position.by_position, run, **options)
    pictures["kld_by_position"] = partial(position.by_position, run, kld=True, **options)
    return pictures
