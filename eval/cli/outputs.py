"""Outputs of a command: messages, the table, files and plots, each even if another fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ...backends.common.message_text import shortened
from ..common.output_files import Outputs, write_text
from ..common.terminal import say
from ..plots import fonts, measures
from ..results import ModelResult, RunResult
from ..table import columns, conditions, markdown, pairs, terminal_table
from ..table.csv_text import csv_of_run
from ..table.numbers import KLD_DIGITS, bound_text, number_text
from ..table.tables import table_of
from .commands import OutputFiles, PictureFlags, TableFlags

LONGEST_ERROR = 3000
"""Maximum number of characters in a line about an error, which may repeat a word of the command
line."""


def print_errors(problems: str) -> int:
    """Print each line on standard error; return the exit status: 2, or 0 without problems."""
    for line in problems.splitlines():
        say(f"error: {shortened(line, LONGEST_ERROR)}", console=Console(stderr=True))
    if problems:
        return 2
    return 0


def print_note(*lines: str | None) -> None:
    """Print the lines that are not None on standard error."""
    for line in lines:
        if line is not None:
            say(line, console=Console(stderr=True))


def print_row(say: Callable[[str], object], row: ModelResult) -> None:
    """Print a row that was just scored: ``W4A16: PPL 7.5, KLD 0.012``."""
    if row.ppl is None or row.from_cache:
        return
    line = f"{row.label}: PPL {row.ppl:,.4f}"
    if row.kld is not None and not row.reference:
        kld = number_text(row.kld, KLD_DIGITS)
        if row.has_bound:
            kld = bound_text(row.kld, KLD_DIGITS)
        line += f", KLD {kld}"
    say(line)


def print_failures(results: RunResult, fail_if: Sequence[conditions.Condition]) -> int:
    """Print the rows that meet a condition of ``--fail-if``.

    Returns exit status 4 if there are any, or else 0.
    """
    failures = list(conditions.faults(results, fail_if))
    for line in failures:
        print_note(f"failed: {line}")
    if failures:
        return 4
    return 0


def nothing_scored(results: RunResult) -> list[str]:
    """Return why no model was scored, one line for each; empty if a model was scored."""
    errors = []
    for model in results.models:
        if not model.error:
            return []
        errors.append(f"{model.label}: {model.error}")
    return errors


def in_table_order(table: TableFlags, results: RunResult) -> RunResult:
    """Return the run with its rows in the order of ``--sort`` and with the marks of ``--fit``."""
    ordered = columns.sorted_rows(results, table.sort)
    if table.fit is None:
        return ordered
    return table.fit.marked(ordered)


def print_table(table: TableFlags, results: RunResult, outputs: Outputs) -> None:
    """Print the table, and paired differences on request."""
    ordered = in_table_order(table, results)
    if table.sort:
        reason = columns.no_order(results, table.sort)
        if reason:
            print_note(f"--sort: {reason}")
    with outputs.writing("standard output"):
        terminal_table.show(table_of(ordered, table.columns), Console(), notes=table.notes)
        if table.fit is not None:
            summary = table.fit.summary(results)
            if summary is not None:
                say("", summary)
        chosen_pairs = pairs.pairs_by_label(ordered, table.pair)
        if table.pairs:
            chosen_pairs = [*pairs.neighbours(ordered), *chosen_pairs]
        if chosen_pairs:
            say("", *pairs.pair_lines(chosen_pairs, ordered))


def write_files(
    files: OutputFiles,
    table: TableFlags,
    pictures: PictureFlags,
    results: RunResult,
    outputs: Outputs,
) -> int:
    """Write the files, draw the plots, print the closing sentences and one line per failure.

    Returns the exit status.  CSV, Markdown and report have the order of the table.
    """
    # A finished run keeps the origin that it was written with.
    results = results.with_origin([Path(sys.argv[0]).name, *sys.argv[1:]])
    ordered = in_table_order(table, results)
    with fonts.one_line_on_missing(say):
        write_texts(files, table.columns, ordered, results, outputs)
        draw_pictures(pictures, results, outputs)
    with outputs.writing("standard output"):
        # The sentences name rows in the order of the run, not in that of --sort.
        terminal_table.conclude(table_of(results), Console())
    return print_errors("\n".join(outputs.failures))


def write_texts(
    files: OutputFiles,
    names: Sequence[str] | None,
    ordered: RunResult,
    results: RunResult,
    outputs: Outputs,
) -> None:
    """Write the results, CSV, Markdown, model card and report.

    ``names``: of the columns; ``ordered``: the run in the order of the table.
    """

    def csv_text() -> str:
        return csv_of_run(ordered, names)

    def markdown_text() -> str:
        return markdown.markdown_text(table_of(ordered, names))

    def card_text() -> str:
        # Imported here, so that a missing package fails this output alone.
        from ..report import model_card

        return model_card.card_text(ordered, names)

    def report_text() -> str:
        from ..report import html_page

        return html_page.page_of(ordered, names, results)

    texts: tuple[tuple[Path | None, str, Callable[[], str]], ...] = (
        (files.output, "results", results.json_text),
        (files.csv, "CSV", csv_text),
        (files.markdown, "Markdown", markdown_text),
        (files.model_card, "model card", card_text),
        (files.html, "report", report_text),
    )
    for file, title, text_of in texts:
        if file is not None:
            with outputs.writing(file):
                write_text(file, text_of())
                say(f"{title}: {file}")


def draw_pictures(flags: PictureFlags, results: RunResult, outputs: Outputs) -> None:
    """Draw the plot of ``-p``, the card, and the folder of ``--plots``."""
    for file in (flags.plot_file, flags.card):
        if file is not None:
            with outputs.writing(file):
                draw_scatter(file, flags, results, outputs)
    if flags.plots is not None:
        with outputs.writing(flags.plots):
            # Imported here, so that a missing matplotlib fails this output alone.
            from ..plots import pictures

            pictures.write_all(results, flags.plots, outputs, dark=flags.dark)


def draw_scatter(file: Path, flags: PictureFlags, results: RunResult, outputs: Outputs) -> None:
    """Draw the plot of ``-p``, or the card, into a file."""
    from ..plots import pictures

    pictures.draw(
        results,
        file,
        outputs,
        measures.measure_of_flags(results, flags.measure, flags.kld_value),
        size=measures.size_of(flags.x_axis or "bpw"),
        max_x=flags.max_x,
        max_y=flags.max_y,
        dark=flags.dark,
        log_y=flags.log_y,
        card=file == flags.card,
    )
