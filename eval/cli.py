"""The command line of compare_q: flags -> specs -> run -> table, files, plot.

Exit status: 0 all models measured; 1 some failed and the others are in the table; 2 bad input or nothing measured.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

import backends
from backends import hub
from backends.base import CompareQError, InputError
from eval import corpus, jobs, plot, report, scores, specs
from eval.progress import Progress
from eval.results import MARK, RunResult
from eval.runner import Runner
from eval.specs import DataSpec, ModelSpec
from eval.store import Store, default_root

TO_SCALE = 1.0
"""Mean KLD (nats) up to which a plot stays to scale: 4 bits being ten times 8 bits is no outlier, a broken model is."""
MARKED = f" ({MARK}: ran otherwise than its checkpoint asks)"
"""What the plot says of marked labels."""
Y_LABEL = 70
"""Letters that the plot's height has room for."""


def parser() -> argparse.ArgumentParser:
    """Every flag of upstream's compare_q, and ours."""
    p = argparse.ArgumentParser(
        prog="compare_q.py",
        description="Compare quantized models by perplexity and KL divergence.",
        allow_abbrev=False,
    )
    p.add_argument("-d", "--dataspec", type=Path, help="data specification (JSON)")
    p.add_argument("-m", "--modelspec", nargs="+", help="model specifications (JSON), wildcards allowed")
    p.add_argument("-r", "--rows", type=rows, help="number of windows, or all; replaces the data spec's max_rows")
    p.add_argument("-mask", "--mask", help="only models whose label holds one of these semicolon-separated words")
    p.add_argument("-cc", "--clear_cache", action="store_true", help="forget stored results of these models first")
    p.add_argument("-o", "--output", type=Path, help="write the results as JSON")
    p.add_argument("--csv", type=Path, help="write the results as CSV")
    p.add_argument("--tokens-out", type=Path, help="folder for each model's per-token scores, as <label>.parquet")
    p.add_argument("-p", "--plot", action="store_true", help="scatter plot, to --plot_file or compare_q.png")
    p.add_argument("-pf", "--plot_file", type=Path, help="file of the plot: .png, .svg or .pdf (implies -p)")
    p.add_argument("-v", "--vram", action="store_true", help="plot over VRAM instead of bits per weight")
    p.add_argument("-mx", "--max_x", type=float, default=math.inf, help="leave out points beyond this x")
    p.add_argument("-my", "--max_y", type=float, default=math.inf, help="leave out points beyond this y")
    p.add_argument("-t", "--title", help="plot title (default: Perplexity, or KL divergence, of quantized models)")
    p.add_argument("-dark", "--dark", action="store_true", help="dark plot")
    p.add_argument("-kld", "--kld", action="store_true", help="plot KL divergence in place of perplexity")
    p.add_argument("-lf", "--logits_file", type=Path, help="reference store for KL divergence: read, or made there")
    p.add_argument("--cache-dir", type=Path, help="where tokens and scores are kept (default: %(default)s)")
    p.add_argument("--check", action="store_true", help="read the specs, say what would run; start no engine")
    p.add_argument("--list-engines", action="store_true", help="list engines, their load_fn names and versions")
    p.add_argument("--verbose", action="store_true", help="let the engines print their own logs")
    p.set_defaults(cache_dir=default_root())
    return p


def rows(text: str) -> int:
    """``-r``: a number of windows; 0 means all, as in the spec."""
    if text == "all":
        return 0
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of rows nor 'all'")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(arguments)
    try:
        if args.list_engines:
            Console().print(engine_table())
            return 0
        if args.dataspec is None or not args.modelspec:
            raise InputError("-d and -m: both are needed (or --list-engines); see --help")
        data_spec = specs.load_data_spec(args.dataspec)
        model_specs = specs.apply_mask(specs.load_model_specs(specs.expand(args.modelspec)), args.mask)
        if args.kld and not (args.logits_file or any(spec.is_reference for spec in model_specs)):
            raise InputError(
                '--kld: no model is the reference: mark one with "reference": true (or out_logits), '
                "or give --logits_file"
            )
        if args.check:
            return check(data_spec, model_specs)
        return compare(args, data_spec, model_specs)
    except CompareQError as error:
        return complain(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; models that were finished are in the cache", file=sys.stderr)
        return 130


def complain(text: str) -> int:
    """One line a problem on standard error; the exit status of bad input."""
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return 2


def compare(args: argparse.Namespace, data_spec: DataSpec, model_specs: Sequence[ModelSpec]) -> int:
    """Measure, then show, write and plot."""
    if args.plot and args.plot_file is None:
        args.plot_file = Path("compare_q.png")
    check_outputs(args)
    max_rows = data_spec.max_rows if args.rows is None else args.rows
    store = Store(args.cache_dir)
    runner = Runner(store, Progress(), clear=args.clear_cache, verbose=args.verbose, logits_file=args.logits_file)
    run = runner.run(data_spec, model_specs, max_rows)
    if len(run.failed) == len(run.models):
        return complain("\n".join(f"{model.label}: {model.error}" for model in run.failed))
    console = Console()
    report.show(run, console)
    if args.output:
        report.write_json(run, args.output, [Path(sys.argv[0]).name, *sys.argv[1:]])
        print(f"results: {args.output}")
    if args.csv:
        report.write_csv(run, args.csv)
        print(f"CSV: {args.csv}")
    if args.plot_file:
        draw(args, run)
    if args.tokens_out:
        copy_scores(store, run, args.tokens_out)
    return 1 if run.failed else 0


def draw(args: argparse.Namespace, run: RunResult) -> None:
    """The scatter plot, or one line that says why there is none."""
    points, left_out = report.points(run, vram=args.vram, kld=args.kld)
    for line in left_out:
        print(line)
    chosen = plot.select(points, args.max_x, args.max_y)
    if not chosen:
        print("no plot: no model has both values within the limits")
        return
    measure = "KL divergence" if args.kld else "Perplexity"
    try:
        figure = plot.scatter(
            chosen,
            x_label=report.VRAM_AXIS if args.vram else report.BPW_AXIS,
            y_label=kld_axis(run) if args.kld else measure,
            title=f"{measure} of quantized models" if args.title is None else args.title,
            subtitle=run.subtitle + (MARKED if any(MARK in point.label for point in chosen) else ""),
            dark=args.dark,
            from_zero=args.kld,
            to_scale=TO_SCALE if args.kld else -math.inf,
        )
    except ValueError as error:  # more groups than can be told apart
        print(f"no plot: {error}")
        return
    plot.save(figure, args.plot_file)
    print(f"plot: {args.plot_file}")


def kld_axis(run: RunResult) -> str:
    """The y axis of the KLD plot; it names the reference where that fits."""
    axis = "KL divergence (nats, mean over tokens)"
    named = f"{axis} against {run.reference['label']}" if run.reference else axis
    return named if len(named) <= Y_LABEL else axis


def copy_scores(store: Store, run: RunResult, folder: Path) -> None:
    """``--tokens-out``: the per-token scores of every measured model; no other gets a failed one's file name."""
    names = scores.file_names([model.label for model in run.models])
    for model, name in zip(run.models, names, strict=True):
        if model.scores_key and not model.error:
            scores.copy(store, model.scores_key, folder / f"{name}.parquet")
            print(f"tokens of {model.label}: {folder / f'{name}.parquet'}")


def check_outputs(args: argparse.Namespace) -> None:
    """InputError, before anything runs, for an output that could not be written afterwards."""
    outputs = {"--output": args.output, "--csv": args.csv, "--plot_file": args.plot_file}
    for flag, file in outputs.items():
        if file is None:
            continue
        folder = file.absolute().parent
        if file.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"{flag}: {file}: cannot be written; is the folder there and yours?")
    if args.tokens_out:
        with suppress(OSError):  # what is wrong shows in the next line
            args.tokens_out.mkdir(parents=True, exist_ok=True)
        if not os.access(args.tokens_out, os.W_OK) or not args.tokens_out.is_dir():
            raise InputError(f"--tokens-out: {args.tokens_out}: cannot be written; is the folder yours?")
    if args.plot_file and args.plot_file.suffix.lower() not in plot.SUFFIXES:
        raise InputError(f"--plot_file: {args.plot_file}: must end in {', '.join(plot.SUFFIXES)}")


def check(data_spec: DataSpec, model_specs: Sequence[ModelSpec]) -> int:
    """``--check``: what would run and what is missing on disk; starts no engine and downloads nothing."""
    planned, problems = jobs.plan(model_specs, data_spec.eval_len)
    try:
        corpus.identity(data_spec)
        tokenizer = data_spec.locate(data_spec.tokenizer_dir)
        if not hub.is_hub_id(tokenizer):
            hub.resolve(tokenizer, data_spec.tokenizer_revision, tokenizer_only=True)
    except InputError as error:
        problems.insert(0, f"data: {error}")
    print(
        f"data: {corpus.display_name(data_spec)}, windows of {data_spec.eval_len} every {data_spec.eval_stride} tokens"
    )
    for job in planned:
        version = " ".join(job.backend.capabilities.installed() or ())
        print(f"{job.request.label}: {job.engine} ({version.strip()}), {job.request.model_dir}")
        if job.is_remote:
            try:
                hub.resolve(job.request.model_dir, job.request.revision, download=False)
            except InputError:
                print(f"{job.request.label}: would be downloaded from the hub")
    return complain("\n".join(problems)) if problems else 0


def engine_table() -> Table:
    """``--list-engines``."""
    drawn = Table("load_fn", "installed, or how to install", "what for")
    for _, backend in backends.engines():
        capabilities = backend.capabilities
        found = capabilities.installed()
        state = " ".join(found).strip() if found else capabilities.install
        drawn.add_row("\n".join(capabilities.load_fns), state, capabilities.summary)
    return drawn
