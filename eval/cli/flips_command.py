"""``compare-q flips``: compare the answers of models to the same tasks, from samples of lm-eval."""

from __future__ import annotations

import argparse
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
from ..results import RunResult
from ..specs.spec_files import numbered
from ..stats.uncertainty import Value
from . import outputs
from .outputs import print_errors, print_note


def run(args: argparse.Namespace) -> int:
    """Compare, print and write; return the exit status, which means the same as that of a run."""
    runs = runs_of(args.samples)
    if args.margin is None and any(
        each.name == flip_conditions.NOT_EQUIVALENT for each in args.fail_if
    ):
        raise InputError("--fail-if: not_equivalent needs --margin, such as --margin 1%")
    files = [file for each in runs for file in each.tasks.values()]
    sources = [*files, *([args.results] if args.results else [])]
    outputs.check(argparse.Namespace(**{**vars(args), "source": sources}))
    klds = klds_of(args.results, [each.label for each in runs[1:]]) if args.results else None
    selection = Selection(args.tasks or (), args.metrics or (), args.margin)
    flip_report = compare(runs[0], runs[1:], selection)
    flips_report.print_terminal(flip_report, Console(), klds)
    written = write_files(args, flip_report, klds)
    faults = list(flip_conditions.faults(flip_report, args.fail_if))
    print_note(*(f"failed: {line}" for line in faults))
    if status := print_errors("\n".join(written.failures)):
        return status
    if faults:
        return 4
    return int(bool(flip_report.absent))


def runs_of(words: list[str]) -> list[RunFiles]:
    """Return the runs that the words name, with different labels; the first is the reference."""
    if len(words) < 2:
        raise InputError(
            "flips: name the samples of the reference and of at least one other model; see compare-q "
            "flips --help"
        )
    runs = [run_files(word) for word in words]
    first: dict[str, str] = {}
    for word, each in zip(words, runs, strict=True):
        for file in each.tasks.values():
            path = os.path.realpath(file)
            if path in first:
                raise InputError(
                    f"{printable(word)}: has the same samples as {printable(first[path])}: {file.name}"
                )
            first[path] = word
    labels = numbered([each.label for each in runs])
    return [replace(each, label=label) for each, label in zip(runs, labels, strict=True)]


def klds_of(file: Path, labels: Sequence[str]) -> dict[str, Value]:
    """Return label -> KLD of a results.json or report.html; InputError if it has no row of these
    labels.
    """
    results = RunResult.read(file)
    klds = {row.label: Value(row.kld, row.kld_stderr) for row in results.models}
    if not klds.keys() & set(labels):
        line = f"{file}: has no row called {', '.join(labels)}; it has {', '.join(klds)}; name one as LABEL=PATH"
        raise InputError(f"--results: {printable(line)}")
    return klds


def write_files(
    args: argparse.Namespace, flip_report: FlipReport, klds: dict[str, Value] | None
) -> Outputs:
    """Write JSON, CSV and Markdown where flags name a file."""
    written = Outputs(args.verbose)
    texts: list[tuple[Path | None, Callable[..., str]]] = [
        (args.output, flips_report.json_text),
        (args.csv, flips_report.csv_text),
        (args.markdown, flips_report.markdown),
    ]
    for file, text_of in texts:
        if file is not None:
            with written.writing(file):
                write_text(file, text_of(flip_report, klds))
                say(f"written: {file}")
    return written
