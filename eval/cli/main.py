"""The command line of compare_q: subcommands and exit statuses.

Exit status 0: all models were scored, or a finished run was shown.  1: some models failed and the others are in the
table; or doctor or check found that a number would be wrong.  2: bad input, no model was scored, or an output could not
be written; a closed standard output (| head) does not count.  128 + its number: a signal.

What only a run needs is imported when it starts, so that --help and show answer sooner.
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
from compare_q.eval.cli import cache as cache_command
from compare_q.eval.cli.outputs import print_errors, print_note
from compare_q.eval.common import files
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.table.render import LiveTable

if TYPE_CHECKING:
    from compare_q.eval.run.config import RunConfig

NO_DATA_SPEC = (
    "with -m, -d takes data specs (JSON); a text alone goes with MODEL arguments: compare-q MODEL ... -d TEXT"
)
NO_MODEL_SPEC = "-m takes model specs (JSON); a model without a spec is an argument: compare-q MODEL ... -d TEXT"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    if words is None:
        files.protect_standard_streams()
    try:
        status = perform(sys.argv[1:] if words is None else words)
    except SystemExit as end:  # --help, --version
        status = int(end.code or 0)
    if error := files.stdout_error():
        status = max(status, print_errors(f"standard output: could not be written: {error}; {files.CURE}"))
    return status


def perform(words: Sequence[str]) -> int:
    """Parse the words and run their command; return the exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(flags.PAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    try:
        args = flags.parse(words)
        return COMMANDS[args.command](args)
    except CompareQError as error:
        return print_errors(str(error))
    except OSError as error:  # a name that is too long, a file without permission, a full disk
        return print_errors(one_line(error))
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted; what was finished is in the cache", file=sys.stderr)
        return 128 + getattr(interrupt, "signal", signal.SIGINT)


def run_command(args: argparse.Namespace) -> int:
    """``run`` and ``check``."""
    from compare_q.eval.text import corpus

    data, models = named_specs(args) if args.models else specs_of_files(args)
    texts = dict(zip(corpus.names_of(data), data, strict=True))
    reference = bool(args.logits_file) or any(spec.is_reference for spec in models)
    if args.until or (args.models and args.rows is None):
        args.until, texts = adaptive.settled(args.until, texts, reference=reference)
    labels = [spec.name for spec in models]
    answers = any(spec.is_answers for spec in data)
    print_note(flags.check_content(args, list(texts), labels, reference=reference, answers=answers))
    tokens = outputs.token_files(args.tokens_out, list(texts), labels) if args.tokens_out else {}
    outputs.check(args, outputs.inputs_of(args, data, models), tokens.values())
    return (check if args.command == "check" else score)(args, texts, models, tokens)


def specs_of_files(args: argparse.Namespace) -> tuple[list[DataSpec], list[ModelSpec]]:
    """Return the texts and models of the files of ``-d`` and ``-m``; print which model is the reference."""
    data = reading.load_data_specs(reading.expand(map(str, args.dataspec)), NO_DATA_SPEC)
    models = reading.load_model_specs(reading.expand(args.modelspec), NO_MODEL_SPEC, print_note)
    models, said = reading.one_reference(models)
    chosen = reading.apply_mask(models, args.mask)
    if not (args.logits_file and said == [reading.NO_REFERENCE]):
        print_note(*said)
    return data, chosen


def named_specs(args: argparse.Namespace) -> tuple[list[DataSpec], list[ModelSpec]]:
    """Return the texts and models that the command line names; print each model's engine, and why it was chosen."""
    from compare_q.eval.cli import shorthand

    elsewhere = {engine for engine, _ in args.python} | set(reading.load_settings().python)
    named = shorthand.models(args.models, elsewhere, Progress(), reference=not args.no_reference)
    data, said = shorthand.texts([str(each) for each in args.dataspec or []], named, args.tokenizer)
    print_note(*(f"{each.spec.name}: {each.spec.load_fn} ({each.why})" for each in named), *said)
    return data, reading.apply_mask([each.spec for each in named], args.mask)


def run_config(args: argparse.Namespace) -> RunConfig:
    """Return the configuration of the run that the flags describe."""
    from compare_q.eval.run.config import local_config

    silence = {} if args.deadline is None else {"load_timeout_s": args.deadline, "window_timeout_s": args.deadline}
    config = local_config(
        Cache(args.cache_dir), Progress(), gpus=[] if args.ray else args.gpus or None, pythons=dict(args.python),
        clear=args.clear_cache, verbose=args.verbose, logits_file=args.logits_file, divergences=args.divergences,
        verify_weights=args.verify_weights, **silence,
    )  # fmt: skip
    if args.ray:
        from compare_q.eval import cluster

        return cluster.on_cluster(config, args.ray, print_note)
    return config


def check(
    args: argparse.Namespace, texts: Mapping[str, DataSpec], models: Sequence[ModelSpec], _: outputs.TokenFiles
) -> int:
    """Print what a run would do, and what is wrong; return the exit status."""
    from compare_q.eval.cli.check import check as check_run

    lines, problems, is_wrong = check_run(run_config(args), texts, models, args.rows)
    if args.until:
        lines.append(f"--until: of spread windows {adaptive.PILOT} come first, then as many as the answer takes")
    print(*map(printable, lines), sep="\n")
    return print_errors("\n".join(problems)) or int(is_wrong)


def score(
    args: argparse.Namespace, texts: Mapping[str, DataSpec], models: Sequence[ModelSpec], tokens: outputs.TokenFiles
) -> int:
    """Score the models and write the results; return the exit status."""
    from compare_q.eval.run import runner
    from compare_q.eval.run.workers import signals_interrupt

    config = run_config(args)
    config.progress.below = look = LiveTable([spec.name for spec in models], list(texts))
    config = replace(config, on_row=look.add)
    with signals_interrupt(config.workers):
        if args.until:
            done = adaptive.run(config, args.until, texts, models)
        else:
            done = runner.run(config, texts, models, args.rows)
        results = done.results.updated(title=args.title)
        if failures := outputs.nothing_scored(results):
            status = print_errors("\n".join(failures))
        else:
            more = partial(outputs.write_run, args, config.cache, done, list(texts.values()), models, tokens)
            status = outputs.write_all(args, results, more)
            status = status or int(any(text.error or text.failed for text in results.texts))
            if done.signal:
                print("interrupted; run again to continue", file=sys.stderr)
        return 128 + done.signal if done.signal else status


def show_command(args: argparse.Namespace) -> int:
    """``show``: print, write and plot finished runs."""
    results = run_results.load(args.source)
    results = results.masked(reading.matching(results.labels, args.mask))
    names, scored = [text.name for text in results.texts], results.scored
    reference, answers = any(text.reference for text in scored), any(text.is_answers for text in scored)
    print_note(flags.check_content(args, names, results.labels, reference=reference, answers=answers))
    outputs.check(args)
    return outputs.write_all(args, results.updated(title=args.title or results.title))


def doctor_command(args: argparse.Namespace) -> int:
    """``doctor``."""
    from compare_q.eval.cli import doctor

    return doctor.run(args)


def list_cache(args: argparse.Namespace) -> int:
    """``cache``: list the cache, after ``--cache-limit``."""
    cache = Cache(args.cache_dir)
    if args.cache_limit is not None:
        print(cache_command.limited(cache, args.cache_limit))
    table, summed = cache_command.listing(cache)
    if table.row_count:
        Console().print(table)
    print(summed)
    return 0


def list_engines(args: argparse.Namespace) -> int:
    """``engines``: list the engines, their versions, and how to install those that are missing."""
    drawn = Table()
    for name in ("load_fn", "installed, or how to install", "what for"):
        drawn.add_column(name, overflow="fold")  # a truncated address is useless
    for _, engine in backends.engines():
        capabilities = engine.capabilities
        found = capabilities.installed()
        state = " ".join(found).strip() if found else capabilities.install
        drawn.add_row("\n".join(capabilities.load_fns), state, capabilities.summary)
    Console().print(drawn)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run_command, "check": run_command, "show": show_command, "doctor": doctor_command, "cache": list_cache,
    "engines": list_engines,
}  # fmt: skip
