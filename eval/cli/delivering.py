"""What a run was asked for: the table first, then files and plots, none of which takes another with it if it fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compare_q.eval.common.cache import Cache
from compare_q.eval.common.outputs import Outputs
from compare_q.eval.plots import measures
from compare_q.eval.results import flat, results_json
from compare_q.eval.results.differences import near_lossless
from compare_q.eval.results.run_result import Results, TextResult
from compare_q.eval.table import columns, llama_statistics, markdown, pairs, terminal

if TYPE_CHECKING:
    from compare_q.backends.base import Window
    from compare_q.eval.run.runner import Finished

Inspect = Callable[[], Sequence[Any]]
"""Makes what the HTML report shows of single tokens of each text, None for one that failed; called only if a report is
written."""


def nothing_scored(results: Results) -> list[str]:
    """Why no model was scored, a line for each text that failed and each model; empty if one was."""
    if any(len(text.failed) < len(text.models) for text in results.scored):
        return []
    failed = [f"{text.name}: {text.error}" for text in results.texts if text.error]
    for label in results.labels:
        reasons = dict.fromkeys(model.error for model in results.of_label(label) if model is not None)
        failed += [f"{label}: {reason}" for reason in reasons]
    return failed


def is_incomplete(results: Results) -> bool:
    """Whether a model or a text failed."""
    return any(text.error or text.failed for text in results.texts)


def deliver(args: argparse.Namespace, finished: Finished, cache: Cache, outputs: Outputs) -> None:
    """All that was asked for of a run that has just finished."""

    def inspect() -> Sequence[Any]:
        from compare_q.eval.html import inspector

        return [
            None if data is None else inspector.inspect_tokens(text, data, cache)
            for text, data in zip(finished.results.texts, finished.data, strict=True)
        ]

    results = replace(finished.results, title=args.title)
    show(args, results, outputs)
    if args.tokens_out:
        copy_scores(cache, finished, args.tokens_out, outputs)
    write(args, results, inspect, outputs)


def show(args: argparse.Namespace, results: Results, outputs: Outputs) -> None:
    """Print the table, and whatever else is to be printed; what is about one of several texts below its name."""
    table, console = columns.ordered(results, args.sort), Console()
    with outputs.writing("standard output"):
        terminal.show(table, console, args.columns, by_text=args.by_text)
        if args.timing:
            terminal.show_timing(table, console)
        if args.statistics or args.pairs or args.pair:
            for text in table.scored:
                if len(table.texts) > 1:
                    terminal.heading(console, text.name)
                show_details(args, text)


def show_details(args: argparse.Namespace, text: TextResult) -> None:
    """Print the statistics of every row, and how rows differ, if that is asked for."""
    if args.statistics:
        print("", *llama_statistics.statistics_lines(text), sep="\n")
    chosen = [*(pairs.neighbours(text) if args.pairs else []), *pairs.pairs_by_label(text, args.pair)]
    if chosen:
        print("", *pairs.pair_lines(chosen, text.data.get("text_tokens"), near_lossless(text.models)), sep="\n")


def write(args: argparse.Namespace, results: Results, inspect: Inspect, outputs: Outputs) -> None:
    """Write the files of a run and draw its plots; CSV and Markdown have the order of the table."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    table = columns.ordered(results, args.sort)

    def write_markdown(file: Path) -> None:
        markdown.write(table, file, args.columns, by_text=args.by_text, timing=args.timing)

    def write_report(file: Path) -> None:
        from compare_q.eval.html import report

        report.write(results, inspect(), file, command, args.columns)

    wanted: tuple[tuple[Path | None, str, Callable[[Path], None]], ...] = (
        (args.output, "results", lambda file: results_json.write_json(results, file, command)),
        (args.csv, "CSV", lambda file: flat.write_csv(table, file, columns.fields_of(args.columns))),
        (args.markdown, "Markdown", write_markdown),
        (args.html, "report", write_report),
    )
    for file, name, write_file in wanted:
        if file:
            with outputs.writing(file):
                write_file(file)
                print(f"{name}: {file}")
    draw(args, results, outputs)


def draw(args: argparse.Namespace, results: Results, outputs: Outputs) -> None:
    """Draw the plot and the pictures that were asked for."""
    for file in filter(None, (args.plot_file, args.card)):
        size, measure = measures.SIZES.get(args.x_axis), measures.chosen(results, args.measure, args.kld_value)
        with outputs.writing(file):
            from compare_q.eval.plots import pictures  # a package that is missing is this output's failure alone

            pictures.draw(
                results, file, measure, size=size, max_x=args.max_x, max_y=args.max_y, dark=args.dark,
                log_y=args.log_y, card=file == args.card,
            )  # fmt: skip
    if args.plots:
        with outputs.writing(args.plots):
            from compare_q.eval.plots import pictures

            pictures.write_all(results, args.plots, outputs, dark=args.dark)


def token_files(folder: Path | None, labels: Sequence[str], texts: Sequence[str]) -> list[Path]:
    """Every file that ``--tokens-out`` may write, of several texts in a folder each."""
    from compare_q.eval.run.token_scores import file_names

    parts = file_names(texts) if len(texts) > 1 else [""]
    return [folder / part / f"{name}.parquet" for part in parts for name in file_names(labels)] if folder else []


def copy_scores(cache: Cache, finished: Finished, folder: Path, outputs: Outputs) -> None:
    """``--tokens-out``: the token scores of every model, of several texts in a folder for each text."""
    from compare_q.eval.run.token_scores import file_names

    texts = finished.results.texts
    several = len(texts) > 1
    names = file_names([text.name for text in texts]) if several else [""]
    for text, data, name in zip(texts, finished.data, names, strict=True):
        if data is not None:
            of = f" on {text.name}" if several else ""
            copy_scores_of_text(cache, text, data.windows, folder / name, outputs, of)


def copy_scores_of_text(
    cache: Cache, text: TextResult, windows: Sequence[Window], folder: Path, outputs: Outputs, of: str
) -> None:
    """The token scores of every scored model on a text; a failed model's file name stays free.

    ``of``: what is said behind a label, of several texts.
    """
    from compare_q.eval.run import token_scores

    names = token_scores.file_names([model.label for model in text.models])
    for model, name in zip(text.models, names, strict=True):
        stored = None if model.error else token_scores.of_row(cache, model.scores_key, windows)
        if stored is not None:
            file = folder / f"{name}.parquet"
            with outputs.writing(file):
                folder.mkdir(exist_ok=True)
                token_scores.write_parquet(stored, file)
                print(f"tokens of {model.label}{of}: {file}")
