"""``compare-q flips``: compare the answers of models to the same tasks, from samples of lm-eval."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ..common.output_files import Outputs, write_text
from ..common.terminal import say
from ..flips import flip_conditions, flips_report
from ..flips.comparing import FlipReport, Selection, compare
from ..flips.sample_files import RunFiles, run_files
from ..results import ModelResult, RunResult
from ..specs.spec_files import numbered
from ..table.markdown import markdown_text
from ..table.tables import Table
from . import output_checks
from .commands import FlipsCommand, OutputFiles, PictureFlags
from .outputs import print_errors, print_note


def run(command: FlipsCommand) -> int:
    """Compare, print and write; return the exit status, which means the same as that of a run."""
    runs = runs_of(command.samples)
    if command.margin is None:
        for condition in command.fail_if:
            if condition.name == flip_conditions.NOT_EQUIVALENT:
                raise InputError("--fail-if: not_equivalent needs --margin, such as --margin 1%")
    input_paths: list[Path] = []
    for lm_eval_run in runs:
        input_paths += lm_eval_run.tasks.values()
    if command.results is not None:
        input_paths.append(command.results)
    output_checks.check(command.files, PictureFlags(), input_paths)
    reference, *others = runs
    klds = None
    if command.results is not None:
        klds = klds_of(command.results, [other.label for other in others])
    selection = Selection(command.tasks, command.metrics, command.margin)
    flip_report = compare(reference, others, selection)
    table = flips_report.table_of_flips(flip_report, klds)
    flips_report.print_flips(table, Console())
    written = write_files(command.files, flip_report, klds, table)
    failures = list(flip_conditions.faults(flip_report, command.fail_if))
    for line in failures:
        print_note(f"failed: {line}")
    status = print_errors("\n".join(written.failures))
    if status:
        return status
    if failures:
        return 4
    return int(bool(flip_report.absent))


def runs_of(words: Sequence[str]) -> list[RunFiles]:
    """Return the runs that the words name, with different labels; the first is the reference."""
    if len(words) < 2:
        raise InputError(
            "flips: name the samples of the reference and of at least one other model; see "
            "compare-q flips --help"
        )
    runs = [run_files(word) for word in words]
    word_of_path: dict[str, str] = {}
    for word, run in zip(words, runs, strict=True):
        for file in run.tasks.values():
            path = os.path.realpath(file)
            if path in word_of_path:
                raise InputError(
                    f"{printable(word)}: has the same samples as "
                    f"{printable(word_of_path[path])}: {file.name}"
                )
            word_of_path[path] = word
    labels = numbered([run.label for run in runs])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def klds_of(file: Path, labels: Sequence[str]) -> dict[str, ModelResult]:
    """Return label -> row of a results.json or report.html.

    InputError if it has no row of these labels.
    """
    results = RunResult.read(file)
    klds = {row.label: row for row in results.models}
    if not klds.keys() & set(labels):
        problem = (
            f"{file}: has no row called {', '.join(labels)}; it has {', '.join(klds)}; name one as "
            "LABEL=PATH"
        )
        raise InputError(f"--results: {printable(problem)}")
    return klds


def write_files(
    files: OutputFiles, flip_report: FlipReport, klds: dict[str, ModelResult] | None, table: Table
) -> Outputs:
    """Write JSON, CSV and Markdown where flags name a file.

    ``table``: of the report and the KLDs.
    """

    def json_text() -> str:
        return flips_report.json_text(flip_report, klds)

    def csv_text() -> str:
        return flips_report.csv_text(flip_report, klds)

    def text_of_table() -> str:
        return markdown_text(table)

    written = Outputs()
    texts: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (files.output, json_text),
        (files.csv, csv_text),
        (files.markdown, text_of_table),
    )
    for file, text_of in texts:
        if file is not None:
            with written.writing(file):
                write_text(file, text_of())
                say(f"written: {file}")
    return written
