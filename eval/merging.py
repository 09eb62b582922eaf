"""Several results.json in one table: which runs may be combined, and which rows are the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..backends.common.errors import InputError
from ..backends.common.message_text import printable
from .results import ModelResult, RunResult
from .specs.spec_files import numbered


def load(files: Sequence[Path]) -> RunResult:
    """Return the run of one file, or the rows of several files in one run.

    InputError in one line for files that are damaged, and for files that ``combine`` refuses.
    """
    paths = [os.path.realpath(file) for file in files]
    for file, path in zip(files, paths, strict=True):
        if paths.count(path) > 1:
            raise InputError(f"{printable(file)}: is given twice; name each run once")
    runs = {}
    for file in files:
        runs[printable(file)] = RunResult.read(file)
    if len(runs) == 1:
        return next(iter(runs.values()))
    return combine(runs)


def combine(runs: Mapping[str, RunResult]) -> RunResult:
    """Return one run with the rows of all ``runs`` (file -> its results), without duplicates.

    InputError with the file, and with what differs, unless all runs have the same tokenizer,
    windows and reference.
    """
    (first_file, first), *others = runs.items()
    for file, run in others:
        check_same_windows(first_file, first, file, run)
    rows: list[ModelResult] = []
    for run in runs.values():
        rows += run.models
    commits = {run.commit for run in runs.values()}
    commit = None
    if len(commits) == 1:
        commit = first.commit
    return first.updated(
        models=unique_rows(rows),
        created=max(run.created for run in runs.values()),
        command=(),
        commit=commit,
        versions=shared_facts([run.versions for run in runs.values()]),
        hardware=shared_facts([run.hardware for run in runs.values()]),
    )


def check_same_windows(first_file: str, first: RunResult, file: str, run: RunResult) -> None:
    """Raise InputError unless ``run`` may be in one table with ``first``."""
    for first_identity, identity in zip(identities(first), identities(run), strict=True):
        if identity.digest != first_identity.digest:
            raise InputError(
                f"{file}: its {identity.what} is not that of {first_file} "
                f"({identity.in_words}, not {first_identity.in_words})"
            )


class Identity(NamedTuple):
    """A property that rows must share to be in one table; ``words``: before its digest."""

    what: str
    digest: str | None
    words: str

    @property
    def in_words(self) -> str:
        """The words and the start of the digest, on one line: both are from a file of results."""
        digest = self.digest or "none"
        return printable(f"{self.words} {digest[:12]}")


def identities(run: RunResult) -> tuple[Identity, ...]:
    """Return the properties that all rows of a table share.

    The digest of the windows includes the methods and the scored positions.
    """
    data = run.data
    reference = run.reference or {}
    # Each method once, in the order of the texts.
    methods = " and ".join(dict.fromkeys(str(text.method) for text in run.texts))
    length = data.get("window_length")
    length_words = ""
    if length:
        length_words = f" of up to {length:,} tokens"
    windows = f"{data.get('windows')} windows{length_words} by method {methods},"
    return (
        Identity("tokenizer", data.get("vocabulary_sha256"), "vocabulary"),
        Identity("cut into windows", data.get("windows_sha256"), windows),
        Identity("reference", reference.get("key"), f"{reference.get('label', 'key')},"),
    )


def shared_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts that are the same in all of ``facts``."""
    first, *others = facts
    shared = {}
    for key, value in first.items():
        if all(other.get(key) == value for other in others):
            shared[key] = value
    return shared


def unique_rows(models: Sequence[ModelResult]) -> tuple[ModelResult, ...]:
    """Return the rows without duplicates, by the key of their scores.

    A measured row replaces a failed row of the same label.  Other rows with the same label get a
    number: "label (2)".
    """
    rows: list[ModelResult] = []
    for model in models:
        duplicate_index = index_of_same(rows, model)
        if duplicate_index is None:
            (label,) = numbered([model.label], [row.label for row in rows])
            rows.append(model.updated(label=label))
        elif rows[duplicate_index].error:
            rows[duplicate_index] = model.updated(label=rows[duplicate_index].label)
    return tuple(rows)


def index_of_same(rows: Sequence[ModelResult], model: ModelResult) -> int | None:
    """Return the index of the first row with the same scores; None without one."""
    for index, row in enumerate(rows):
        if is_same(row, model):
            return index
    return None


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """Return True if two rows have the same scores; if one failed, if they have the same label."""
    if one.error or other.error:
        return one.label == other.label
    return one.scores_key == other.scores_key != ""
