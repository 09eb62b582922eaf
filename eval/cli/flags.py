"""The command line: the subcommands, one table of all flags, what a flag's value may be, and which go together."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from compare_q.eval.plots.measures import KLD_VALUES, SIZES
from compare_q.eval.table import registry

COMMANDS = {
    "run": "measure models (the word may be left out)",
    "check": "say what a run would do, and what it would refuse; starts no engine",
    "show": "show, draw, cut down and combine finished runs",
    "doctor": "say what checkpoints are, and what is wrong with them; loads nothing",
    "cache": "list what is kept of earlier runs, and keep it small",
    "engines": "list the engines, and how to install what is missing",
}
"""Subcommands -> what they do."""
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
TAKES_WORDS_OF_RUN = "It takes the same words as run, whose flags are shown by: compare-q run --help"
ELSEWHERE = {
    "-f": "-d", "--file": "-d", "--tasks": "-d lm_eval:TASK", "--chunks": "-r", "--limit": "-r", "--output_path": "-o",
    "--model": "the models alone, as compare-q MODEL MODEL ...", "--model_args": "the models alone",
    "-c": "eval_len in a data spec", "--ctx-size": "eval_len in a data spec", "--device": "--gpus",
    "-ngl": 'n_gpu_layers in "engine" of a model spec', "--batch_size": 'options in "engine" of a model spec',
    "--kl-divergence": "nothing: KLD is measured anyway, against the first model", "--kl-divergence-base": "-lf",
}  # fmt: skip
"""Flags of llama-perplexity and lm-eval -> what compare-q has in their place."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line, and whose flags with one value are given once."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(allow_abbrev=False, **keys)
        for name in (None, "store"):
            self.register("action", name, Once)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


class Once(argparse.Action):
    """A flag with one value; InputError if it is given twice, where argparse would silently keep the last value."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise InputError(f"{option}: is given twice; it takes one value")
        setattr(namespace, self.dest, values)


def filled(given: str) -> str:
    """A value; an empty one, which a shell variable that is not set gives, would be the working directory."""
    if not given.strip():
        raise argparse.ArgumentTypeError("is empty; give it a value")
    return given


def path_argument(given: str) -> Path:
    """A file or folder."""
    return Path(filled(given))


def number(what: str, least: float, most: float = sys.float_info.max, kind: type[Any] = float) -> Callable[[str], Any]:
    """What reads the number of a flag, from ``least`` to ``most``."""

    def read(given: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(given)) <= most:  # never of nan
                return value
        raise argparse.ArgumentTypeError(f"{given!r} is no {what}")

    return read


def window_count(given: str) -> int:
    """``-r``: a number of windows; 0 means all, as in the spec."""
    return 0 if given == "all" else int(number("number of windows, nor 'all'", 0, kind=int)(given))


def names(given: str) -> list[str]:
    """Names with commas between."""
    return [name for each in filled(given).split(",") if (name := each.strip())]


def column_names(given: str) -> tuple[str, ...]:
    """``--columns``: names of columns with commas between."""
    try:
        return registry.checked(names(given))
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def sort_key(given: str) -> str:
    """``--sort``: the name of a column, and a text's name behind it or not."""
    column_names(given.partition(":")[0])
    return given


def engine_python(given: str) -> tuple[str, str]:
    """``--python``: an engine or load_fn, and the Python that runs it."""
    engine, _, python = given.partition("=")
    if not (engine and python):
        raise argparse.ArgumentTypeError(f"{given!r} is not ENGINE=PYTHON")
    return engine, python


def byte_size(given: str) -> int:
    """``--cache-limit`` in bytes: a number with a unit.

    A number alone is refused: 20 bytes, where 20 GB were meant, would empty the cache.
    """
    with suppress(ValueError):
        if re.search(r"[a-z]\s*$", given, re.IGNORECASE):
            return TypeAdapter(ByteSize).validate_python(given)
    raise argparse.ArgumentTypeError(f"{given!r} is no size with a unit; give for example 20GB or 500MiB")


def one_of(known: Sequence[str]) -> dict[str, Any]:
    """What argparse is told of a flag whose value is one of the ``known`` words."""

    def read(given: str) -> str:
        if given not in known:
            raise argparse.ArgumentTypeError(f"{given!r} is none of {', '.join(known)}{nearest(given, known)}")
        return given

    return {"type": read, "metavar": "|".join(known)}


@dataclass(frozen=True)
class Flag:
    """A flag: its ``names``, the ``commands`` that have it, and what argparse is told of it.

    The ``dest`` of words that belong to no flag is their only name.
    """

    names: tuple[str, ...]
    commands: tuple[str, ...]
    keys: dict[str, Any]

    @property
    def dest(self) -> str:
        """Its name among the parsed flags."""
        return str(self.keys.get("dest") or self.names[-1].lstrip("-").replace("-", "_"))


def flag(names: str, commands: str, help: str, **keys: Any) -> Flag:
    """A flag, from names and commands with spaces between."""
    return Flag(tuple(names.split()), tuple(commands.split()), {"help": help, **keys})


on, many = partial(flag, action="store_true"), {"nargs": "+", "action": "extend"}
file, folder = partial(flag, type=path_argument, metavar="FILE"), partial(flag, type=path_argument, metavar="FOLDER")
RUN, SHOWN = "run check", "run check show"
FLAGS = {
    "what": [
        flag("models", RUN, "models without a spec, the first is the reference: a folder, a hub id, a file or a "
             "server's address, as [label=]MODEL[@engine]", nargs="*", default=[], metavar="MODEL"),
        flag("models", "doctor", "folders, GGUF files, hub ids, or model specs", nargs="+", metavar="MODEL"),
        file("source", "show", "results.json or report.html of finished runs; several become one table", nargs="+",
             default=[]),
        flag("-d --dataspec", RUN, "data specs (JSON), wildcards allowed, or with MODELs: wiki2, code, chat, "
             "lm_eval:TASK, a file of text; a model loads once for all", type=path_argument, metavar="TEXT", **many),
        flag("-m --modelspec", RUN, "model specs (JSON), wildcards allowed", metavar="SPEC", **many),
        flag("-mask --mask", SHOWN, "only models whose label holds one of these words, with semicolons "
             "between; the reference stays"),
        flag("--tokenizer", RUN, "of MODELs that have none, as GGUF files alone: a folder or hub id", type=filled,
             metavar="FOLDER"),
        on("--no-reference", RUN, "MODELs are not compared with the first one"),
        flag("-r --rows", RUN, "number of windows, or all (also 0), in place of max_rows", type=window_count),
        flag("--until", RUN, "score windows until every row's KLD is known to this error (kld:2%%)",
             type=adaptive.relative_error, metavar="kld:PERCENT%"),
        on("--divergences", RUN, "measure reverse KLD, Jensen-Shannon, total variation and top-5 agreement too"),
        file("-lf --logits_file", RUN, "reference store for KL divergence: read, or made there"),
        on("-cc --clear_cache", RUN, "forget what is stored of this text and these models first"),
        on("--verify-weights", RUN, "tell models apart by every byte of their files, not by samples"),
    ],
    "where": [
        flag("--gpus", "run check", "GPUs to use (0,1); models run at the same time on several", type=names,
             metavar="LIST"),
        flag("--python", "run check", "Python (or folder of a virtual environment) that runs an engine",
             type=engine_python, action="append", default=[], metavar="ENGINE=PYTHON"),
        flag("--ray", RUN, "run models on the nodes of a Ray cluster (auto: its own)", type=filled,
             metavar="ADDRESS"),
        flag("--deadline", "run check", "end a model that is silent for so long (default: generous)",
             type=number("positive number of seconds", math.ulp(0.0)), metavar="SECONDS"),
        on("--verbose", "run check show", "let the engines print their own logs; show where an error arose"),
        folder("--cache-dir", "run check cache", "where tokens, scores, references and logs are kept "
               "(default: %(default)s)"),
        flag("--cache-limit", "run check cache", "keep the cache below SIZE (20GB); the oldest goes first",
             type=byte_size, metavar="SIZE"),
        flag("--version", "run", "say the version", action="version", version=f"compare_q {__version__}"),
    ],
    "table": [
        flag("--columns", SHOWN, f"columns of table, Markdown, CSV and report, of {', '.join(registry.BY_NAME)}",
             type=column_names, metavar="A,B,C"),
        flag("--sort", SHOWN, "order the table's rows by a column, of several texts by its mean, or by COLUMN:TEXT "
             "(default: the order of the specs)", type=sort_key, metavar="COLUMN"),
        on("--by-text", SHOWN, "of several texts: a table each, one below the other"),
        on("--notes", SHOWN, "print what the columns and marks of the table mean"),
        on("--timing", SHOWN, "print where the seconds of every row went"),
        on("--pairs", SHOWN, "print how every row differs from the next one, with errors"),
        flag("--pair", SHOWN, "print how the models with these two labels differ, with errors", nargs=2,
             action="append", default=[], metavar=("A", "B")),
    ],
    "files": [
        file("-o --output", SHOWN, "write the results as JSON"),
        file("--csv", SHOWN, "write the results as CSV"),
        file("--markdown", SHOWN, "write the table as Markdown"),
        file("--html", SHOWN, "write a report as one HTML file"),
        folder("--tokens-out", RUN, "the token scores of each model, as <label>.parquet"),
        folder("--save-specs", RUN, "write what ran as data.json and models.json"),
    ],
    "picture": [
        on("-p --plot", SHOWN, "draw a scatter plot, into --plot_file or compare_q.png"),
        file("-pf --plot_file", SHOWN, "file of the plot: .png, .svg or .pdf (implies -p)"),
        file("--card", SHOWN, "draw the plot in 1,200 x 675 pixels, to be shared"),
        folder("--plots", SHOWN, "draw every kind of plot"),
        flag("-kld --kld", SHOWN, "plot KLD, the default if known", action="store_const", const="kld",
             dest="measure"),
        flag("-ppl --ppl", SHOWN, "plot perplexity", action="store_const", const="ppl", dest="measure"),
        flag("-acc --acc", SHOWN, "plot the accuracy of answers (the default of a task of questions)",
             action="store_const", const="acc", dest="measure"),
        flag("-acc_norm --acc_norm", SHOWN, "plot the same of acc norm", action="store_const", const="acc_norm",
             dest="measure"),
        flag("--kld-value", SHOWN, "plot this KL divergence of the tokens (default: mean)", **one_of([*KLD_VALUES])),
        flag("--x-axis", SHOWN, "plot over bits per weight (default), VRAM, file size or KV cache", **one_of([*SIZES])),
        flag("-v --vram", SHOWN, "the same as --x-axis vram", action="store_const", const="vram", dest="x_axis"),
        flag("-mx --max_x", SHOWN, "leave out points beyond this x", type=float, default=math.inf),
        flag("-my --max_y", SHOWN, "leave out points beyond this y", type=float, default=math.inf),
        flag("--log_y", SHOWN, "logarithmic or linear y axis (default: linear for KLD within a decade and a half, "
             "logarithmic beyond, by the excess over the reference's for PPL)",
             action=argparse.BooleanOptionalAction),
        flag("-t --title", SHOWN, "title of plots and report (default: names what is plotted)", type=unicode),
        on("-dark --dark", SHOWN, "dark plots"),
    ],
}  # fmt: skip
"""Every flag, below the heading that it has in the help of its commands."""


def parser(command: str) -> Parser:
    """The flags of a subcommand; flags of other subcommands have their defaults."""
    own = {heading: [each for each in flags if command in each.commands] for heading, flags in FLAGS.items()}
    sharing = Counter(each.dest for flags in own.values() for each in flags)
    words = [f" {each.keys['metavar']} ..." for each in own["what"] if not each.names[0].startswith("-")]
    p = Parser(
        prog=f"compare-q {command}", usage=f"compare-q {command}{''.join(words)} [flags]",
        description=f"{COMMANDS[command].capitalize()}.",
        epilog=TAKES_WORDS_OF_RUN if command == "check" else
        "In long flags - and _ are the same. docs/specs.md says more about each flag.",
    )  # fmt: skip
    hidden = {"help": argparse.SUPPRESS} if command == "check" else {}
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for heading, flags in own.items():
        group = p.add_argument_group(heading)
        for each in flags:
            place: argparse._ActionsContainer = group
            if sharing[each.dest] > 1:
                place = exclusive[each.dest] = exclusive.get(each.dest) or group.add_mutually_exclusive_group()
            place.add_argument(*each.names, **{**each.keys, **hidden})
    absent = (each for flags in FLAGS.values() for each in flags if each.dest not in sharing)
    p.set_defaults(**{each.dest: each.keys.get("default") for each in absent} | {"cache_dir": default_root()})
    return p


def spelled(words: Sequence[str], command: str, known: Iterable[str]) -> list[str]:
    """The words with flags as they are declared: - and _ are the same in them, and one - as good as two.

    InputError for a flag that is not known, of which argparse would make another one: ``-output x`` would be ``-o
    utput`` and a MODEL x, and ``-c`` would be ``-cc``.
    """
    own = {name.replace("_", "-"): name for name in known}

    def as_declared(word: str) -> str:
        name, equals, value = word.partition("=")
        plain = name.replace("_", "-")
        found = own.get(plain) or own.get(f"-{plain}")
        if not word.startswith("-") or re.match(r"-\d|-\w\d|-?$", word):  # a number, -r64, or -
            return word
        if found is None:
            raise InputError(unknown(name, command))
        return f"{found}{equals}{value}"

    return list(map(as_declared, words))


def command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return (the subcommand, its words); InputError for a misspelled subcommand."""
    first = words[0]
    if first in COMMANDS:
        return first, list(words[1:])
    hint = "" if json_files.exists(first) or re.search(r"[^\w]", first) else nearest(first, COMMANDS)
    if hint:
        raise InputError(f"{first}: no such command, folder or file{hint}; see compare-q --help")
    return "run", list(words)


def unknown(name: str, command: str) -> str:
    """What is wrong with a word, or a flag without its value, that a subcommand does not know."""
    name = printable(name)
    if not name.startswith("-"):
        return f"{name}: compare-q {command} takes no such word; see compare-q {command} --help"
    if name in ELSEWHERE and command in RUN.split():
        return f"{name}: in its place compare-q has {ELSEWHERE[name]}; see compare-q {command} --help"
    others = [other for other in COMMANDS if name in parser(other)._option_string_actions]
    if others:
        return f"{name}: is no flag of compare-q {command}, but of compare-q {others[0]}"
    near = nearest(name, parser(command)._option_string_actions)
    return f"{name}: compare-q {command} has no such flag{near}; see compare-q {command} --help"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The flags; InputError for flags that cannot go together.  With ``-p`` there always is a ``plot_file``.

    ``command``: the subcommand.
    """
    command, rest = command_of(words)
    p = parser(command)
    args, left = p.parse_known_intermixed_args(spelled(rest, command, p._option_string_actions))
    if left:
        raise InputError(unknown(left[0], command))
    args.command = command
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    if args.kld_value:
        if args.measure not in (None, "kld"):
            raise InputError(f"--kld-value: is a value of KL divergence; leave it or -{args.measure} out")
        args.measure = "kld"
    if command in ("run", "check"):
        check_run(args)
    return args


def check_run(args: argparse.Namespace) -> None:
    """InputError for flags of a run that cannot go together."""
    if not args.models and not args.modelspec:
        texts = [str(each) for each in args.dataspec or []]
        cure = f"; -d has taken all of {printable(' '.join(texts))}: put models before it" if len(texts) > 1 else ""
        raise InputError(f"name models, or give -d and -m{cure}; see compare-q {args.command} --help")
    if args.models and args.modelspec:
        raise InputError(
            f"{printable(args.models[0])}: is named beside -m, whose specs stand for all models; leave one of them out"
        )
    if not args.models and not args.dataspec:
        raise InputError(
            f"-d: is missing: specs of models go with a spec of a text; see compare-q {args.command} --help"
        )
    if args.until and args.rows is not None:
        raise InputError("--until: finds out how many windows it takes; leave -r out")
    named_only = {"--save-specs": args.save_specs, "--tokenizer": args.tokenizer, "--no-reference": args.no_reference}
    for name in (name for name, value in named_only.items() if value and not args.models):
        raise InputError(f"{name}: is for models that are named without specs; name models in place of -m")
    if args.ray and args.gpus:
        raise InputError("--gpus: names GPUs of this machine; with --ray the cluster hands out its own")


def check_texts(args: argparse.Namespace, texts: Sequence[str]) -> None:
    """InputError for a flag that does not go with as many texts; ``texts``: their names."""
    _, colon, text = (args.sort or "").partition(":")
    if colon and (len(texts) == 1 or text not in texts):
        raise InputError(f"--sort: {args.sort}: of several texts, name one behind the colon: {', '.join(texts)}")
    if args.by_text and len(texts) == 1:
        raise InputError("--by-text: there is one text, whose table it is anyway; leave it out")
    if len(texts) > 1 and args.logits_file is not None:
        raise InputError("--logits_file: a reference store is of one text; leave it out, or run once for each text")


def unused_picture_flags(args: argparse.Namespace) -> str | None:
    """A line on flags that change a picture where no such picture is asked for; None if there are no such flags."""
    given = {
        "-v" if args.x_axis == "vram" else "--x-axis": args.x_axis, "--kld-value": args.kld_value,
        f"-{args.measure}": args.measure and not args.kld_value, "-mx": args.max_x < math.inf,
        "-my": args.max_y < math.inf, "--log_y": args.log_y is not None, "-dark": args.dark and not args.plots,
    }  # fmt: skip
    flags = [flag for flag, is_given in given.items() if is_given]
    if args.plot_file or args.card or not flags:
        return None
    return f"{', '.join(flags)}: for the picture of -p (or -pf FILE), which was not asked for"
