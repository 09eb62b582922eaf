"""The table of several texts in a terminal and as Markdown: all texts beside each other, or one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from backends.common.messages import printable
from eval.common.files import replacing
from eval.results.run_result import RunResult
from eval.results.texts import TextsResult
from eval.table import markdown, terminal
from eval.table.columns import Filled
from eval.table.footnotes import COMMON_ERROR, footnotes
from eval.table.registry import LABEL
from eval.table.text_columns import OF_TEXT, Blocks, blocks
from eval.table.timing import HEADERS, timing_rows

MEANS = (
    "mean: over the texts, which weigh alike, of KLD the mean of the texts' means, of PPL the geometric mean, "
    "without answers; "
    "n/a unless every text has a value; its ± takes the texts' errors as independent"
)


def show(result: TextsResult, console: Console, names: Sequence[str] | None = None) -> None:
    """Print all texts beside each other; where they do not fit, without errors, and then in several tables."""
    width = console.width
    for number, found in enumerate(tables(blocks(result, names), width)):
        console.width = max(width, terminal.least_width(found))
        console.print(terminal.rich_table("" if number else title_of(result), found, console.width))
        console.width = width
    for note in notes(result):
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)


def tables(found: Blocks, width: int) -> list[list[Filled]]:
    """The columns of one table that fits so many letters, or of several ones, each with the label."""
    for less in ((), OF_TEXT[:1], OF_TEXT):
        narrow = found.without_errors(less)
        if fits(narrow.all, width):
            return [narrow.all]
    split = [list(found.models)]
    for block in filter(None, (*found.texts, found.means)):
        if fits([*split[-1], *block], width) or [each.column.name for each in split[-1]] == [LABEL]:
            split[-1] += block
        else:
            split.append([found.models[0], *block])
    return split


def fits(found: Sequence[Filled], width: int) -> bool:
    """Whether columns leave enough room to those of words."""
    return terminal.width_left(found, width) >= min(terminal.natural_width(found), terminal.TEXT)


def show_by_text(result: TextsResult, console: Console, names: Sequence[str] | None = None) -> None:
    """Print the table of each text below its name, as a run of it alone would."""
    for text in result.texts:
        heading(console, text.name)
        if text.run is None:
            console.print(f"failed: {printable(text.error)}", markup=False, highlight=False, soft_wrap=True)
        else:
            terminal.show(text.run, console, names)


def heading(console: Console, name: str) -> None:
    """Print the name of a text above what is about it alone."""
    console.print(f"\n== {printable(name)} ==", markup=False, highlight=False, soft_wrap=True)


def title_of(result: TextsResult) -> str:
    """The texts' names in one line."""
    return f"{len(result.texts)} texts: {', '.join(text.name for text in result.texts)}"


def notes(result: TextsResult) -> list[str]:
    """The footnotes: what is true of every text once, and what is not with the name of its text."""
    found = {text.name: notes_of_text(text.run) for text in result.texts if text.run is not None}
    known = list(found.values())
    everywhere = [note for note in known[0] if all(note in each for each in known)]
    lines = [f"{text.name}: failed: {text.error}" for text in result.texts if text.run is None]
    lines += [f"{name}: {note}" for name, own in found.items() for note in own if note not in everywhere]
    errors = [COMMON_ERROR] if any(has_errors(run) for run in result.runs) else []
    return [*lines, *errors, MEANS, *everywhere]


def notes_of_text(run: RunResult) -> list[str]:
    """A text's footnotes, the first of them what it is; what ± is stands below the table once."""
    own = [note.removesuffix(f"; {COMMON_ERROR}") for note in footnotes(run)]
    return [run.subtitle, *own]


def has_errors(run: RunResult) -> bool:
    """Whether any error of a text is known."""
    return any(model.ppl and model.ppl.stderr is not None for model in run.models)


def timing_of_texts(result: TextsResult) -> tuple[list[str], list[list[str]]]:
    """(headers, rows) of where the seconds of every model and text went; a model's load stands at its first text."""
    rows = []
    for label in result.labels:
        for text in result.texts:
            model = next((each for each in text.run.models if each.label == label), None) if text.run else None
            if model is None or model.timing is None or text.run is None:
                continue
            (cells,) = timing_rows(RunResult(text.run.data, "", (model,)))
            if model.timing.started == model.timing.loaded:  # it was loaded for a text before
                cells = [cell if header != "load s" else "" for header, cell in zip(HEADERS, cells, strict=True)]
            rows.append([cells[0], text.name, *cells[1:]])
    return [HEADERS[0], "text", *HEADERS[1:]], rows


def markdown_text(
    result: TextsResult, names: Sequence[str] | None = None, *, by_text: bool = False, timing: bool = False
) -> str:
    """The table of all texts and its footnotes, or with ``by_text`` a table for each text below its name."""
    lines: list[str] = []
    if by_text:
        for text in result.texts:
            lines += [f"### {markdown.escaped(text.name)}", ""]
            failed = f"failed: {markdown.escaped(text.error)}\n"
            lines.append(failed if text.run is None else markdown.markdown_text(text.run, names))
    else:
        lines += [f"**{markdown.escaped(title_of(result))}**", ""]
        lines += markdown.table_lines(blocks(result, names).all)
        lines += ["", *(f"- {markdown.escaped(note)}" for note in notes(result)), ""]
    if timing:
        headers, rows = timing_of_texts(result)
        lines += [*markdown.timing_lines(headers, rows), ""]
    return "\n".join(lines)


def write_markdown(
    result: TextsResult, file: Path, names: Sequence[str] | None = None, *, by_text: bool = False, timing: bool = False
) -> None:
    """Write the table atomically."""
    with replacing(file) as part:
        part.write_text(markdown_text(result, names, by_text=by_text, timing=timing), encoding="utf-8")
