"""The command line: every flag, and which flags go together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from compare_q import __version__
from compare_q.backends.common.errors import InputError
from compare_q.eval.cli import output_flags, plot_flags, run_flags
from compare_q.eval.cli.flag_values import Once
from compare_q.eval.common.cache import default_root


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors of one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")


def parser() -> argparse.ArgumentParser:
    """Every flag of upstream's compare_q, and the flags that upstream has not."""
    p = Parser(
        description="Compare quantized models by perplexity and KL divergence.",
        epilog="compare-q trace --help: have a model answer prompts, to score models on its answers.",
        allow_abbrev=False,
    )
    for name in (None, "store"):
        p.register("action", name, Once)
    p.add_argument("--version", action="version", version=f"compare_q {__version__}")
    run_flags.add(p)
    output_flags.add(p)
    plot_flags.add(p)
    p.set_defaults(cache_dir=default_root())
    return p


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The flags; InputError for flags that cannot go together.  With ``-p`` there always is a ``plot_file``."""
    args = parser().parse_args(words)
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    if args.kld_value:
        if args.measure not in (None, "kld"):
            raise InputError(f"--kld-value: is a value of KL divergence; leave it or -{args.measure} out")
        args.measure = "kld"
    if args.doctor and (args.dataspec or args.modelspec or args.source or args.cache or args.list_engines):
        raise InputError("--doctor: examines models and does nothing else; leave -d, -m, --from and --cache out")
    if args.against and not args.doctor:
        raise InputError("--against: goes with --doctor")
    if args.source:
        running = {
            "-d": args.dataspec, "-m": args.modelspec, "-r": args.rows is not None, "-mask": args.mask,
            "-cc": args.clear_cache, "-lf": args.logits_file, "--check": args.check, "--tokens-out": args.tokens_out,
            "--divergences": args.divergences,
        }  # fmt: skip
        for flag, given in running.items():
            if given:
                raise InputError(f"--from: shows a finished run; {flag} is for a run that is still to start")
    elif not (args.list_engines or args.cache or args.doctor or args.from_qbench) and (
        args.dataspec is None or not args.modelspec
    ):
        raise InputError("-d and -m: both are needed (or --from, --doctor, --cache, or --list-engines); see --help")
    if args.ray and args.gpus:
        raise InputError("--gpus: names GPUs of this machine; with --ray the cluster hands out its own")
    if args.from_qbench and (args.source or args.dataspec or args.modelspec or args.cache):
        raise InputError("--from-qbench: writes two specs and does nothing else; leave --from, --cache, -d and -m out")
    if args.cache and (args.source or args.dataspec or args.modelspec or args.clear_cache):
        raise InputError("--cache: lists the cache and does nothing else; leave --from, -d, -m and -cc out")
    if args.cache_limit is not None and (args.source or args.check or args.list_engines):
        raise InputError("--cache-limit: goes with a run, or with --cache")
    return args
