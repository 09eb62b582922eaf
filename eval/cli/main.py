"""The command line of compare_q: subcommands and exit statuses.

Exit status 0: all models were scored, or a finished run was shown.  1: some models failed, or the
reference could not be kept, and the others are in the table; or doctor or check found that a number
would be wrong.  2: bad input, no model was scored, or an output could not be written; a closed
standard output (| head) does not count.  4: a condition of --fail-if holds.  128 + its number: a
signal.  gate has its own statuses.

Modules that only a run needs are imported when it starts, so that --help and show answer sooner.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from ... import backends
from ...backends.common.errors import CompareQError
from ...backends.common.message_text import one_line
from .. import merging
from ..common import output_files
from ..common.output_files import Outputs
from ..common.terminal import say
from ..results import RunResult
from ..specs import spec_files
from ..table import conditions
from . import cache_command as cache_command
from . import flags, outputs
from .outputs import print_errors, print_note


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    if words is None:
        output_files.protect_standard_streams()
    kept = "; what was finished is in the cache"
    try:
        args = flags.parse(sys.argv[1:] if words is None else words)
        kept = "; a gate keeps no scores" if args.command == "gate" else kept
        status = COMMANDS[args.command](args)
    except SystemExit as end:  # --help, --version
        status = int(end.code or 0)
    except CompareQError as error:
        status = print_errors(str(error))
    except OSError as error:  # a name that is too long, a file without permission, a full disk
        status = print_errors(one_line(error))
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted{kept}", file=sys.stderr)
        status = 128 + getattr(interrupt, "signal", signal.SIGINT)
    if lost := output_files.stdout_error():
        status = max(
            status,
            print_errors(f"standard output: could not be written: {lost}; {output_files.CURE}"),
        )
    return status


def run_command(args: argparse.Namespace) -> int:
    """``run``, and ``check``, which ends before anything is scored."""
    from ..run import runner
    from ..run.workers import signals_interrupt
    from ..text import corpus, slice_names
    from . import run_inputs, shorthand

    data, models = run_inputs.specs_of(args)
    texts = dict(zip(corpus.names_of(data), data, strict=True))
    reference_is_made = any(spec.is_reference for spec in models)
    reference = bool(args.logits_file) or reference_is_made
    if args.models and args.rows is None:
        texts = shorthand.with_default_windows(
            texts, None if reference_is_made else args.logits_file
        )
    labels = [spec.name for spec in models]
    slices = slice_names.slices_of(list(texts.values()), list(texts), reference=reference)
    print_note(flags.check_content(args, slices, labels, reference=reference))
    outputs.check(args, texts, models)
    config = run_inputs.run_config(args)
    if args.command == "check":
        from . import check_command

        return check_command.run(config, args, texts, models)
    with signals_interrupt(config.workers):
        done = runner.run(config, texts, models, args.rows)
        done = replace(done, results=done.results.updated(title=args.title))
        status = print_errors("\n".join(outputs.nothing_scored(done.results)))
        if not status:
            written = Outputs(args.verbose)
            outputs.print_table(args, done.results, written)
            results = outputs.write_run(args, config.cache, done, texts, models, written)
            status = outputs.write_files(args, results, written)
            lacks_reference = results.reference is None and any(
                model.reference for model in results.models
            )
            failed = any(model.error for model in results.models)
            status = status or failing(args, results) or int(failed or lacks_reference)
            print_note("interrupted; run again to continue" if done.signal else None)
        return 128 + done.signal if done.signal else status


def show_command(args: argparse.Namespace) -> int:
    """``show``: print, write and plot finished runs."""
    results = merging.load(args.source)
    results = results.masked(spec_files.matching(results.labels, args.mask))
    has_reference = results.reference is not None
    print_note(flags.check_content(args, results.slices, results.labels, reference=has_reference))
    outputs.check(args)
    results, written = results.updated(title=args.title or results.title), Outputs(args.verbose)
    outputs.print_table(args, results, written)
    return outputs.write_files(args, results, written) or failing(args, results)


def failing(args: argparse.Namespace, results: RunResult) -> int:
    """Print the rows that meet a condition of ``--fail-if``; return exit status 4 if there are any,
    or else 0.
    """
    found = list(conditions.faults(results, args.fail_if))
    print_note(*(f"failed: {line}" for line in found))
    return 4 if found else 0


def list_engines(args: argparse.Namespace) -> int:
    """``engines``: list the engines, their versions, and how to install those that are missing."""
    for _, engine in backends.engines():
        capabilities = engine.capabilities
        found = capabilities.installed()
        state = (
            f"installed: {' '.join(found).strip()}"
            if found
            else f"not installed: {capabilities.install}"
        )
        say(", ".join(capabilities.load_fns), f"  {capabilities.summary}", f"  {state}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run_command,
    "check": run_command,
    "show": show_command,
    "cache": cache_command.run,
    "engines": list_engines,
    "doctor": lambda args: importlib.import_module("compare_q.eval.cli.doctor_command").run(
        args.models
    ),
    "flips": lambda args: importlib.import_module("compare_q.eval.cli.flips_command").run(args),
    "gate": lambda args: importlib.import_module("compare_q.eval.cli.gate_command").run(args),
    "pack": lambda args: importlib.import_module("compare_q.eval.cli.pack_command").run(args),
}
