"""Several results.json in one table: which runs may be combined, and which of their rows are the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.eval.results import ModelResult, RunResult, TextResult
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

    InputError with the file, and with what differs, unless all runs have the same texts, tokenizer, windows and
    reference.
    """
    (first_file, first), *others = runs.items()
    for file, run in others:
        check_same_texts(first_file, first, file, run)
    texts = []
    for place, text in enumerate(first.texts):
        models = [model for run in runs.values() for model in run.texts[place].models]
        texts.append(text.updated(models=unique_rows(models)))
    commits = {run.commit for run in runs.values()}
    return first.updated(
        texts=tuple(texts),
        created=max(run.created for run in runs.values()),
        command=(),
        commit=first.commit if len(commits) == 1 else None,
        versions=shared([run.versions for run in runs.values()]),
        hardware=shared([run.hardware for run in runs.values()]),
    )


def check_same_texts(first_file: str, first: RunResult, file: str, run: RunResult) -> None:
    """InputError unless the rows of ``run`` may be in one table with those of ``first``."""
    if len(run.texts) != len(first.texts):
        counts = f"({len(run.texts)}, not {len(first.texts)})"
        raise InputError(f"{file}: its number of texts differs from {first_file}'s {counts}")
    for first_text, text in zip(first.texts, run.texts, strict=True):
        if first_text.error or text.error:
            failed = file if text.error else first_file
            raise InputError(f"{failed}: its text {text.name} failed; run it again")
        for wanted, found in zip(identities(first_text), identities(text), strict=True):
            if found.digest != wanted.digest:
                both = f"{found.in_words}, not {wanted.in_words}"
                raise InputError(f"{file}: its {found.what} is not that of {first_file} ({both})")


class Identity(NamedTuple):
    """A property that rows must share to be in one table."""

    what: str
    digest: str | None
    words: str  # before the digest in messages

    @property
    def in_words(self) -> str:
        """The words and the start of the digest."""
        digest = self.digest or "none"
        return f"{self.words} {digest[:12]}"


def identities(text: TextResult) -> tuple[Identity, ...]:
    """What the rows of a text share.  The digest of the windows includes the method and the scored positions."""
    data = text.data
    reference = text.reference or {}
    windows = f"{data.get('windows')} windows by method {data.get('method')},"
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
