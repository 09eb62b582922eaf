"""The marks of rows: at their labels, best values and machines."""

from __future__ import annotations

from collections.abc import Iterable

from ..results import ModelResult, RunResult

BEST = "\N{BLACK STAR}"
"""Before the best value of a column."""
TOO_LARGE = "\N{BALLOT X}"
"""After the label of a row that ``--fit`` excludes."""
FLOOR_MARK = "\N{ALMOST EQUAL TO}"
"""After the label of a noise floor."""


def label_of(model: ModelResult) -> str:
    """Return the label with its marks."""
    label = model.marked_label
    if model.noise_floor:
        label += f" {FLOOR_MARK}"
    if model.fits is False:
        label += f" {TOO_LARGE}"
    return label


def machine_letters(run: RunResult) -> dict[str, str]:
    """Return a letter for each machine, in the order of the rows; empty if all rows ran on the same
    machine.

    A name that is a part of one other name is the same machine: "GPU" is the same as "GPU, CPU", as
    llama.cpp names it.
    """
    names = dict.fromkeys(model.where for model in run.models if model.where)
    letters: dict[str, str] = {}
    letter_by_name: dict[str, str] = {}
    for name in names:
        longer_names = longer_names_of(name, names)
        full_name = name
        # With several longer names it is not known which of these machines it was.
        if len(longer_names) == 1:
            full_name = longer_names[0]
        if full_name not in letters:
            letters[full_name] = chr(ord("A") + len(letters))
        letter_by_name[name] = letters[full_name]
    if len(letters) == 1:
        return {}
    return letter_by_name


def longer_names_of(name: str, names: Iterable[str]) -> list[str]:
    """Return the names of machines that have all parts of a name, and others."""
    parts = set(name.split(", "))
    longer_names = []
    for other in names:
        if parts < set(other.split(", ")):
            longer_names.append(other)
    return longer_names
