"""The columns of the table, one declaration each, and the order of the rows.

Terminal, Markdown, CSV, report, ``--columns``, ``--sort``, Python and docs/outputs.md read
``COLUMNS``.  A field of ``ModelResult`` (``eval/results/``) becomes a column by one entry there.
A column may take a parameter after a colon: ``memory:32k`` takes a number of tokens, ``kld:chat`` a
slice of the scored tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest, printable
from ..results import ModelResult, RunResult
from ..stats.slices import BEGIN_LENGTH
from ..text.slice_names import BEGIN, REST, SPECIAL, SURE, UNSURE
from .numbers import KLD_DIGITS, PPL_DIGITS


@dataclass(frozen=True)
class Column:
    """A column of the table.

    ``shown``: when the table of a run has the column by default; with ``of_reference`` it also
    needs a reference.

    - "known": a row has a value;
    - "different": rows have different values;
    - "nonzero": a value is not 0;
    - "no files": no row has the size of its files.
    """

    name: str  # chooses it in --columns and --sort
    header: str  # at most two lines
    note: str  # what it means, for --notes and docs/outputs.md
    field: str = ""  # the field of results.json that it shows; empty: the one called ``name``
    digits: int | None = None  # decimals of a number; None for words
    times: float = 1.0  # the cell shows ``times`` * field + ``plus``
    plus: float = 0.0
    signed: bool = False  # a positive number has a sign
    error: bool = False  # the field has a standard error, ``..._stderr``
    of_reference: float | None = (
        None  # the reference's value by definition; None: models are not compared with it
    )
    best: Literal["", "nll", "kld", "same_top"] = (
        ""  # the score of ``eval/ranking.py`` that marks the best rows
    )
    more_is_better: bool = False  # sorting begins with the largest value
    wraps: bool = False  # words that a narrow terminal may wrap
    shown: Literal["", "always", "known", "different", "nonzero", "no files"] = ""
    spare: int = (
        0  # a narrow terminal leaves out the columns with the smallest numbers first; 0: never
    )
    parameter: Literal["", "context", "slice"] = ""  # what may follow the name after a colon
    context: int = 0  # N of ``memory:N``, a number of tokens; 0 for any other column
    slice: str = ""  # the slice whose tokens the column is over; empty: all scored tokens

    @property
    def fields(self) -> tuple[str, ...]:
        """The field of results.json, and that of its error; of a slice, the names that CSV and
        pandas have for them.
        """
        field = self.name if self.slice else self.field or self.name
        return (field, f"{field}_stderr") if self.error else (field,)

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.replace("-\n", "-").replace("\n", " ")

    def value(self, model: ModelResult) -> Any:
        """A row's value of the field; None if it is not known."""
        if self.context:
            return model.memory and model.memory.gigabytes(self.context)
        return self.attribute(model, "")

    def stderr(self, model: ModelResult) -> float | None:
        """The standard error of a row's value; None if it is not known, or if the column does not
        have one.
        """
        if not self.error:
            return None
        stderr: float | None = self.attribute(model, "_stderr")
        return stderr

    def attribute(self, model: ModelResult, suffix: str) -> Any:
        """A row's field with this suffix, or that of the row's slice; None if the row does not have
        the slice.
        """
        name = (self.field or self.name.partition(":")[0]).replace(".", "_") + suffix
        if self.slice:
            return getattr(model.slices.get(self.slice), name, None)
        return getattr(model, name)

    def is_usual(self, run: RunResult) -> bool:
        """Return True if the table of a run has the column by default."""
        values = [self.value(model) for model in run.models]
        known = values.count(None) < len(values)
        return (self.of_reference is None or run.reference is not None) and {
            "": False,
            "always": True,
            "known": known,
            "nonzero": any(values),
            "different": len({*values} - {None}) > 1,
            "no files": not any(model.file_bytes for model in run.models),
        }[self.shown]


share = partial(Column, digits=2, times=100.0, error=True)
"""Columns of shares in percent."""
COLUMNS = (
    Column("label", "label", "the model, with its marks", wraps=True, shown="always"),
    Column("engine", "engine", "the load_fn of its spec", wraps=True),
    Column(
        "kernel",
        "kernel",
        "what computed most quantized layers, by the engine's own name",
        wraps=True,
        shown="always",
    ),
    Column("where", "where", "the machine that it ran on", shown="different"),
    Column(
        "attention",
        "attention",
        "what computed the attention, by the engine's own name",
        wraps=True,
    ),
    Column(
        "version", "version", "the package that provided the engine", "engine_version", wraps=True
    ),
    Column(
        "options", "options", "the engine's options in which rows of the table differ", wraps=True
    ),
    Column(
        "phase",
        "phase",
        "prefill, or decode SxB: in steps of S tokens of each of B windows",
        wraps=True,
        shown="different",
    ),
    Column(
        "kv_cache",
        "KV\ncache",
        "the precision in which keys and values were kept",
        shown="different",
        spare=12,
    ),
    Column(
        "kv_mb",
        "KV MB /\n1k tok",
        "the KV cache of 1,000 tokens: 10^6 bytes, all layers, all GPUs",
        digits=1,
        shown="different",
        spare=11,
    ),
    Column(
        "bpw_layer", "layer\nbpw", "stored bits per weight of the layers", digits=2, shown="always"
    ),
    Column(
        "bpw_head",
        "head\nbpw",
        "stored bits per weight of the output head",
        digits=2,
        shown="different",
        spare=2,
    ),
    Column(
        "vram_gib", "VRAM\nGiB", "stored layers and head, 2^30 bytes", digits=2, shown="no files"
    ),
    Column(
        "size", "file\nGB", "weight files on disk, 10^9 bytes", "file_bytes", 2, 1e-9, shown="known"
    ),
    Column(
        "ppl",
        "PPL",
        "perplexity: how well the model predicts the text; lower is better, within one table",
        digits=PPL_DIGITS,
        error=True,
        best="nll",
        shown="always",
        parameter="slice",
    ),
    Column(
        "ratio",
        "PPL vs\nref %",
        "how far perplexity is above the reference's, with the paired error",
        "ppl_ratio",
        2,
        100,
        -100,
        signed=True,
        error=True,
        of_reference=1,
        shown="known",
        spare=10,
    ),
    Column(
        "kld",
        "KLD",
        "how far predictions are from the reference's: mean KL(reference || model) over tokens, nats",
        digits=KLD_DIGITS,
        error=True,
        of_reference=0,
        best="kld",
        shown="always",
        parameter="slice",
    ),
    Column(
        "kld_median",
        "median\nKLD",
        "half of the tokens have a smaller KLD",
        digits=KLD_DIGITS,
        of_reference=0,
    ),
    Column(
        "kld_p99", "99 %\nKLD", "99 % of the tokens have a smaller KLD", digits=4, of_reference=0
    ),
    Column(
        "kld_p99.9",
        "99.9 %\nKLD",
        "99.9 % of the tokens have a smaller KLD",
        digits=4,
        of_reference=0,
        shown="known",
        spare=9,
    ),
    Column("kld_max", "max\nKLD", "the largest KLD of a token", digits=4, of_reference=0),
    share(
        "same_top",
        "same\ntop %",
        "tokens at which model and reference have the same most probable token",
        of_reference=1,
        best="same_top",
        more_is_better=True,
        shown="always",
        parameter="slice",
    ),
    share(
        "top1",
        "hits\n%",
        "tokens of the text that are the model's most probable",
        error=False,
        more_is_better=True,
    ),
    Column("entropy", "entropy", "mean entropy of the model's predictions, nats", digits=4),
    Column("bits_per_byte", "bits /\nbyte", "bits per byte of the text", digits=4),
    Column(
        "non_finite",
        "non-\nfinite",
        "tokens without a finite log-probability, left out of PPL",
        digits=0,
        shown="nonzero",
    ),
    Column("load", "load\ns", "seconds of loading", "load_seconds", 1),
    Column("seconds", "seconds", "seconds of scoring", "score_seconds", 1),
    Column(
        "speed",
        "tok/s",
        "scored tokens per second of scoring",
        "tokens_per_second",
        0,
        more_is_better=True,
        shown="known",
        spare=3,
    ),
)
"""In the order of the table, unless ``--columns`` gives another order."""
BY_NAME = {column.name: column for column in COLUMNS}
MEMORY = Column(
    "memory",
    "memory\nGB",
    "serving one sequence of N tokens (32k: 32,768): weights, KV cache and activations, 10^9 bytes",
    digits=2,
    parameter="context",
)
"""``memory:N``; without a number of tokens it is not a column."""
CONTEXT = re.compile(r"0*([1-9]\d{0,8})(k?)")
SLICES = {
    SPECIAL: "special tokens of the tokenizer",
    SURE: "tokens at which the reference's highest probability is at least 0.9",
    UNSURE: "tokens at which the reference's highest probability is below 0.5",
    BEGIN: f"the first {BEGIN_LENGTH} tokens of each window",
    REST: f"tokens after the first {BEGIN_LENGTH} of a window",
}
"""The slices that every run may have, and their tokens in words."""
OF_SLICES = tuple(column.name for column in COLUMNS if column.parameter == "slice")
"""Names of the columns that take a slice."""


def named(name: str) -> Column:
    """Return the column of a name, which may have a parameter: ``memory:32k``, ``kld:special``.

    InputError for an unknown name.  Which slices a run has is not known here (``check_slices``).
    """
    first, colon, parameter = name.partition(":")
    column = MEMORY if first == MEMORY.name else BY_NAME.get(first)
    if column is None or (colon and not column.parameter):
        slices = ", ".join(f"{each}:SLICE" for each in OF_SLICES)
        known = (
            f"{', '.join(BY_NAME)}, memory:N (N tokens, as memory:32k), {slices} (as kld:special)"
        )
        raise InputError(f"{printable(name)!r} is not a column{meant(name)}; there are: {known}")
    if column.parameter == "context":
        return of_context(column, parameter)
    return of_slice(column, parameter) if colon else column


def meant(name: str) -> str:
    """Return a hint at the column whose title in the table a user wrote, or else at a similar name."""
    titles = {column.title.removesuffix(" %").lower(): column.name for column in COLUMNS}
    written = name.removesuffix("%").strip().lower().replace("_", " ")
    found = titles.get(written)
    return f" (did you mean {found!r}?)" if found else nearest(name, BY_NAME)


def of_context(column: Column, parameter: str) -> Column:
    """Return a column for a number of tokens; InputError unless the ``parameter`` is one, as 8192
    or 32k.
    """
    found = CONTEXT.fullmatch(parameter)
    if found is None:
        first = column.name
        name = f"{first}:{parameter}" if parameter else first
        raise InputError(
            f"{name!r}: write the number of tokens after {first}, as {first}:8192 or {first}:32k"
        )
    thousands = found[2]
    tokens = int(found[1]) * (1024 if thousands else 1)
    header = column.header.replace("\n", f"\n{found[1]}{thousands} ")
    return replace(column, name=f"{column.name}:{parameter}", header=header, context=tokens)


def of_slice(column: Column, name: str) -> Column:
    """Return a column over the tokens of a slice; InputError for an empty name.

    It marks no best rows, and is in no table by its own rule.
    """
    if not name:
        raise InputError(
            f"'{column.name}:': write the name of a slice after the colon, as {column.name}:special"
        )
    in_words = SLICES.get(name, f"tokens of {name}")
    return replace(
        column,
        name=f"{column.name}:{name}",
        field=column.fields[0],
        header=f"{' '.join(name.split())}\n{column.title}",
        note=f"{column.title} over {in_words}",
        slice=name,
        best="",
        shown="",
        spare=0,
    )


def check_slices(columns: Sequence[Column], known: Sequence[str]) -> None:
    """Raise InputError for a column over a slice that no row has; ``known``: the slices of the run."""
    for column in columns:
        if column.slice and column.slice not in known:
            there = f"there are: {printable(', '.join(known))}" if known else "this run has none"
            near = nearest(column.slice, known)
            raise InputError(
                f"{printable(column.name)}: no row has the slice {column.slice!r}{near}; {there}"
            )


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of columns, each once; the label first unless it is named.

    Raises InputError for an unknown name, or for no name.
    """
    for name in names:
        named(name)
    if not names:
        raise InputError(f"names no column; there are: {', '.join(BY_NAME)}")
    return tuple(dict.fromkeys(names if "label" in names else ("label", *names)))


def fields_of(names: Sequence[str]) -> list[str]:
    """Return the fields of chosen columns, as CSV and pandas name them."""
    return [field for name in names for field in named(name).fields]


def values_of(model: ModelResult, names: Sequence[str] | None) -> Mapping[str, Any]:
    """Return a row's fields with a single value, and the values of those chosen columns that have a
    parameter.
    """
    values = model.flat
    for column in map(named, names or ()):
        if column.context or column.slice:
            numbers = (column.value(model), column.stderr(model))
            values |= dict(zip(column.fields, numbers, strict=False))
    return values


def ordered(run: RunResult, key: str | None) -> RunResult:
    """Return the run with its rows sorted by ``key``, unknown values and then failures last.

    ``key``: the name of a column; None: unchanged.  The smallest value comes first, or the largest
    if more is better.
    """
    if key is None:
        return run
    column = named(key)

    def place(model: ModelResult) -> tuple[bool, bool, float | str]:
        failed = bool(model.error)
        value = sort_value(column, model)
        if column.digits is None:
            return failed, not value, str(value or "").casefold()
        if value is None:
            return failed, True, 0.0
        return failed, False, -value if column.more_is_better else value

    return run.updated(models=tuple(sorted(run.models, key=place)))


def sort_value(column: Column, model: ModelResult) -> Any:
    """Return a row's value for sorting; the reference has the value that the column gives it by
    definition.
    """
    if model.error:
        return None
    if model.reference and column.of_reference is not None:
        return column.of_reference
    return column.value(model)


def no_order(run: RunResult, key: str) -> str | None:
    """Return why sorting by ``key`` has no effect, and what to do; None if a row except the
    reference has a value.
    """
    column = named(key)
    is_compared = column.of_reference is not None
    rows = [model for model in run.models if not (model.reference and is_compared)]
    if not rows or any(sort_value(column, model) is not None for model in rows):
        return None
    needs = "; it is measured with a reference" if is_compared else ""
    return f"{key}: no row has a value of it{needs}"
