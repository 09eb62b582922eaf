"""The flags of the command line, and the checks of flags that need no spec and no engine."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, get_args

from backends.common.errors import InputError
from eval import __version__
from eval.common.cache import default_root
from eval.plots.measures import KLD_VALUES, SIZES
from eval.run.devices import Overlap
from eval.table.columns import ORDERS


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


class Once(argparse.Action):
    """A flag with one value; InputError if it is given twice, where argparse would silently keep the last value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        seen: set[str] = vars(namespace).setdefault("seen", set())
        if self.dest in seen:
            reason = "a run has one text; run once for each" if self.dest == "dataspec" else "it takes one value"
            raise InputError(f"{option}: is given twice; {reason}")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


def parser() -> argparse.ArgumentParser:
    """Every flag of upstream's compare_q, and the flags that upstream has not."""
    p = Parser(
        description="Compare quantized models by perplexity and KL divergence.",
        allow_abbrev=False,
    )
    for name in (None, "store"):
        p.register("action", name, Once)
    p.add_argument("--version", action="version", version=f"compare_q {__version__}")
    add_run(p)
    add_output(p)
    add_plot(p)
    p.set_defaults(cache_dir=default_root())
    return p


def add_run(p: argparse.ArgumentParser) -> None:
    """Flags that say what runs."""
    p.add_argument("-d", "--dataspec", type=path_argument, help="data specification (JSON)")
    p.add_argument(
        "-m", "--modelspec", nargs="+", action="extend", help="model specifications (JSON), wildcards allowed"
    )
    p.add_argument(
        "-r", "--rows", type=window_count, help="number of windows, or all; replaces max_rows of the data spec"
    )
    p.add_argument("-mask", "--mask", help="only models whose label holds one of these words, with semicolons between")
    p.add_argument(
        "-cc", "--clear_cache", action="store_true", help="forget what is stored of this text and these models first"
    )
    p.add_argument(
        "-lf", "--logits_file", type=path_argument, help="reference store for KL divergence: read, or made there"
    )
    p.add_argument("--from", dest="source", type=path_argument, nargs="+", action="extend", default=[], metavar="FILE",
                   help="show a finished run (results.json, report.html), or several merged; runs nothing")  # fmt: skip
    p.add_argument(
        "--cache-dir", type=path_argument, help="where tokens, scores and references are kept (default: %(default)s)"
    )
    p.add_argument("--cache", action="store_true", help="list what the cache holds, and do nothing else")
    p.add_argument(
        "--cache-limit", type=byte_size, metavar="SIZE", help="keep the cache below SIZE (20GB); the oldest goes first"
    )
    p.add_argument(
        "--gpus", type=device_list, metavar="LIST", help="GPUs to use (0,1); models run at the same time on several"
    )
    p.add_argument(
        "--ray",
        type=node_address,
        metavar="ADDRESS",
        help="run models on the nodes of a Ray cluster (auto: its own)",
    )
    p.add_argument("--python", type=engine_python, action=Mapped, default={}, metavar="ENGINE=PYTHON",
                   help="Python (or folder of a virtual environment) that runs an engine")  # fmt: skip
    p.add_argument("--deadline", type=seconds, metavar="SECONDS",
                   help="end a model that is silent for so long (default: generous)")  # fmt: skip
    p.add_argument("--overlap", choices=get_args(Overlap), default="auto",
                   help="load a model while the one before is on its GPUs: auto, where both fit")  # fmt: skip
    p.add_argument("--verify-weights", action="store_true",
                   help="tell models apart by every byte of their files, not by samples")  # fmt: skip
    p.add_argument("--check", action="store_true", help="read the specs and say what would run; start no engine")
    p.add_argument("--doctor", nargs="+", action="extend", default=[], metavar="MODEL",
                   help="say what checkpoints are and what is wrong with them; load nothing")  # fmt: skip
    p.add_argument("--against", metavar="MODEL", help="with --doctor: compare weights and tokens with this model's")
    p.add_argument("--list-engines", action="store_true", help="list engines, their load_fn names and versions")
    p.add_argument("--verbose", action="store_true", help="let the engines print their own logs")


def add_output(p: argparse.ArgumentParser) -> None:
    """Flags that say what is printed and written."""
    p.add_argument("-o", "--output", type=path_argument, help="write the results as JSON")
    p.add_argument("--csv", type=path_argument, help="write the results as CSV")
    p.add_argument("--markdown", type=path_argument, help="write the table as Markdown")
    p.add_argument("--html", type=path_argument, help="write a report as one HTML file")
    p.add_argument(
        "--tokens-out", type=path_argument, help="folder for the token scores of each model, as <label>.parquet"
    )
    p.add_argument("--sort", choices=tuple(ORDERS), help="order of the table's rows (default: the order of the specs)")
    p.add_argument("--statistics", action="store_true", help="print llama.cpp's block of statistics for every model")
    p.add_argument("--timing", action="store_true", help="print where the seconds of every row went")
    p.add_argument("--pairs", action="store_true", help="print how every row differs from the next one, with errors")
    p.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"),
                   help="print how the models with these two labels differ, with errors")  # fmt: skip


def add_plot(p: argparse.ArgumentParser) -> None:
    """Flags that say what is drawn."""
    p.add_argument("-p", "--plot", action="store_true", help="draw a scatter plot, into --plot_file or compare_q.png")
    p.add_argument("-pf", "--plot_file", type=path_argument, help="file of the plot: .png, .svg or .pdf (implies -p)")
    p.add_argument(
        "--card", type=path_argument, metavar="FILE", help="draw the plot in 1,200 x 675 pixels, to be shared"
    )
    p.add_argument("--plots", type=path_argument, help="folder into which every kind of plot is drawn")
    x_axis = p.add_mutually_exclusive_group()
    x_axis.add_argument("--x-axis", choices=tuple(SIZES), help="plot over bits per weight (default), VRAM or file size")
    x_axis.add_argument(
        "-v", "--vram", action="store_const", const="vram", dest="x_axis", help="the same as --x-axis vram"
    )
    p.add_argument("-mx", "--max_x", type=float, default=math.inf, help="leave out points beyond this x")
    p.add_argument("-my", "--max_y", type=float, default=math.inf, help="leave out points beyond this y")
    p.add_argument("-t", "--title", help="plot title (default: Perplexity, or KL divergence, of quantized models)")
    p.add_argument("-dark", "--dark", action="store_true", help="dark plots")
    p.add_argument(
        "--log_y", action=argparse.BooleanOptionalAction,
        help="logarithmic or linear y axis (default: logarithmic for KLD, by the excess over the reference's for PPL)",
    )  # fmt: skip
    measure = p.add_mutually_exclusive_group()
    measure.add_argument(
        "-kld", "--kld", action="store_const", const=True, help="plot KL divergence (default: if known)"
    )
    measure.add_argument("-ppl", "--ppl", action="store_const", const=False, dest="kld", help="plot perplexity")
    p.add_argument(
        "--kld-value", choices=tuple(KLD_VALUES), help="plot this KL divergence of the tokens (default: mean)"
    )


def window_count(given: str) -> int:
    """``-r``: a number of windows; 0 means all, as in the spec."""
    if given == "all":
        return 0
    if not given.isdecimal():
        raise argparse.ArgumentTypeError(f"{given!r} is neither a number of windows nor 'all'")
    return int(given)


def device_list(given: str) -> list[str]:
    """``--gpus``: names of GPUs with commas between."""
    found = [each.strip() for each in given.split(",") if each.strip()]
    if not found:
        raise argparse.ArgumentTypeError("names no GPU; leave the flag out to use all")
    return found


def node_address(given: str) -> str:
    """``--ray``: what Ray calls the address of a cluster."""
    if not given.strip():
        raise argparse.ArgumentTypeError("is empty; give auto, or the address that ray start has printed")
    return given


class Mapped(argparse.Action):
    """Collects ``NAME=VALUE`` pairs of several flags in a dict."""

    def __call__(self, _: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **values})


def engine_python(given: str) -> dict[str, str]:
    """``--python``: an engine or load_fn, and the Python that runs it."""
    engine, equals, python = given.partition("=")
    if not (engine and equals and python):
        raise argparse.ArgumentTypeError(f"{given!r} is not ENGINE=PYTHON")
    return {engine: python}


def seconds(given: str) -> float:
    """``--deadline``: a positive number."""
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{given!r} is no positive number of seconds")
    return found


def path_argument(given: str) -> Path:
    """A file or folder; an empty name, which a shell variable that is not set gives, would be the working directory."""
    if not given:
        raise argparse.ArgumentTypeError("is empty; give a file or folder")
    return Path(given)


def byte_size(given: str) -> int:
    """``--cache-limit`` in bytes: a number alone, with KB to TB (powers of 1,000), or KiB to TiB (powers of 1,024)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", given.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{given!r} is no size; give for example 20GB or 500MiB")
    power = "KMGT".find((found[2] or "").upper()) + 1 if found[2] else 0
    wanted = float(found[1]) * (1024 if found[3] else 1000) ** power
    if not math.isfinite(wanted):
        raise argparse.ArgumentTypeError(f"{given[:20]}... is too large")
    return int(wanted)


def unused_picture_flags(args: argparse.Namespace) -> str | None:
    """A line on flags that change a picture where no picture is asked for; None if there are no such flags."""
    given = {
        "-v" if args.x_axis == "vram" else "--x-axis": args.x_axis, "--kld-value": args.kld_value,
        "-kld": args.kld is True and not args.kld_value, "-ppl": args.kld is False, "-mx": args.max_x < math.inf,
        "-my": args.max_y < math.inf, "--log_y": args.log_y is not None, "-dark": args.dark and not args.plots,
    }  # fmt: skip
    flags = [flag for flag, is_given in given.items() if is_given]
    if args.plot_file or args.card or not flags:
        return None
    change = "changes" if len(flags) == 1 else "change"
    return f"{', '.join(flags)}: {change} the picture of -p (or -pf FILE), which was not asked for"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The flags; InputError for flags that cannot go together.  With ``-p`` there always is a ``plot_file``."""
    args = parser().parse_args(words)
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    if args.kld_value:
        if args.kld is False:
            raise InputError("--kld-value: is a value of KL divergence; leave it or -ppl out")
        args.kld = True
    if args.doctor and (args.dataspec or args.modelspec or args.source or args.cache or args.list_engines):
        raise InputError("--doctor: examines models and does nothing else; leave -d, -m, --from and --cache out")
    if args.against and not args.doctor:
        raise InputError("--against: goes with --doctor")
    if args.source:
        running = {
            "-d": args.dataspec, "-m": args.modelspec, "-r": args.rows is not None, "-mask": args.mask,
            "-cc": args.clear_cache, "-lf": args.logits_file, "--check": args.check, "--tokens-out": args.tokens_out,
        }  # fmt: skip
        for flag, given in running.items():
            if given:
                raise InputError(f"--from: shows a finished run; {flag} is for a run that is still to start")
    elif not (args.list_engines or args.cache or args.doctor) and (args.dataspec is None or not args.modelspec):
        raise InputError("-d and -m: both are needed (or --from, --doctor, --cache, or --list-engines); see --help")
    if args.ray and args.gpus:
        raise InputError("--gpus: names GPUs of this machine; with --ray the cluster hands out its own")
    if args.cache and (args.source or args.dataspec or args.modelspec or args.clear_cache):
        raise InputError("--cache: lists the cache and does nothing else; leave --from, -d, -m and -cc out")
    if args.cache_limit is not None and (args.source or args.check or args.list_engines):
        raise InputError("--cache-limit: goes with a run, or with --cache")
    return args


def check_outputs(args: argparse.Namespace, inputs: Mapping[Path, str] | None = None) -> None:
    """InputError, before anything runs, for an output that could not be written afterwards, or that is an input too.

    ``inputs``: files and folders that the run reads -> what they are.
    """
    files = {"--output": args.output, "--csv": args.csv, "--markdown": args.markdown, "--html": args.html,
             "--plot_file": args.plot_file, "--card": args.card}  # fmt: skip
    given = {flag: file for flag, file in files.items() if file is not None}
    taken = dict.fromkeys((file.resolve() for file in args.source), "--from")
    for flag, file in given.items():
        if file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
            raise InputError(f"{flag}: {file}: cannot be written; is the folder there and yours?")
        if taken.setdefault(file.resolve(), flag) != flag:
            raise InputError(f"{flag}: {file}: is the file of {taken[file.resolve()]} as well; name another file")
        for path, what in (inputs or {}).items():
            if path.exists() and (file.resolve() == path.resolve() or path.resolve() in file.resolve().parents):
                raise InputError(f"{flag}: {file}: is {what}, or lies in it; name another file")
    for flag, folder in {"--tokens-out": args.tokens_out, "--plots": args.plots}.items():
        if folder:
            check_folder(flag, folder)
    for flag in ("--plot_file", "--card"):
        if given.get(flag):
            check_picture(flag, given[flag])


def check_picture(flag: str, file: Path) -> None:
    """InputError for a file name that does not end like a picture that compare_q can draw."""
    from eval.plots import style  # with matplotlib: 0.3 s that --help and bad input need not wait

    if file.suffix.lower() not in style.SUFFIXES:
        raise InputError(f"{flag}: {file}: must end in {', '.join(style.SUFFIXES)}")


def check_folder(flag: str, folder: Path) -> None:
    """Makes an output folder; InputError if nothing can be written in it."""
    with suppress(OSError):  # what is wrong shows in the next line
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) or not folder.is_dir():
        raise InputError(f"{flag}: {folder}: cannot be written; is the folder yours?")
