"""compare_q from Python: the runs of the command line, as a pandas DataFrame.

result = compare("bf16", "fp8=w8a8@vllm", data="wiki2", rows="all")
specs = ["bf16.json", {"load_fn": "vllm_score", "model_dir": "nvfp4"}]
result = compare(data="data.json", models=specs)
print(result.frame()[["label", "ppl", "kld", "kld_stderr"]])
show(load("a/results.json", "b/results.json"))  # the rows of finished runs in one table
where("bf16", "w4a16", by="kind").dataframe()  # the modules in which W4A16 loses
"""

from __future__ import annotations

import html
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from .. import backends
from ..backends.common.errors import InputError
from ..backends.common.message_text import one_line, printable
from . import merging
from .cli import flag_table, shorthand
from .common.cache import Cache, default_root
from .common.progress import Progress
from .ranking import compare as compare_rows
from .report.worst_sequences import with_sequence_texts
from .report.worst_tokens import with_worst_tokens
from .results import NOT_FLAT, ModelResult, RunResult, json_schema
from .run import runner, stored_scores
from .run.run_config import local_config
from .specs import spec_files
from .specs.spec_files import S
from .specs.spec_types import DataSpec, ModelSpec
from .table import columns as table_columns
from .table import notes, terminal_table
from .table.tables import table_of
from .text import corpus
from .text.eval_data import EvalData
from .where import parts, recipe, where_run, where_table
from .where.recipe import Target
from .where.results import WhereResult
from .where.search import Question

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Spec = str | os.PathLike[str] | Mapping[str, Any]
"""A spec file, or a dict with a spec's keys."""
SpecInput = Spec | Sequence[Spec]
"""One spec, or several."""
results_schema = json_schema
PANDAS_DTYPES = {bool: "bool", int: "Int64", float: "float64"}
"""Type of a field of results.json -> dtype of its column; others are objects."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished run: ``results`` is what results.json holds (``eval/results/``).

    ``data``: the windows of its texts; ``cache``: where the scores of single tokens are.  A run
    that was read back has neither.
    """

    results: RunResult
    data: EvalData | None = None
    cache: Cache | None = None

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One row per model in the order of the specs.

        ``columns``: names as ``--columns`` takes them, each with its error, in this order; None:
        all fields of a row that are one value (``eval.results.ModelResult`` has their units), and
        its footnotes as ``notes``.  Unknown values are NaN, None or NA; an unknown truth value is
        False.
        """
        import pandas as pd

        names = chosen_columns(columns, self.results)
        rows: list[dict[str, Any]] = []
        for model in self.results.models:
            footnotes = "; ".join(notes.model_notes(model, self.results)) or None
            rows.append({**table_columns.values_of(model, names), "notes": footnotes})
        types = {}
        for name, field in ModelResult.model_fields.items():
            if name not in NOT_FLAT:
                types[field.alias or name] = dtype_of(field.annotation)
        if names is None:
            fields = [*types, "notes"]
        else:
            fields = table_columns.fields_of(names, self.results.models)
        for name in fields:
            # ModelResult has no field for a column with a parameter, such as memory:N or
            # kld:SLICE; its values are floats.
            if name not in types and name != "notes":
                types[name] = "float64"
        frame = pd.DataFrame(rows, columns=fields, dtype=object)
        for name, dtype in types.items():
            if name in frame:
                values = frame[name]
                if dtype == "bool":
                    values = values.fillna(False)
                frame[name] = values.astype(dtype)
        return frame

    def pairs(self) -> pd.DataFrame:
        """Return one row per pair of models: the ``first`` minus the ``second``.

        Differences are paired token by token.

        ``ln_ppl_ratio``: ln(PPL / PPL), ``kld``: difference of the mean KLDs, both in nats, each
        with ``..._stderr`` and the ends ``..._low`` and ``..._high`` of the 95 % interval; NaN
        where they are not known.  If the KLD of one model is a bound, the interval has an infinite
        end, and the KLDs differ by at least ``kld``, or it is NaN.
        """
        import pandas as pd

        rows = []
        for first, second in itertools.combinations(self.results.models, 2):
            row: dict[str, Any] = {"first": first.label, "second": second.label}
            for name, score in (("ln_ppl_ratio", "nll"), ("kld", "kld")):
                difference = compare_rows(first, second, score)
                low, high = difference.limits or (None, None)
                row[name] = difference.value
                row[f"{name}_stderr"] = difference.stderr
                row[f"{name}_low"] = low
                row[f"{name}_high"] = high
            rows.append(row)
        return pd.DataFrame(rows)

    def plot(self, file: str | Path | None = None, **options: Any) -> Figure:
        """Return the plot of ``-p``, and write it to ``file`` if given.

        InputError if there is nothing to draw.

        ``options``: ``measure`` ("kld", "ppl"), ``x_axis`` (as ``--x-axis``), ``title``, ``dark``,
        ``card``.
        """
        # Imported here: only plots need matplotlib.
        from .plots import measures, picture_style, pictures, scatter

        try:
            measure_name = options.pop("measure", None)
            if measure_name not in (None, "kld", "ppl"):
                raise ValueError(f"measure: {measure_name!r} is neither kld nor ppl")
            measure = measures.measure_of_flags(self.results, measure_name, None)
            size = measures.size_of(options.pop("x_axis", None) or "bpw")
            origin = ""
            if options.get("card"):
                origin = pictures.origin_of(self.results.with_origin(["compare_q"]))
            figure = scatter.scatter_figure(
                self.results, size=size, measure=measure, origin=origin, **options
            )
        except (ValueError, KeyError) as error:
            raise InputError(f"plot: {one_line(error)}") from None
        if file is not None:
            picture_style.save_figure(figure, Path(file))
        return figure

    def tokens(self, label: str, text: str | None = None) -> pd.DataFrame:
        """Return the scores of every token of a model, as ``--tokens-out`` writes them.

        ``text``: the name of a text, for its tokens alone.

        InputError for a run that was read back (its windows are not known), and for a model without
        scores.
        """
        import pandas as pd

        model = next((model for model in self.results.models if model.label == label), None)
        if model is None:
            labels = printable(", ".join(self.results.labels))
            raise InputError(f"tokens: no model is called {label!r}; there are: {labels}")
        if self.data is None or self.cache is None:
            raise InputError(
                "tokens: not in a run that was read back; compare the models again (from the cache)"
            )
        names = [data_text.name for data_text in self.data.texts]
        if text is not None and text not in names:
            raise InputError(f"tokens: name one of the texts: {', '.join(names)}")
        if model.error:
            raise InputError(f"tokens: {label} has no scores of single tokens: {model.error}")
        scores = stored_scores.scores_of_row(self.cache, model.scores_key, self.data)
        if scores is None:
            raise InputError(f"tokens: {label} has no scores of single tokens")
        frame = pd.DataFrame(stored_scores.columns_by_token(scores, self.data))
        if text is None:
            return frame
        is_of_text = self.data.text_of[scores.window] == names.index(text)
        return frame[is_of_text].reset_index(drop=True)

    def save(self, file: str | Path) -> None:
        """Write results.json, as ``-o`` does; ``load`` and ``show`` read it."""
        results = self.results
        if self.data is not None and self.cache is not None:
            results = with_worst_tokens(results, self.data, self.cache)
            results = with_sequence_texts(results, self.data)
        results.with_origin(["compare_q"]).write(Path(file))

    def __repr__(self) -> str:
        labels = list(self.results.labels)
        first_labels = labels[:4]
        if len(labels) > 4:
            first_labels.append("...")
        return f"<Comparison of {len(labels)} models: {', '.join(first_labels)}>"

    def _repr_html_(self) -> str:
        """Return the table with its footnotes and the finding, for notebooks."""
        table = table_of(self.results)
        columns: list[list[str]] = []
        for table_column in table.columns:
            # Numbers are right-aligned, and stay on one line with their errors.
            alignment = "right"
            wrap = "nowrap"
            if table_column.column.digits is None:
                alignment = "left"
                wrap = "normal"
            title = html.escape(table_column.column.title)
            cells = [f'<th style="text-align: {alignment}">{title}</th>']
            for cell in table_column.cells:
                text = html.escape(cell.shown + cell.marks + cell.plus_minus)
                style = f"text-align: {alignment}; white-space: {wrap}"
                cells.append(f'<td style="{style}">{text}</td>')
            columns.append(cells)
        header, *rows = ["".join(["<tr>", *row, "</tr>"]) for row in zip(*columns, strict=True)]
        html_table = f"<table><thead>{header}</thead><tbody>{''.join(rows)}</tbody></table>"
        lines = [*table.notes, *table.finding]
        return "".join([paragraph(table.title), html_table, *map(paragraph, lines)])


def paragraph(line: str) -> str:
    """Return a line as a paragraph of HTML."""
    return f"<p>{html.escape(line)}</p>"


@dataclass(frozen=True, repr=False)
class Shares:
    """The shares of the parts of a quantized model in its KLD: ``result`` is what ``-o`` writes
    (``eval/where/results.py``).
    """

    result: WhereResult

    def dataframe(self) -> pd.DataFrame:
        """One row per part in the order of the model, with the columns of ``--csv``.

        KLDs and shares in nats; unknown values are NaN or NA.
        """
        import pandas as pd

        frame = pd.DataFrame(where_table.rows_of(self.result))
        for column in frame.columns:
            if column == "layer":
                frame[column] = frame[column].astype("Int64")
            elif column.startswith(("share", "percent", "kld", "bits")):
                frame[column] = frame[column].astype("float64")
        return frame

    def plot(
        self, file: str | Path | None = None, *, title: str | None = None, dark: bool = False
    ) -> Figure:
        """Return the picture of ``-p``, and write it to ``file`` if given.

        InputError if no share is known, or if the suffix of the file is unknown.
        """
        # Imported here: only plots need matplotlib.
        from .plots import picture_style, where_bars

        try:
            figure = where_bars.where_bars(self.result, title=title, dark=dark)
            if file is not None:
                picture_style.save_figure(figure, Path(file))
        except ValueError as error:
            raise InputError(f"plot: {one_line(error)}") from None
        return figure

    def plot_recipes(
        self, file: str | Path | None = None, *, title: str | None = None, dark: bool = False
    ) -> Figure:
        """Return the picture of the front of recipes, and write it to ``file`` if given.

        InputError if the KLD is not known, or if the suffix of the file is unknown.
        """
        # Imported here: only plots need matplotlib.
        from .plots import picture_style, where_front

        try:
            figure = where_front.where_front(self.result, title=title, dark=dark)
            if file is not None:
                picture_style.save_figure(figure, Path(file))
        except ValueError as error:
            raise InputError(f"plot: {one_line(error)}") from None
        return figure

    def save(self, file: str | Path) -> None:
        """Write the JSON file of ``-o``; ``WhereResult.read`` reads it."""
        self.result.with_origin(["compare_q"]).write(Path(file))

    def __repr__(self) -> str:
        return f"<Shares of {len(self.result.rows)} parts of {self.result.quantized.label}>"


def chosen_columns(columns: Sequence[str] | None, results: RunResult) -> tuple[str, ...] | None:
    """Return the names of columns, the label first; None for the default.

    InputError for a column that the run lacks.
    """
    if columns is None:
        return None
    names = table_columns.column_names(columns)
    table_columns.check_slices([table_columns.column_of(name) for name in names], results.slices)
    return names


def dtype_of(annotation: Any) -> str:
    """Return the dtype of a column for the values of a field."""
    types = {annotation}
    for part in get_args(annotation):
        types.add(part)
        types.update(get_args(part))
    for value_type, dtype in PANDAS_DTYPES.items():
        if value_type in types:
            return dtype
    return "object"


def compare(
    *words_or_specs: SpecInput,
    data: SpecInput | None = None,
    models: SpecInput | None = None,
    rows: int | str | None = None,
    eval_len: int | None = None,
    eval_stride: int | None = None,
    sample: str | None = None,
    tokenizer: str | Path | None = None,
    logits_file: str | Path | None = None,
    cache_dir: str | Path | None = None,
    clear_cache: bool = False,
    verbose: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Score models on one or several texts; cached scores are not computed again.

    ``words_or_specs``: MODEL arguments of the command line,
    ``[LABEL=]MODEL[@ENGINE][:KEY=VALUE,...]``; the first of several is the reference.  ``data`` is
    then what ``-d`` takes with them, or a dict with the keys of a data spec, and without ``rows``,
    32 windows of each text are scored, spread over it.

    ``models``: instead, spec files, or dicts with the same keys, whose relative paths start at the
    working directory; ``data`` is then a data spec, and ``rows`` replaces its ``max_rows``.  Specs
    may also come by position, data first.

    ``rows``: number of windows, 0 or "all" for all; ``quiet``: no progress on standard error; the
    other arguments are as on the command line.  Bad input raises InputError with one line per
    problem, before any engine starts.  A model that fails later becomes a row with its ``error``.
    """
    words, data, models = by_position(words_or_specs, data, models)
    arguments = {
        "rows": rows,
        "eval_len": eval_len,
        "eval_stride": eval_stride,
        "sample": sample,
        "tokenizer": tokenizer,
    }
    flags = given_flags(arguments)
    n_windows = flags.pop("rows", None)
    config = local_config(
        Cache(Path(cache_dir or default_root())),
        Progress(quiet=quiet),
        clear=clear_cache,
        verbose=verbose,
        logits_file=Path(logits_file) if logits_file is not None else None,
    )
    if words:
        data_specs, model_specs, lines = specs_of_words(words, data, flags, config.progress)
    else:
        shorthand.refuse_keys(flags, "a run of models=")
        model_specs = spec_files.with_own_labels(
            specs_of(ModelSpec, models, "models"), config.progress.say
        )
        model_specs, lines = spec_files.one_reference(model_specs, stored=logits_file is not None)
        data_specs = specs_of(DataSpec, data, "data")
        spec_files.check_labels(data_specs)
    for line in lines:
        config.progress.say(line)
    texts = dict(zip(corpus.names_of(data_specs), data_specs, strict=True))
    if words and n_windows is None:
        reference_is_made = any(spec.is_reference for spec in model_specs)
        finished_store = None if reference_is_made else config.logits_file
        texts = shorthand.with_default_windows(texts, finished_store)
    outcome = runner.run(config, texts, model_specs, n_windows)
    # The result keeps the cache: without this, its entries would stay marked as used.
    config.cache.release()
    if outcome.signal:
        raise KeyboardInterrupt
    return Comparison(outcome.results, outcome.data, config.cache)


def where(
    reference: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    by: str = "layer",
    data: SpecInput | None = None,
    *,
    only: bool = False,
    recipes: Sequence[str] = (),
    keep_bits: int = recipe.FULL_BITS,
    rows: int | str | None = None,
    eval_len: int | None = None,
    eval_stride: int | None = None,
    sample: str | None = None,
    tokenizer: str | Path | None = None,
    cache_dir: str | Path | None = None,
    clear_cache: bool = False,
    verbose: bool = False,
    quiet: bool = False,
) -> Shares:
    """Find the parts of a quantized model in which its KLD from the reference is lost.

    ``reference``, ``quantized``: MODEL arguments of the command line.  ``by``: "layer", "kind",
    "matrix", or a regular expression for the names of modules.  ``only``: quantize one part of the
    reference at a time, instead of restoring one.  ``recipes``: targets such as "kld=0.1" and
    "bpw=5.5", whose recipes keep parts in ``keep_bits``, 16 or 8.  The other arguments are those of
    ``compare``.

    InputError for bad input, before any engine starts; ModelError if a model fails, or if the two
    models cannot be exchanged in parts.
    """
    arguments = {
        "rows": rows,
        "eval_len": eval_len,
        "eval_stride": eval_stride,
        "sample": sample,
        "tokenizer": tokenizer,
    }
    flags = given_flags(arguments)
    n_windows = flags.pop("rows", None)
    try:
        parts.check_pattern(by)
    except InputError as error:
        raise InputError(f"by: {error}") from None
    question = Question(by, only, targets_of(recipes, keep_bits, only=only), keep_bits)
    config = local_config(
        Cache(Path(cache_dir or default_root())),
        Progress(quiet=quiet),
        clear=clear_cache,
        verbose=verbose,
    )
    words = [str(reference), str(quantized)]
    flags["general"] = backends.DEQUANTIZING
    data_specs, model_specs, lines = specs_of_words(words, data, flags, config.progress)
    where_run.check_engines(model_specs)
    for line in lines:
        config.progress.say(line)
    texts = dict(zip(corpus.names_of(data_specs), data_specs, strict=True))
    if n_windows is None:
        texts = shorthand.with_default_windows(texts, None)
    try:
        result = where_run.where(config, texts, model_specs, n_windows, question)
    finally:
        config.cache.release()
    return Shares(result)


def targets_of(recipes: Sequence[str], keep_bits: int, *, only: bool) -> tuple[Target, ...]:
    """Return the targets of ``where``; InputError for wrong ones."""
    if isinstance(recipes, str):
        raise InputError(f"recipes: expected a list of targets, such as [{recipes!r}]")
    if keep_bits not in (recipe.FULL_BITS, recipe.FEWER_BITS):
        raise InputError(f"keep_bits: {keep_bits!r}: expected 16 or 8")
    if recipes and only:
        raise InputError("recipes: restore parts of the quantized model; leave only out")
    try:
        return tuple(recipe.target_of(word) for word in recipes)
    except InputError as error:
        raise InputError(f"recipes: {error}") from None


def specs_of_words(
    words: Sequence[str], data: SpecInput | None, flags: Mapping[str, Any], progress: Progress
) -> tuple[list[DataSpec], list[ModelSpec], list[str]]:
    """Return (texts, models, lines about the engines and the text) of MODEL arguments."""
    text_words: list[str | DataSpec] = []
    for text in listed(data, "data"):
        if isinstance(text, Mapping):
            text_words += specs_of(DataSpec, text, "data")
        else:
            text_words.append(str(text))
    return shorthand.specs(words, text_words, progress, **flags)


def given_flags(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not None, converted as the flags of the command line are."""
    flags = {}
    for name, value in arguments.items():
        if value is not None:
            flags[name] = flag_table.converted(name, value)
    return flags


def by_position(
    words_or_specs: Sequence[SpecInput], data: SpecInput | None, models: SpecInput | None
) -> tuple[list[str], SpecInput | None, SpecInput | None]:
    """Return (MODEL arguments, data, models) of a call.

    Specs by position are those of the data, then of the models.
    """
    arguments = list(words_or_specs)
    has_specs = not all(map(is_model_word, arguments))
    if arguments and data is None and (has_specs or models is not None):
        data = arguments.pop(0)
    if arguments and models is None and has_specs:
        models = arguments.pop(0)
    if arguments and models is not None:
        raise InputError(
            "models: specs cannot be combined with MODEL arguments; give one or the other"
        )
    if not arguments and models is None:
        raise InputError(
            'models: missing; name them, as in compare("bf16", "w8a8", data="wiki2"), or give '
            "models="
        )
    return [str(argument) for argument in arguments], data, models


def is_model_word(argument: SpecInput) -> bool:
    """True for a MODEL argument, False for specs."""
    is_name = isinstance(argument, str | os.PathLike)
    return is_name and not str(argument).endswith(".json")


def load(*files: str | Path) -> Comparison:
    """Return a finished run (results.json or report.html), or several merged into one.

    InputError for files that are damaged, and for runs that cannot be merged.
    """
    if not files or not all(isinstance(file, str | Path) for file in files):
        raise InputError("load: give at least one results.json or report.html, each by its name")
    return Comparison(merging.load([Path(file) for file in files]))


def show(result: Comparison | str | Path, columns: Sequence[str] | None = None) -> Comparison:
    """Print the table of a run, or of a results.json; return the run.

    It has the footnotes and the sentence of the command line.

    ``columns``: names as ``--columns`` takes them.
    """
    if isinstance(result, Comparison):
        comparison = result
    else:
        comparison = load(result)
    results = comparison.results
    table = table_of(results, chosen_columns(columns, results))
    terminal_table.show(table, Console())
    terminal_table.conclude(table, Console())
    return comparison


def listed(specs: SpecInput | None, name: str) -> list[Spec]:
    """Return a list of no spec, one or several; InputError names the argument."""
    if specs is None:
        return []
    if isinstance(specs, str | os.PathLike | Mapping):
        return [specs]
    if not isinstance(specs, Iterable):
        raise InputError(f"{name}: {specs!r}: expected names, spec files or dicts")
    return list(specs)


def specs_of(kind: type[S], inputs: SpecInput | None, name: str) -> list[S]:
    """Return specs from files and from dicts, in the same order.

    A file may hold several specs, and names may have wildcards.  InputError names the argument.
    """
    specs: list[S] = []
    for number, spec in enumerate(listed(inputs, name)):
        if isinstance(spec, Mapping):
            try:
                # As a file would give it: paths as strings, tuples as lists.
                keys = json.loads(json.dumps(dict(spec), default=os.fspath))
            except (TypeError, ValueError) as error:
                raise InputError(f"spec: holds what JSON cannot: {one_line(error)}") from None
            place = f"{name}[{number}]"
            if spec is inputs:
                place = name
            specs += spec_files.specs_in(kind, keys, Path(place))
        else:
            specs += spec_files.load(kind, spec_files.expand([str(spec)]))
    if not specs:
        raise InputError(f"{name}: give a spec file or a dict, at least one")
    return specs
