"""The columns of the table, one declaration each, and their cells; the order of the rows.

Terminal, Markdown, CSV, report, ``--columns``, ``--sort``, Python and docs/outputs.md read ``COLUMNS``.  A field of
``ModelResult`` (``eval/results.py``) becomes a column by one entry there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest
from compare_q.eval.ranking import best_labels
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.stats.uncertainty import Value
from compare_q.eval.table.numbers import KLD_DIGITS, PPL_DIGITS, error_text, number_text

BEST = "\N{BLACK STAR}"
"""Before the best value of a column."""
FLOOR = "\N{ALMOST EQUAL TO}"
"""After the label of a noise floor."""
EARLIER = "*"
"""After seconds that an earlier run measured."""
DIVERGENCES, QUESTIONS = "--divergences", "a task of questions (-d lm_eval:TASK)"


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        name: chooses it in ``--columns`` and ``--sort``.
        header: at most two lines.
        note: what it means, for ``--notes`` and docs/outputs.md.
        field: the field of results.json that it shows; empty: the one called ``name``.
        digits: decimals of a number; None for words.
        times, plus: the cell shows ``times`` * field + ``plus``.
        signed: a positive number has a sign.
        error: the field has a standard error, ``..._stderr``.
        of_reference: the field's value for the reference by definition; None unless models are compared with it.
        best: marks the best rows by this score (``SCORES`` of ``eval/ranking.py``).
        more_is_better: sorting begins with the largest value.
        per_model: it describes the model and not the text; a table of several texts has it once.
        wraps: words that a narrow terminal may wrap.
        needs: what a run needs for it in addition to a reference.
        shown: True if the table of a text has it by default; a column with ``of_reference`` also needs a reference.
        spare: a narrow terminal leaves out the columns with the smallest numbers first; 0: never.
    """

    name: str
    header: str
    note: str
    field: str = ""
    digits: int | None = None
    times: float = 1.0
    plus: float = 0.0
    signed: bool = False
    error: bool = False
    of_reference: float | None = None
    best: Literal["", "nll", "kld", "same_top"] = ""
    more_is_better: bool = False
    per_model: bool = False
    wraps: bool = False
    needs: str = ""
    shown: Callable[[Column, TextResult], bool] = lambda column, text: False
    spare: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """The field of results.json, and that of its error."""
        field = self.field or self.name
        return (field, f"{field}_stderr") if self.error else (field,)

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.replace("-\n", "-").replace("\n", " ")

    def is_usual(self, text: TextResult) -> bool:
        """Return True if the table of a text has the column by default."""
        return (self.of_reference is None or text.reference is not None) and self.shown(self, text)

    def value(self, model: ModelResult) -> Any:
        """A row's value of the field; None if it is not known."""
        return getattr(model, self.fields[0].replace(".", "_"))

    def stderr(self, model: ModelResult) -> float | None:
        """The standard error of a row's value."""
        return getattr(model, self.fields[1]) if self.error else None


def always(column: Column, text: TextResult) -> bool:
    """Return True."""
    return True


def known(column: Column, text: TextResult) -> bool:
    """Return True if a row has a value."""
    return any(column.value(model) is not None for model in text.models)


def different(column: Column, text: TextResult) -> bool:
    """Return True if rows have different values; two names of one machine do not differ."""
    if column.name == "where":
        return bool(machine_letters(text))
    return len({column.value(model) for model in text.models} - {None}) > 1


def nonzero(column: Column, text: TextResult) -> bool:
    """Return True if a row's value is not 0."""
    return any(column.value(model) for model in text.models)


def without_files(column: Column, text: TextResult) -> bool:
    """Return True if no row has the size of its files."""
    return not any(model.file_bytes for model in text.models)


def for_questions(column: Column, text: TextResult) -> bool:
    """Return True if the text is a task of questions."""
    return any(model.questions is not None for model in text.models)


def known_or_no_questions(column: Column, text: TextResult) -> bool:
    """Return True if a row has a value, or if the text is not a task of questions."""
    return not for_questions(column, text) or known(column, text)


COLUMNS = (
    Column("label", "label", "the model, with its marks", per_model=True, wraps=True, shown=always),
    Column("engine", "engine", "the load_fn of its spec", per_model=True, wraps=True),
    Column("kernel", "kernel", "what computed most quantized layers, by the engine's own name",
           per_model=True, wraps=True, shown=always),
    Column("where", "where", "the machine that it ran on", per_model=True, shown=different),
    Column("phase", "phase", "prefill, or decode SxB: in steps of S tokens of each of B windows",
           per_model=True, wraps=True, shown=different),
    Column("kv_cache", "KV\ncache", "the precision in which keys and values were kept",
           per_model=True, shown=different, spare=12),
    Column("kv_mb", "KV MB /\n1k tok", "the KV cache of 1,000 tokens: 10^6 bytes, all layers, all GPUs", digits=1,
           per_model=True, shown=different, spare=11),
    Column("bpw_layer", "layer\nbpw", "stored bits per weight of the layers", digits=2, per_model=True,
           shown=always),
    Column("bpw_head", "head\nbpw", "stored bits per weight of the output head", digits=2, per_model=True,
           shown=different, spare=2),
    Column("vram_gib", "VRAM\nGiB", "stored layers and head, 2^30 bytes", digits=2, per_model=True,
           shown=without_files),
    Column("size", "file\nGB", "weight files on disk, 10^9 bytes", "file_bytes", 2, 1e-9, per_model=True,
           shown=known),
    Column("ppl", "PPL", "perplexity: how well the model predicts the text; lower is better, within one table",
           digits=PPL_DIGITS, error=True, best="nll", shown=always),
    Column("ratio", "PPL vs\nref %", "how far perplexity is above the reference's, with the paired error", "ppl_ratio",
           2, 100, -100, signed=True, error=True, of_reference=1, shown=known, spare=10),
    Column("kld", "KLD", "how far predictions are from the reference's: mean KL(reference || model) over tokens, nats",
           digits=KLD_DIGITS, error=True, of_reference=0, best="kld", shown=always),
    Column("kld_median", "median\nKLD", "half of the tokens have a smaller KLD", digits=KLD_DIGITS, of_reference=0),
    Column("kld_p99", "99 %\nKLD", "99 % of the tokens have a smaller KLD", digits=4, of_reference=0),
    Column("kld_p99.9", "99.9 %\nKLD", "99.9 % of the tokens have a smaller KLD", digits=4, of_reference=0,
           shown=known, spare=9),
    Column("kld_max", "max\nKLD", "the largest KLD of a token", digits=4, of_reference=0),
    Column("reverse_kld", "reverse\nKLD", "mean KL(model || reference), nats", digits=KLD_DIGITS, error=True,
           of_reference=0, needs=DIVERGENCES, shown=known, spare=7),
    Column("js", "JS", "mean Jensen-Shannon divergence, nats", digits=KLD_DIGITS, error=True, of_reference=0,
           needs=DIVERGENCES, shown=known, spare=6),
    Column("tv", "TV %", "total variation: how often, at least, a sampled token is another one", digits=2, times=100,
           error=True, of_reference=0, needs=DIVERGENCES, shown=known, spare=5),
    Column("same_top", "same\ntop %", "tokens at which model and reference have the same most probable token", digits=2,
           times=100, error=True, of_reference=1, best="same_top", more_is_better=True, shown=known_or_no_questions),
    Column("top5", "top 5\n%", "how many of the five most probable tokens are the reference's", digits=2, times=100,
           error=True, of_reference=1, more_is_better=True, needs=DIVERGENCES, shown=known, spare=4),
    Column("top1", "hits\n%", "tokens of the text that are the model's most probable", digits=2, times=100,
           more_is_better=True),
    Column("entropy", "entropy", "mean entropy of the model's predictions, nats", digits=4),
    Column("bits_per_byte", "bits /\nbyte", "bits per byte of the text", digits=4),
    Column("questions", "ques-\ntions", "questions whose answers were scored", digits=0, needs=QUESTIONS),
    Column("acc", "acc\n%", "questions whose most probable answer is right", digits=2, times=100, error=True,
           more_is_better=True, needs=QUESTIONS, shown=for_questions),
    Column("acc_norm", "acc\nnorm %", "the same by log-probability per character of the answer", digits=2, times=100,
           error=True, more_is_better=True, needs=QUESTIONS, shown=known, spare=14),
    Column("flips", "flips\n%", "questions that only one of model and reference has right, by acc", digits=2, times=100,
           error=True, of_reference=0, needs=QUESTIONS, shown=for_questions),
    Column("flips_norm", "flips\nnorm %", "the same by acc_norm", digits=2, times=100, error=True, of_reference=0,
           needs=QUESTIONS),
    Column("changed", "changed\n%", "questions with another answer than the reference's, by acc", digits=2, times=100,
           error=True, of_reference=0, needs=QUESTIONS),
    Column("changed_norm", "changed\nnorm %", "the same by acc_norm", digits=2, times=100, error=True, of_reference=0,
           needs=QUESTIONS),
    Column("mcnemar_p", "McNemar\np", "exact test of acc against the reference's, two-sided", digits=4, needs=QUESTIONS,
           shown=known, spare=13),
    Column("mcnemar_p_norm", "McNemar\nnorm p", "the same of acc_norm", digits=4, needs=QUESTIONS),
    Column("non_finite", "non-\nfinite", "tokens without a finite log-probability, left out of PPL", digits=0,
           shown=nonzero),
    Column("load", "load\ns", "seconds of loading", "load_seconds", 1, per_model=True),
    Column("seconds", "seconds", "seconds of scoring", "score_seconds", 1),
    Column("speed", "tok/s", "scored tokens a second of scoring", "tokens_per_second", 0, more_is_better=True,
           shown=known, spare=3),
)  # fmt: skip
"""In the order of the table, unless ``--columns`` gives another order."""
BY_NAME = {column.name: column for column in COLUMNS}
OF_TEXT, OF_ANSWERS = ("ppl", "kld"), ("acc", "flips", "kld")
"""Columns of each text in a table of several texts, by default.  The PPL of answers includes wrong ones."""
TOP_ERROR = 8
"""``spare`` of the error of ``same_top``.  On a task of questions the column itself has 1."""


@dataclass(frozen=True)
class Cell:
    """A number, its standard error and the marks after it, as they are written; or words.  Each may be empty."""

    value: str
    error: str = ""
    is_best: bool = False
    marks: str = ""

    @property
    def shown(self) -> str:
        """The value, with its mark if it is the best."""
        return f"{BEST}{self.value}" if self.is_best else self.value

    @property
    def plus_minus(self) -> str:
        """The error as written after the value; empty without one."""
        return f" ± {self.error}" if self.error else ""


@dataclass(frozen=True)
class Filled:
    """A column with a cell for each row.

    ``block``: columns with the same number stay together.  0: about the models; 1, 2, ...: about a text; -1: means over
    the texts.
    """

    column: Column
    cells: tuple[Cell, ...]
    block: int = 0


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of columns, each once; the label first unless it is named.

    Raises InputError for an unknown name, or for no name.
    """
    for name in names:
        if name not in BY_NAME:
            raise InputError(f"{name!r} is no column{nearest(name, BY_NAME)}; there are: {', '.join(BY_NAME)}")
    if not names:
        raise InputError(f"names no column; there are: {', '.join(BY_NAME)}")
    return tuple(dict.fromkeys(names if "label" in names else ("label", *names)))


def fields_of(names: Sequence[str] | None) -> list[str] | None:
    """Return the fields of results.json of chosen columns; None if no columns were chosen."""
    return None if names is None else [field for name in names for field in BY_NAME[name].fields]


def usual_columns(text: TextResult) -> list[str]:
    """Return the names of the columns of a text's table by default, if it is wide enough."""
    return [column.name for column in COLUMNS if column.is_usual(text)]


def spare_columns(text: TextResult) -> tuple[str, ...]:
    """Return the columns, and errors of columns (``..._stderr``), that a narrow terminal leaves out, last one first."""
    ranks = {column.name: column.spare for column in COLUMNS if column.spare and column.is_usual(text)}
    if BY_NAME["same_top"].is_usual(text):
        ranks |= {"same_top_stderr": TOP_ERROR, **({"same_top": 1} if for_questions(BY_NAME["same_top"], text) else {})}
    return tuple(sorted(ranks, key=lambda name: -ranks[name]))


def filled(text: TextResult, names: Sequence[str]) -> list[Filled]:
    """Return columns with a cell for each model; a failed model has "failed" in its first number."""
    chosen = [BY_NAME[name] for name in names]
    numbers = [column.name for column in chosen if column.digits is not None]
    failed = "ppl" if "ppl" in numbers else next(iter(numbers), "")
    letters, found = machine_letters(text), []
    for column in chosen:
        best = best_labels(text.models, column.best) if column.best else frozenset()
        cells = []
        for model in text.models:
            if column.name == "label":
                cells.append(Cell(label_of(model)))
            elif model.estimates is None:
                cells.append(Cell("failed" if column.name == failed else ""))
            elif column.name == "where" and letters:
                cells.append(Cell(letters.get(model.where or "", "n/a")))
            elif column.digits is None:
                cells.append(Cell(column.value(model) or "n/a"))
            else:
                cells.append(number_cell(column, model, is_best=model.label in best))
        found.append(Filled(column, tuple(cells)))
    return found


def number_cell(column: Column, model: ModelResult, *, is_best: bool = False) -> Cell:
    """Return the cell of a measured model in a column of numbers."""
    if column.of_reference is not None and model.reference:
        return Cell("ref")
    value, stderr = column.value(model), column.stderr(model)
    if value is None:
        return Cell("n/a")
    shown = column.times * value + column.plus
    number = f"{shown:+,.{column.digits}f}" if column.signed else number_text(shown, column.digits or 0)
    marks = EARLIER if model.from_cache and column.name in ("seconds", "speed", "load") else ""
    return Cell(number, error_text(None if stderr is None else column.times * stderr), is_best, marks)


def label_of(model: ModelResult) -> str:
    """Return the label with its marks."""
    return f"{model.marked_label} {FLOOR}" if model.noise_floor else model.marked_label


def machine_letters(text: TextResult) -> dict[str, str]:
    """Return a letter for each machine, in the order of the rows; empty if all rows ran on the same machine.

    A name that is a part of one other name is the same machine: llama.cpp also names the CPU if others name GPUs alone.
    """
    found = dict.fromkeys(model.where for model in text.models if model.where)
    fuller = {each: [other for other in found if set(each.split(", ")) < set(other.split(", "))] for each in found}
    whole = {each: others[0] if len(others) == 1 else each for each, others in fuller.items()}
    letters = dict(zip(dict.fromkeys(whole.values()), map(chr, itertools.count(ord("A"))), strict=False))
    return {each: letters[whole[each]] for each in found} if len(letters) > 1 else {}


def ordered(run: RunResult, key: str | None) -> RunResult:
    """Return the run with the rows of every text sorted by ``key``, unknown values and then failures last.

    ``key``: the name of a column, or "kld:NAME" for the text of that name; None: unchanged.  Without a text, the rows
    of several texts are sorted by their means.  The smallest value comes first, or the largest if more is better.
    """
    if key is None:
        return run
    column, text = BY_NAME[key.partition(":")[0]], key.partition(":")[2]

    def place(label: str) -> tuple[bool, bool, float | str]:
        value = sort_value(run, label, column, text)
        failed = all(model is None or model.error for model in run.of_label(label))
        if column.digits is None:
            return failed, not value, str(value or "").casefold()
        return failed, value is None, 0.0 if value is None else -value if column.more_is_better else value

    order = {label: number for number, label in enumerate(sorted(run.labels, key=place))}
    return run.updated(texts=tuple(
        text.updated(models=tuple(sorted(text.models, key=lambda model: order[model.label]))) for text in run.texts
    ))  # fmt: skip


def sort_value(run: RunResult, label: str, column: Column, of_text: str) -> Any:
    """Return a model's value of a column on the text ``of_text``; "": its mean over the texts, or the first words."""
    if len(run.texts) > 1 and not of_text and column.name in OF_TEXT:
        return mean_of(run, label, column.name).value
    values = []
    for text, model in zip(run.texts, run.of_label(label), strict=True):
        if not of_text or text.name == of_text:
            exact = model is not None and model.reference and column.of_reference is not None
            known = model is not None and not model.error
            values.append(column.of_reference if known and exact else column.value(model) if known and model else None)
    found = [value for value in values if value is not None]
    if column.per_model or column.digits is None:
        return found[0] if found else None
    return sum(found) / len(found) if found and len(found) == len(values) else None


def mean_of(run: RunResult, label: str, name: str) -> Value:
    """Return a model's macro mean of "ppl" or "kld"."""
    return run.mean_kld(label) if name == "kld" else run.mean_ppl(label)


def no_order(run: RunResult, key: str) -> str | None:
    """Return why sorting by ``key`` has no effect, and what to do; None if a row except the reference has a value."""
    name, _, of_text = key.partition(":")
    column = BY_NAME[name]
    compared = column.of_reference is not None
    exact = {model.label for text in run.texts for model in text.models if model.reference and compared}
    rows = [label for label in run.labels if label not in exact]

    def is_known(text: str) -> bool:
        return any(sort_value(run, label, column, text) is not None for label in rows)

    if not rows or is_known(of_text):
        return None
    if not of_text and (some := next((text.name for text in run.texts if is_known(text.name)), None)):
        return f"{key}: not every text has values of it; name one that has: {name}:{some}"
    needs = column.needs or ("a reference" if compared else "")
    return f"{key}: no row has a value of it" + (f"; it is measured with {needs}" if needs else "")
