"""What a run was asked for: the table first, then files and plots, none of which takes another with it if it fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from eval.common.cache import Cache
from eval.common.outputs import Outputs
from eval.plots import measures
from eval.results import results_csv, results_json
from eval.results.near_lossless import near_lossless
from eval.results.run_result import RunResult
from eval.results.texts import TextsResult
from eval.table import columns, llama_statistics, markdown, pairs, terminal

if TYPE_CHECKING:
    from backends.base import Window
    from eval.run.runner import FinishedRun

Inspect = Callable[[], Any]
"""Makes what the HTML report shows of single tokens; called only if a report is written."""


def nothing_scored(result: RunResult | TextsResult) -> list[str]:
    """Why no model was scored, a line for each model, and text where there are several; empty if one was."""
    if isinstance(result, RunResult):
        failed = [f"{model.label}: {model.error}" for model in result.failed]
        return failed if len(failed) == len(result.models) else []
    if any(len(run.failed) < len(run.models) for run in result.runs):
        return []
    failed = [f"{text.name}: {text.error}" for text in result.texts if text.run is None]
    for label in result.labels:
        reasons = dict.fromkeys(model.error for model in result.of_label(label) if model is not None)
        failed += [f"{label}: {reason}" for reason in reasons]
    return failed


def is_incomplete(result: RunResult | TextsResult) -> bool:
    """Whether a model or a text failed."""
    if isinstance(result, RunResult):
        return bool(result.failed)
    return len(result.runs) < len(result.texts) or any(run.failed for run in result.runs)


def deliver(args: argparse.Namespace, finished: FinishedRun, cache: Cache, outputs: Outputs) -> None:
    """All that was asked for of a run that has just finished."""

    def inspect() -> Any:
        from eval.html import inspector

        return inspector.inspect_tokens(finished.results, finished.data, cache)

    run = replace(finished.results, title=args.title)
    show(args, run, outputs)
    if args.tokens_out:
        copy_scores(cache, run, finished.data.windows, args.tokens_out, outputs)
    write(args, run, inspect, outputs)


def show(args: argparse.Namespace, run: RunResult, outputs: Outputs) -> None:
    """Print the table, and whatever else is to be printed."""
    table = columns.ordered(run, args.sort)
    with outputs.writing("standard output"):
        terminal.show(table, Console(), args.columns)
        if args.timing:
            terminal.show_timing(table, Console())
        show_details(args, table)


def show_details(args: argparse.Namespace, table: RunResult) -> None:
    """Print the statistics of every row, and how rows differ, if that is asked for."""
    if args.statistics:
        print("", *llama_statistics.statistics_lines(table), sep="\n")
    chosen = [*(pairs.neighbours(table) if args.pairs else []), *pairs.pairs_by_label(table, args.pair)]
    if chosen:
        print("", *pairs.pair_lines(chosen, table.data.get("text_tokens"), near_lossless(table.models)), sep="\n")


def write(args: argparse.Namespace, run: RunResult, inspect: Inspect, outputs: Outputs) -> None:
    """Write the files of a run and draw its plots; CSV and Markdown have the order of the table."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    table = columns.ordered(run, args.sort)

    def write_report(file: Path) -> None:
        from eval.html import report

        report.write(run, inspect(), file, command, run.title or report.TITLE, args.columns)

    write_each(
        outputs,
        (args.output, "results", lambda file: results_json.write_json(run, file, command)),
        (args.csv, "CSV", lambda file: results_csv.write_csv(table, file, columns.fields_of(args.columns))),
        (args.markdown, "Markdown", lambda file: markdown.write(table, file, args.columns, timing=args.timing)),
        (args.html, "report", write_report),
    )
    draw(args, run, outputs)


def write_each(outputs: Outputs, *wanted: tuple[Path | None, str, Callable[[Path], None]]) -> None:
    """Write the files that were asked for, each called by its name when it is there; one that fails stops no other."""
    for file, name, write_file in wanted:
        if file:
            with outputs.writing(file):
                write_file(file)
                print(f"{name}: {file}")


def draw(args: argparse.Namespace, run: RunResult, outputs: Outputs) -> None:
    """Draw the plot and the pictures that were asked for."""
    for file in filter(None, (args.plot_file, args.card)):
        size, measure = measures.SIZES[args.x_axis or "bpw"], measures.chosen(run, args.measure, args.kld_value)
        with outputs.writing(file):
            from eval.plots import figures  # a package that is missing is this output's failure alone

            figures.draw(
                run, file, size=size, measure=measure, max_x=args.max_x, max_y=args.max_y, title=run.title,
                dark=args.dark, log_y=args.log_y, card=file == args.card,
            )  # fmt: skip
    if args.plots:
        with outputs.writing(args.plots):
            from eval.plots import pictures

            pictures.write_all(run, args.plots, outputs, dark=args.dark, title=run.title or "")


def token_files(folder: Path | None, labels: Sequence[str], texts: Sequence[str]) -> list[Path]:
    """Every file that ``--tokens-out`` may write, of several texts in a folder each."""
    from eval.run.token_scores import file_names

    parts = file_names(texts) if len(texts) > 1 else [""]
    return [folder / part / f"{name}.parquet" for part in parts for name in file_names(labels)] if folder else []


def copy_scores(
    cache: Cache, run: RunResult, windows: Sequence[Window], folder: Path, outputs: Outputs, of: str = ""
) -> None:
    """``--tokens-out``: the token scores of every scored model; a failed model's file name stays free.

    ``of``: what is said behind a label, of several texts.
    """
    from eval.run import token_scores

    models = run.models
    names = token_scores.file_names([model.label for model in models])
    for model, name in zip(models, names, strict=True):
        stored = None if model.error else token_scores.of_row(cache, model.scores_key, windows)
        if stored is not None:
            file = folder / f"{name}.parquet"
            with outputs.writing(file):
                folder.mkdir(exist_ok=True)
                token_scores.write_parquet(stored, file)
                print(f"tokens of {model.label}{of}: {file}")
