"""The columns of the table, one declaration each, and the order of the rows.

Terminal, Markdown, CSV, report, ``--columns``, ``--sort``, Python and docs/outputs.md read
``COLUMNS``.  A field of ``ModelResult`` becomes a column by one entry there.  A column may take a
parameter after a colon: ``memory:32k`` takes a number of tokens, ``kld:chat`` a slice of the scored
tokens.
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

    Attributes:
        name: selects the column in ``--columns`` and ``--sort``.
        header: at most two lines.
        note: the meaning of the column, for ``--notes`` and docs/outputs.md.
        field: the field of results.json that it shows; empty: the one called ``name``.
        digits: decimals of a number; None for words.
        times, plus: the cell shows ``times`` * field + ``plus``.
        signed: a positive number has a sign.
        error: the field has a standard error, ``..._stderr``.
        of_reference: the reference's value by definition.  If it is not None, the column compares
            models with the reference.
        best: the score of ``eval/ranking.py`` that marks the best rows; empty: no row is marked.
        more_is_better: sorting begins with the largest value.
        wraps: the column has words that a narrow terminal may wrap.
        default_when: when the table of a run has the column by default.  "known": a row has a
            value; "different": rows have different values; "nonzero": a value is not 0;
            "no files": no row has the size of its files.  With ``of_reference`` the run also needs
            a reference.
        left_out_rank: a narrow terminal leaves out the columns with the smallest rank first; 0 is
            not a rank.
        parameter: what may follow the name after a colon.
        of_rollouts: it compares models with recorded log-probabilities.
        context: N of ``memory:N``, a number of tokens; 0 for any other column.
        slice: the slice whose tokens the column is over; empty: all scored tokens.
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
    wraps: bool = False
    default_when: Literal["", "always", "known", "different", "nonzero", "no files"] = ""
    left_out_rank: int = 0
    parameter: Literal["", "context", "slice"] = ""
    of_rollouts: bool = False
    context: int = 0
    slice: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """The field of results.json, and that of its error.

        For a slice: the names that CSV and pandas have for them.
        """
        if self.slice:
            field = self.name
        else:
            field = self.field or self.name
        if self.error:
            return (field, f"{field}_stderr")
        return (field,)

    @property
    def shows_kld(self) -> bool:
        """True if the values are KLDs: means or percentiles, of all tokens or of a slice."""
        return self.name.startswith("kld")

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.replace("-\n", "-").replace("\n", " ")

    def value(self, model: ModelResult) -> Any:
        """A row's value of the field; None if it is not known."""
        if not self.context:
            return self.attribute(model, "")
        if model.memory is None:
            return None
        return model.memory.gigabytes(self.context)

    def stderr(self, model: ModelResult) -> float | None:
        """The standard error of a row's value.

        None if it is not known, or if the column does not have one.
        """
        if not self.error:
            return None
        stderr: float | None = self.attribute(model, "_stderr")
        return stderr

    def attribute(self, model: ModelResult, suffix: str) -> Any:
        """A row's field with this suffix, or that of the row's slice.

        None if the row does not have the slice.
        """
        field = self.field or self.name.partition(":")[0]
        # Python names cannot have the dot of kld_p99.9.
        attribute = field.replace(".", "_") + suffix
        if self.slice:
            return getattr(model.slices.get(self.slice), attribute, None)
        return getattr(model, attribute)

    def is_default(self, run: RunResult) -> bool:
        """Return True if the table of a run has the column by default."""
        if self.of_reference is not None and run.reference is None:
            return False
        if self.default_when == "always":
            return True
        if self.default_when == "no files":
            return not any(model.file_bytes for model in run.models)
        values = [self.value(model) for model in run.models]
        if self.default_when == "known":
            return any(value is not None for value in values)
        if self.default_when == "nonzero":
            return any(values)
        if self.default_when == "different":
            return len(set(values) - {None}) > 1
        return False


percent_column = partial(Column, digits=2, times=100.0, error=True)
"""A column of shares in percent."""
rollout_column = partial(Column, default_when="known", of_rollouts=True)
"""A column that compares models with recorded log-probabilities."""
COLUMNS = (
    Column(
        "label",
        "label",
        "the model, with its marks",
        wraps=True,
        default_when="always",
    ),
    Column(
        "engine",
        "engine",
        "the load_fn of its spec",
        wraps=True,
    ),
    Column(
        "kernel",
        "kernel",
        "what computed most quantized layers, by the engine's own name",
        wraps=True,
        default_when="always",
    ),
    Column(
        "where",
        "where",
        "the machine that it ran on",
        default_when="different",
    ),
    Column(
        "attention",
        "attention",
        "what computed the attention, by the engine's own name",
        wraps=True,
    ),
    Column(
        "version",
        "version",
        "the package that provided the engine",
        field="engine_version",
        wraps=True,
    ),
    Column(
        "options",
        "options",
        "the engine's options in which rows of the table differ",
        wraps=True,
    ),
    Column(
        "phase",
        "phase",
        "prefill, or decode SxB: in steps of S tokens of each of B windows",
        wraps=True,
        default_when="different",
    ),
    Column(
        "kv_cache",
        "KV\ncache",
        "the precision in which keys and values were kept",
        default_when="different",
        left_out_rank=12,
    ),
    Column(
        "kv_mb",
        "KV MB /\n1k tok",
        "the KV cache of 1,000 tokens: 10^6 bytes, all layers, all GPUs",
        digits=1,
        default_when="different",
        left_out_rank=11,
    ),
    Column(
        "bpw_layer",
        "layer\nbpw",
        "stored bits per weight of the layers",
        digits=2,
        default_when="always",
    ),
    Column(
        "bpw_head",
        "head\nbpw",
        "stored bits per weight of the output head",
        digits=2,
        default_when="different",
        left_out_rank=2,
    ),
    Column(
        "vram_gib",
        "VRAM\nGiB",
        "stored layers and head, 2^30 bytes",
        digits=2,
        default_when="no files",
    ),
    Column(
        "size",
        "file\nGB",
        "weight files on disk, 10^9 bytes",
        field="file_bytes",
        digits=2,
        times=1e-9,
        default_when="known",
    ),
    Column(
        "ppl",
        "PPL",
        "perplexity: how well the model predicts the text; lower is better, within one table",
        digits=PPL_DIGITS,
        error=True,
        best="nll",
        default_when="always",
        parameter="slice",
    ),
    Column(
        "ratio",
        "PPL vs\nref %",
        "how far perplexity is above the reference's, with the paired error",
        field="ppl_ratio",
        digits=2,
        times=100,
        plus=-100,
        signed=True,
        error=True,
        of_reference=1,
        default_when="known",
        left_out_rank=10,
    ),
    Column(
        "kld",
        "KLD",
        "how far predictions are from the reference's: mean KL(reference || model) over tokens, "
        "nats",
        digits=KLD_DIGITS,
        error=True,
        of_reference=0,
        best="kld",
        default_when="always",
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
        "kld_p99",
        "99 %\nKLD",
        "99 % of the tokens have a smaller KLD",
        digits=4,
        of_reference=0,
    ),
    Column(
        "kld_p99.9",
        "99.9 %\nKLD",
        "99.9 % of the tokens have a smaller KLD",
        digits=4,
        of_reference=0,
        default_when="known",
        left_out_rank=9,
    ),
    Column(
        "kld_max",
        "max\nKLD",
        "the largest KLD of a token",
        digits=4,
        of_reference=0,
    ),
    percent_column(
        "same_top",
        "same\ntop %",
        "tokens at which model and reference have the same most probable token",
        of_reference=1,
        best="same_top",
        more_is_better=True,
        default_when="always",
        parameter="slice",
    ),
    rollout_column(
        "k3",
        "k3",
        "mean of exp(d) - d - 1 over sampled tokens, nats; d = ln p of the model - ln p that the "
        "rollouts recorded",
        digits=KLD_DIGITS,
        error=True,
    ),
    rollout_column(
        "d_mean",
        "mean\n|d|",
        "mean size of d, nats",
        digits=KLD_DIGITS,
        error=True,
        left_out_rank=8,
    ),
    rollout_column(
        "d_max",
        "max\n|d|",
        "largest size of d, nats",
        digits=4,
        left_out_rank=7,
    ),
    rollout_column(
        "d_large",
        "|d| > 1\ntokens",
        "sampled tokens at which d is above 1 nat or below -1 nat",
        digits=0,
        left_out_rank=6,
    ),
    rollout_column(
        "seq_ratio_p5",
        "5 %\nratio",
        "5 % of the sequences have a smaller ratio exp(sum of d)",
        digits=4,
        left_out_rank=5,
    ),
    rollout_column(
        "seq_ratio_median",
        "median\nratio",
        "half of the sequences have a smaller ratio",
        digits=4,
    ),
    rollout_column(
        "seq_ratio_p95",
        "95 %\nratio",
        "95 % of the sequences have a smaller ratio",
        digits=4,
        left_out_rank=4,
    ),
    percent_column(
        "top1",
        "hits\n%",
        "tokens of the text that are the model's most probable",
        error=False,
        more_is_better=True,
    ),
    Column(
        "entropy",
        "entropy",
        "mean entropy of the model's predictions, nats",
        digits=4,
    ),
    Column(
        "bits_per_byte",
        "bits /\nbyte",
        "bits per byte of the text",
        digits=4,
    ),
    Column(
        "non_finite",
        "non-\nfinite",
        "tokens without a finite log-probability, left out of PPL",
        digits=0,
        default_when="nonzero",
    ),
    Column(
        "load",
        "load\ns",
        "seconds of loading, which other models may do at the same time",
        field="load_seconds",
        digits=1,
    ),
    Column(
        "seconds",
        "seconds",
        "seconds of scoring",
        field="score_seconds",
        digits=1,
    ),
    Column(
        "speed",
        "tok/s",
        "scored tokens per second of scoring",
        field="tokens_per_second",
        digits=0,
        more_is_better=True,
        default_when="known",
        left_out_rank=3,
    ),
)
"""In the order of the table, unless ``--columns`` gives another order."""
BY_NAME = {column.name: column for column in COLUMNS}
MEMORY_COLUMN = Column(
    "memory",
    "memory\nGB",
    "serving one sequence of N tokens (32k: 32,768): weights, KV cache and activations, 10^9 bytes",
    digits=2,
    parameter="context",
)
"""``memory:N``; without a number of tokens it is not a column."""
CONTEXT_TOKENS = re.compile(r"0*([1-9]\d{0,8})(k?)")
"""The number of tokens in ``memory:N``, without zeros before it; k: times 1024."""
TOKENS_OF_SLICE = {
    SPECIAL: "special tokens of the tokenizer",
    SURE: "tokens at which the reference's highest probability is at least 0.9",
    UNSURE: "tokens at which the reference's highest probability is below 0.5",
    BEGIN: f"the first {BEGIN_LENGTH} tokens of each window",
    REST: f"tokens after the first {BEGIN_LENGTH} of a window",
}
"""The slices that every run may have, and their tokens in words."""
OF_SLICES = tuple(column.name for column in COLUMNS if column.parameter == "slice")
"""Names of the columns that take a slice."""


def column_of(name: str) -> Column:
    """Return the column of a name, which may have a parameter: ``memory:32k``, ``kld:special``.

    InputError for an unknown name.  Which slices a run has is not known here (``check_slices``).
    """
    first, colon, parameter = name.partition(":")
    # Without a number of tokens it is not a column, and therefore not in BY_NAME.
    if first == MEMORY_COLUMN.name:
        return column_of_context(MEMORY_COLUMN, parameter)
    column = BY_NAME.get(first)
    if column is None or (colon and not column.parameter):
        slices = ", ".join(f"{name_of_column}:SLICE" for name_of_column in OF_SLICES)
        forms = f"memory:N (N tokens, as memory:32k), {slices} (as kld:special)"
        choices = f"{', '.join(BY_NAME)}, {forms}"
        hint = hint_at_column(name)
        raise InputError(f"{printable(name)!r} is not a column{hint}; there are: {choices}")
    if colon:
        return column_of_slice(column, parameter)
    return column


def hint_at_column(name: str) -> str:
    """Return a hint at the column whose title in the table a user wrote, or at a similar name."""
    names_by_title = {}
    for column in COLUMNS:
        title = column.title.removesuffix(" %").lower()
        names_by_title[title] = column.name
    written_title = name.removesuffix("%").strip().lower().replace("_", " ")
    if written_title in names_by_title:
        return f" (did you mean {names_by_title[written_title]!r}?)"
    return nearest(name, BY_NAME)


def column_of_context(column: Column, parameter: str) -> Column:
    """Return a column for a number of tokens, as 8192 or 32k; InputError for another parameter."""
    match = CONTEXT_TOKENS.fullmatch(parameter)
    if match is None:
        first = column.name
        name = first
        if parameter:
            name = f"{first}:{parameter}"
        form = f"as {first}:8192 or {first}:32k"
        raise InputError(f"{name!r}: write the number of tokens after {first}, {form}")
    number, thousands = match.groups()
    tokens = int(number)
    if thousands:
        tokens *= 1024
    header = column.header.replace("\n", f"\n{number}{thousands} ")
    return replace(column, name=f"{column.name}:{parameter}", header=header, context=tokens)


def column_of_slice(column: Column, name: str) -> Column:
    """Return a column over the tokens of a slice; InputError for an empty name.

    It marks no best rows, and is in no table by its own rule.
    """
    if not name:
        example = f"{column.name}:special"
        raise InputError(
            f"'{column.name}:': write the name of a slice after the colon, as {example}"
        )
    tokens = TOKENS_OF_SLICE.get(name, f"tokens of {name}")
    # A header has two lines, but a name may have line breaks.
    name_on_one_line = " ".join(name.split())
    return replace(
        column,
        name=f"{column.name}:{name}",
        field=column.fields[0],
        header=f"{name_on_one_line}\n{column.title}",
        note=f"{column.title} over {tokens}",
        slice=name,
        # Rows are ranked by sums over blocks, which are of all tokens.
        best="",
        default_when="",
        left_out_rank=0,
    )


def check_slices(columns: Sequence[Column], slices: Sequence[str]) -> None:
    """Raise InputError for a column over a slice that is not among the ``slices`` of the run."""
    for column in columns:
        if not column.slice or column.slice in slices:
            continue
        if slices:
            choices = f"there are: {printable(', '.join(slices))}"
        else:
            choices = "this run has none"
        fault = f"no row has the slice {column.slice!r}{nearest(column.slice, slices)}"
        raise InputError(f"{printable(column.name)}: {fault}; {choices}")


def column_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of columns, each once; the label first unless it is named.

    Raises InputError for an unknown name, or for no name.
    """
    for name in names:
        column_of(name)
    if not names:
        raise InputError(f"names no column; there are: {', '.join(BY_NAME)}")
    # A row without a label cannot be assigned to its model.
    if "label" not in names:
        names = ("label", *names)
    return tuple(dict.fromkeys(names))


def fields_of(names: Sequence[str], models: Sequence[ModelResult]) -> list[str]:
    """Return the fields of chosen columns, as CSV and pandas name them.

    ``kld_kind`` follows the columns of KLDs if a KLD is not exact, which a number alone does not
    show.
    """
    fields: list[str] = []
    has_kld = False
    for name in names:
        column = column_of(name)
        fields += column.fields
        has_kld = has_kld or column.shows_kld
    is_exact = all(model.kld_kind == "exact" for model in models)
    if has_kld and not is_exact:
        fields.append("kld_kind")
    return fields


def values_of(model: ModelResult, names: Sequence[str] | None) -> Mapping[str, Any]:
    """Return a row's fields with a single value, and the values of those chosen columns that have a
    parameter.
    """
    values = model.flat
    for name in names or ():
        column = column_of(name)
        if not (column.context or column.slice):
            continue
        value_field, *error_field = column.fields
        values[value_field] = column.value(model)
        for field in error_field:
            values[field] = column.stderr(model)
    return values


def sorted_rows(run: RunResult, key: str | None) -> RunResult:
    """Return the run with its rows sorted by ``key``, unknown values and then failures last.

    ``key``: the name of a column; None: unchanged.  The smallest value comes first, or the largest
    if more is better.
    """
    if key is None:
        return run
    column = column_of(key)

    def rank(model: ModelResult) -> tuple[bool, bool, float | str]:
        failed = bool(model.error)
        value = sort_value(column, model)
        # False is before True: values, unknown values, failures.
        if column.digits is None:
            return failed, not value, str(value or "").casefold()
        if value is None:
            return failed, True, 0.0
        if column.more_is_better:
            value = -value
        return failed, False, value

    return run.updated(models=tuple(sorted(run.models, key=rank)))


def sort_value(column: Column, model: ModelResult) -> Any:
    """Return a row's value for sorting.

    The reference has the value that the column gives it by definition.
    """
    if model.error:
        return None
    if model.reference and column.of_reference is not None:
        return column.of_reference
    return column.value(model)


def no_order(run: RunResult, key: str) -> str | None:
    """Return why sorting by ``key`` has no effect, and what to do.

    None if a row has a value.  The reference does not count if the column compares with it.
    """
    column = column_of(key)
    is_compared = column.of_reference is not None
    rows = [model for model in run.models if not (model.reference and is_compared)]
    if not rows or any(sort_value(column, model) is not None for model in rows):
        return None
    reason = f"{key}: no row has a value of it"
    if is_compared:
        reason += "; it is measured with a reference"
    return reason
