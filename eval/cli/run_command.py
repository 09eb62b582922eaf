"""``run``: score models, print the table and write what the flags request.

``check`` ends before anything is scored.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...backends.common.message_text import printable
from ..common.cache import Cache
from ..common.output_files import Outputs
from ..common.terminal import say
from ..report.worst_sequences import with_sequence_texts
from ..report.worst_tokens import with_worst_tokens
from ..results import RunResult
from ..run import runner, stored_scores
from ..run.runner import RunOutcome
from ..run.workers import signals_interrupt
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus, slice_names
from . import flag_checks, output_checks, outputs, run_inputs, shorthand
from .cache_command import large_cache_note, limited
from .commands import Resources, RunCommand
from .outputs import print_errors, print_note


def run(command: RunCommand) -> int:
    """Run or check the models on the texts; return the exit status."""
    inputs = command.inputs
    logits_file = command.resources.logits_file
    data, models = run_inputs.specs_of(inputs, command.resources, stored=logits_file is not None)
    texts = dict(zip(corpus.names_of(data), data, strict=True))
    reference_is_made = any(spec.is_reference for spec in models)
    has_reference = reference_is_made or logits_file is not None
    # Models that are named without specs are scored on few windows, spread over the text.
    if inputs.models and inputs.rows is None:
        # A model that is the reference writes --logits_file and can add windows.  Without one the
        # store is only read, so that only its windows can be scored.
        finished_store = None
        if not reference_is_made:
            finished_store = logits_file
        texts = shorthand.with_default_windows(texts, finished_store)
    unused_flags = flag_checks.check_content(
        command.table,
        command.pictures,
        slice_names.slices_of(list(texts.values()), list(texts), reference=has_reference),
        [spec.name for spec in models],
        reference=has_reference,
        is_run=not command.only_checks,
    )
    print_note(unused_flags)
    input_paths = output_checks.spec_paths(inputs)
    if logits_file is not None:
        input_paths.append(logits_file)
    output_checks.check(command.files, command.pictures, input_paths, texts, models)
    config = run_inputs.run_config(command.resources)
    if command.only_checks:
        # Imported here: only ``check`` needs it.
        from . import check_command

        return check_command.run(config, inputs.rows, texts, models)
    with signals_interrupt(config.workers):
        outcome = runner.run(config, texts, models, inputs.rows)
        status = print_and_write(command, config.cache, outcome, texts, models)
        if outcome.signal:
            return 128 + outcome.signal
        return status


def print_and_write(
    command: RunCommand,
    cache: Cache,
    outcome: RunOutcome,
    texts: Mapping[str, DataSpec],
    models: Sequence[ModelSpec],
) -> int:
    """Print the table of a run and write its files; return the exit status of rows and files."""
    results = outcome.results.updated(title=command.pictures.title)
    outcome = replace(outcome, results=results)
    # If no model was scored, there are errors instead of a table.
    status = print_errors("\n".join(outputs.nothing_scored(results)))
    if status:
        return status
    written = Outputs(command.resources.verbose)
    outputs.print_table(command.table, results, written)
    if command.files.save_specs is not None and not outcome.signal:
        with written.writing(command.files.save_specs):
            save_specs(command.files.save_specs, command.resources, outcome, texts, models)
    if command.files.tokens_out is not None:
        write_token_scores(command.files.tokens_out, cache, outcome, models, written)
    # No other file holds the worst tokens.
    if command.files.output is not None or command.files.html is not None:
        results = with_worst_tokens(results, outcome.data, cache)
        results = with_sequence_texts(results, outcome.data)
    limit_cache(cache, command.cache_limit, written)
    status = outputs.write_files(command.files, command.table, command.pictures, results, written)
    if not status:
        status = outputs.print_failures(results, command.table.fail_if)
    if not status:
        status = status_of_rows(results)
    if outcome.signal:
        print_note("interrupted; run again to continue")
    return status


def save_specs(
    folder: Path,
    resources: Resources,
    outcome: RunOutcome,
    texts: Mapping[str, DataSpec],
    models: Sequence[ModelSpec],
) -> None:
    """Write the specs that repeat a run, and print the command that runs them."""
    command = shorthand.save(
        folder, output_checks.SPEC_FILES, list(texts.values()), models, outcome
    )
    words = [command]
    if resources.verify_weights:
        words.append("--verify-weights")
    for engine, python in resources.pythons:
        words.append(f"--python={shlex.quote(printable(f'{engine}={python}'))}")
    if resources.logits_file is not None:
        words += ["-lf", shlex.quote(printable(os.path.abspath(resources.logits_file)))]
    # ``say`` would break the line in a terminal; it could not be pasted then.
    print(" ".join(words), file=sys.stderr)


def write_token_scores(
    folder: Path,
    cache: Cache,
    outcome: RunOutcome,
    models: Sequence[ModelSpec],
    written: Outputs,
) -> None:
    """Write the token scores of each model that has some, as ``--tokens-out`` requests."""
    files = output_checks.token_files(folder, [spec.name for spec in models])
    for model in outcome.results.models:
        if model.error:
            continue
        scores = stored_scores.scores_of_row(cache, model.scores_key, outcome.data)
        if scores is None:
            continue
        file = files[model.label]
        with written.writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            stored_scores.write_parquet(scores, outcome.data, file)
            say(f"tokens of {model.label}: {file}")


def limit_cache(cache: Cache, limit: int | None, written: Outputs) -> None:
    """Delete the oldest entries above the limit of ``--cache-limit``, in bytes.

    Without a limit, print a line if the cache is large.
    """
    if limit is None:
        print_note(large_cache_note(cache))
        return
    with written.writing(cache.root):
        say(limited(cache, limit))


def status_of_rows(results: RunResult) -> int:
    """Return exit status 1 if a model failed, or if the reference could not be kept, or else 0."""
    for model in results.models:
        if model.error or (model.reference and results.reference is None):
            return 1
    return 0
