"""The command line of compare_q: flags -> specs -> run, or a finished run -> table, files, plots.

Exit status: 0 if all models were scored (or a finished run was shown); 1 if some models failed and the others are in
the table, or if --doctor or --check find that a number or an answer would be wrong; 2 for bad input, if no model was
scored, or if an output could not be written.  Standard output that is closed, or whose reader goes (| head), is none.

What only a run or a listing needs is imported where it begins, so that --help and --from answer sooner.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from compare_q import backends
from compare_q.backends.common.errors import CompareQError, InputError
from compare_q.backends.common.json_files import is_file
from compare_q.backends.common.messages import one_line, printable
from compare_q.backends.common.options import strings_in
from compare_q.eval.cli import arguments, cache_listing, delivering, output_flags, plot_flags
from compare_q.eval.common import streams
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.outputs import CURE, Outputs
from compare_q.eval.common.progress import Progress
from compare_q.eval.plots.measures import ACCURACIES
from compare_q.eval.results import merging
from compare_q.eval.specs import qbench, reading
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.table import pairs

if TYPE_CHECKING:
    from compare_q.eval.run.hosts import Hosts
    from compare_q.eval.run.runner import Finished


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if words is None:
        streams.make_safe()
    try:
        status = answer(sys.argv[1:] if words is None else words)
    except SystemExit as end:  # --help, --version
        status = int(end.code or 0)
    if error := streams.lost():
        status = max(status, complain(f"standard output: could not be written: {error}; {CURE}"))
    return status


def answer(words: Sequence[str]) -> int:
    """Do what the words ask for; returns the exit status."""
    try:
        if words[:1] == ["trace"]:
            from compare_q.eval.cli.trace import command

            return command.run(words[1:])
        args = arguments.parse(words)
        if args.list_engines:
            Console().print(engine_table())
            return 0
        if args.from_qbench:
            return convert_project(args.from_qbench)
        if args.source:
            return show_again(args)
        if args.cache:
            return show_cache(args)
        if args.doctor:
            from compare_q.eval.cli import doctor

            output_flags.check_outputs(args)
            return doctor.run(args)
        data_specs = reading.load_data_specs(reading.expand(map(str, args.dataspec)))
        model_specs = chosen_models(args)
        if args.measure == "kld" and not (args.logits_file or any(spec.is_reference for spec in model_specs)):
            raise InputError(
                '--kld: no model is the reference: mark one with "reference": true (or out_logits), '
                "or give --logits_file"
            )
        if args.measure in ACCURACIES and not any(spec.dataset == "lm_eval" for spec in data_specs):
            raise InputError(f'--{args.measure}: no text is a task of questions ("dataset": "lm_eval")')
        pairs.check_labels(args.pair, [spec.name for spec in model_specs])
        from compare_q.eval.text import corpus

        texts = dict(zip(corpus.names_of(data_specs), data_specs, strict=True))
        output_flags.check_texts(args, list(texts))
        remark(plot_flags.unused_picture_flags(args, len(texts)))
        if args.check:
            return check(args, texts, model_specs)
        return compare(args, texts, model_specs)
    except CompareQError as error:
        return complain(str(error))
    except OSError as error:  # a name that is too long, a file that may not be read, a full disk
        return complain(one_line(error))
    except KeyboardInterrupt as interrupt:
        print("\ninterrupted; what was finished is in the cache", file=sys.stderr)
        return 128 + getattr(interrupt, "signal", signal.SIGINT)


def convert_project(file: Path) -> int:
    """``--from-qbench``: write a project's specs, and print what was not carried over and how to run them."""
    data, models, said = qbench.convert(file)
    remark(*said)
    print(f"compare-q -d {printable(data)} -m {printable(models)}")
    return 0


def complain(problems: str) -> int:
    """Print one line for each problem on standard error; returns the exit status of bad input."""
    for line in problems.splitlines():
        print(f"error: {printable(line)}", file=sys.stderr)
    return 2


def chosen_models(args: argparse.Namespace) -> list[ModelSpec]:
    """The models of the spec files that the mask leaves; prints which one is the reference, or how to mark one."""
    found, said = reading.one_reference(reading.load_model_specs(reading.expand(args.modelspec)))
    chosen = reading.apply_mask(found, args.mask)
    if not (args.logits_file and said == [reading.NO_REFERENCE]):
        remark(*said)
    return chosen


def inputs_of(
    args: argparse.Namespace, data_specs: Iterable[DataSpec], model_specs: Sequence[ModelSpec]
) -> dict[Path, str]:
    """What a run reads, so that no output may replace it: spec files, texts, tokenizers, models, a reference."""
    from compare_q.eval.text import windows

    found = dict.fromkeys(reading.expand(map(str, args.dataspec)), "the data spec")
    found |= dict.fromkeys(reading.expand(args.modelspec), "a model spec")
    for model in model_specs:
        named = [Path(each) for each in strings_in(model.options) if is_file(Path(each))]
        python = [] if model.python is None else [Path(model.locate(model.python))]
        found |= dict.fromkeys([*model.override_tensors, *named, *python], f"a file of {model.name}")
        found[Path(model.located)] = f"the model of {model.name}"
    for spec in data_specs:
        found[Path(spec.locate(spec.tokenizer_dir))] = "the tokenizer"
        with suppress(InputError):  # which the run will meet too
            found |= dict.fromkeys(windows.paths_of(spec), "the text")
    return found if args.logits_file is None else {**found, args.logits_file: "the reference"}


def remark(*lines: str | None) -> None:
    """Print lines that are good to know on standard error."""
    for line in lines:
        if line is not None:
            print(printable(line), file=sys.stderr)


def check(args: argparse.Namespace, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec]) -> int:
    """``--check``: print what would run and what is wrong."""
    from compare_q.eval.cli import checking

    checked = checking.check(texts, model_specs, args.rows, Cache(args.cache_dir), Progress(), hosts_of(args))
    for line in checked.lines:
        print(printable(line))
    return complain("\n".join(checked.problems)) if checked.problems else int(checked.is_wrong)


def show_cache(args: argparse.Namespace) -> int:
    """``--cache``: what the cache holds, after ``--cache-limit`` if that is given."""
    cache = Cache(args.cache_dir)
    if args.cache_limit is not None:
        print(cache_listing.limited(cache, args.cache_limit))
    table, summed = cache_listing.listing(cache)
    if table.row_count:
        Console().print(table)
    print(summed)
    return 0


def compare(args: argparse.Namespace, texts: Mapping[str, DataSpec], model_specs: Sequence[ModelSpec]) -> int:
    """Measure, then show, write and plot; ``texts``: by their names."""
    from compare_q.eval.run import runner
    from compare_q.eval.run.session import Session, signals_interrupt

    tokens = delivering.token_files(args.tokens_out, [spec.name for spec in model_specs], list(texts))
    output_flags.check_outputs(args, inputs_of(args, texts.values(), model_specs), tokens)
    cache = Cache(args.cache_dir)
    session = Session(
        cache, Progress(), args.clear_cache, args.verbose, args.logits_file, hosts_of(args), args.verify_weights,
        divergences=args.divergences,
    )  # fmt: skip
    with signals_interrupt(session.hosts.running):
        return deliver(args, runner.run(session, texts, model_specs, args.rows), cache)


def deliver(args: argparse.Namespace, finished: Finished, cache: Cache) -> int:
    """Show, write and plot a run that has just ended; the exit status."""
    if failures := delivering.nothing_scored(finished.results):
        complain("\n".join(failures))
        return 128 + finished.signal if finished.signal else 2
    outputs = Outputs(args.verbose)
    delivering.deliver(args, finished, cache, outputs)
    if args.cache_limit is not None:
        with outputs.writing(cache.root):
            print(cache_listing.limited(cache, args.cache_limit))
    status = status_of(outputs) or int(delivering.is_incomplete(finished.results))
    if finished.signal:
        print("interrupted; run again to go on", file=sys.stderr)
        return 128 + finished.signal
    return status


def hosts_of(args: argparse.Namespace) -> Hosts:
    """Where models run, by the flags and the settings file."""
    from compare_q.eval.run import hosts

    found, said = hosts.of_this_machine(args.gpus, args.python, args.deadline)
    if args.ray:
        from compare_q.eval import cluster

        return cluster.on_cluster(found, args.ray, remark)
    remark(said or None)
    return found


def show_again(args: argparse.Namespace) -> int:
    """``--from``: show, write and plot a finished run, or several merged, as today's flags ask."""
    results, excerpts = merging.load(args.source)
    if args.measure == "kld" and not any(text.reference for text in results.scored):
        raise InputError(f"--kld: {', '.join(map(str, args.source))} has no reference, and so no KL divergence")
    if args.measure in ACCURACIES and not any(text.is_answers for text in results.scored):
        raise InputError(f"--{args.measure}: {', '.join(map(str, args.source))} has no answers, and so no accuracy")
    pairs.check_labels(args.pair, results.labels)
    output_flags.check_outputs(args)
    output_flags.check_texts(args, [text.name for text in results.texts])
    remark(plot_flags.unused_picture_flags(args, len(results.texts)))
    outputs = Outputs(args.verbose)
    results = replace(results, title=args.title or results.title)
    delivering.show(args, results, outputs)
    delivering.write(args, results, lambda: excerpts, outputs)
    return status_of(outputs)


def status_of(outputs: Outputs) -> int:
    """The exit status after all outputs were tried; prints a line for each that failed."""
    return complain("\n".join(outputs.failures)) if outputs.failures else 0


def engine_table() -> Table:
    """``--list-engines``."""
    drawn = Table()
    for name in ("load_fn", "installed, or how to install", "what for"):
        drawn.add_column(name, overflow="fold")  # an address that ends in dots is no use
    for _, engine in backends.engines():
        capabilities = engine.capabilities
        found = capabilities.installed()
        state = " ".join(found).strip() if found else capabilities.install
        drawn.add_row("\n".join(capabilities.load_fns), state, capabilities.summary)
    return drawn
