"""The command line: every flag, what its value may be, and which flags go together."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ByteSize, TypeAdapter

from compare_q import __version__
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import unicode
from compare_q.eval.cli import until
from compare_q.eval.common.cache import default_root
from compare_q.eval.plots.measures import KLD_VALUES, SIZES
from compare_q.eval.table import registry

MODES = {"--from": "source", "--doctor": "doctor", "--cache": "cache", "--from-qbench": "from_qbench",
         "--list-engines": "list_engines"}  # fmt: skip
"""Flags that do something else than a run -> their names in the parsed flags."""
OF_A_RUN = {
    "MODEL": "models", "-d": "dataspec", "-m": "modelspec", "-r": "rows", "--until": "until",
    "-mask": "mask", "-cc": "clear_cache", "-lf": "logits_file",
    "--check": "check", "--tokens-out": "tokens_out", "--divergences": "divergences",
}  # fmt: skip
OF_ONE_TEXT = ("--kld-value", "-mx", "-my", "--log_y")
"""Flags that the plot of several texts does not know."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line, and whose flags with one value are given once."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(allow_abbrev=False, **keys)
        for name in (None, "store"):
            self.register("action", name, Once)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


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


SHARED: dict[str, dict[str, Any]] = {
    "-mask --mask": {"help": "only models whose label holds one of these words, with semicolons between"},
    "--cache-dir": {"type": path_argument, "help": "where tokens, scores and references are kept "
                    "(default: %(default)s)"},
    "--gpus": {"type": names, "metavar": "LIST", "help": "GPUs to use (0,1); models run at the same time on several"},
    "--python": {"type": engine_python, "action": "append", "default": [], "metavar": "ENGINE=PYTHON",
                 "help": "Python (or folder of a virtual environment) that runs an engine"},
    "--deadline": {"type": number("positive number of seconds", math.ulp(0.0)), "metavar": "SECONDS",
                   "help": "end a model that is silent for so long (default: generous)"},
    "--verbose": {"action": "store_true", "help": "let the engines print their own logs"},
}  # fmt: skip
"""Flags of a run and of ``compare-q trace``."""
RUN: dict[str, dict[str, Any]] = {
    "models": {"nargs": "*", "default": [], "metavar": "MODEL",
               "help": "models without a spec, the first is the reference: a folder, a hub id, a file or a server's "
               "address, as [label=]MODEL[@engine]"},
    "-d --dataspec": {"type": path_argument, "nargs": "+", "action": "extend",
                      "help": "data specifications (JSON), wildcards allowed, or with MODELs: wiki2, chat, "
                      "lm_eval:TASK, a file of text; a model loads once for all"},
    "-m --modelspec": {"nargs": "+", "action": "extend", "help": "model specifications (JSON), wildcards allowed"},
    "-r --rows": {"type": window_count, "help": "number of windows, or all; replaces max_rows of the data spec"},
    "--until": {"type": until.target, "metavar": "ANSWER",
                "help": "score until every row's KLD is known (kld:2%%), or the rows' order (ranked)"},
    "--no-reference": {"action": "store_true", "help": "MODELs are not compared with the first one"},
    "--save-specs": {"type": path_argument, "metavar": "FOLDER", "help": "write what ran as data.json and models.json"},
    "-cc --clear_cache": {"action": "store_true", "help": "forget what is stored of this text and these models first"},
    "-lf --logits_file": {"type": path_argument,
                          "help": "reference store for KL divergence: read, or made there"},
    "--divergences": {"action": "store_true",
                      "help": "measure reverse KLD, Jensen-Shannon, total variation and top-5 agreement too"},
    **SHARED,
    "--cache-limit": {"type": byte_size, "metavar": "SIZE",
                      "help": "keep the cache below SIZE (20GB); the oldest goes first"},
    "--ray": {"type": filled, "metavar": "ADDRESS", "help": "run models on the nodes of a Ray cluster (auto: its own)"},
    "--verify-weights": {"action": "store_true", "help": "tell models apart by every byte of their files, not by "
                         "samples"},
    "--check": {"action": "store_true", "help": "read the specs and say what would run; start no engine"},
    "--against": {"metavar": "MODEL", "help": "with --doctor: compare weights and tokens with this model's"},
}  # fmt: skip
OTHER_MODES: dict[str, dict[str, Any]] = {
    "--from": {"dest": "source", "type": path_argument, "nargs": "+", "action": "extend", "default": [],
               "metavar": "FILE",
               "help": "show a finished run (results.json, report.html), or several merged; runs nothing"},
    "--from-qbench": {"type": path_argument, "metavar": "PROJECT",
                      "help": "write a qbench project (YAML) as specs beside it, and do nothing else"},
    "--cache": {"action": "store_true", "help": "list what the cache holds, and do nothing else"},
    "--doctor": {"nargs": "+", "action": "extend", "default": [], "metavar": "MODEL",
                 "help": "say what checkpoints are and what is wrong with them; load nothing"},
    "--list-engines": {"action": "store_true", "help": "list engines, their load_fn names and versions"},
}  # fmt: skip
OUTPUTS: dict[str, dict[str, Any]] = {
    "-o --output": {"type": path_argument, "help": "write the results as JSON"},
    "--csv": {"type": path_argument, "help": "write the results as CSV"},
    "--markdown": {"type": path_argument, "help": "write the table as Markdown"},
    "--html": {"type": path_argument, "help": "write a report as one HTML file"},
    "--tokens-out": {"type": path_argument,
                     "help": "folder for the token scores of each model, as <label>.parquet"},
    "--columns": {"type": column_names, "metavar": "A,B,C",
                  "help": f"columns of table, Markdown, CSV and report, of {', '.join(registry.BY_NAME)}"},
    "--sort": {"type": sort_key, "metavar": "COLUMN",
               "help": "order the table's rows by a column, of several texts by its mean, or by COLUMN:TEXT "
               "(default: the order of the specs)"},
    "--by-text": {"action": "store_true", "help": "of several texts: a table each, one below the other"},
    "--statistics": {"action": "store_true", "help": "print llama.cpp's block of statistics for every model"},
    "--timing": {"action": "store_true", "help": "print where the seconds of every row went"},
    "--pairs": {"action": "store_true", "help": "print how every row differs from the next one, with errors"},
    "--pair": {"nargs": 2, "action": "append", "default": [], "metavar": ("A", "B"),
               "help": "print how the models with these two labels differ, with errors"},
    "-p --plot": {"action": "store_true", "help": "draw a scatter plot, into --plot_file or compare_q.png"},
    "-pf --plot_file": {"type": path_argument, "help": "file of the plot: .png, .svg or .pdf (implies -p)"},
    "--card": {"type": path_argument, "metavar": "FILE", "help": "draw the plot in 1,200 x 675 pixels, to be shared"},
    "--plots": {"type": path_argument, "help": "folder into which every kind of plot is drawn"},
    "-mx --max_x": {"type": float, "default": math.inf, "help": "leave out points beyond this x"},
    "-my --max_y": {"type": float, "default": math.inf, "help": "leave out points beyond this y"},
    "-t --title": {"type": unicode, "help": "plot title (default: names what is plotted)"},
    "-dark --dark": {"action": "store_true", "help": "dark plots"},
    "--log_y": {"action": argparse.BooleanOptionalAction,
                "help": "logarithmic or linear y axis (default: linear for KLD within a decade and a half, "
                "logarithmic beyond, by the excess over the reference's for PPL)"},
    "--kld-value": {"choices": tuple(KLD_VALUES), "help": "plot this KL divergence of the tokens (default: mean)"},
}  # fmt: skip
X_AXES: dict[str, dict[str, Any]] = {
    "--x-axis": {"choices": tuple(SIZES), "help": "plot over bits per weight (default), VRAM or file size"},
    "-v --vram": {"action": "store_const", "const": "vram", "dest": "x_axis", "help": "the same as --x-axis vram"},
}
MEASURES: dict[str, dict[str, Any]] = {
    f"-{name} --{name}": {"action": "store_const", "const": name, "dest": "measure", "help": f"plot {what}"}
    for name, what in {
        "kld": "KLD, the default if known", "ppl": "perplexity",
        "acc": "the accuracy of answers (the default of a task of questions)", "acc_norm": "the same of acc norm",
    }.items()
}  # fmt: skip


def add(p: argparse._ActionsContainer, flags: dict[str, dict[str, Any]]) -> None:
    """Add the flags of a table: their names, with a space between -> what argparse is told."""
    for words, keys in flags.items():
        p.add_argument(*words.split(), **keys)


def parser() -> argparse.ArgumentParser:
    """Every flag of upstream's compare_q, and the flags that upstream has not."""
    p = Parser(
        description="Compare quantized models by perplexity and KL divergence.",
        epilog="compare-q trace --help: have a model answer prompts, to score models on its answers.",
    )
    p.add_argument("--version", action="version", version=f"compare_q {__version__}")
    add(p, RUN)
    add(p, OUTPUTS)
    for choices in (OTHER_MODES, X_AXES, MEASURES):
        add(p.add_mutually_exclusive_group(), choices)
    p.set_defaults(cache_dir=default_root())
    return p


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The flags; InputError for flags that cannot go together.  With ``-p`` there always is a ``plot_file``."""
    p = parser()
    args = p.parse_args(words)
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    if args.kld_value:
        if args.measure not in (None, "kld"):
            raise InputError(f"--kld-value: is a value of KL divergence; leave it or -{args.measure} out")
        args.measure = "kld"
    mode = next((flag for flag, name in MODES.items() if getattr(args, name)), None)
    if args.against and mode != "--doctor":
        raise InputError("--against: goes with --doctor")
    for flag, name in OF_A_RUN.items() if mode else ():
        if getattr(args, name) != p.get_default(name):
            raise InputError(f"{flag}: is for a run, and does not go with {mode}")
    if mode is None and not (args.models or (args.dataspec and args.modelspec)):
        raise InputError("name models, or give -d and -m (or --from, --doctor, --cache, --list-engines); see --help")
    if args.models and args.modelspec:
        raise InputError("-m: specs stand for models that are named; leave the one or the other out")
    if args.until and args.rows is not None:
        raise InputError("--until: finds out how many windows it takes; leave -r out")
    if args.save_specs and not args.models:
        raise InputError("--save-specs: writes specs of models that are named without; name models in place of -m")
    if args.ray and args.gpus:
        raise InputError("--gpus: names GPUs of this machine; with --ray the cluster hands out its own")
    if args.cache_limit is not None and (args.check or mode not in (None, "--cache")):
        raise InputError("--cache-limit: goes with a run, or with --cache")
    return args


def check_texts(args: argparse.Namespace, texts: Sequence[str]) -> None:
    """InputError for a flag that does not go with as many texts; ``texts``: their names."""
    _, colon, text = (args.sort or "").partition(":")
    if colon and (len(texts) == 1 or text not in texts):
        raise InputError(f"--sort: {args.sort}: of several texts, name one behind the colon: {', '.join(texts)}")
    if args.by_text and len(texts) == 1:
        raise InputError("--by-text: there is one text, whose table it is anyway; leave it out")
    if len(texts) > 1 and args.logits_file is not None:
        raise InputError("--logits_file: a reference store is of one text; leave it out, or run once for each text")


def unused_picture_flags(args: argparse.Namespace, n_texts: int) -> str | None:
    """A line on flags that change a picture where no such picture is asked for; None if there are no such flags."""
    given = {
        "-v" if args.x_axis == "vram" else "--x-axis": args.x_axis, "--kld-value": args.kld_value,
        f"-{args.measure}": args.measure and not args.kld_value, "-mx": args.max_x < math.inf,
        "-my": args.max_y < math.inf, "--log_y": args.log_y is not None, "-dark": args.dark and not args.plots,
    }  # fmt: skip
    flags = [flag for flag, is_given in given.items() if is_given]
    only_one = [flag for flag in flags if flag in OF_ONE_TEXT]
    if n_texts > 1 and only_one:
        return f"{', '.join(only_one)}: for the plot of one text; the plot of {n_texts} texts is drawn without"
    if args.plot_file or args.card or not flags:
        return None
    return f"{', '.join(flags)}: for the picture of -p (or -pf FILE), which was not asked for"
