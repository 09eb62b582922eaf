"""The columns of the table, one declaration each, and the order of the rows.

Terminal, Markdown, CSV, report, ``--columns``, ``--sort``, Python and docs/outputs.md read ``COLUMNS``.  A field of
``ModelResult`` (``eval/results.py``) becomes a column by one entry there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.table.numbers import KLD_DIGITS, PPL_DIGITS


@dataclass(frozen=True)
class Column:
    """A column of the table.

    ``shown``: when the table of a text has the column by default; with ``of_reference`` it also needs a reference.

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
    of_reference: float | None = None  # the reference's value by definition; None: models are not compared with it
    best: Literal["", "nll", "kld", "same_top"] = ""  # the score of ``eval/ranking.py`` that marks the best rows
    more_is_better: bool = False  # sorting begins with the largest value
    per_model: bool = False  # about the model and not the text; a table of several texts has it once
    wraps: bool = False  # words that a narrow terminal may wrap
    needs: str = ""  # what a run needs for this column in addition to a reference
    shown: Literal["", "always", "known", "different", "nonzero", "no files"] = ""
    spare: int = 0  # a narrow terminal leaves out the columns with the smallest numbers first; 0: never
    context: int = 0  # N of ``memory:N``, a number of tokens; 0 for any other column

    @property
    def fields(self) -> tuple[str, ...]:
        """The field of results.json, and that of its error."""
        field = self.field or self.name
        return (field, f"{field}_stderr") if self.error else (field,)

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.replace("-\n", "-").replace("\n", " ")

    def value(self, model: ModelResult) -> Any:
        """A row's value of the field; None if it is not known."""
        if self.context:
            return model.memory and model.memory.gigabytes(self.context)
        return getattr(model, self.fields[0].replace(".", "_"))

    def is_usual(self, text: TextResult) -> bool:
        """Return True if the table of a text has the column by default."""
        values = [self.value(model) for model in text.models]
        known = values.count(None) < len(values)
        return (self.of_reference is None or text.reference is not None) and {
            "": False, "always": True, "known": known, "nonzero": any(values),
            "different": len({*values} - {None}) > 1,
            "no files": not any(model.file_bytes for model in text.models),
        }[self.shown]  # fmt: skip


about = partial(Column, per_model=True)
share = partial(Column, digits=2, times=100.0, error=True)
"""Columns about the model, and of shares in percent."""
COLUMNS = (
    about("label", "label", "the model, with its marks", wraps=True, shown="always"),
    about("engine", "engine", "the load_fn of its spec", wraps=True),
    about("kernel", "kernel", "what computed most quantized layers, by the engine's own name", wraps=True,
          shown="always"),
    about("where", "where", "the machine that it ran on", shown="different"),
    about("attention", "attention", "what computed the attention, by the engine's own name", wraps=True),
    about("version", "version", "the package that provided the engine", "engine_version", wraps=True),
    about("options", "options", "the engine's options in which rows of the table differ", wraps=True),
    about("phase", "phase", "prefill, or decode SxB: in steps of S tokens of each of B windows", wraps=True,
          shown="different"),
    about("kv_cache", "KV\ncache", "the precision in which keys and values were kept", shown="different", spare=12),
    about("kv_mb", "KV MB /\n1k tok", "the KV cache of 1,000 tokens: 10^6 bytes, all layers, all GPUs", digits=1,
          shown="different", spare=11),
    about("bpw_layer", "layer\nbpw", "stored bits per weight of the layers", digits=2, shown="always"),
    about("bpw_head", "head\nbpw", "stored bits per weight of the output head", digits=2, shown="different", spare=2),
    about("vram_gib", "VRAM\nGiB", "stored layers and head, 2^30 bytes", digits=2, shown="no files"),
    about("size", "file\nGB", "weight files on disk, 10^9 bytes", "file_bytes", 2, 1e-9, shown="known"),
    Column("ppl", "PPL", "perplexity: how well the model predicts the text; lower is better, within one table",
           digits=PPL_DIGITS, error=True, best="nll", shown="always"),
    Column("ratio", "PPL vs\nref %", "how far perplexity is above the reference's, with the paired error", "ppl_ratio",
           2, 100, -100, signed=True, error=True, of_reference=1, shown="known", spare=10),
    Column("kld", "KLD", "how far predictions are from the reference's: mean KL(reference || model) over tokens, nats",
           digits=KLD_DIGITS, error=True, of_reference=0, best="kld", shown="always"),
    Column("kld_median", "median\nKLD", "half of the tokens have a smaller KLD", digits=KLD_DIGITS, of_reference=0),
    Column("kld_p99", "99 %\nKLD", "99 % of the tokens have a smaller KLD", digits=4, of_reference=0),
    Column("kld_p99.9", "99.9 %\nKLD", "99.9 % of the tokens have a smaller KLD", digits=4, of_reference=0,
           shown="known", spare=9),
    Column("kld_max", "max\nKLD", "the largest KLD of a token", digits=4, of_reference=0),
    share("same_top", "same\ntop %", "tokens at which model and reference have the same most probable token",
          of_reference=1, best="same_top", more_is_better=True, shown="always"),
    share("top1", "hits\n%", "tokens of the text that are the model's most probable", error=False, more_is_better=True),
    Column("entropy", "entropy", "mean entropy of the model's predictions, nats", digits=4),
    Column("bits_per_byte", "bits /\nbyte", "bits per byte of the text", digits=4),
    Column("non_finite", "non-\nfinite", "tokens without a finite log-probability, left out of PPL", digits=0,
           shown="nonzero"),
    about("load", "load\ns", "seconds of loading", "load_seconds", 1),
    Column("seconds", "seconds", "seconds of scoring", "score_seconds", 1),
    Column("speed", "tok/s", "scored tokens per second of scoring", "tokens_per_second", 0, more_is_better=True,
           shown="known", spare=3),
)  # fmt: skip
"""In the order of the table, unless ``--columns`` gives another order."""
BY_NAME = {column.name: column for column in COLUMNS}
MEMORY = re.compile(r"memory:0*([1-9]\d{0,8})(k?)")
MEMORY_NOTE = "serving one sequence of N tokens (32k: 32,768): weights, KV cache and activations, 10^9 bytes"


def named(name: str) -> Column:
    """Return the column of a name, in which ``memory:32k`` has a number of tokens; InputError for an unknown name."""
    if found := MEMORY.fullmatch(name):
        tokens = int(found[1]) * (1024 if found[2] else 1)
        return about(name, f"memory\n{found[1]}{found[2]} GB", MEMORY_NOTE, digits=2, context=tokens)
    if name.partition(":")[0] == "memory":
        raise InputError(f"{name!r}: write the number of tokens after memory, as memory:8192 or memory:32k")
    if name not in BY_NAME:
        known = f"{', '.join(BY_NAME)}, memory:N (N tokens, as memory:32k)"
        raise InputError(f"{name!r} is not a column{nearest(name, BY_NAME)}; there are: {known}")
    return BY_NAME[name]


def sort_key(key: str) -> tuple[Column, str]:
    """Return the column of COLUMN or COLUMN:TEXT, and the name of the text or ""; InputError for an unknown column."""
    found = re.match(r"memory:[^:]*", key)
    name = found[0] if found else key.partition(":")[0]
    return named(name), key[len(name) + 1 :]


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of columns, each once; the label first unless it is named.

    Raises InputError for an unknown name, or for no name.
    """
    for name in names:
        named(name)
    if not names:
        raise InputError(f"names no column; there are: {', '.join(BY_NAME)}")
    return tuple(dict.fromkeys(names if "label" in names else ("label", *names)))


def fields_of(names: Sequence[str] | None) -> list[str] | None:
    """Return the fields of results.json of chosen columns; None if no columns were chosen."""
    return None if names is None else [field for name in names for field in named(name).fields]


def values_of(model: ModelResult, fields: Sequence[str] | None) -> Mapping[str, Any]:
    """Return a row's fields with a single value, and its memory for each ``memory:N`` among the chosen ``fields``."""
    return model.flat | {name: named(name).value(model) for name in fields or () if MEMORY.fullmatch(name)}


def ordered(run: RunResult, key: str | None) -> RunResult:
    """Return the run with the rows of every text sorted by ``key``, unknown values and then failures last.

    ``key``: the name of a column, or "kld:NAME" for the text of that name; None: unchanged.  The smallest value comes
    first, or the largest if more is better.
    """
    if key is None:
        return run
    (column, _), values = sort_key(key), sort_values(run, key)

    def place(label: str) -> tuple[bool, bool, float | str]:
        value, failed = values[label], all(model is None or model.error for model in run.of_label(label))
        if column.digits is None:
            return failed, not value, str(value or "").casefold()
        return failed, value is None, 0.0 if value is None else -value if column.more_is_better else value

    order = sorted(run.labels, key=place)
    return run.updated(texts=tuple(
        text.updated(models=tuple(sorted(text.models, key=lambda model: order.index(model.label))))
        for text in run.texts
    ))  # fmt: skip


def sort_values(run: RunResult, key: str) -> dict[str, Any]:
    """Return each label's value of ``key`` (``ordered``); without a text its mean over the texts, None if one lacks it.

    For words, and for a column about the model and not the text: the first known value.
    """
    (column, of_text), found = sort_key(key), {}
    for label in run.labels:
        values: list[Any] = []
        for text, model in zip(run.texts, run.of_label(label), strict=True):
            if of_text in ("", text.name):
                exact = model is not None and model.reference and column.of_reference is not None
                values.append(
                    None if model is None or model.error else column.of_reference if exact else column.value(model)
                )
        known = [value for value in values if value is not None]
        if column.per_model or column.digits is None:
            found[label] = next(iter(known), None)
        elif column.name == "ppl" and len(values) > 1:
            found[label] = run.mean_ppl(label).value
        else:
            found[label] = sum(known) / len(values) if known and len(known) == len(values) else None
    return found


def no_order(run: RunResult, key: str) -> str | None:
    """Return why sorting by ``key`` has no effect, and what to do; None if a row except the reference has a value."""
    (column, of_text), texts = sort_key(key), [text.name for text in run.texts]
    compared = column.of_reference is not None
    rows = set(run.labels) - {
        model.label for text in run.texts for model in text.models if model.reference and compared
    }
    keys = [key, *(f"{column.name}:{name}" for name in texts if not of_text)]
    known = [each for each in keys if any(sort_values(run, each)[label] is not None for label in rows)]
    if not rows or key in known:
        return None
    if known:
        return f"{key}: not every text has values of it; name one that has: {known[0]}"
    needs = column.needs or ("a reference" if compared else "")
    return f"{key}: no row has a value of it" + (f"; it is measured with {needs}" if needs else "")
