"""Several results.json in one table: which runs may be combined, and which of their rows are the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.specs.reading import numbered


def load(files: Sequence[Path]) -> RunResult:
    """The run of one file, or the rows of several files in one run.

    InputError in one line for files that are damaged, and for files that ``combine`` refuses.
    """
    paths = [os.path.realpath(file) for file in files]
    for file, path in zip(files, paths, strict=True):
        if paths.count(path) > 1:
            raise InputError(f"{printable(file)}: is given twice; name each run once")
    runs = {printable(file): RunResult.read(file) for file in files}
    if len(runs) == 1:
        return next(iter(runs.values()))
    return combine(runs)


def combine(runs: Mapping[str, RunResult]) -> RunResult:
    """One run with the rows of all ``runs`` (file -> its results), in their order and without duplicates.

    InputError with the file, and with what differs, unless all runs have the same tokenizer, windows and reference.
    """
    (first_file, first), *others = runs.items()
    for file, run in others:
        check_same_windows(first_file, first, file, run)
    models = [model for run in runs.values() for model in run.models]
    commits = {run.commit for run in runs.values()}
    return first.updated(
        models=unique_rows(models),
        created=max(run.created for run in runs.values()),
        command=(),
        commit=first.commit if len(commits) == 1 else None,
        versions=shared([run.versions for run in runs.values()]),
        hardware=shared([run.hardware for run in runs.values()]),
    )


def check_same_windows(first_file: str, first: RunResult, file: str, run: RunResult) -> None:
    """InputError unless the rows of ``run`` may be in one table with those of ``first``."""
    for wanted, other in zip(identities(first), identities(run), strict=True):
        if other.digest != wanted.digest:
            both = f"{other.in_words}, not {wanted.in_words}"
            raise InputError(f"{file}: its {other.what} is not that of {first_file} ({both})")


class Identity(NamedTuple):
    """A property that rows must share to be in one table."""

    what: str
    digest: str | None
    words: str  # before the digest in messages

    @property
    def in_words(self) -> str:
        """The words and the start of the digest, on one line: both are from a file of results."""
        digest = self.digest or "none"
        return printable(f"{self.words} {digest[:12]}")


def identities(run: RunResult) -> tuple[Identity, ...]:
    """Properties of all rows of a table.  The digest of the windows includes the methods and the scored positions."""
    data = run.data
    reference = run.reference or {}
    methods = " and ".join(dict.fromkeys(str(text.method) for text in run.texts))
    length = data.get("window_length")
    of_length = f" of up to {length:,} tokens" if length else ""
    windows = f"{data.get('windows')} windows{of_length} by method {methods},"
    return (
        Identity("tokenizer", data.get("vocabulary_sha256"), "vocabulary"),
        Identity("cut into windows", data.get("windows_sha256"), windows),
        Identity("reference", reference.get("key"), f"{reference.get('label', 'key')},"),
    )


def shared(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts that are the same in all of ``facts``."""
    first, *others = facts
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def unique_rows(models: Sequence[ModelResult]) -> tuple[ModelResult, ...]:
    """The rows without duplicates, by the key of their scores.

    A measured row replaces a failed row of the same label.  Other rows with the same label get a number: "label (2)".
    """
    rows: list[ModelResult] = []
    for model in models:
        place = next((place for place, row in enumerate(rows) if is_same(row, model)), None)
        if place is None:
            (label,) = numbered([model.label], [row.label for row in rows])
            rows.append(model.updated(label=label))
        elif rows[place].error:
            rows[place] = model.updated(label=rows[place].label)
    return tuple(rows)


def is_same(one: ModelResult, other: ModelResult) -> bool:
    """True if two rows have the same scores; if one of them failed, if they have the same label."""
    if one.error or other.error:
        return one.label == other.label
    return one.scores_key == other.scores_key != ""
