"""What a run was asked for: whether it can be written; then the table, files and plots, of which any may fail alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, is_file, is_folder
from compare_q.backends.common.messages import printable
from compare_q.backends.common.options import strings_in
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.files import Outputs, file_names, is_writable, write_text
from compare_q.eval.plots import measures
from compare_q.eval.results import RunResult
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.table import columns, pairs, render

if TYPE_CHECKING:
    from compare_q.eval.run.runner import RunOutcome

TokenFiles = Mapping[tuple[str, str], Path]
"""(text, label) -> the file of ``--tokens-out``."""


def inputs_of(
    args: argparse.Namespace, data_specs: Iterable[DataSpec], model_specs: Sequence[ModelSpec]
) -> list[str | Path]:
    """What a run reads, so that no output may replace it: spec files, texts, tokenizers, models, a reference."""
    from compare_q.eval.text import windows

    read: list[str | Path] = [*reading.expand(map(str, args.dataspec or [])), *reading.expand(args.modelspec or [])]
    for model in model_specs:
        named = [path for path in map(Path, strings_in(model.options)) if is_file(path)]
        read += [
            model.located,
            *model.override_tensors,
            *named,
            *([model.locate(model.python)] if model.python else []),
        ]
    for spec in data_specs:
        read.append(spec.locate(spec.tokenizer_dir))
        with suppress(InputError):  # which the run will meet too
            read += windows.paths_of(spec)
    return read if args.logits_file is None else [*read, args.logits_file]


def check(args: argparse.Namespace, inputs: Sequence[str | Path] = (), tokens: Iterable[Path] = ()) -> None:
    """InputError, before anything runs, for an output that could not be written afterwards, or that is an input too.

    ``inputs``: files and folders that the run reads; ``tokens``: the files of ``--tokens-out``.
    """
    files = {"--output": args.output, "--csv": args.csv, "--markdown": args.markdown, "--html": args.html,
             "--plot_file": args.plot_file, "--card": args.card}  # fmt: skip
    given = [(flag, file) for flag, file in files.items() if file is not None]
    written = [*given, *(("--tokens-out", file) for file in tokens if os.path.lexists(file))]
    asked = {"--tokens-out": args.tokens_out, "--plots": args.plots, "--save-specs": args.save_specs}
    folders = [(flag, folder) for flag, folder in asked.items() if folder]
    read = {os.path.realpath(path) for path in (*args.source, *inputs) if exists(path)}
    taken: dict[str, str] = {}
    for flag, file in written:
        if not is_writable(file):
            folder = Path(file).parent
            why = "is the folder yours, and the file?" if is_folder(folder) else f"there is no folder {folder}"
            raise InputError(f"{flag}: {file}: cannot be written; {why}")
        if (other := taken.setdefault(os.path.realpath(file), flag)) != flag:
            raise InputError(f"{flag}: {file}: is the file of {other} as well; name another file")
    for flag, path in (*folders, *written):
        place = Path(os.path.realpath(path))
        if read & set(map(str, (place, *place.parents))):
            raise InputError(f"{flag}: {path}: is read here, or lies in a folder that is; name another")
    for flag, folder in folders:
        if not can_hold(Path(folder)):
            raise InputError(f"{flag}: {folder}: cannot be written; is the folder yours?")
    for flag, file in given:
        if flag in ("--plot_file", "--card") and file.suffix.lower() not in measures.SUFFIXES:
            raise InputError(f"{flag}: {file}: must end in {', '.join(measures.SUFFIXES)}")


def can_hold(folder: Path) -> bool:
    """Whether a folder may be written, or made where there is none yet."""
    try:
        folder.stat()
    except FileNotFoundError:
        return not folder.is_symlink() and can_hold(folder.parent)
    except OSError:
        return False
    return folder.is_dir() and os.access(folder, os.W_OK)


def nothing_scored(results: RunResult) -> list[str]:
    """Why no model was scored, a line for each text that failed and each model; empty if one was."""
    if any(len(text.failed) < len(text.models) for text in results.scored):
        return []
    failed = [f"{text.name}: {text.error}" for text in results.texts if text.error]
    for label in results.labels:
        reasons = dict.fromkeys(model.error for model in results.of_label(label) if model is not None)
        failed += [f"{label}: {reason}" for reason in reasons]
    return failed


def show(args: argparse.Namespace, results: RunResult, outputs: Outputs) -> None:
    """Print the table, and whatever else is to be printed; what is about one of several texts below its name."""
    table, console = columns.ordered(results, args.sort), Console()
    if args.sort and (reason := columns.no_order(results, args.sort)):
        print(f"--sort: {printable(reason)}", file=sys.stderr)
    with outputs.writing("standard output"):
        render.show(table, console, args.columns, by_text=args.by_text, notes=args.notes)
        if args.timing:
            render.show_timing(table, console)
        for text in table.scored if args.pairs or args.pair else ():
            if len(table.texts) > 1:
                render.heading(console, text.name)
            chosen = [*(pairs.neighbours(text) if args.pairs else []), *pairs.pairs_by_label(text, args.pair)]
            if chosen:
                print("", *pairs.pair_lines(chosen, text), sep="\n")


def write(args: argparse.Namespace, results: RunResult, outputs: Outputs) -> None:
    """Write the files of a run and draw its plots; CSV, Markdown and report have the order of the table."""
    results = results.with_origin([Path(sys.argv[0]).name, *sys.argv[1:]])
    table = columns.ordered(results, args.sort)

    def report_text() -> str:
        from compare_q.eval.report import page

        return page.page_of(table, args.columns, results)

    def draw(file: Path) -> None:
        from compare_q.eval.plots import pictures  # a package that is missing is this output's failure alone

        measure, size = measures.chosen(results, args.measure, args.kld_value), measures.SIZES[args.x_axis or "bpw"]
        pictures.draw(
            results, file, measure, size=size, max_x=args.max_x, max_y=args.max_y, dark=args.dark, log_y=args.log_y,
            card=file == args.card,
        )  # fmt: skip

    def draw_all(folder: Path) -> None:
        from compare_q.eval.plots import pictures

        pictures.write_all(results, folder, outputs, dark=args.dark)

    texts: tuple[tuple[Path | None, str, Callable[[], str]], ...] = (
        (args.output, "results", results.json_text),
        (args.csv, "CSV", lambda: render.csv_text(table, columns.fields_of(args.columns))),
        (args.markdown, "Markdown",
         lambda: render.markdown_text(table, args.columns, by_text=args.by_text, timing=args.timing)),
        (args.html, "report", report_text),
    )  # fmt: skip
    for file, name, text_of in texts:
        if file:
            with outputs.writing(file):
                write_text(file, text_of())
                print(f"{name}: {file}")
    for path, draw_it in ((args.plot_file, draw), (args.card, draw), (args.plots, draw_all)):
        if path:
            with outputs.writing(path):
                draw_it(path)


def conclude(results: RunResult, outputs: Outputs) -> None:
    """Print the last line of a run: what was found."""
    with outputs.writing("standard output"):
        render.conclude(results, Console())


def token_files(folder: Path, texts: Sequence[str], labels: Sequence[str]) -> dict[tuple[str, str], Path]:
    """Every file that ``--tokens-out`` may write, of several texts in a folder each."""
    folders = dict(zip(texts, file_names(texts) if len(texts) > 1 else [""], strict=True))
    files = dict(zip(labels, file_names(labels), strict=True))
    return {(text, label): folder / folders[text] / f"{files[label]}.parquet" for text in texts for label in labels}


def copy_scores(cache: Cache, finished: RunOutcome, files: TokenFiles, outputs: Outputs) -> None:
    """``--tokens-out``: the token scores of every scored model; a failed model's file name stays free."""
    from compare_q.eval.run import token_scores

    for text, data in zip(finished.results.texts, finished.data, strict=True):
        of = f" on {text.name}" if len(finished.data) > 1 else ""
        for model in text.models:
            stored = None if data is None or model.error else token_scores.of_row(cache, model.scores_key, data.windows)
            if stored is not None:
                file = files[text.name, model.label]
                with outputs.writing(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    token_scores.write_parquet(stored, file)
                    print(f"tokens of {model.label}{of}: {file}")
