"""Flags that say what is printed and written; whether all that is asked for can be written."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists
from compare_q.eval.cli import plot_flags
from compare_q.eval.cli.flag_values import path_argument
from compare_q.eval.common.files import is_writable
from compare_q.eval.table import registry


def add(p: argparse.ArgumentParser) -> None:
    """Flags that say what is printed and written."""
    p.add_argument("-o", "--output", type=path_argument, help="write the results as JSON")
    p.add_argument("--csv", type=path_argument, help="write the results as CSV")
    p.add_argument("--markdown", type=path_argument, help="write the table as Markdown")
    p.add_argument("--html", type=path_argument, help="write a report as one HTML file")
    p.add_argument(
        "--tokens-out", type=path_argument, help="folder for the token scores of each model, as <label>.parquet"
    )
    p.add_argument("--columns", type=column_names, metavar="A,B,C",
                   help=f"columns of table, Markdown, CSV and report, of {', '.join(registry.BY_NAME)}")  # fmt: skip
    p.add_argument("--sort", type=sort_key, metavar="COLUMN",
                   help="order the table's rows by a column, of several texts by its mean, or by COLUMN:TEXT "
                   "(default: the order of the specs)")  # fmt: skip
    p.add_argument("--by-text", action="store_true", help="of several texts: a table each, one below the other")
    p.add_argument("--statistics", action="store_true", help="print llama.cpp's block of statistics for every model")
    p.add_argument("--timing", action="store_true", help="print where the seconds of every row went")
    p.add_argument("--pairs", action="store_true", help="print how every row differs from the next one, with errors")
    p.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"),
                   help="print how the models with these two labels differ, with errors")  # fmt: skip


def sort_key(given: str) -> str:
    """``--sort``: the name of a column, and a text's name behind it or not."""
    if given.partition(":")[0] not in registry.BY_NAME:
        raise argparse.ArgumentTypeError(f"{given!r} is no column; there are: {', '.join(registry.BY_NAME)}")
    return given


def check_texts(args: argparse.Namespace, names: Sequence[str]) -> None:
    """InputError for a flag that does not go with as many texts; ``names``: of the texts."""
    _, colon, text = (args.sort or "").partition(":")
    if colon and len(names) == 1:
        raise InputError(f"--sort: {args.sort}: there is one text; give the column alone")
    if colon and text not in names:
        raise InputError(f"--sort: no text is called {text!r}; there are: {', '.join(names)}")
    if args.by_text and len(names) == 1:
        raise InputError("--by-text: there is one text, whose table it is anyway; leave it out")
    if len(names) > 1 and args.logits_file is not None:
        raise InputError("--logits_file: a reference store is of one text; leave it out, or run once for each text")


def column_names(given: str) -> tuple[str, ...]:
    """``--columns``: names of columns with commas between."""
    try:
        return registry.checked([name for each in given.split(",") if (name := each.strip())])
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_outputs(
    args: argparse.Namespace, inputs: Mapping[Path, str] | None = None, tokens: Sequence[Path] = ()
) -> None:
    """InputError, before anything runs, for an output that could not be written afterwards, or that is an input too.

    ``inputs``: files and folders that the run reads -> what they are; ``tokens``: the files of ``--tokens-out``.
    """
    files = {"--output": args.output, "--csv": args.csv, "--markdown": args.markdown, "--html": args.html,
             "--plot_file": args.plot_file, "--card": args.card}  # fmt: skip
    given = {flag: file for flag, file in files.items() if file is not None}
    taken = dict.fromkeys(map(os.path.realpath, args.source), "--from")
    for stream, what in (("/dev/stdout", "standard output"), ("/dev/stderr", "standard error")):
        if os.path.isfile(printed := os.path.realpath(stream)):
            taken[printed] = what
    written = [*given.items(), *(("--tokens-out", file) for file in tokens)]
    for flag, file in written:
        if not is_writable(file) and (flag in given or os.path.lexists(file)):  # its folder is made below
            raise InputError(f"{flag}: {file}: cannot be written; is the folder there and yours, and the file?")
        if taken.setdefault(real := os.path.realpath(file), flag) != flag:
            raise InputError(f"{flag}: {file}: is the file of {taken[real]} as well; name another file")
    asked = {"--tokens-out": args.tokens_out, "--plots": args.plots}
    folders = [(flag, folder) for flag, folder in asked.items() if folder]
    read = {Path(os.path.realpath(path)): what for path, what in (inputs or {}).items() if exists(path)}
    for flag, path in [*folders, *written]:
        place = Path(os.path.realpath(path))
        for each in {place, *place.parents} & read.keys():
            raise InputError(f"{flag}: {path}: is {read[each]}, or lies in it; name another")
    for flag, folder in folders:
        check_folder(flag, folder)
    for flag in ("--plot_file", "--card"):
        if given.get(flag):
            plot_flags.check_picture(flag, given[flag])


def check_folder(flag: str, folder: Path) -> None:
    """Makes an output folder; InputError if nothing can be written in it."""
    with suppress(OSError):  # what is wrong shows in the next line
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) or not folder.is_dir():
        raise InputError(f"{flag}: {folder}: cannot be written; is the folder yours?")
