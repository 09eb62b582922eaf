"""Find the samples of a run of lm-eval: ``samples_TASK_DATE.jsonl`` in a folder that lm-eval calls
like the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...backends.common.errors import InputError
from ...backends.common.json_files import exists, expanded, is_file, is_folder
from ...backends.common.message_text import printable

NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
"""The name that lm-eval 0.4 gives a file of samples."""
PATTERN = "samples_*.jsonl"
HOW = "write samples with lm_eval --log_samples --output_path FOLDER"
SHOWN = 3
"""Largest number of folders that a message names."""


@dataclass(frozen=True)
class RunFiles:
    """The samples of one model: a file for each task."""

    label: str
    tasks: Mapping[str, Path]
    notes: tuple[str, ...] = ()  # on older files that are not read


def run_files(word: str) -> RunFiles:
    """Return the samples that ``[LABEL=]PATH`` names; InputError if there are none, or if it is not
    clear which.
    """
    label, path = split(word)
    if is_file(path):
        task, _ = task_and_date(path)
        return RunFiles(label or path.resolve().parent.name, {task: path})
    if not is_folder(path):
        raise InputError(f"{printable(path)}: no such file or folder; {HOW}")
    folder = folder_of_model(path)
    label = label or folder.resolve().name
    tasks, notes = newest(sorted(folder.glob(PATTERN)), label)
    return RunFiles(label, tasks, tuple(notes))


def split(word: str) -> tuple[str, Path]:
    """Return (label or "", path); a word that is a path as a whole has no label."""
    label, equals, rest = word.partition("=")
    if not equals or exists(expanded(word)):
        return "", expanded(word)
    if not label.strip() or not rest.strip():
        raise InputError(f"{printable(word)}: expected LABEL=PATH")
    return label.strip(), expanded(rest)


def folder_of_model(folder: Path) -> Path:
    """Return the folder with samples: this one, or the only one in it that has some."""
    if any(folder.glob(PATTERN)):
        return folder
    models = sorted({file.parent for file in folder.glob(f"*/{PATTERN}")})
    if not models:
        raise InputError(f"{printable(folder)}: holds no {PATTERN}; {HOW}")
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:SHOWN])
        more = f" and {len(models) - SHOWN} more" if len(models) > SHOWN else ""
        raise InputError(
            f"{printable(folder)}: holds the samples of {len(models)} models: {printable(names)}{more}; "
            "name one of these folders"
        )
    return models[0]


def task_and_date(file: Path) -> tuple[str, str]:
    """Return the task and the date in the name of a file; another name is the task itself, without
    a date.
    """
    if known := NAME.fullmatch(file.name):
        return known["task"], known["date"]
    return file.stem, ""


def newest(files: list[Path], label: str) -> tuple[dict[str, Path], list[str]]:
    """Return (task -> its newest file, a note for each task with older files)."""
    dated: dict[str, list[tuple[str, Path]]] = {}
    for file in files:
        task, date = task_and_date(file)
        dated.setdefault(task, []).append((date, file))
    notes = []
    for task, runs in dated.items():
        runs.sort()
        if len(runs) > 1:
            notes.append(f"{label}: {task}: the newest of {len(runs)} runs, of {runs[-1][0]}")
    return {task: runs[-1][1] for task, runs in dated.items()}, notes
