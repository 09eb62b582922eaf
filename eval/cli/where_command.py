"""``compare-q where``: which modules of a quantized model cause how much of its KLD."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ... import backends
from ...backends.common.errors import InputError, ModelError
from ...backends.common.message_text import printable
from ..common.cache import Cache
from ..common.output_files import Outputs, write_text
from ..common.progress import Progress
from ..common.terminal import say
from ..run.workers import signals_interrupt
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus
from ..where import recipe, where_run, where_table
from ..where.recipe import Target
from ..where.results import WhereResult
from ..where.search import Question
from . import output_checks, run_inputs, shorthand
from .cache_command import large_cache_note, limited
from .commands import Inputs, PictureFlags, WhereCommand
from .outputs import print_errors, print_note

FAILED = 1
"""Exit status if a model fails, as of a run."""


def run(command: WhereCommand) -> int:
    """Find the shares, print the table and write the files; return the exit status."""
    check_models(command.inputs)
    check_recipes(command)
    command = replace(command, pictures=with_front(command.pictures, command.targets))
    config = run_inputs.run_config(command.resources)
    texts, models = inputs_of(command)
    output_checks.check(command.files, command.pictures, command.inputs.data, texts, models)
    question = Question(
        command.by, command.only, command.targets, command.keep_bits or recipe.FULL_BITS
    )
    with signals_interrupt(config.workers):
        try:
            result = where_run.where(config, texts, models, command.inputs.rows, question)
        except ModelError as error:
            print_errors(str(error))
            return FAILED
        return print_and_write(command, config.cache, result)


def check_models(inputs: Inputs) -> None:
    """InputError unless two models are named."""
    if len(inputs.models) == 2:
        return
    advice = ""
    # -d takes all words up to the next flag, also models after the text.
    if len(inputs.data) > 1:
        texts = printable(" ".join(str(path) for path in inputs.data))
        advice = f"; -d has taken all of {texts}: put models before it"
    raise InputError(
        f"where: expected two models, the reference and the quantized one, not "
        f"{len(inputs.models)}{advice}; see compare-q where --help"
    )


def check_recipes(command: WhereCommand) -> None:
    """InputError for flags of recipes that cannot be combined."""
    if command.targets and command.only:
        raise InputError(
            "--recipe cannot be combined with --only: recipes restore parts of the quantized "
            "model; remove --only"
        )
    if command.keep_bits is not None and not command.targets:
        raise InputError("--keep-bits needs a target; add --recipe kld=NATS or bpw=BITS")


def with_front(flags: PictureFlags, targets: Sequence[Target]) -> PictureFlags:
    """Return the flags with the file of the front, if there are recipes."""
    if flags.plot_file is None or not targets:
        return flags
    name = f"{flags.plot_file.stem}-recipes{flags.plot_file.suffix}"
    return replace(flags, front=flags.plot_file.with_name(name))


def inputs_of(command: WhereCommand) -> tuple[dict[str, DataSpec], list[ModelSpec]]:
    """Return the texts by their names, and the two models.

    Prints each model's engine, and the text if no word names one.
    """
    inputs = command.inputs
    data, models, notes = shorthand.specs(
        inputs.models,
        [str(path) for path in inputs.data],
        Progress(),
        pythons=dict(command.resources.pythons),
        general=backends.DEQUANTIZING,
        tokenizer=inputs.tokenizer,
        eval_len=inputs.eval_len,
        eval_stride=inputs.eval_stride,
        sample=inputs.sample,
    )
    # First: another engine is not asked about its options.
    where_run.check_engines(models)
    print_note(*notes)
    texts = dict(zip(corpus.names_of(data), data, strict=True))
    if inputs.rows is None:
        texts = shorthand.with_default_windows(texts, None)
    return texts, models


def print_and_write(command: WhereCommand, cache: Cache, result: WhereResult) -> int:
    """Print the table and write the files; return the exit status."""
    result = result.updated(title=command.pictures.title)
    result = result.with_origin([Path(sys.argv[0]).name, *sys.argv[1:]])
    written = Outputs(command.resources.verbose)
    with written.writing("standard output"):
        where_table.print_result(result, Console())

    def csv_text() -> str:
        return where_table.csv_text(result)

    def markdown_text() -> str:
        return where_table.markdown_of(result)

    def page() -> str:
        # Imported here, so that a missing package fails this output alone.
        from ..report import where_page

        return where_page.page_of(result)

    texts: tuple[tuple[Path | None, Callable[[], str]], ...] = (
        (command.files.output, result.json_text),
        (command.files.csv, csv_text),
        (command.files.markdown, markdown_text),
        (command.files.html, page),
    )
    for file, text_of in texts:
        if file is not None:
            with written.writing(file):
                write_text(file, text_of())
                say(f"written: {file}")
    if command.pictures.plot_file is not None:
        with written.writing(command.pictures.plot_file):
            draw(command.pictures, result)
    if command.pictures.front is not None:
        with written.writing(command.pictures.front):
            draw_front(command.pictures, result)
    limit_cache(command, cache, written)
    status = print_errors("\n".join(written.failures))
    if not status and unknown(result):
        return FAILED
    return status


def draw(flags: PictureFlags, result: WhereResult) -> None:
    """Draw the picture of ``-p``."""
    # Imported here, so that a missing matplotlib fails this output alone.
    from ..plots import fonts, picture_style, where_bars

    assert flags.plot_file is not None
    with fonts.one_line_on_missing(say):
        figure = where_bars.where_bars(result, dark=flags.dark)
        picture_style.save_figure(figure, flags.plot_file)
    say(f"plot: {flags.plot_file}")


def draw_front(flags: PictureFlags, result: WhereResult) -> None:
    """Draw the front of the recipes, in a file next to that of ``-p``."""
    # Imported here, so that a missing matplotlib fails this output alone.
    from ..plots import fonts, picture_style, where_front

    assert flags.front is not None
    with fonts.one_line_on_missing(say):
        figure = where_front.where_front(result, dark=flags.dark)
        picture_style.save_figure(figure, flags.front)
    say(f"plot: {flags.front}")


def unknown(result: WhereResult) -> bool:
    """Return True if no share is known."""
    return all(row.share is None for row in result.rows)


def limit_cache(command: WhereCommand, cache: Cache, written: Outputs) -> None:
    """Delete the oldest entries above --cache-limit; without it, report a large cache."""
    if command.cache_limit is None:
        print_note(large_cache_note(cache))
        return
    with written.writing(cache.root):
        say(limited(cache, command.cache_limit))
