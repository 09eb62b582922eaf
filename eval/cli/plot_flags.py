"""Flags that say what is drawn."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import unicode
from compare_q.eval.cli.flag_values import path_argument
from compare_q.eval.plots.measures import KLD_VALUES, SIZES


def add(p: argparse.ArgumentParser) -> None:
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
    p.add_argument("-t", "--title", type=unicode, help="plot title (default: names what is plotted)")
    p.add_argument("-dark", "--dark", action="store_true", help="dark plots")
    p.add_argument(
        "--log_y", action=argparse.BooleanOptionalAction,
        help="logarithmic or linear y axis (default: linear for KLD within a decade and a half, logarithmic beyond, by "
        "the excess over the reference's for PPL)",
    )  # fmt: skip
    measure = p.add_mutually_exclusive_group()
    measure.add_argument(
        "-kld", "--kld", action="store_const", const="kld", dest="measure", help="plot KLD, the default if known"
    )
    measure.add_argument("-ppl", "--ppl", action="store_const", const="ppl", dest="measure", help="plot perplexity")
    measure.add_argument(
        "-acc", "--acc", action="store_const", const="acc", dest="measure",
        help="plot the accuracy of answers (the default of a task of questions)",
    )  # fmt: skip
    measure.add_argument(
        "-acc_norm", "--acc_norm", action="store_const", const="acc_norm", dest="measure", help="the same of acc norm"
    )
    p.add_argument(
        "--kld-value", choices=tuple(KLD_VALUES), help="plot this KL divergence of the tokens (default: mean)"
    )


OF_ONE_TEXT = ("--kld-value", "-mx", "-my", "--log_y")
"""Flags that the plot of several texts does not know."""


def unused_picture_flags(args: argparse.Namespace, n_texts: int = 1) -> str | None:
    """A line on flags that change a picture where no such picture is asked for; None if there are no such flags."""
    given = {
        "-v" if args.x_axis == "vram" else "--x-axis": args.x_axis, "--kld-value": args.kld_value,
        f"-{args.measure}": args.measure and not args.kld_value, "-mx": args.max_x < math.inf,
        "-my": args.max_y < math.inf, "--log_y": args.log_y is not None, "-dark": args.dark and not args.plots,
    }  # fmt: skip
    flags = [flag for flag, is_given in given.items() if is_given]
    only_one = [flag for flag in flags if flag in OF_ONE_TEXT]
    if n_texts > 1 and only_one:
        change = "changes" if len(only_one) == 1 else "change"
        return f"{', '.join(only_one)}: {change} the plot of one text; the plot of {n_texts} texts is drawn without"
    if args.plot_file or args.card or not flags:
        return None
    change = "changes" if len(flags) == 1 else "change"
    return f"{', '.join(flags)}: {change} the picture of -p (or -pf FILE), which was not asked for"


def check_picture(flag: str, file: Path) -> None:
    """InputError for a file name that does not end like a picture that compare_q can draw."""
    from compare_q.eval.plots import style  # with matplotlib: 0.3 s that --help and bad input need not wait

    if file.suffix.lower() not in style.SUFFIXES:
        raise InputError(f"{flag}: {file}: must end in {', '.join(style.SUFFIXES)}")
