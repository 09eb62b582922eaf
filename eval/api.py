"""compare_q from Python: the runs of the command line, as a pandas DataFrame.

result = compare("bf16", "fp8=w8a8@vllm", data="wiki2", rows="all")
result = compare(data="data.json", models=["bf16.json", {"load_fn": "vllm_score", "model_dir": "nvfp4"}])
print(result.frame()[["label", "ppl", "kld", "kld_stderr"]])
show(load("a/results.json", "b/results.json"))  # the rows of finished runs in one table
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

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line, printable
from compare_q.eval import merging
from compare_q.eval.cli import flags, shorthand
from compare_q.eval.common.cache import Cache, default_root
from compare_q.eval.common.progress import Progress
from compare_q.eval.ranking import compare as compare_rows
from compare_q.eval.report.tokens import with_worst_tokens
from compare_q.eval.results import NOT_FLAT, ModelResult, RunResult, json_schema
from compare_q.eval.run import runner, token_scores
from compare_q.eval.run.config import local_config
from compare_q.eval.specs import reading as spec_files
from compare_q.eval.specs.reading import S
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.table import columns as table_columns
from compare_q.eval.table import notes, render, tables
from compare_q.eval.table.verdict import verdict
from compare_q.eval.text import corpus
from compare_q.eval.text.eval_data import EvalData

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Spec = str | os.PathLike[str] | Mapping[str, Any]
"""A spec file, or a dict with a spec's keys."""
Given = Spec | Sequence[Spec]
results_schema = json_schema
DTYPES = {bool: "bool", int: "Int64", float: "float64"}
"""Type of a field of results.json -> dtype of its column; others are objects."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished run: ``results`` is what results.json holds (``eval/results.py``).

    ``data``: the windows of its texts; ``cache``: where the scores of single tokens are.  A run that was read back has
    neither.
    """

    results: RunResult
    data: EvalData | None = None
    cache: Cache | None = None

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One row per model in the order of the specs.

        ``columns``: names as ``--columns`` takes them, each with its error, in this order; None: all fields of a row
        that are one value (``eval.results.ModelResult`` has their units), and its footnotes as ``notes``.  Unknown
        values are NaN, None or NA.
        """
        import pandas as pd

        names = chosen_columns(columns, self.results)
        rows: list[dict[str, Any]] = []
        for model in self.results.models:
            footnotes = "; ".join(notes.model_notes(model, self.results)) or None
            rows.append({**table_columns.values_of(model, names), "notes": footnotes})
        fields = {name: field for name, field in ModelResult.model_fields.items() if name not in NOT_FLAT}
        types = {field.alias or name: dtype_of(field.annotation) for name, field in fields.items()}
        chosen = [*types, "notes"] if names is None else table_columns.fields_of(names)
        types |= {name: "float64" for name in chosen if name not in (*types, "notes")}  # memory:N, kld:SLICE
        frame = pd.DataFrame(rows, columns=chosen, dtype=object)
        for name, dtype in types.items():
            if name in frame:
                frame[name] = (frame[name].fillna(False) if dtype == "bool" else frame[name]).astype(dtype)
        return frame

    def pairs(self) -> pd.DataFrame:
        """Return one row per pair of models: the ``first`` minus the ``second``, paired token by token.

        ``ln_ppl_ratio``: ln(PPL / PPL), ``kld``: difference of the mean KLDs, both in nats, each with ``..._stderr``
        and the ends ``..._low`` and ``..._high`` of the 95 % interval; NaN where they are not known.
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
        """Return the plot of ``-p``, and write it to ``file`` if given; InputError if there is nothing to draw.

        ``options``: ``measure`` ("kld", "ppl"), ``x_axis`` (as ``--x-axis``), ``title``,
        ``dark``, ``card``.
        """
        from compare_q.eval.plots import measures, pictures, scatter, style

        try:
            kind = options.pop("measure", None)
            if kind not in (None, "kld", "ppl"):
                raise ValueError(f"measure: {kind!r} is neither kld nor ppl")
            measure = measures.chosen(self.results, kind, None)
            size = measures.size_of(options.pop("x_axis", None) or "bpw")
            origin = pictures.origin_of(self.results.with_origin(["compare_q"])) if options.get("card") else ""
            drawn = scatter.scatter_figure(self.results, size=size, measure=measure, origin=origin, **options)
        except (ValueError, KeyError) as error:
            raise InputError(f"plot: {one_line(error)}") from None
        if file is not None:
            style.save_figure(drawn, Path(file))
        return drawn

    def tokens(self, label: str, text: str | None = None) -> pd.DataFrame:
        """Return the scores of every token of a model, as ``--tokens-out`` writes them; of one text, if it is named.

        InputError for a run that was read back (its windows are not known), and for a model without scores.
        """
        import pandas as pd

        model = next((model for model in self.results.models if model.label == label), None)
        if model is None:
            labels = printable(", ".join(self.results.labels))
            raise InputError(f"tokens: no model is called {label!r}; there are: {labels}")
        if self.data is None or self.cache is None:
            raise InputError("tokens: not in a run that was read back; compare the models again (from the cache)")
        names = [each.name for each in self.data.texts]
        if text is not None and text not in names:
            raise InputError(f"tokens: name one of the texts: {', '.join(names)}")
        stored = None if model.error else token_scores.of_row(self.cache, model.scores_key, self.data)
        if stored is None:
            reason = f": {model.error}" if model.error else ""
            raise InputError(f"tokens: {label} has no scores of single tokens{reason}")
        frame = pd.DataFrame({**token_scores.index_of(stored, self.data), **stored.columns})
        if text is None:
            return frame
        return frame[self.data.text_of[stored.window] == names.index(text)].reset_index(drop=True)

    def save(self, file: str | Path) -> None:
        """Write results.json, as ``-o`` does; ``load`` and ``show`` read it."""
        results = self.results
        if self.data is not None and self.cache is not None:
            results = with_worst_tokens(results, self.data, self.cache)
        results.with_origin(["compare_q"]).write(Path(file))

    def __repr__(self) -> str:
        labels = list(self.results.labels)
        named = labels[:4]
        if len(labels) > 4:
            named.append("...")
        return f"<Comparison of {len(labels)} models: {', '.join(named)}>"

    def _repr_html_(self) -> str:
        """The table with its footnotes and the finding, for notebooks; a number and its error are on one line."""
        table, columns = tables.table_of(self.results), list[list[str]]()
        for each in table.columns:
            side, wrap = ("left", "normal") if each.column.digits is None else ("right", "nowrap")
            texts = [html.escape(cell.shown + cell.marks + cell.plus_minus) for cell in each.cells]
            head = f'<th style="text-align: {side}">{html.escape(each.column.title)}</th>'
            style = f"text-align: {side}; white-space: {wrap}"
            columns.append([head, *(f'<td style="{style}">{text}</td>' for text in texts)])
        head, *rows = (f"<tr>{''.join(row)}</tr>" for row in zip(*columns, strict=True))
        drawn = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
        lines = [table.title, *table.notes, verdict(self.results)]
        title, *below = (f"<p>{html.escape(line)}</p>" for line in lines)
        return "".join([title, drawn, *below])


def chosen_columns(columns: Sequence[str] | None, results: RunResult) -> tuple[str, ...] | None:
    """Return the names of columns, the label first; None for the default.  InputError for one that the run lacks."""
    if columns is None:
        return None
    names = table_columns.checked(columns)
    table_columns.check_slices([table_columns.named(name) for name in names], results.slices)
    return names


def dtype_of(annotation: Any) -> str:
    """The dtype of a column for the values of a field."""
    kinds = {annotation, *get_args(annotation), *(each for part in get_args(annotation) for each in get_args(part))}
    return next((dtype for kind, dtype in DTYPES.items() if kind in kinds), "object")


def compare(
    *named: Given, data: Given | None = None, models: Given | None = None, rows: int | str | None = None,
    eval_len: int | None = None, eval_stride: int | None = None, sample: str | None = None,
    tokenizer: str | Path | None = None, logits_file: str | Path | None = None, cache_dir: str | Path | None = None,
    clear_cache: bool = False, verbose: bool = False, quiet: bool = False,
) -> Comparison:  # fmt: skip
    """Score models on one or several texts; cached scores are not computed again.

    ``named``: MODEL arguments of the command line, ``[LABEL=]MODEL[@ENGINE][:KEY=VALUE,...]``; the first of several is
    the reference.  ``data`` is then what ``-d`` takes with them, or a dict with the keys of a data spec, and without
    ``rows``, 32 windows of each text are scored, spread over it.

    ``models``: instead, spec files, or dicts with the same keys, whose relative paths start at the working directory;
    ``data`` is then a data spec, and ``rows`` replaces its ``max_rows``.  Specs may also come by position, data first.

    ``rows``: number of windows, 0 or "all" for all; ``quiet``: no progress on standard error; the other arguments are
    as on the command line.  Bad input raises InputError with one line per problem, before any engine starts.  A
    model that fails later becomes a row with its ``error``.
    """
    words, data, models = by_position(named, data, models)
    given = {"rows": rows, "eval_len": eval_len, "eval_stride": eval_stride, "sample": sample, "tokenizer": tokenizer}
    window_flags = {name: flags.converted(name, each) for name, each in given.items() if each is not None}
    n_windows = window_flags.pop("rows", None)
    config = local_config(
        Cache(Path(cache_dir or default_root())), Progress(quiet=quiet), clear=clear_cache, verbose=verbose,
        logits_file=Path(logits_file) if logits_file is not None else None,
    )  # fmt: skip
    if words:
        named_texts = list[str | DataSpec]()
        for each in listed(data, "data"):
            named_texts += specs_of(DataSpec, each, "data") if isinstance(each, Mapping) else [str(each)]
        data_specs, model_specs, said = shorthand.specs(words, named_texts, config.progress, **window_flags)
    else:
        shorthand.refuse_keys(window_flags, "a run of models=")
        own = spec_files.with_own_labels(specs_of(ModelSpec, models, "models"), config.progress.say)
        model_specs, said = spec_files.one_reference(own, stored=logits_file is not None)
        data_specs = specs_of(DataSpec, data, "data")
        spec_files.check_labels(data_specs)
    for line in said:
        config.progress.say(line)
    texts = dict(zip(corpus.names_of(data_specs), data_specs, strict=True))
    if words and n_windows is None:
        reference_is_made = any(spec.is_reference for spec in model_specs)
        texts = shorthand.with_default_windows(texts, None if reference_is_made else config.logits_file)
    finished = runner.run(config, texts, model_specs, n_windows)
    config.cache.release()  # the result keeps the cache
    if finished.signal:
        raise KeyboardInterrupt
    return Comparison(finished.results, finished.data, config.cache)


def by_position(
    named: Sequence[Given], data: Given | None, models: Given | None
) -> tuple[list[str], Given | None, Given | None]:
    """Return (MODEL arguments, data, models) of a call: specs by position are those of the data, then of the models."""
    words = list(named)
    has_specs = any(not isinstance(each, str | os.PathLike) or str(each).endswith(".json") for each in words)
    if words and data is None and (has_specs or models is not None):
        data = words.pop(0)
    if words and models is None and has_specs:
        models = words.pop(0)
    if words and models is not None:
        raise InputError("models: specs cannot be combined with MODEL arguments; give one or the other")
    if not words and models is None:
        raise InputError('models: missing; name them, as in compare("bf16", "w8a8", data="wiki2"), or give models=')
    return list(map(str, words)), data, models


def load(*files: str | Path) -> Comparison:
    """Return a finished run (results.json or report.html), or several merged into one; InputError as in ``show``."""
    if not files or not all(isinstance(file, str | Path) for file in files):
        raise InputError("load: give at least one results.json or report.html, each by its name")
    return Comparison(merging.load([Path(file) for file in files]))


def show(result: Comparison | str | Path, columns: Sequence[str] | None = None) -> Comparison:
    """Print the table of a run, or of a results.json, with its footnotes, as the command line does; returns the run.

    ``columns``: names as ``--columns`` takes them.
    """
    shown = result if isinstance(result, Comparison) else load(result)
    render.show(shown.results, Console(), chosen_columns(columns, shown.results))
    render.conclude(shown.results, Console())
    return shown


def listed(given: Given | None, name: str) -> list[Spec]:
    """Return a list of what is given: nothing, one, or several."""
    if isinstance(given, str | os.PathLike | Mapping):
        return [given]
    if given is not None and not isinstance(given, Iterable):
        raise InputError(f"{name}: {given!r}: expected names, spec files or dicts")
    return list(given or ())


def specs_of(kind: type[S], given: Given | None, name: str) -> list[S]:
    """Return specs from files (each may hold several; wildcards allowed) and from dicts, in the given order."""
    found: list[S] = []
    for number, each in enumerate(listed(given, name)):
        if isinstance(each, Mapping):
            try:  # as a file would give it: paths as strings, tuples as lists
                keys = json.loads(json.dumps(dict(each), default=os.fspath))
            except (TypeError, ValueError) as error:
                raise InputError(f"spec: holds what JSON cannot: {one_line(error)}") from None
            found += spec_files.specs_in(kind, keys, Path(name if each is given else f"{name}[{number}]"))
        else:
            found += spec_files.load(kind, spec_files.expand([str(each)]))
    if not found:
        raise InputError(f"{name}: give a spec file or a dict, at least one")
    return found
