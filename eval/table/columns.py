"""Results -> the columns of a table and their cells, for terminal, Markdown and report; the order of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.results.beside import words_beside
from eval.results.differences import best_labels
from eval.results.digits import error_text, number_text
from eval.results.results_json import flat_json
from eval.results.run_result import ModelResult, RunResult
from eval.table.registry import BY_NAME, COLUMNS, KERNEL, LABEL, Column

BEST = "\N{BLACK STAR}"
"""Before the best value of a column."""
FLOOR = "\N{ALMOST EQUAL TO}"
"""Beside the label of a noise floor."""
EARLIER, BESIDE = "*", "\N{DOUBLE DAGGER}"
"""Beside seconds of an earlier run, and beside a speed while other rows loaded or were scored."""
ALWAYS = ("where", "bpw", "size", "ppl", "kld", "same_top", "non_finite")
WORTH_SAYING = 0.1
"""Share of a row's seconds from which its first step, in which engines compile, is told."""
TOP_ERROR = "same_top_stderr"
EXTRAS = (
    "acc_norm", "mcnemar_p", "kv_cache", "ratio", "kld_p99.9", TOP_ERROR, "reverse_kld", "js", "tv", "top5", "speed",
    "head_bpw", "same_top",
)  # fmt: skip
IF_DIFFERENT = ("kv_cache", "head_bpw")
"""Columns that a narrow table leaves out, the last one first, and the error of one.  The ratio has a paired error, that
of PPL is mostly the text's."""


@dataclass(frozen=True)
class Cell:
    """A number, its standard error and marks behind it as they are written, or words; each may be empty."""

    value: str
    error: str = ""
    is_best: bool = False
    marks: str = ""

    @property
    def shown(self) -> str:
        """The value, with its mark if it is the best."""
        return f"{BEST}{self.value}" if self.is_best else self.value


@dataclass(frozen=True)
class Filled:
    """A column of the table with a cell a model."""

    column: Column
    cells: tuple[Cell, ...]


def ordered(run: RunResult, key: str | None) -> RunResult:
    """The run with its models sorted by a column (None: as they are), unknown values and failures last.

    The smallest first, but the largest where more is better.
    """
    if key is None:
        return run
    column = BY_NAME[key]

    def place(model: ModelResult) -> tuple[bool, bool, float | str]:
        value = value_of(column, model, flat_json(model, run))
        if isinstance(value, str):
            return bool(model.error), not value, value.casefold()
        return bool(model.error), value is None, 0.0 if value is None else -value if column.more else value

    return replace(run, models=tuple(sorted(run.models, key=place)))


def value_of(column: Column, model: ModelResult, flat: dict[str, Any]) -> Any:
    """A model's value by its ``flat_json``: a number, words ("" if there are none), or None."""
    if column.exact is not None and model.is_reference and not model.error:
        return column.exact
    value = flat.get(column.source)
    return value or "" if column.digits is None else value


def fields_of(names: Sequence[str] | None) -> list[str] | None:
    """The fields of results.json of chosen columns; None: no columns were chosen."""
    return None if names is None else [field for name in names for field in BY_NAME[name].fields]


def always_shown(run: RunResult) -> tuple[str, ...]:
    """The columns that a table of any width has: machines that differ, sizes, and what is compared.

    Without the size of any file the size of the weights stands in its place.
    """
    wanted = set(ALWAYS) - (set() if run.reference else {"kld", "same_top"})
    if any(model.estimates and model.estimates.answers for model in run.models):
        wanted = wanted - {"same_top"} | {"acc", *(["flips"] if run.reference else [])}
    if not machine_letters(run):
        wanted.discard("where")
    if not any(model.ppl and model.ppl.non_finite for model in run.models):
        wanted.discard("non_finite")
    if not any(model.storage.file_bytes for model in run.models):
        wanted = wanted - {"size"} | {"vram"}
    return (LABEL, KERNEL, *(column.name for column in COLUMNS if column.name in wanted))


def possible_extras(run: RunResult) -> tuple[str, ...]:
    """The ``EXTRAS`` that tell something of a run: what some row has, and of ``IF_DIFFERENT`` what differs."""
    flats, shown = [flat_json(model, run) for model in run.models], always_shown(run)

    def tells(extra: str) -> bool:
        if extra == TOP_ERROR:
            return run.reference is not None
        column = BY_NAME[extra]
        known = {flat.get(column.source) for flat in flats} - {None}
        compared = column.exact is None or run.reference is not None
        return extra not in shown and compared and len(known) > (extra in IF_DIFFERENT)

    return tuple(extra for extra in EXTRAS if tells(extra))


def table_columns(run: RunResult, names: Sequence[str] | None = None) -> list[Filled]:
    """The columns of these names; None: all that a table has which is wide enough."""
    wanted = {*always_shown(run), *possible_extras(run)}
    return filled(run, [column.name for column in COLUMNS if column.name in wanted] if names is None else names)


def narrowed(found: Sequence[Filled], without: Collection[str]) -> list[Filled]:
    """The columns without some of the ``EXTRAS``."""
    return [
        replace(each, cells=tuple(replace(cell, error="") for cell in each.cells))
        if TOP_ERROR in without and each.column.name == "same_top" else each
        for each in found if each.column.name not in without
    ]  # fmt: skip


def filled(run: RunResult, names: Sequence[str]) -> list[Filled]:
    """Columns with the cells of every model; a failed model has one word beside its label."""
    chosen = [BY_NAME[name] for name in names]
    numbers = [column.name for column in chosen if column.digits is not None]
    failed = "ppl" if "ppl" in numbers else next(iter(numbers), "")
    letters = machine_letters(run)
    flats = [flat_json(model, run) for model in run.models]
    found = []
    for column in chosen:
        best = best_labels(run.models, column.best) if column.best else frozenset()
        cells = []
        for model, flat in zip(run.models, flats, strict=True):
            if column.name == LABEL:
                cells.append(Cell(label_of(model)))
            elif model.error or model.ppl is None:
                cells.append(Cell("failed" if column.name == failed else ""))
            elif column.name == "where" and letters:
                cells.append(Cell(letters.get(model.where, "n/a")))
            elif column.digits is None:
                cells.append(Cell(flat[column.source] or ("" if column.name == "beside" else "n/a")))
            else:
                cells.append(number_cell(column, model, flat, is_best=model.label in best))
        found.append(Filled(column, tuple(cells)))
    return found


def number_cell(column: Column, model: ModelResult, flat: dict[str, Any], *, is_best: bool) -> Cell:
    """A measured model's number with its error."""
    if column.exact is not None and model.is_reference:
        return Cell("ref")
    value, stderr = flat.get(column.source), flat.get(f"{column.source}_stderr")
    if value is None:
        return Cell("n/a")
    shown = column.times * value + column.plus
    number = f"{shown:+,.{column.digits}f}" if column.signed else number_text(shown, column.digits or 0)
    marks = (EARLIER if model.cached else "") if column.name in ("seconds", "speed", "load") else ""
    marks += BESIDE if column.name == "speed" and flat["beside"] else ""
    error = error_text(column.times * stderr) if column.error and stderr is not None else ""
    return Cell(number, error, is_best, marks)


def machine_letters(run: RunResult) -> dict[str, str]:
    """Machine -> the letter that stands for it, in the order of the rows; empty if all rows ran on one.

    A name that is a part of one other name is the same machine: llama.cpp names the CPU too where others name GPUs.
    """
    found = dict.fromkeys(model.where for model in run.models if model.where)
    fuller = {each: [other for other in found if set(each.split(", ")) < set(other.split(", "))] for each in found}
    whole = {each: others[0] if len(others) == 1 else each for each, others in fuller.items()}
    letters = dict(zip(dict.fromkeys(whole.values()), map(chr, itertools.count(ord("A"))), strict=False))
    return {each: letters[whole[each]] for each in found} if len(letters) > 1 else {}


def label_of(model: ModelResult) -> str:
    """The label as the table shows it, with its marks."""
    return f"{model.marked_label} {FLOOR}" if model.is_noise_floor else model.marked_label


def column_notes(run: RunResult, shown: Collection[str]) -> list[str]:
    """Footnotes of the shown columns that need one."""
    notes = []
    if "kv_cache" in shown and len({model.kv_cache for model in run.models if model.kv_cache}) > 1:
        notes.append(
            "KV cache: the precision in which keys and values were kept while the text was scored; rows that differ in "
            "it differ in more than their weights"
        )
    if "speed" in shown and any(model.tokens_per_second for model in run.models):
        notes.append(speed_note(run))
    return notes


def speed_note(run: RunResult) -> str:
    """What the speeds are, and what ran beside the rows."""
    timed = [model.timing for model in run.models if model.timing]
    first = max(((each.first_window - each.score_began) / each.scoring_seconds for each in timed), default=0.0)
    about = "tok/s: scored tokens a second, the first step included"
    about += f" (up to {100 * first:.0f} % of a row's seconds)" if first >= WORTH_SAYING else ""
    if any(words_beside(model, run) for model in run.models):
        about += f"; {BESIDE} while other rows loaded or were scored on the same machine (--columns speed,beside)"
    if any(model.tokens_per_second and model.timing is None for model in run.models):
        about += "; of rows of compare_q 0.2 it is not known what ran beside them"
    return about
