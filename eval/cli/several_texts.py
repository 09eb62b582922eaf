"""What a run of several texts was asked for: the table first, then files and plots, as for one text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from eval.cli import delivering
from eval.common.cache import Cache
from eval.common.outputs import Outputs
from eval.plots import measures
from eval.results import results_csv, texts_json
from eval.results.texts import TextsResult
from eval.run.token_scores import file_names
from eval.table import columns, several_texts, terminal, text_columns

if TYPE_CHECKING:
    from eval.run.runner import FinishedTexts

Inspect = Callable[[], list[Any]]
"""Makes what the HTML report shows of single tokens, for each text, None for one that failed."""


def deliver(args: argparse.Namespace, finished: FinishedTexts, cache: Cache, outputs: Outputs) -> None:
    """All that was asked for of a run that has just finished."""

    def inspect() -> list[Any]:
        from eval.html import inspector

        return [
            None if text.run is None or data is None else inspector.inspect_tokens(text.run, data, cache)
            for text, data in zip(finished.results.texts, finished.data, strict=True)
        ]

    result = replace(finished.results, title=args.title)
    show(args, result, outputs)
    if args.tokens_out:
        copy_scores(cache, finished, args.tokens_out, outputs)
    write(args, result, inspect, outputs)


def show(args: argparse.Namespace, result: TextsResult, outputs: Outputs) -> None:
    """Print the table, and whatever else is to be printed; what is about one text stands below its name."""
    table, console = text_columns.ordered(result, args.sort), Console()
    with outputs.writing("standard output"):
        (several_texts.show_by_text if args.by_text else several_texts.show)(table, console, args.columns)
        if args.timing:
            console.print(terminal.timing_table(*several_texts.timing_of_texts(table)))
        for text in table.texts:
            if text.run is not None and (args.statistics or args.pairs or args.pair):
                several_texts.heading(console, text.name)
                delivering.show_details(args, text.run)


def write(args: argparse.Namespace, result: TextsResult, inspect: Inspect, outputs: Outputs) -> None:
    """Write the files of a run and draw its plots; CSV and Markdown have the order of the table."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    table = text_columns.ordered(result, args.sort)

    def write_markdown(file: Path) -> None:
        several_texts.write_markdown(table, file, args.columns, by_text=args.by_text, timing=args.timing)

    def write_report(file: Path) -> None:
        from eval.html import texts_report

        texts_report.write_report(result, inspect(), file, command, args.columns)

    delivering.write_each(
        outputs,
        (args.output, "results", lambda file: texts_json.write_json(result, file, command)),
        (args.csv, "CSV", lambda file: results_csv.write_csv(table, file, columns.fields_of(args.columns))),
        (args.markdown, "Markdown", write_markdown),
        (args.html, "report", write_report),
    )
    draw(args, result, outputs)


def draw(args: argparse.Namespace, result: TextsResult, outputs: Outputs) -> None:
    """Draw the plot of all texts, and of each text the pictures that were asked for."""
    for file in filter(None, (args.plot_file, args.card)):
        with outputs.writing(file):
            from eval.plots.texts import dumbbell  # a package that is missing is this output's failure alone

            size = measures.SIZES[args.x_axis] if args.x_axis else None
            dumbbell.draw(
                result, file, size=size, title=result.title, dark=args.dark, card=file == args.card, kind=args.measure
            )
    if args.plots:
        with outputs.writing(args.plots):
            from eval.plots.texts import dumbbell

            dumbbell.write_all(result, args.plots, outputs, dark=args.dark, title=result.title or "")


def copy_scores(cache: Cache, finished: FinishedTexts, folder: Path, outputs: Outputs) -> None:
    """``--tokens-out``: a folder for each text, with the token scores of every model that scored it."""
    names = file_names([text.name for text in finished.results.texts])
    for text, data, name in zip(finished.results.texts, finished.data, names, strict=True):
        if text.run is not None and data is not None:
            delivering.copy_scores(cache, text.run, data.windows, folder / name, outputs, f" on {text.name}")
