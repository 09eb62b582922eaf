"""Results -> the columns of a table and their cells, for terminal, Markdown and report; the order of the rows.

The table of one text has all that its terminal is wide enough for.  In the table of several texts stand first what a
model is, then each text's values, and then the means over the texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compare_q.eval.ranking import best_labels
from compare_q.eval.results import PARTS, ModelResult, RunResult, TextResult
from compare_q.eval.stats.uncertainty import Value
from compare_q.eval.table.numbers import error_text, number_text
from compare_q.eval.table.registry import BY_NAME, COLUMNS, KERNEL, LABEL, NEEDS, OF_MODEL, Column

BEST = "\N{BLACK STAR}"
"""Before the best value of a column."""
FLOOR = "\N{ALMOST EQUAL TO}"
"""Beside the label of a noise floor."""
EARLIER = "*"
"""Beside seconds of an earlier run."""
ALWAYS = ("where", "phase", "bpw_layer", "size", "ppl", "kld", "same_top", "non_finite")
TOP_ERROR = "same_top_stderr"
EXTRAS = (
    "acc_norm", "mcnemar_p", "kv_cache", "kv_mb", "ratio", "kld_p99.9", TOP_ERROR, "reverse_kld", "js", "tv", "top5",
    "speed", "bpw_head", "same_top",
)  # fmt: skip
MEANS = -1
"""The block of the means over all texts."""
OF_TEXT = ("ppl", "kld")
"""What a table has of every text, unless columns are chosen."""
OF_ANSWERS = ("acc", "flips", "kld")
"""What it has of answers to questions, whose PPL is over wrong ones too."""
LONGEST_NAME = 14
"""Letters of a text's name in a header, if the names can be told apart by so many."""
IF_DIFFERENT = ("kv_cache", "kv_mb", "bpw_head")
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
    """A column of the table with a cell a model.

    ``block``: columns of one number stand together: what models are (0), the values of each text (1, 2, ...), and
    ``MEANS`` of the texts.
    """

    column: Column
    cells: tuple[Cell, ...]
    block: int = 0


def ordered(results: RunResult, key: str | None) -> RunResult:
    """The models of every text sorted by a column (None: as they are), unknown values and then failures last.

    ``kld:NAME`` sorts by the column of the text of that name.  Without a name ``kld`` and ``ppl`` of several texts are
    the mean over the texts, other columns the plain mean of the texts' values.  The smallest first, but the largest
    where more is better.
    """
    if key is None:
        return results
    name, _, of = key.partition(":")
    column = BY_NAME[name]

    def place(label: str) -> tuple[bool, bool, float | str]:
        value = value_over_texts(results, label, column, of)
        failed = all(model is None or model.error for model in results.of_label(label))
        if column.digits is None:
            return failed, not value, str(value or "").casefold()
        return failed, value is None, 0.0 if value is None else -value if column.more else value

    order = {label: number for number, label in enumerate(sorted(results.labels, key=place))}
    return results.updated(texts=tuple(
        text.updated(models=tuple(sorted(text.models, key=lambda model: order[model.label])))
        for text in results.texts
    ))  # fmt: skip


def no_order(results: RunResult, key: str) -> str | None:
    """Why sorting by a column orders nothing, and what would; None if a row has a value, not by definition alone."""
    name, _, of = key.partition(":")
    column = BY_NAME[name]
    exact = {m.label for text in results.texts for m in text.models if m.reference and column.exact is not None}
    rows = [label for label in results.labels if label not in exact]
    known = {
        text: any(value_over_texts(results, label, column, text) not in (None, "") for label in rows)
        for text in (of, *(text.name for text in results.texts))
    }
    if known.pop(of) or not rows:
        return None
    if some := [text for text, is_known in known.items() if is_known and not of]:
        return f"{key}: not every text has values of it; name one that has: {name}:{some[0]}"
    needs = NEEDS.get(name, "a reference" if column.exact is not None else "")
    return f"{key}: no row has a value of it" + (f"; it is measured with {needs}" if needs else "")


def value_over_texts(results: RunResult, label: str, column: Column, of: str) -> Any:
    """A model's value of a column for the text ``of``; "": its mean over the texts, of words the first."""
    if len(results.texts) > 1 and not of and column.name in OF_TEXT:
        return mean_of(results, label, column.name).value
    values: list[Any] = []
    for text, model in zip(results.texts, results.of_label(label), strict=True):
        if not of or text.name == of:
            values.append(None if model is None or model.error else value_of(column, model, text))
    known = [value for value in values if value is not None]
    if column.name in OF_MODEL or column.digits is None:
        return known[0] if known else None
    return sum(known) / len(known) if known and len(known) == len(values) else None


def value_of(column: Column, model: ModelResult, text: TextResult) -> Any:
    """A measured model's value: a number, words ("" if there are none), or None."""
    if column.exact is not None and model.reference:
        return column.exact
    value = model.flat.get(column.source)
    return value or "" if column.digits is None else value


def fields_of(names: Sequence[str] | None) -> list[str] | None:
    """The fields of results.json of chosen columns; None: no columns were chosen."""
    return None if names is None else [field for name in names for field in BY_NAME[name].fields]


def always_shown(run: TextResult) -> tuple[str, ...]:
    """The columns that a table of any width has: machines that differ, sizes, and what is compared.

    Without the size of any file the size of the weights stands in its place.
    """
    wanted = set(ALWAYS) - (set() if run.reference else {"kld", "same_top"})
    if any(model.estimates and model.estimates.answers for model in run.models):
        wanted = wanted - {"same_top"} | {"acc", *(["flips"] if run.reference else [])}
    if not machine_letters(run):
        wanted.discard("where")
    if len({model.phase for model in run.models if not model.error}) < 2:
        wanted.discard("phase")
    if not any(model.non_finite for model in run.models):
        wanted.discard("non_finite")
    if not any(model.file_bytes for model in run.models):
        wanted = wanted - {"size"} | {"vram_gib"}
    return (LABEL, KERNEL, *(column.name for column in COLUMNS if column.name in wanted))


def possible_extras(run: TextResult) -> tuple[str, ...]:
    """The ``EXTRAS`` that tell something of a run: what some row has, and of ``IF_DIFFERENT`` what differs."""
    flats, shown = [model.flat for model in run.models], always_shown(run)

    def tells(extra: str) -> bool:
        if extra == TOP_ERROR:
            return run.reference is not None
        column = BY_NAME[extra]
        known = {flat.get(column.source) for flat in flats} - {None}
        compared = column.exact is None or run.reference is not None
        return extra not in shown and compared and len(known) > (extra in IF_DIFFERENT)

    return tuple(extra for extra in EXTRAS if tells(extra))


def table_columns(run: TextResult, names: Sequence[str] | None = None) -> list[Filled]:
    """The columns of these names; None: all that a table has which is wide enough."""
    wanted = {*always_shown(run), *possible_extras(run)}
    return filled(run, [column.name for column in COLUMNS if column.name in wanted] if names is None else names)


def without(shown: Sequence[Filled], left_out: Collection[str]) -> list[Filled]:
    """The columns but for those of these names; ``..._stderr`` leaves out the errors of a column."""
    return [
        replace(each, cells=tuple(replace(cell, error="") for cell in each.cells))
        if f"{each.column.name}_stderr" in left_out else each
        for each in shown if each.column.name not in left_out
    ]  # fmt: skip


def filled(run: TextResult, names: Sequence[str]) -> list[Filled]:
    """Columns with the cells of every model; a failed model has one word beside its label."""
    chosen = [BY_NAME[name] for name in names]
    numbers = [column.name for column in chosen if column.digits is not None]
    failed = "ppl" if "ppl" in numbers else next(iter(numbers), "")
    letters = machine_letters(run)
    flats = [model.flat for model in run.models]
    found = []
    for column in chosen:
        best = best_labels(run.models, column.best) if column.best else frozenset()
        cells = []
        for model, flat in zip(run.models, flats, strict=True):
            if column.name == LABEL:
                cells.append(Cell(label_of(model)))
            elif model.estimates is None:
                cells.append(Cell("failed" if column.name == failed else ""))
            elif column.name == "where" and letters:
                cells.append(Cell(letters.get(model.where or "", "n/a")))
            elif column.digits is None:
                cells.append(Cell(flat[column.source] or "n/a"))
            else:
                cells.append(number_cell(column, model, flat, is_best=model.label in best))
        found.append(Filled(column, tuple(cells)))
    return found


def number_cell(column: Column, model: ModelResult, flat: dict[str, Any], *, is_best: bool) -> Cell:
    """A measured model's number with its error."""
    if column.exact is not None and model.reference:
        return Cell("ref")
    value, stderr = flat.get(column.source), flat.get(f"{column.source}_stderr")
    if value is None:
        return Cell("n/a")
    shown = column.times * value + column.plus
    number = f"{shown:+,.{column.digits}f}" if column.signed else number_text(shown, column.digits or 0)
    marks = (EARLIER if model.from_cache else "") if column.name in ("seconds", "speed", "load") else ""
    error = error_text(column.times * stderr) if column.error and stderr is not None else ""
    return Cell(number, error, is_best, marks)


def machine_letters(run: TextResult) -> dict[str, str]:
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
    return f"{model.marked_label} {FLOOR}" if model.noise_floor else model.marked_label


def columns_of_texts(results: RunResult, names: Sequence[str] | None = None) -> list[Filled]:
    """The columns of these names: what models are, of each text its values, and the means.

    None: label, kernel, sizes, and of every text PPL and KLD, of answers accuracy.
    """
    models, compared = models_of(results), any(text.reference for text in results.scored)
    usual = [*(name for name in always_shown(models) if name in OF_MODEL), *OF_TEXT[: 1 + compared]]
    chosen = usual if names is None else names
    of_text = [name for name in chosen if name not in OF_MODEL]
    shown = filled(models, [LABEL, *(name for name in chosen if name in OF_MODEL and name != LABEL)])
    for number, header in enumerate(short_names([text.name for text in results.texts])):
        own = OF_ANSWERS[: 1 + 2 * compared] if results.texts[number].is_answers else OF_TEXT[: 1 + compared]
        shown += text_columns(results, number, header, own if names is None else of_text)
    return shown + [mean_column(results, name) for name in of_text if name in OF_TEXT]


def models_of(results: RunResult) -> TextResult:
    """A text that says what the models are: each one's first row that did not fail."""
    rows = [[model for model in results.of_label(label) if model is not None] for label in results.labels]
    models = tuple(next((model for model in each if not model.error), each[0]) for each in rows)
    return results.scored[0].updated(models=models)


def text_columns(results: RunResult, number: int, header: str, names: Sequence[str]) -> list[Filled]:
    """A text's columns, with its name above; where the text or a model failed, every cell is n/a."""
    text = results.texts[number]
    models = text.models or tuple(ModelResult.of(label, "", error=text.error) for label in results.labels)
    return [
        Filled(
            replace(each.column, header=f"{header}\n{each.column.title}"),
            tuple(Cell("n/a") if m.error else cell for m, cell in zip(models, each.cells, strict=True)),
            number + 1,
        )
        for each in filled(text.updated(models=models), names)
    ]


def mean_column(results: RunResult, name: str) -> Filled:
    """The macro means of PPL or KLD."""
    column = BY_NAME[name]

    def cell(label: str) -> Cell:
        is_reference = all(model and model.reference and not model.error for model in results.of_label(label))
        mean = mean_of(results, label, name)
        if name == "kld" and is_reference:
            return Cell("ref")
        return Cell(number_text(mean.value, column.digits or 0), error_text(mean.stderr))

    return Filled(replace(column, header=f"mean\n{column.title}"), tuple(map(cell, results.labels)), MEANS)


def mean_of(results: RunResult, label: str, name: str) -> Value:
    """A model's macro mean of PPL or KLD."""
    return results.mean_kld(label) if name == "kld" else results.mean_ppl(label)


def short_names(names: Sequence[str]) -> list[str]:
    """The names for headers, cut where they are long, unless they could not be told apart then."""
    cut = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    return cut if len(set(cut)) == len(cut) else list(names)


def timing_columns(results: RunResult) -> list[Filled]:
    """Where the seconds of every model, of several texts of every model and text, went.

    * marks rows of an earlier run.  A model's load stands at the first text that it scored.
    """
    several = len(results.texts) > 1
    heads = [Column(LABEL, LABEL, ""), Column("text", "text", "")][: 1 + several]
    heads += [Column(part, f"{part.replace('_', ' ')} s", "", digits=1) for part in PARTS]
    rows = []
    for label in results.labels:
        for text in results.scored:
            model = next(model for model in text.models if model.label == label)
            if model.timing is None:
                continue
            cells = [number_text(model.timing.seconds[part], 1) for part in PARTS]
            if several and model.timing.started == model.timing.loaded:  # it was loaded for a text before
                cells[0] = ""
            name = label_of(model) + (EARLIER if model.from_cache else "")
            rows.append([name, *([text.name] if several else []), *cells])
    return [Filled(head, tuple(Cell(row[i]) for row in rows)) for i, head in enumerate(heads)]
