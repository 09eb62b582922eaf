"""The subcommands, one table of their options, and which options go together."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ByteSize, TypeAdapter

from compare_q import __version__
from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest, printable, unicode
from compare_q.eval.cli import adaptive
from compare_q.eval.common.cache import default_root
from compare_q.eval.plots.measures import ACCURACIES, KLD_VALUES, SIZES
from compare_q.eval.table import columns, pairs

COMMANDS = {
    "run": "measure models (the word may be left out)",
    "check": "print what a run would do, and what it would refuse; starts no engine",
    "show": "print, draw, filter and combine finished runs",
    "doctor": "describe checkpoints and what is wrong with them; loads nothing",
    "cache": "list what is kept of earlier runs, and keep it small",
    "engines": "list the engines, and how to install what is missing",
}
"""Subcommands and what they do."""
PAGE = f"""\
compare-q measures what quantized language models lost: perplexity and KL
divergence, in the engines that serve them, in one table with error bars.

  compare-q Qwen/Qwen3-0.6B RedHatAI/Qwen3-0.6B-FP8-dynamic ./qwen3-Q4_K_M.gguf
    the first model is the reference; text, windows and engines follow from it
  compare-q -d data.json -m models.json -p -o results.json
    the same from specs: a plot, and a file that holds everything
  compare-q show results.json --sort kld --html report.html
    a finished run again, in another order, and as a report

{"".join(f"  {name:9}{summary}{chr(10)}" for name, summary in COMMANDS.items())}
`compare-q COMMAND --help` has the flags of a command, `compare-q run --help`
all flags of a run. `compare-q --version` says the version. A model in a folder
called like a command is ./NAME.
"""
"""``compare-q --help``."""
FOREIGN_FLAGS = {
    "-f": "-d", "--file": "-d", "--tasks": "-d lm_eval:TASK", "--chunks": "-r", "--limit": "-r", "--output_path": "-o",
    "--model": "the models alone, as compare-q MODEL MODEL ...", "--model_args": "the models alone",
    "-c": "eval_len in a data spec", "--ctx-size": "eval_len in a data spec", "--device": "--gpus",
    "-ngl": 'n_gpu_layers in "engine" of a model spec', "--batch_size": 'options in "engine" of a model spec',
    "--kl-divergence": "nothing: KLD is measured anyway, against the first model", "--kl-divergence-base": "-lf",
}  # fmt: skip
"""Flags of llama-perplexity and lm-eval, and what compare-q has instead."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


class Help(argparse.HelpFormatter):
    """Help with one metavar per flag and as little wrapping as possible."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings) or str(action.metavar)
        if action.nargs == 0 or not action.option_strings:
            return names
        if action.nargs == "+":
            return f"{names} {action.metavar} ..."
        return f"{names} {self._format_args(action, action.dest.upper())}"


class Once(argparse.Action):
    """Store the value of a flag, or its ``const``; InputError if a flag with the same meaning was given before."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise InputError(f"{option}: is given twice, or with a flag that excludes it; give one of them")
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def value(pattern: str, expected: str, convert: Callable[[re.Match[str]], Any]) -> Callable[[str], Any]:
    """Return a ``type`` for ``add_argument``: words that match the pattern, in any case, are converted."""

    def of(given: str) -> Any:
        found = re.fullmatch(pattern, given, re.IGNORECASE)
        if not found:
            raise argparse.ArgumentTypeError(f"{given!r}: expected {expected}")
        return convert(found)

    return of


WINDOWS = value(r"\d+|all", "a number of windows, or all", lambda found: int(found[0]) if found[0].isdigit() else 0)
SECONDS = value(r"(?=.*[1-9])\d*\.?\d+", "a positive number of seconds", lambda found: float(found[0]))
PYTHON = value(r"([^=]+)=(.+)", "ENGINE=PYTHON", lambda found: found.groups())
BYTES = value(  # a number without a unit is refused: 20 for 20 GB would empty the cache
    r"\s*\d{0,15}\.?\d{1,15}\s*([kmgtpe]i?b?|b)\s*", "a size with a unit, for example 20GB or 500MiB",
    lambda found: TypeAdapter(ByteSize).validate_python(found[0]),
)  # fmt: skip


def non_empty(given: str) -> str:
    """Return the value; an unset shell variable gives an empty one, which as a path is the working directory."""
    if not given.strip():
        raise argparse.ArgumentTypeError("is empty; give it a value")
    return given


def path(given: str) -> Path:
    """A file or folder."""
    return Path(non_empty(given))


def names(given: str) -> list[str]:
    """Names with commas between."""
    return [name for each in non_empty(given).split(",") if (name := each.strip())]


def column_names(given: str) -> tuple[str, ...]:
    """``--columns``: names of columns with commas between."""
    try:
        return columns.checked(names(given))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sort_key(given: str) -> str:
    """``--sort``: the name of a column, or COLUMN:TEXT."""
    column_names(given.partition(":")[0])
    return given


def one_of(known: Sequence[str], given: str) -> str:
    """Return the value if it is one of the ``known`` ones."""
    if given not in known:
        raise argparse.ArgumentTypeError(f"{given!r} is none of {', '.join(known)}{nearest(given, known)}")
    return given


Option = tuple[list[str], list[str], dict[str, Any]]
"""The names of an option, the commands that take it, and the other arguments of ``add_argument``."""


def option(names: str, commands: str, help: str, **keys: Any) -> Option:
    """An option, from names and commands with spaces between; it stores one value unless ``keys`` say otherwise."""
    keys = {"action": Once, **keys} if names.startswith("-") else keys
    return names.split(), commands.split(), {"help": help, **keys}


on, many = partial(option, action="store_true"), {"nargs": "+", "action": "extend"}
file, folder = (partial(option, type=path, metavar=name) for name in ("FILE", "FOLDER"))
RUN, SHOWN, EVERY = "run check", "run check show", " ".join(COMMANDS)
OPTIONS: dict[str, list[Option]] = {
    "what": [
        option("models", RUN, "folders, hub ids, files or servers as [LABEL=]MODEL[@ENGINE]; the first is the "
               "reference", nargs="*", default=[], metavar="MODEL"),
        option("models", "doctor", "folders, GGUF files, hub ids, or model specs", nargs="+", default=[],
               metavar="MODEL"),
        file("source", "show", "results.json or report.html of finished runs; several become one table", nargs="+",
             default=[]),
        option("-d --dataspec", RUN, "data specs (JSON); with MODELs also wiki2, code, chat, lm_eval:TASK, or a file "
               "of text", type=path, metavar="TEXT", **many),
        option("-m --modelspec", RUN, "model specs (JSON)", metavar="SPEC", **many),
        option("-mask --mask", SHOWN, "only models with one of these words in the label", metavar="A;B"),
        option("--tokenizer", RUN, "tokenizer for MODELs without one, as GGUF files", type=non_empty,
               metavar="FOLDER"),
        on("--no-reference", RUN, "do not compare MODELs with the first one"),
        option("-r --rows", RUN, "number of windows, or all", type=WINDOWS, metavar="N"),
        option("--until", RUN, "choose the number of windows by the KLD's error", type=adaptive.relative_error,
               metavar="kld:PERCENT%"),
        on("--divergences", RUN, "also measure reverse KLD, JS, TV, top-5 agreement"),
        file("-lf --logits_file", RUN, "reference store to read, or to make"),
        on("-cc --clear_cache", RUN, "first delete what is cached of text and models"),
        on("--verify-weights", RUN, "identify models by every byte, not by samples"),
    ],
    "where": [
        option("--gpus", RUN, "GPUs to use, as 0,1", type=names, metavar="LIST"),
        option("--python", RUN, "Python or virtual environment for an engine", type=PYTHON, action="append",
               default=[], metavar="ENGINE=PYTHON"),
        option("--ray", RUN, "run on the nodes of a Ray cluster; auto: the local", type=non_empty, metavar="ADDRESS"),
        option("--deadline", RUN, "stop a model that is silent for this time", type=SECONDS, metavar="SECONDS"),
        on("--verbose", SHOWN, "let engines print their logs"),
        folder("--cache-dir", "run check cache", "where tokens, scores and references are kept", default=None),
        option("--cache-limit", "run check cache", "delete the oldest entries above SIZE, as 20GB", type=BYTES,
               metavar="SIZE"),
        option("--version", "run", "print the version", action="version", version=f"compare_q {__version__}"),
        option("-h --help", EVERY, "print this", action="help"),
    ],
    "table": [
        option("--columns", SHOWN, "columns of table, Markdown, CSV and report", type=column_names, metavar="A,B,C"),
        option("--sort", SHOWN, "order rows by a column, or by COLUMN:TEXT", type=sort_key, metavar="COLUMN"),
        on("--by-text", SHOWN, "one table per text"),
        on("--notes", SHOWN, "explain the columns and marks of the table"),
        on("--pairs", SHOWN, "print the difference of each row from the next"),
        option("--pair", SHOWN, "print the difference of two models, by label", nargs=2, action="append", default=[],
               metavar=("A", "B")),
    ],
    "files": [
        file("-o --output", SHOWN, "write the results as JSON"),
        file("--csv", SHOWN, "write the results as CSV"),
        file("--markdown", SHOWN, "write the table as Markdown"),
        file("--html", SHOWN, "write a report as one HTML file"),
        folder("--tokens-out", RUN, "write the token scores of each model as Parquet"),
        folder("--save-specs", RUN, "write data.json and models.json of what ran"),
    ],
    "picture": [
        on("-p --plot", SHOWN, "draw a scatter plot, into -pf or compare_q.png"),
        file("-pf --plot_file", SHOWN, "file of the plot: .png, .svg or .pdf; implies -p"),
        file("--card", SHOWN, "draw the plot in 1,200 x 675 pixels, to be shared"),
        folder("--plots", SHOWN, "draw every kind of plot"),
        option("-kld --kld", SHOWN, "plot KLD, the default if known", nargs=0, const="kld", dest="measure"),
        option("-ppl --ppl", SHOWN, "plot perplexity", nargs=0, const="ppl", dest="measure"),
        option("-acc --acc", SHOWN, "plot accuracy, the default of a task", nargs=0, const="acc", dest="measure"),
        option("-acc_norm --acc_norm", SHOWN, "plot length-normalized accuracy", nargs=0, const="acc_norm",
               dest="measure"),
        option("--kld-value", SHOWN, f"plot this KLD: {', '.join(KLD_VALUES)}", type=partial(one_of, [*KLD_VALUES]),
               metavar="VALUE"),
        option("--x-axis", SHOWN, f"plot over one of {', '.join(SIZES)}", type=partial(one_of, [*SIZES]),
               metavar="SIZE"),
        option("-v --vram", SHOWN, "plot over VRAM", nargs=0, const="vram", dest="x_axis"),
        option("-mx --max_x", SHOWN, "leave out points beyond this x", type=float, default=math.inf, metavar="X"),
        option("-my --max_y", SHOWN, "leave out points beyond this y", type=float, default=math.inf, metavar="Y"),
        option("--log_y", SHOWN, "logarithmic or linear y axis; default: by the data",
               action=argparse.BooleanOptionalAction),
        option("-t --title", SHOWN, "title of plots and report", type=unicode),
        on("-dark --dark", SHOWN, "dark plots"),
    ],
}  # fmt: skip
"""Every option, under its heading in the help."""


def parser(command: str) -> Parser:
    """The parser of a subcommand; what only other subcommands take has its default."""
    arguments = {"show": " FILE ...", "cache": "", "engines": ""}.get(command, " MODEL ...")
    note = "In long flags - and _ are the same. docs/specs.md says more about each flag."
    is_check = command == "check"
    p = Parser(
        prog=f"compare-q {command}", usage=f"compare-q {command}{arguments} [flags]", allow_abbrev=False,
        add_help=False, formatter_class=Help, description=f"{COMMANDS[command].capitalize()}.",
        epilog="It takes the words and flags of a run: compare-q run --help" if is_check else note,
    )  # fmt: skip
    others = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    for title, options in OPTIONS.items():
        group = p.add_argument_group(title)
        for names, commands, keys in options:
            shown = {**keys, "help": argparse.SUPPRESS} if is_check else keys
            (group if command in commands else others).add_argument(*names, **shown)
    known = {action.dest for action in p._actions}
    p.set_defaults(**{each.dest: each.default for each in others._actions if each.dest not in known})
    return p


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed words, with the ``command``; InputError for flags that cannot go together."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(PAGE, end="", file=sys.stdout if words else sys.stderr)
        raise SystemExit(0 if words else 2)
    command, rest = (words[0], words[1:]) if words[0] in COMMANDS else ("run", words)
    is_name = command != "run" or json_files.exists(words[0]) or re.search(r"[^\w]", words[0])
    if not is_name and words[0] != "run" and (hint := nearest(words[0], COMMANDS)):
        raise InputError(f"{words[0]}: no such command, folder or file{hint}; see compare-q --help")
    p = parser(command)
    args, left = p.parse_known_intermixed_args(normalize_flags(rest, command, p._option_string_actions))
    if left:
        raise InputError(unknown(left[0], command))
    args.command = command
    args.cache_dir = args.cache_dir or default_root()
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    if args.kld_value and args.measure not in (None, "kld"):
        raise InputError(f"--kld-value: is a value of KL divergence; leave it or -{args.measure} out")
    args.measure = "kld" if args.kld_value else args.measure
    if command in RUN.split():
        check_run(args)
    return args


def normalize_flags(words: Sequence[str], command: str, known: Iterable[str]) -> list[str]:
    """Return the words with flags as they are declared: - and _ are the same in them, and one - as good as two.

    InputError for an unknown flag: argparse would read ``-output x`` as ``-o utput`` and a MODEL x.
    """
    own, declared = {name.replace("_", "-"): name for name in known}, []
    for word in words:
        name, equals, given = word.partition("=")
        plain = name.replace("_", "-")
        if word.startswith("-") and not re.match(r"-\d|-\w\d|-?$", word):  # a number, -r64, or -
            found = own.get(plain) or own.get(f"-{plain}")
            if found is None:
                raise InputError(unknown(name, command))
            word = f"{found}{equals}{given}"
        declared.append(word)
    return declared


def unknown(name: str, command: str) -> str:
    """A line about a word or flag that a subcommand does not know."""
    name, see = printable(name), f"see compare-q {command} --help"
    if not name.startswith("-"):
        return f"{name}: compare-q {command} takes no such word; {see}"
    if name in FOREIGN_FLAGS and command in RUN.split():
        return f"{name}: compare-q has {FOREIGN_FLAGS[name]} instead; {see}"
    for other in COMMANDS:
        if name in parser(other)._option_string_actions:
            return f"{name}: is a flag of compare-q {other}, not of compare-q {command}"
    return f"{name}: compare-q {command} has no such flag{nearest(name, parser(command)._option_string_actions)}; {see}"


def refuse(*cases: tuple[object, str]) -> None:
    """InputError with the message of the first case whose condition holds."""
    for is_wrong, message in cases:
        if is_wrong:
            raise InputError(message)


def check_run(args: argparse.Namespace) -> None:
    """InputError for flags of a run that cannot go together."""
    texts, see = [str(each) for each in args.dataspec or []], f"see compare-q {args.command} --help"
    cure = f"; -d has taken all of {printable(' '.join(texts))}: put models before it" if len(texts) > 1 else ""
    first = printable("".join(args.models[:1]))
    instead = "is for models that are named without specs; give MODEL arguments instead of -m"
    refuse(
        (not args.models and not args.modelspec, f"name models, or give -d and -m{cure}; {see}"),
        (args.models and args.modelspec, f"{first}: cannot be combined with -m; give either MODEL arguments or -m"),
        (not args.models and not texts, f"-d: is missing: specs of models go with a spec of a text; {see}"),
        (args.until and args.rows is not None, "--until: chooses the number of windows itself; remove -r"),
        (args.save_specs and not args.models, f"--save-specs: {instead}"),
        (args.tokenizer and not args.models, f"--tokenizer: {instead}"),
        (args.no_reference and not args.models, f"--no-reference: {instead}"),
        (args.ray and args.gpus,
         "--gpus: cannot be combined with --ray, which assigns the cluster's GPUs; remove --gpus"),
    )  # fmt: skip


def check_content(
    args: argparse.Namespace, texts: Sequence[str], labels: Sequence[str], *, reference: bool, answers: bool
) -> str | None:
    """Return a line about flags without effect, None if there are none; InputError for flags that do not fit the run.

    ``texts``: their names; ``labels``: the models'; ``reference``: if there is one; ``answers``: if a text is a task.
    """
    _, colon, text = (args.sort or "").partition(":")
    several = len(texts) > 1
    refuse(
        (args.measure == "kld" and not reference,
         '--kld: no model is the reference: mark one with "reference": true (or out_logits), or give --logits_file'),
        (args.measure in ACCURACIES and not answers,
         f'--{args.measure}: no text is a task of questions ("dataset": "lm_eval")'),
        (colon and not (several and text in texts),
         f"--sort: {args.sort}: name one of the texts after the colon: {', '.join(texts)}"),
        (args.by_text and not several, "--by-text: there is one text, whose table it is anyway; leave it out"),
        (args.logits_file is not None and several,
         "--logits_file: a reference store is of one text; leave it out, or run once for each text"),
    )  # fmt: skip
    pairs.check_labels(args.pair, labels)
    given = {
        "-v" if args.x_axis == "vram" else "--x-axis": args.x_axis, "--kld-value": args.kld_value,
        f"-{args.measure}": args.measure and not args.kld_value, "-mx": args.max_x < math.inf,
        "-my": args.max_y < math.inf, "--log_y": args.log_y is not None, "-dark": args.dark and not args.plots,
    }  # fmt: skip
    unused = [flag for flag, is_given in given.items() if is_given and not (args.plot_file or args.card)]
    return f"{', '.join(unused)}: for the picture of -p (or -pf FILE), which was not requested" if unused else None
