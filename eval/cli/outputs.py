"""Outputs of a run: check them before the start; write table, files and plots, each even if another
fails.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ...backends.common.engine_options import paths_in
from ...backends.common.errors import InputError
from ...backends.common.json_files import exists, is_file, is_folder
from ...backends.common.message_text import printable, shortened
from ..common.cache import Cache
from ..common.output_files import Outputs, file_names, is_writable, write_text
from ..common.terminal import say
from ..plots import fonts, measures
from ..results import ModelResult, RunResult
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..table import columns, pairs, render
from .cache_command import large_cache_note, limited

if TYPE_CHECKING:
    from ..run.runner import RunOutcome

FILES = (
    "--output",
    "--csv",
    "--markdown",
    "--model-card",
    "--junit",
    "--html",
    "--plot_file",
    "--card",
)
SPECS = ("data.json", "models.json")
"""The files that ``--save-specs`` writes: data specs and model specs.  No existing file is
replaced."""
NO_PART_OF_A_MODEL = (*measures.SUFFIXES, ".html", ".csv", ".md")
"""Suffixes of outputs that may be written into the folder of a model: engines do not read such
files, and the keys of cached scores do not depend on them."""
LONGEST_ERROR = 3000
"""Maximum number of characters in a line about an error, which may repeat a word of the command
line."""
FOLDERS = ("--tokens-out", "--plots", "--save-specs")


def print_errors(problems: str) -> int:
    """Print each line on standard error; return the exit status: 2, or 0 without problems."""
    for line in problems.splitlines():
        say(f"error: {shortened(line, LONGEST_ERROR)}", console=Console(stderr=True))
    return 2 if problems else 0


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
        line += f", KLD {row.kld:z.5f}"
    say(line)


def check(
    args: argparse.Namespace, texts: Mapping[str, DataSpec] = {}, models: Sequence[ModelSpec] = ()
) -> None:
    """InputError, before anything runs, for an output that cannot be written, or is an input of
    this run.
    """
    given = {
        flag: path
        for flag in (*FILES, *FOLDERS)
        if (path := getattr(args, flag[2:].replace("-", "_")))
    }
    tokens = token_files(args.tokens_out, [spec.name for spec in models]) if args.tokens_out else {}
    written = [(flag, given[flag]) for flag in FILES if flag in given]
    written += [("--tokens-out", file) for file in tokens.values() if os.path.lexists(file)]
    folders = [(flag, given[flag]) for flag in FOLDERS if flag in given]
    read = {os.path.realpath(path) for path in inputs_of(args, texts, models) if exists(path)}
    taken: dict[str, str] = {}
    for flag, file in written:
        if not is_writable(file):
            folder = file.parent
            why = (
                "is the folder yours, and the file?"
                if is_folder(folder)
                else f"there is no folder {folder}"
            )
            raise InputError(f"{flag}: {file}: cannot be written; {why}")
        if (other := taken.setdefault(os.path.realpath(file), flag)) != flag:
            raise InputError(f"{flag}: {file}: is the file of {other} as well; name another file")
        if flag in ("--plot_file", "--card") and file.suffix.lower() not in measures.SUFFIXES:
            raise InputError(f"{flag}: {file}: must end in {', '.join(measures.SUFFIXES)}")
    of_models = {
        os.path.realpath(folder) for folder in model_folders(texts, models)
    } - folders_of_texts(texts)
    for flag, path in (*folders, *written):
        place = Path(os.path.realpath(path))
        sources = read & set(map(str, (place, *place.parents)))
        if flag in FILES and path.suffix.lower() in NO_PART_OF_A_MODEL:
            sources -= of_models
        if sources:
            raise InputError(
                f"{flag}: {path}: is read here, or lies in a folder that is; name another"
            )
    for flag, folder in folders:
        there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
        if not (is_folder(there) and os.access(there, os.W_OK | os.X_OK)):
            raise InputError(f"{flag}: {folder}: cannot be written; is the folder yours?")
    for file in (args.save_specs / name for name in SPECS) if args.save_specs else ():
        if os.path.lexists(file):
            raise InputError(f"--save-specs: {file}: exists already; name another folder")


def model_folders(texts: Mapping[str, DataSpec], models: Sequence[ModelSpec]) -> list[str | Path]:
    """Return the paths of models and tokenizers.  Engines read only files of a checkpoint there."""
    folders: list[str | Path] = [model.located for model in models]
    for spec in texts.values():
        folders.append(spec.locate(spec.tokenizer_dir))
    return folders


def folders_of_texts(texts: Mapping[str, DataSpec]) -> set[str]:
    """Return the files and folders of texts; a file that is added to a folder may be read as a
    text.
    """
    from ..text import corpus

    found: set[str] = set()
    for spec in texts.values():
        with suppress(InputError):  # the run reports it
            found |= {os.path.realpath(path) for path in corpus.paths_of(spec)}
    return found


def inputs_of(
    args: argparse.Namespace, texts: Mapping[str, DataSpec], models: Sequence[ModelSpec]
) -> list[str | Path]:
    """Return the files and folders that the command reads, which no output may replace."""
    from ..text import corpus

    read: list[str | Path] = [
        *args.source,
        *spec_files.expand([*map(str, args.dataspec or []), *(args.modelspec or [])]),
    ]
    for model in models:
        read += [
            model.located,
            *model.override_tensors,
            *filter(is_file, map(Path, paths_in(model.options))),
        ]
        read += [model.locate(model.python)] if model.python else []
    for spec in texts.values():
        read.append(spec.locate(spec.tokenizer_dir))
        with suppress(InputError):  # the run reports it
            read += corpus.paths_of(spec)
    return read if args.logits_file is None else [*read, args.logits_file]


def nothing_scored(results: RunResult) -> list[str]:
    """Return why no model was scored, one line for each; empty if a model was scored."""
    if any(not model.error for model in results.models):
        return []
    return [f"{model.label}: {model.error}" for model in results.models]


def table_of(args: argparse.Namespace, results: RunResult) -> RunResult:
    """Return the run with its rows in the order of ``--sort`` and with the marks of ``--fit``."""
    ordered = columns.ordered(results, args.sort)
    return args.fit.marked(ordered) if args.fit else ordered


def print_table(args: argparse.Namespace, results: RunResult, outputs: Outputs) -> None:
    """Print the table, and paired differences on request."""
    table, console = table_of(args, results), Console()
    if args.sort and (reason := columns.no_order(results, args.sort)):
        print_note(f"--sort: {reason}")
    with outputs.writing("standard output"):
        render.show(table, console, args.columns, notes=args.notes)
        fitting = args.fit.summary(results) if args.fit else None
        if fitting is not None:
            say("", fitting)
        chosen = pairs.pairs_by_label(table, args.pair)
        if args.pairs:
            chosen = [*pairs.neighbours(table), *chosen]
        if chosen:
            say("", *pairs.pair_lines(chosen, table))


def write_run(
    args: argparse.Namespace,
    cache: Cache,
    done: RunOutcome,
    texts: Mapping[str, DataSpec],
    models: Sequence[ModelSpec],
    outputs: Outputs,
) -> RunResult:
    """Write specs and token scores, and limit the cache; return the results with each model's worst
    tokens.
    """
    from ..run import token_scores

    results = done.results
    if args.save_specs and not done.signal:
        from . import shorthand

        with outputs.writing(args.save_specs):
            command = shorthand.save(args.save_specs, SPECS, list(texts.values()), models, done)
            flags = ["--verify-weights"] * args.verify_weights
            flags += [
                f"--python={shlex.quote(printable(f'{engine}={python}'))}"
                for engine, python in args.python
            ]
            if args.logits_file:
                flags += ["-lf", shlex.quote(printable(os.path.abspath(args.logits_file)))]
            print(
                " ".join([command, *flags]), file=sys.stderr
            )  # not broken, so that it can be pasted
    if args.tokens_out:
        files = token_files(args.tokens_out, [spec.name for spec in models])
        for model in results.models:
            stored = (
                None if model.error else token_scores.of_row(cache, model.scores_key, done.data)
            )
            if stored is not None:
                file = files[model.label]
                with outputs.writing(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    token_scores.write_parquet(stored, done.data, file)
                    say(f"tokens of {model.label}: {file}")
    if args.output or args.html:
        from ..report.worst_tokens import with_worst_tokens

        results = with_worst_tokens(results, done.data, cache)
    if args.cache_limit is not None:
        with outputs.writing(cache.root):
            say(limited(cache, args.cache_limit))
    else:
        print_note(large_cache_note(cache))
    return results


def token_files(folder: Path, labels: Sequence[str]) -> dict[str, Path]:
    """Return label -> the file that ``--tokens-out`` may write."""
    return {
        label: folder / f"{name}.parquet"
        for label, name in zip(labels, file_names(labels), strict=True)
    }


def write_files(args: argparse.Namespace, results: RunResult, outputs: Outputs) -> int:
    """Write the files, draw the plots, print the verdict and one line per failure; return the exit
    status.

    CSV, Markdown and report have the order of the table.
    """
    results = results.with_origin([Path(sys.argv[0]).name, *sys.argv[1:]])
    table = table_of(args, results)
    with fonts.one_line_on_missing(say):
        write_texts(args, table, results, outputs)
        draw_pictures(args, results, outputs)
    with outputs.writing("standard output"):
        render.conclude(results, Console())
    return print_errors("\n".join(outputs.failures))


def write_texts(
    args: argparse.Namespace, table: RunResult, results: RunResult, outputs: Outputs
) -> None:
    """Write the results, CSV, Markdown, model card and report; ``table``: the run in the order of
    the table.
    """

    def report_text() -> str:
        from ..report import html_page  # a missing package fails this output alone

        return html_page.page_of(table, args.columns, results)

    def card_text() -> str:
        from ..report import model_card

        return model_card.card_text(table, args.columns)

    texts: tuple[tuple[Path | None, str, Callable[[], str]], ...] = (
        (args.output, "results", results.json_text),
        (args.csv, "CSV", lambda: render.csv_text(table, args.columns)),
        (args.markdown, "Markdown", lambda: render.markdown_text(table, args.columns)),
        (args.model_card, "model card", card_text),
        (args.html, "report", report_text),
    )
    for file, name, text_of in texts:
        if file:
            with outputs.writing(file):
                write_text(file, text_of())
                say(f"{name}: {file}")


def draw_pictures(args: argparse.Namespace, results: RunResult, outputs: Outputs) -> None:
    """Draw the plot of ``-p``, the card, and the folder of ``--plots``."""
    for file in filter(None, (args.plot_file, args.card)):
        with outputs.writing(file):
            from ..plots import pictures

            measure = measures.chosen(results, args.measure, args.kld_value)
            size = measures.size_of(args.x_axis or "bpw")
            pictures.draw(
                results,
                file,
                outputs,
                measure,
                size=size,
                max_x=args.max_x,
                max_y=args.max_y,
                dark=args.dark,
                log_y=args.log_y,
                card=file == args.card,
            )
    if args.plots:
        with outputs.writing(args.plots):
            from ..plots import pictures

            pictures.write_all(results, args.plots, outputs, dark=args.dark)
