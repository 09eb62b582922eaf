"""Which flags can be combined, and which fit the models and texts of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ..plots.measures import SUFFIXES
from ..table import columns, pairs
from ..table.columns import Column
from ..table.conditions import Condition
from .commands import (
    Command,
    GateCommand,
    Inputs,
    PackCommand,
    PictureFlags,
    Resources,
    RunCommand,
    ShowCommand,
    TableFlags,
)

NEEDS_REFERENCE = (
    'no model is the reference: mark one with "reference": true (or out_logits), or give '
    "--logits_file"
)


def check(command: Command, name: str, *, is_plot: bool) -> None:
    """InputError for flags of a command that cannot be combined; ``is_plot``: with ``-p``."""
    match command:
        case RunCommand():
            check_inputs(command.inputs, command.resources, command.files.save_specs, name)
            if is_plot:
                check_no_picture(command.inputs.models, "model")
        case GateCommand() | PackCommand():
            check_inputs(command.inputs, command.resources, None, name)
        case ShowCommand():
            if is_plot:
                check_no_picture([str(source) for source in command.sources], "run")
            check_no_columns(command.sources)


def check_cache_folder(folder: Path) -> None:
    """InputError for a cache that is a file."""
    if json_files.is_file(folder):
        raise InputError(f"--cache-dir: {folder}: is a file; name the folder of the cache")


def check_measure(measure: str | None) -> None:
    """InputError for ``--kld-value`` with ``-ppl``."""
    if measure not in (None, "kld"):
        raise InputError(f"--kld-value: is a value of KL divergence; leave it or -{measure} out")


def check_inputs(
    inputs: Inputs, resources: Resources, save_specs: Path | None, command: str
) -> None:
    """InputError for models, texts and flags of a run that cannot be combined."""
    see = f"see compare-q {command} --help"
    if not inputs.models and not inputs.specs:
        advice = ""
        # -d takes all words up to the next flag, also models after the text.
        if len(inputs.data) > 1:
            texts = printable(" ".join(str(path) for path in inputs.data))
            advice = f"; -d has taken all of {texts}: put models before it"
        raise InputError(f"name models, or give -d and -m{advice}; {see}")
    if inputs.models and inputs.specs:
        model = printable(inputs.models[0])
        raise InputError(f"{model}: is a MODEL argument, which cannot be combined with -m")
    if inputs.specs and not inputs.data:
        raise InputError(f"-d: is missing: specs of models go with a spec of a text; {see}")
    if resources.ray and resources.gpus:
        raise InputError(
            "--gpus: cannot be combined with --ray, which assigns the cluster's GPUs; remove --gpus"
        )
    if inputs.specs:
        check_only_specs(inputs, save_specs)


def check_only_specs(inputs: Inputs, save_specs: Path | None) -> None:
    """InputError for a flag that only MODEL arguments take."""
    values = {
        "--save-specs": save_specs,
        "--tokenizer": inputs.tokenizer,
        "--no-reference": inputs.no_reference,
        "--eval-len": inputs.eval_len,
        "--eval-stride": inputs.eval_stride,
        "--sample": inputs.sample,
    }
    for flag, value in values.items():
        if value:
            raise InputError(
                f"{flag}: is for models that are named without specs; give MODEL arguments instead "
                "of -m"
            )


def check_no_picture(words: Sequence[str], kind: str) -> None:
    """InputError for the file of a plot after ``-p``, which takes none.

    The word would be read as a model or a run (``kind``).
    """
    for word in words:
        if word.lower().endswith(tuple(SUFFIXES)):
            raise InputError(f"{printable(word)}: is not a {kind}; -pf names the file of the plot")


def check_no_columns(sources: Sequence[Path]) -> None:
    """InputError for a file that is the name of a column: a space was put after a comma."""
    for source in sources:
        if str(source) in columns.BY_NAME and not json_files.exists(source):
            raise InputError(
                f"{source}: no such file; the columns of --columns have commas between them, and "
                "no spaces"
            )


def check_slices(flag: str, used_columns: Sequence[Column], slices: Sequence[str]) -> None:
    """InputError for a column of a flag over a slice that no row has.

    ``slices``: names of the slices that rows have.
    """
    try:
        columns.check_slices(used_columns, slices)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None


def check_content(
    table: TableFlags,
    pictures: PictureFlags,
    slices: Sequence[str],
    labels: Sequence[str],
    *,
    reference: bool,
    is_run: bool,
) -> str | None:
    """Return a line about flags without effect, None if there are none.

    InputError for flags that do not fit the run.

    ``slices``: names of the slices that rows have; ``labels``: the models'; ``reference``: if there
    is one; ``is_run``: if the models will be scored.
    """
    if pictures.measure == "kld" and not reference:
        raise InputError(f"--kld: {NEEDS_REFERENCE}")
    # Otherwise each row would fail after hours of scoring.
    if is_run and not reference:
        check_conditions(table.fail_if)
    pairs.check_labels(table.pair, labels)
    check_slices("--columns", [columns.column_of(name) for name in table.columns or ()], slices)
    if table.sort:
        check_slices("--sort", [columns.column_of(table.sort)], slices)
    check_slices("--fail-if", [condition.column for condition in table.fail_if], slices)
    if pictures.plot_file or pictures.card:
        return None
    unused = plot_flags(pictures)
    if not unused:
        return None
    return f"{', '.join(unused)}: for the picture of -p (or -pf FILE), which was not requested"


def check_conditions(conditions: Sequence[Condition]) -> None:
    """InputError for a condition on a column that only a run with a reference has."""
    names = []
    for condition in conditions:
        if condition.column.of_reference is not None:
            names.append(condition.column.name)
    if names:
        raise InputError(f"--fail-if: no row can have {', '.join(names)}: {NEEDS_REFERENCE}")


def plot_flags(pictures: PictureFlags) -> list[str]:
    """Return the given flags that only the plot of ``-p`` and the card follow."""
    flags = []
    if pictures.x_axis == "vram":
        flags.append("-v")
    elif pictures.x_axis:
        flags.append("--x-axis")
    # --kld-value has set the measure.
    if pictures.kld_value:
        flags.append("--kld-value")
    elif pictures.measure:
        flags.append(f"-{pictures.measure}")
    if pictures.max_x < math.inf:
        flags.append("-mx")
    if pictures.max_y < math.inf:
        flags.append("-my")
    if pictures.log_y is not None:
        flags.append("--log_y")
    # The pictures of --plots are dark, too.
    if pictures.dark and not pictures.plots:
        flags.append("-dark")
    return flags
