"""Find the samples of a run of lm-eval: ``samples_TASK_DATE.jsonl`` in a folder that lm-eval calls
like the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...backends.common.errors import InputError
from ...backends.common.json_files import exists, expanded, is_file, is_folder
from ...backends.common.message_text import printable

SAMPLE_FILE_NAME = re.compile(
    r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl"
)
"""The name that lm-eval 0.4 gives a file of samples."""
SAMPLE_FILES = "samples_*.jsonl"
ADVICE = "write samples with lm_eval --log_samples --output_path FOLDER"
MOST_NAMED_FOLDERS = 3
"""Largest number of folders that a message names."""


@dataclass(frozen=True)
class RunFiles:
    """The samples of one model: a file for each task.

    ``notes``: on older files that are not read.
    """

    label: str
    tasks: Mapping[str, Path]
    notes: tuple[str, ...] = ()


def run_files(word: str) -> RunFiles:
    """Return the samples that ``[LABEL=]PATH`` names; InputError if there are none, or if it is not
    clear which.
    """
    label, path = label_and_path(word)
    if is_file(path):
        # lm-eval calls the folder like the model.
        task, _ = task_and_date(path)
        return RunFiles(label or path.resolve().parent.name, {task: path})
    if not is_folder(path):
        raise InputError(f"{printable(path)}: no such file or folder; {ADVICE}")
    folder = folder_of_model(path)
    if not label:
        label = folder.resolve().name
    tasks, notes = newest_files(sorted(folder.glob(SAMPLE_FILES)), label)
    return RunFiles(label, tasks, tuple(notes))


def label_and_path(word: str) -> tuple[str, Path]:
    """Return (label or "", path); a word that is a path as a whole has no label."""
    label, equals, path = word.partition("=")
    # A path may have an equals sign.
    if not equals or exists(expanded(word)):
        return "", expanded(word)
    if not label.strip() or not path.strip():
        raise InputError(f"{printable(word)}: expected LABEL=PATH")
    return label.strip(), expanded(path)


def folder_of_model(folder: Path) -> Path:
    """Return the folder with samples: this one, or the only one in it that has some."""
    if any(folder.glob(SAMPLE_FILES)):
        return folder
    models = sorted({file.parent for file in folder.glob(f"*/{SAMPLE_FILES}")})
    if not models:
        raise InputError(f"{printable(folder)}: holds no {SAMPLE_FILES}; {ADVICE}")
    if len(models) == 1:
        return models[0]
    names = printable(", ".join(model.name for model in models[:MOST_NAMED_FOLDERS]))
    if len(models) > MOST_NAMED_FOLDERS:
        names += f" and {len(models) - MOST_NAMED_FOLDERS} more"
    fault = f"holds the samples of {len(models)} models: {names}"
    raise InputError(f"{printable(folder)}: {fault}; name one of these folders")


def task_and_date(file: Path) -> tuple[str, str]:
    """Return the task and the date in the name of a file.

    A name of another form is the task itself, without a date.
    """
    match = SAMPLE_FILE_NAME.fullmatch(file.name)
    if match is None:
        return file.stem, ""
    return match["task"], match["date"]


def newest_files(files: Sequence[Path], label: str) -> tuple[dict[str, Path], list[str]]:
    """Return (task -> its newest file, a note for each task with older files)."""
    runs_by_task: dict[str, list[tuple[str, Path]]] = {}
    for file in files:
        task, date = task_and_date(file)
        runs_by_task.setdefault(task, []).append((date, file))
    newest = {}
    notes = []
    for task, runs in runs_by_task.items():
        # Dates have the order of their texts: year, month, day, time.
        date, file = max(runs)
        newest[task] = file
        if len(runs) > 1:
            notes.append(f"{label}: {task}: the newest of {len(runs)} runs, of {date}")
    return newest, notes
