"""The subcommands, one table of their options, and which options go together."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import ByteSize, TypeAdapter

from ... import __version__
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest, printable, unicode
from ..common.cache import default_root
from ..flips import flip_conditions as flip_conditions
from ..plots.measures import KLD_VALUES, SIZES, SUFFIXES, size_of
from ..specs.spec_types import Sample
from ..table import columns, conditions, pairs
from ..table.memory_fit import Fit

COMMANDS = {
    "run": "measure models (the word may be left out)",
    "check": "print what a run would do, and what it would refuse; starts no engine",
    "show": "print, draw, filter and combine finished runs",
    "gate": "check that several ways to run a model compute the same",
    "pack": "record a model as a reference pack, for machines without the model",
    "flips": "compare answers to tasks, from samples that lm_eval logged",
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
    "-f": "-d",
    "--chunks": "-r",
    "--limit": "-r",
    "--device": "--gpus",
    "--tasks": "compare-q flips, for samples of lm_eval,",
    "-ngl": 'n_gpu_layers in "engine" of a model spec',
    **dict.fromkeys(
        ("-c", "--context", "--ctx", "--ctx-size"), "--eval-len, or eval_len in a data spec,"
    ),
    **dict.fromkeys(
        ("--dtype", "--kv-cache-dtype"), 'dtype and kv_cache_dtype in "engine" of a model spec'
    ),
    **dict.fromkeys(("--model", "--model_args"), "MODEL arguments (compare-q MODEL MODEL ...)"),
    **dict.fromkeys(
        ("--reference", "--ref", "--kl-divergence", "--kl-divergence-base"), "the first MODEL"
    ),
    "--kld-base": "the first MODEL",
    **dict.fromkeys(
        (
            "--quantization",
            "--tensor-parallel-size",
            "-tp",
            "--max-model-len",
            "--trust-remote-code",
        ),
        '"engine" in a model spec, or MODEL@vllm:option=value,',
    ),
    "--json": "-o",
    "-hf": "MODEL arguments, also as owner/name,",
    "--until": "-r N (a run ends with the N for a standard error of 2 %)",
}
"""Flags of llama-perplexity, of lm-eval and of compare_q 0.3, and what compare-q has instead."""


NO_REFERENCE = 'no model is the reference: mark one with "reference": true (or out_logits), or give --logits_file'


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def _get_value(self, action: argparse.Action, given: str) -> Any:
        """Convert a value; an unset shell variable gives an empty one, which as a path is the
        working directory.
        """
        if action.type in (Path, str, names) and not given.strip():
            raise argparse.ArgumentError(action, "is empty; give it a value")
        if action.type is Path and given == "-":
            raise argparse.ArgumentError(
                action, "- does not name a file; use /dev/stdout or /dev/stdin"
            )
        try:
            return super()._get_value(action, given)
        except InputError as error:
            raise argparse.ArgumentError(action, str(error)) from None


class Help(argparse.HelpFormatter):
    """Help with one metavar per flag and as little wrapping as possible."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = ", ".join(action.option_strings) or str(action.metavar)
        if action.nargs == 0 or not action.option_strings:
            return shown
        values = (
            f"{action.metavar} ..."
            if action.nargs == "+"
            else self._format_args(action, action.dest.upper())
        )
        return f"{shown} {values}"


class Once(argparse.Action):
    """Store the value of a flag, or its ``const``; InputError if a flag with the same meaning was
    given before.
    """

    def __call__(
        self, _: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise InputError(
                f"{option}: is given twice, or with a flag that excludes it; give one of them"
            )
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def value(
    pattern: str, expected: str, convert: Callable[[re.Match[str]], Any]
) -> Callable[[str], Any]:
    """Return a ``type`` for ``add_argument``: words that match the pattern, in any case, are
    converted.
    """

    def of(given: str) -> Any:
        if found := re.fullmatch(pattern, given, re.IGNORECASE):
            return convert(found)
        raise InputError(f"{given!r}: expected {expected}")

    return of


WINDOWS = value(
    r"\d+|all",
    "a number of windows, or all",
    lambda found: int(found[0]) if found[0].isdigit() else 0,
)
COUNT = value(r"0*[1-9]\d{0,8}", "a whole number from 1 to 999999999", lambda found: int(found[0]))
PYTHON = value(r"([^=]+)=(.+)", "ENGINE=PYTHON", lambda found: found.groups())
BYTES = value(  # a number without a unit is refused: 20 for 20 GB would empty the cache
    r"\s*\d{0,15}\.?\d{1,15}\s*([kmgtpe]i?b?|b)\s*",
    "a size with a unit, for example 20GB or 500MiB",
    lambda found: TypeAdapter(ByteSize).validate_python(found[0]),
)


FIT = value(
    r"\s*(\d{0,6}\.?\d{1,6}\s*[mgt]i?b)\s*@\s*(\d+k?)\s*",
    "MEMORY@CONTEXT, such as 24GB@32k",
    lambda found: Fit(
        BYTES(found[1]), columns.named(f"memory:{found[2].lower()}"), found[0].strip()
    ),
)


def seconds(given: str) -> float:
    """``--deadline``: a number above 0."""
    with suppress(ValueError):
        if 0 < (number := float(given)) <= sys.float_info.max:  # False for nan
            return number
    raise InputError(f"{given!r}: expected a positive number of seconds")


def margin(given: str) -> float:
    """``--margin``: 0.01 for ``1%``."""
    with suppress(ValueError):
        if given.endswith("%") and 0 < (share := float(given[:-1]) / 100) < 1:
            return share
    raise InputError(f"{given!r}: expected a percentage above 0 and below 100, such as 1%")


def names(given: str) -> list[str]:
    """Names with commas between."""
    return [name for each in given.split(",") if (name := each.strip())]


def sort_by(given: str) -> str:
    """``--sort``: the name of a column."""
    columns.named(given)
    return given


def x_axis(given: str) -> str:
    """``--x-axis``: a word of ``measures.size_of``."""
    size_of(given)
    return given


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return a ``type`` for one of the ``known`` words."""

    def of(given: str) -> str:
        if given in known:
            return given
        raise InputError(f"{given!r} is none of {', '.join(known)}{nearest(given, known)}")

    return of


Option = tuple[list[str], list[str], dict[str, Any]]
"""The names of an option, the commands that take it, and the other arguments of ``add_argument``.
"""


def option(
    names: str, commands: str, metavar: Any, help: str, type: Any = None, **keys: Any
) -> Option:
    """An option, from names and commands with spaces between; it stores one value unless ``keys``
    say otherwise.
    """
    keys = {"action": Once, **keys} if names.startswith("-") else keys
    keys |= {"metavar": metavar} if metavar else {}
    return (
        names.split(),
        commands.split(),
        {"help": help, **keys, **({"type": type} if type else {})},
    )


def on(names: str, commands: str, help: str, action: Any = "store_true") -> Option:
    """An option without a value."""
    return names.split(), commands.split(), {"help": help, "action": action}


many, no_limit = {"nargs": "+", "action": "extend"}, {"type": float, "default": math.inf}
y_axis = {"nargs": 0, "dest": "measure"}
RUN, RUNS, SHOWN, EVERY = "run check", "run check gate pack", "run check show", " ".join(COMMANDS)
OPTIONS: dict[str, list[Option]] = {
    "what": [
        option(
            "models",
            RUN,
            "MODEL",
            "folders, hub ids, files or servers as [LABEL=]MODEL[@ENGINE]; the first is the "
            "reference",
            nargs="*",
            default=[],
        ),
        option(
            "models",
            "gate",
            "MODEL",
            "folders or hub ids as [LABEL=]MODEL[@ENGINE]; the others are compared with the first",
            nargs="*",
            default=[],
        ),
        option(
            "models",
            "pack",
            "MODEL",
            "folder or hub id as [LABEL=]MODEL[@ENGINE]",
            nargs="*",
            default=[],
        ),
        option(
            "models",
            "doctor",
            "MODEL",
            "folders, GGUF files, hub ids, or model specs",
            nargs="+",
            default=[],
        ),
        option(
            "source",
            "show",
            "FILE",
            "results.json or report.html of finished runs; several become one table",
            Path,
            nargs="+",
            default=[],
        ),
        option(
            "samples",
            "flips",
            "RUN",
            "files or folders of samples as [LABEL=]PATH; the first is the reference",
            nargs="*",
            default=[],
        ),
        option("--tasks", "flips", "A,B", "compare these tasks only", names),
        option(
            "--metrics", "flips", "A,B", "compare by these metrics only; each must be 0 or 1", names
        ),
        option(
            "--margin", "flips", "1%", "test whether accuracies differ by less than this", margin
        ),
        option(
            "--results",
            "flips",
            "FILE",
            "show KLDs of this results.json next to rows of the same label",
            Path,
        ),
        option(
            "-d --dataspec",
            RUN,
            "TEXT",
            "data specs (JSON), whose windows are joined; with MODELs also "
            "wiki2, code, chat, or a file of text",
            Path,
            **many,
        ),
        option(
            "-d --dataspec",
            "gate pack",
            "TEXT",
            "data spec (JSON) of one text; with MODELs also wiki2, code, chat, or a file of text",
            Path,
            **many,
        ),
        option("-m --modelspec", RUNS, "SPEC", "model specs (JSON)", **many),
        option("-mask --mask", SHOWN, "A;B", "only models with one of these words in the label"),
        option(
            "--tokenizer", RUNS, "FOLDER", "tokenizer for MODELs without one, as GGUF files", str
        ),
        on("--no-floor", "pack", "do not score the model once more for the noise floor"),
        on(
            "--logits",
            "pack",
            "allow a pack of logits where states do not suffice; it is much larger",
        ),
        option("--eval-len", RUNS, "N", "with MODELs: tokens in a window", COUNT),
        option(
            "--eval-stride",
            RUNS,
            "N",
            "with MODELs: tokens between the starts of two windows",
            COUNT,
        ),
        option(
            "--sample",
            "run check pack",
            "WHICH",
            f"with MODELs: windows that -r takes: {' or '.join(get_args(Sample))}",
            one_of(get_args(Sample)),
        ),
        on("--no-reference", RUN, "do not compare MODELs with the first one"),
        option("-r --rows", RUNS, "N", "number of windows of each text, or all", WINDOWS),
        option(
            "--sweep",
            "gate",
            "KEY=A,B",
            "a variant for each value of a key of the model spec, as engine.NAME=A,B",
            str,
            action="append",
            default=[],
        ),
        option(
            "--variant",
            "gate",
            "LABEL:KEY=A",
            "a variant with these keys, as new:python=~/vllm-new",
            str,
            action="append",
            default=[],
        ),
        option(
            "--phase", "gate", "PHASE", "prefill or decode alone", one_of(("prefill", "decode"))
        ),
        option(
            "--baseline",
            "gate",
            "FILE",
            "take the first variant's scores of this gate.json from the cache",
            Path,
        ),
        option(
            "--arbiter",
            "gate",
            "ENGINE",
            "report which variant is nearer to float32 in this engine",
            str,
        ),
        option(
            "--fail-if",
            "run check show gate",
            "CONDITION",
            "fail if a row fulfils it, as 'kld > 0.05' or 'kld:SLICE > 0.1'",
            conditions.parse,
            action="append",
            default=[],
        ),
        option(
            "--fail-if",
            "flips",
            "CONDITION",
            "fail if a row fulfils it, as 'lost > 5' or not_equivalent",
            flip_conditions.parse,
            action="append",
            default=[],
        ),
        option("-lf --logits_file", RUN, "FILE", "reference store to read, or to make", Path),
        on(
            "-cc --clear_cache", RUN, "first delete what is cached of this run's windows and models"
        ),
        on("--verify-weights", RUN, "identify models by every byte, not by samples"),
    ],
    "where": [
        option("--gpus", RUNS, "LIST", "GPUs to use, as 0,1", names),
        option(
            "--python",
            RUNS,
            "ENGINE=PYTHON",
            "Python or virtual environment for an engine",
            PYTHON,
            action="append",
            default=[],
        ),
        option("--ray", RUN, "ADDRESS", "run on the nodes of a Ray cluster; auto: the local", str),
        option("--deadline", RUNS, "SECONDS", "stop a model that is silent for this time", seconds),
        on("--verbose", f"{SHOWN} gate pack", "let engines print their logs"),
        option(
            "--cache-dir",
            "run check gate pack cache",
            "FOLDER",
            "where scores and references are kept",
            Path,
        ),
        option(
            "--cache-limit",
            "run check cache",
            "SIZE",
            "delete the oldest entries above SIZE, as 20GB",
            BYTES,
        ),
        option(
            "--version",
            "run",
            None,
            "print the version",
            action="version",
            version=f"compare_q {__version__}",
        ),
        on("-h --help", EVERY, "print this", "help"),
    ],
    "table": [
        option(
            "--columns",
            SHOWN,
            "A,B,C",
            "columns of table, Markdown, CSV and report, as label,kld,kld:SLICE",
            lambda given: columns.checked(names(given)),
        ),
        option("--sort", SHOWN, "COLUMN", "order rows by a column, as kld or kld:SLICE", sort_by),
        option("--fit", SHOWN, "24GB@32k", "mark rows that need more memory for this context", FIT),
        on("--notes", SHOWN, "explain the columns and marks of the table"),
        on("--pairs", SHOWN, "print the difference of each row from the next"),
        option(
            "--pair",
            SHOWN,
            ("A", "B"),
            "print the difference of two models, by label",
            nargs=2,
            action="append",
            default=[],
        ),
    ],
    "files": [
        option(
            "-o --output",
            f"{SHOWN} gate pack flips",
            "FILE",
            "write the results as JSON, or the pack",
            Path,
        ),
        option("--csv", f"{SHOWN} flips", "FILE", "write the results as CSV", Path),
        option(
            "--markdown",
            f"{SHOWN} gate flips",
            "FILE",
            "write the table, or the verdicts, as Markdown",
            Path,
        ),
        option(
            "--model-card",
            SHOWN,
            "FILE",
            "write a model card for the hub about the quantized rows",
            Path,
        ),
        option("--junit", "gate", "FILE", "write the verdicts as JUnit XML", Path),
        option("--html", SHOWN, "FILE", "write a report as one HTML file", Path),
        option(
            "--tokens-out", RUN, "FOLDER", "write the token scores of each model as Parquet", Path
        ),
        option("--save-specs", RUN, "FOLDER", "write data.json and models.json of what ran", Path),
    ],
    "picture": [
        on("-p --plot", SHOWN, "draw a scatter plot, into -pf or compare_q.png"),
        option(
            "-pf --plot_file",
            SHOWN,
            "FILE",
            "file of the plot: .png, .svg or .pdf; implies -p",
            Path,
        ),
        option("--card", SHOWN, "FILE", "draw the plot in 1,200 x 675 pixels, to be shared", Path),
        option("--plots", SHOWN, "FOLDER", "draw every kind of plot", Path),
        option("-kld --kld", SHOWN, None, "plot KLD, the default if known", const="kld", **y_axis),
        option("-ppl --ppl", SHOWN, None, "plot perplexity", const="ppl", **y_axis),
        option(
            "--kld-value",
            SHOWN,
            "VALUE",
            f"plot this KLD: {', '.join(KLD_VALUES)}",
            one_of(KLD_VALUES),
        ),
        option(
            "--x-axis", SHOWN, "SIZE", f"plot over one of {', '.join(SIZES)}, memory:32k", x_axis
        ),
        option("-v --vram", SHOWN, None, "plot over VRAM", nargs=0, const="vram", dest="x_axis"),
        option("-mx --max_x", SHOWN, "X", "leave out points beyond this x", **no_limit),
        option("-my --max_y", SHOWN, "Y", "leave out points beyond this y", **no_limit),
        on(
            "--log_y",
            SHOWN,
            "logarithmic or linear y axis; default: by the data",
            argparse.BooleanOptionalAction,
        ),
        option("-t --title", SHOWN, None, "title of plots and report", unicode),
        on("-dark --dark", SHOWN, "dark plots"),
    ],
}
"""Every option, under its heading in the help."""


def parser(command: str) -> Parser:
    """Return the parser of a subcommand; options of other subcommands have their defaults."""
    arguments = {"show": " FILE ...", "flips": " REF NEW ...", "cache": "", "engines": ""}.get(
        command, " MODEL ..."
    )
    p = Parser(
        prog=f"compare-q {command}",
        usage=f"compare-q {command}{arguments} [flags]",
        allow_abbrev=False,
        add_help=False,
        formatter_class=Help,
        description=f"{COMMANDS[command].capitalize()}.",
        epilog="In long flags - and _ are the same. docs/specs.md says more about each flag.",
    )
    others = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    for title, options in OPTIONS.items():
        group = p.add_argument_group(title)
        for names, commands, keys in options:
            (group if command in commands else others).add_argument(*names, **keys)
    known = {action.dest for action in p._actions}
    p.set_defaults(
        **{each.dest: each.default for each in others._actions if each.dest not in known}
    )
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
    args, left = p.parse_known_intermixed_args(
        normalize_flags(rest, command, p._option_string_actions)
    )
    if left:
        raise InputError(unknown(left[0], command))
    args.command = command
    args.cache_dir = args.cache_dir or default_root()
    if json_files.is_file(args.cache_dir):
        raise InputError(f"--cache-dir: {args.cache_dir}: is a file; name the folder of the cache")
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    if args.kld_value and (args.measure or "kld") != "kld":
        raise InputError(
            f"--kld-value: is a value of KL divergence; leave it or -{args.measure} out"
        )
    args.measure = "kld" if args.kld_value else args.measure
    if command in RUNS.split():
        check_run(args)
    check_no_picture(args)
    if lost := [
        str(each)
        for each in args.source
        if str(each) in columns.BY_NAME and not json_files.exists(each)
    ]:
        raise InputError(
            f"{lost[0]}: no such file; the columns of --columns have commas between them, and no spaces"
        )
    return args


def converted(name: str, given: object) -> Any:
    """Return the value of a flag of a run that is given in Python: 0 for ``rows`` and "all";
    InputError names it.
    """
    known = parser("run")
    try:
        return known._get_value(
            known._option_string_actions[f"--{name.replace('_', '-')}"], str(given)
        )
    except argparse.ArgumentError as error:
        raise InputError(f"{name}: {error.message}") from None


def normalize_flags(words: Sequence[str], command: str, known: Iterable[str]) -> list[str]:
    """Return the words with flags as they are declared: - and _ in them are equal, and so are one
    and two leading -.

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
    """Return a line about a word or flag that a subcommand does not know."""
    name, see = printable(name), f"see compare-q {command} --help"
    if not name.startswith("-"):
        return f"{name}: compare-q {command} takes no such word; {see}"
    if name in FOREIGN_FLAGS and command in RUN.split():
        return f"{name}: compare-q has {FOREIGN_FLAGS[name]} instead; {see}"
    for other in COMMANDS:
        if name in parser(other)._option_string_actions:
            return f"{name}: is a flag of compare-q {other}, not of compare-q {command}"
    near = nearest(name, parser(command)._option_string_actions) if name.startswith("--") else ""
    return f"{name}: compare-q {command} has no such flag{near}; {see}"


def refuse(*cases: tuple[object, str]) -> None:
    """InputError with the message of the first case whose condition holds."""
    for is_wrong, message in cases:
        if is_wrong:
            raise InputError(message)


def check_no_picture(args: argparse.Namespace) -> None:
    """InputError for the file of a plot after ``-p``, which takes none: it would be read as a model
    or a run.
    """
    if not args.plot:
        return
    kind = "run" if args.source else "model"
    for name in (*args.models, *map(str, args.source)):
        if name.lower().endswith(tuple(SUFFIXES)):
            raise InputError(f"{printable(name)}: is not a {kind}; -pf names the file of the plot")


def check_run(args: argparse.Namespace) -> None:
    """InputError for flags of a run that cannot go together."""
    texts, see = [str(each) for each in args.dataspec or []], f"see compare-q {args.command} --help"
    cure = (
        f"; -d has taken all of {printable(' '.join(texts))}: put models before it"
        if len(texts) > 1
        else ""
    )
    first = printable("".join(args.models[:1]))
    refuse(
        (not args.models and not args.modelspec, f"name models, or give -d and -m{cure}; {see}"),
        (
            args.models and args.modelspec,
            f"{first}: is a MODEL argument, which cannot be combined with -m",
        ),
        (
            not args.models and not texts,
            f"-d: is missing: specs of models go with a spec of a text; {see}",
        ),
        (
            args.ray and args.gpus,
            "--gpus: cannot be combined with --ray, which assigns the cluster's GPUs; remove --gpus",
        ),
        *(
            (
                not args.models and getattr(args, flag.strip("-").replace("-", "_")),
                f"{flag}: is for models that are named without specs; give MODEL arguments instead of -m",
            )
            for flag in (
                "--save-specs",
                "--tokenizer",
                "--no-reference",
                "--eval-len",
                "--eval-stride",
                "--sample",
            )
        ),
    )


def check_slices(args: argparse.Namespace, slices: Sequence[str]) -> None:
    """Raise InputError for a slice that no row has; ``slices``: the names of those that rows have."""
    chosen = {
        "--columns": [columns.named(name) for name in args.columns or ()],
        "--sort": [columns.named(args.sort)] if args.sort else [],
        "--fail-if": [condition.column for condition in args.fail_if],
    }
    for flag, used in chosen.items():
        try:
            columns.check_slices(used, slices)
        except InputError as error:
            raise InputError(f"{flag}: {error}") from None


def check_content(
    args: argparse.Namespace, slices: Sequence[str], labels: Sequence[str], *, reference: bool
) -> str | None:
    """Return a line about flags without effect, None if there are none; InputError for flags that
    do not fit the run.

    ``slices``: names of the slices that rows have; ``labels``: the models'; ``reference``: if there
    is one.
    """
    is_run = args.command == "run"
    comparing = [each.column.name for each in args.fail_if if each.column.of_reference is not None]
    refuse(
        (args.measure == "kld" and not reference, f"--kld: {NO_REFERENCE}"),
        (
            is_run and comparing and not reference,
            f"--fail-if: no row can have {', '.join(comparing)}: {NO_REFERENCE}",
        ),
    )
    pairs.check_labels(args.pair, labels)
    check_slices(args, slices)
    given = {
        "-v" if args.x_axis == "vram" else "--x-axis": args.x_axis,
        "--kld-value": args.kld_value,
        f"-{args.measure}": args.measure and not args.kld_value,
        "-mx": args.max_x < math.inf,
        "-my": args.max_y < math.inf,
        "--log_y": args.log_y is not None,
        "-dark": args.dark and not args.plots,
    }
    unused = [
        flag for flag, is_given in given.items() if is_given and not (args.plot_file or args.card)
    ]
    return (
        f"{', '.join(unused)}: for the picture of -p (or -pf FILE), which was not requested"
        if unused
        else None
    )
