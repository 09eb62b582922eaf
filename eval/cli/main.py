"""The command line of compare_q: flags -> specs -> run, or a finished run -> table, files, plots.

Exit status: 0 if all models were scored (or a finished run was shown); 1 if some models failed and the others are in
the table, or if doctor or check find that a number or an answer would be wrong; 2 for bad input, if no model was
scored, or if an output could not be written.  Standard output that is closed, or whose reader goes (| head), is none.

What only a run or a listing needs is imported where it begins, so that --help and show answer sooner.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from compare_q import backends
from compare_q.backends.common.errors import CompareQError
from compare_q.backends.common.messages import one_line, printable
from compare_q.eval import results as run_results
from compare_q.eval.cli import adaptive, flags, outputs
from compare_q.eval.cli.cache import limited, listing
from compare_q.eval.common import files
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.files import CURE, Outputs
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.table.render import LiveTable

if TYPE_CHECKING:
    from compare_q.eval.run.config import RunConfig
    from compare_q.eval.run.runner import RunOutcome


NO_DATA_SPEC = "beside -m, -d takes data specs (JSON); a text alone goes with models alone: compare-q MODEL ... -d TEXT"
NO_MODEL_SPEC = "-m takes model specs (JSON); a model without a spec stands alone: compare-q MODEL ... -d TEXT"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if words is None:
        files.protect_standard_streams()
    try:
        status = answer(sys.argv[1:] if words is None else words)
    except SystemExit as end:  # --help, --version
        status = int(end.code or 0)
    if error := files.stdout_error():
        status = max(status, complain(f"standard output: could not be written: {error}; {CURE}"))
    return status


def answer(words: Sequence[str]) -> int:
    """Do what the words ask for; returns the exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(flags.PAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    try:
        args = flags.parse(words)
        return PERFORM[args.command](args)
    except CompareQError as error:
        return complain(str(error))
    except OSError as error:  # a name that is too long, a file that may not be read, a full disk
        return complain(one_line(error))
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted; what was finished is in the cache", file=sys.stderr)
        return 128 + getattr(interrupt, "signal", signal.SIGINT)


def measure(args: argparse.Namespace) -> int:
    """``run`` and ``check``: the models and texts that are named, or those of the specs."""
    if args.models:
        data_specs, model_specs = named_specs(args)
    else:
        data_specs = reading.load_data_specs(reading.expand(map(str, args.dataspec)), NO_DATA_SPEC)
        model_specs = chosen_models(args)
    from compare_q.eval.text import corpus

    texts = dict(zip(corpus.names_of(data_specs), data_specs, strict=True))
    reference = bool(args.logits_file) or any(spec.is_reference for spec in model_specs)
    if args.until or (args.models and args.rows is None):
        args.until, texts = adaptive.settled(args.until, texts, reference=reference)
    labels, answers = [spec.name for spec in model_specs], any(spec.is_answers for spec in data_specs)
    remark(flags.check_content(args, list(texts), labels, reference=reference, answers=answers))
    return (check if args.command == "check" else compare)(args, texts, model_specs)


def examine(args: argparse.Namespace) -> int:
    """``doctor``."""
    from compare_q.eval.cli import doctor

    return doctor.run(args)


def complain(problems: str) -> int:
    """Print one line for each problem on standard error; returns the exit status: of bad input, 0 without problems."""
    for line in problems.splitlines():
        print(f"error: {printable(line)}", file=sys.stderr)
    return 2 if problems else 0


def chosen_models(args: argparse.Namespace) -> list[ModelSpec]:
    """The models of the spec files that the mask leaves; prints which one is the reference, or how to mark one."""
    specs = reading.load_model_specs(reading.expand(args.modelspec), NO_MODEL_SPEC, remark)
    found, said = reading.one_reference(specs)
    chosen = reading.apply_mask(found, args.mask)
    if not (args.logits_file and said == [reading.NO_REFERENCE]):
        remark(*said)
    return chosen


def named_specs(args: argparse.Namespace) -> tuple[list[DataSpec], list[ModelSpec]]:
    """The texts and models that are named without specs; says which engine runs each model, and why."""
    from compare_q.eval.cli import shorthand

    elsewhere = {engine for engine, _ in args.python} | set(reading.load_settings().python)
    named = shorthand.models(args.models, elsewhere, Progress(), reference=not args.no_reference)
    data_specs, said = shorthand.texts([str(each) for each in args.dataspec or []], named, args.tokenizer)
    remark(*(f"{each.spec.name}: {each.spec.load_fn} ({each.why})" for each in named), *said)
    return data_specs, reading.apply_mask([each.spec for each in named], args.mask)


def remark(*lines: str | None) -> None:
    """Print lines that are good to know on standard error."""
    for line in lines:
        if line is not None:
            print(printable(line), file=sys.stderr)


def check(args: argparse.Namespace, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec]) -> int:
    """``check``: print what would run and what is wrong."""
    from compare_q.eval.cli import check as checking

    writes(args, texts, model_specs)
    lines, problems, is_wrong = checking.check(config_of(args), texts, model_specs, args.rows)
    if args.until:
        lines.append(f"--until: of spread windows {adaptive.PILOT} come first, then as many as the answer takes")
    print(*map(printable, lines), sep="\n")
    return complain("\n".join(problems)) or int(is_wrong)


def show_cache(args: argparse.Namespace) -> int:
    """``cache``: what the cache holds, after ``--cache-limit`` if that is given."""
    cache = Cache(args.cache_dir)
    if args.cache_limit is not None:
        print(limited(cache, args.cache_limit))
    table, summed = listing(cache)
    if table.row_count:
        Console().print(table)
    print(summed)
    return 0


def writes(
    args: argparse.Namespace, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec]
) -> outputs.TokenFiles:
    """The files of ``--tokens-out``; InputError if an output of a run could not be written, or is an input."""
    labels = [spec.name for spec in model_specs]
    tokens = outputs.token_files(args.tokens_out, list(texts), labels) if args.tokens_out else {}
    outputs.check(args, outputs.inputs_of(args, texts.values(), model_specs), tokens.values())
    return tokens


def config_of(args: argparse.Namespace) -> RunConfig:
    """Return the configuration of the run that the flags ask for."""
    from compare_q.eval.run.config import local_config

    silence = {} if args.deadline is None else {"load_timeout_s": args.deadline, "window_timeout_s": args.deadline}
    config = local_config(
        Cache(args.cache_dir), Progress(), gpus=[] if args.ray else args.gpus or None, pythons=dict(args.python),
        clear=args.clear_cache, verbose=args.verbose, logits_file=args.logits_file, divergences=args.divergences,
        verify_weights=args.verify_weights, **silence,
    )  # fmt: skip
    if args.ray:
        from compare_q.eval import cluster

        return cluster.on_cluster(config, args.ray, remark)
    return config


def compare(args: argparse.Namespace, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec]) -> int:
    """Measure, then show, write and plot; ``texts``: by their names.  Returns the exit status."""
    from compare_q.eval.run import runner
    from compare_q.eval.run.workers import signals_interrupt

    tokens = writes(args, texts, model_specs)
    config = config_of(args)
    cache = config.cache
    config.progress.below = look = LiveTable([spec.name for spec in model_specs], list(texts))
    config = replace(config, on_row=look.add)
    with signals_interrupt(config.workers):
        if args.until:
            finished = adaptive.run(args.until, texts, partial(one_stage, config, model_specs), remark)
        else:
            finished = runner.run(config, texts, model_specs, args.rows)
        interrupted = 128 + finished.signal if finished.signal else 0
        results = finished.results.updated(title=args.title)
        if failures := outputs.nothing_scored(results):
            status = complain("\n".join(failures))
            return interrupted or status
        written = Outputs(args.verbose)
        outputs.show(args, results, written)
        if args.save_specs:
            from compare_q.eval.cli import shorthand

            with written.writing(args.save_specs):
                remark(shorthand.save(args.save_specs, list(texts.values()), model_specs, finished))
        if tokens:
            outputs.copy_scores(cache, finished, tokens, written)
        if args.output or args.html:
            from compare_q.eval.report import tokens as single_tokens

            results = single_tokens.with_worst_tokens(results, finished.data, cache)
        outputs.write(args, results, written)
        if args.cache_limit is not None:
            with written.writing(cache.root):
                print(limited(cache, args.cache_limit))
        outputs.conclude(results, written)
        status = complain("\n".join(written.failures))
        if interrupted:
            print("interrupted; run again to go on", file=sys.stderr)
        return interrupted or status or int(any(text.error or text.failed for text in results.texts))


def one_stage(
    config: RunConfig, specs: Sequence[ModelSpec], texts: Mapping[str, DataSpec], *, again: bool
) -> RunOutcome:
    """A run of ``--until``; what an earlier one has scored is not forgotten ``again``."""
    from compare_q.eval.run import runner

    return runner.run(replace(config, clear=config.clear and not again), texts, specs)


def show_again(args: argparse.Namespace) -> int:
    """``show``: show, write and plot a finished run, or the rows of several, as today's flags ask."""
    results = run_results.load(args.source)
    results = results.masked(reading.matching(results.labels, args.mask))
    names, scored = [text.name for text in results.texts], results.scored
    reference, answers = any(text.reference for text in scored), any(text.is_answers for text in scored)
    remark(flags.check_content(args, names, results.labels, reference=reference, answers=answers))
    outputs.check(args)
    written = Outputs(args.verbose)
    results = results.updated(title=args.title or results.title)
    outputs.show(args, results, written)
    outputs.write(args, results, written)
    outputs.conclude(results, written)
    return complain("\n".join(written.failures))


def list_engines(args: argparse.Namespace) -> int:
    """``engines``: a line for each: whether it is installed, and how to install it."""
    drawn = Table()
    for name in ("load_fn", "installed, or how to install", "what for"):
        drawn.add_column(name, overflow="fold")  # an address that ends in dots is no use
    for _, engine in backends.engines():
        capabilities = engine.capabilities
        found = capabilities.installed()
        state = " ".join(found).strip() if found else capabilities.install
        drawn.add_row("\n".join(capabilities.load_fns), state, capabilities.summary)
    Console().print(drawn)
    return 0


PERFORM: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": measure, "check": measure, "show": show_again, "doctor": examine, "cache": show_cache,
    "engines": list_engines,
}  # fmt: skip
"""Subcommands -> what performs them."""
