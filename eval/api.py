"""compare_q from Python: the runs of the command line, as a pandas DataFrame.

from compare_q import compare, load, show

data = {"tokenizer_dir": "/models/bf16", "dataset": "text", "path": "text.txt", "eval_len": 2048, "eval_stride": 2048}
models = [
    {"load_fn": "vllm_score", "label": "bf16", "model_dir": "/models/bf16", "reference": True},
    {"load_fn": "vllm_score", "label": "NVFP4", "model_dir": "/models/nvfp4"},
]
result = compare(data, models, rows=16)
print(result.frame()[["label", "bpw_layer", "ppl", "kld", "kld_stderr"]])
print(result.pairs())  # how each two models differ, with paired errors

show(load("a/results.json", "b/results.json"))  # the rows of finished runs in one table
"""

from __future__ import annotations

import html
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.eval import results as run_results
from compare_q.eval.common.cache import Cache, default_root
from compare_q.eval.common.progress import Progress
from compare_q.eval.ranking import difference_or_reason
from compare_q.eval.report.tokens import with_worst_tokens
from compare_q.eval.results import NESTED, ModelResult, RunResult
from compare_q.eval.run import runner, token_scores
from compare_q.eval.run.config import local_config
from compare_q.eval.specs import reading as spec_files
from compare_q.eval.specs.reading import S
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.table import columns as table_columns
from compare_q.eval.table import notes, render, tables
from compare_q.eval.text import corpus
from compare_q.eval.text.windows import EvalData

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Spec = str | Path | Mapping[str, Any]
"""A spec file, or a dict with a spec's keys."""
DTYPES = {bool: "bool", int: "Int64", float: "float64"}
"""Type of a field of results.json -> dtype of its column; others are objects."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished run of one or more texts.

    Attributes:
        results: the whole run, as results.json holds it (``eval/results.py``).
        data: the windows of each text; None for a text that failed, empty for a run that was read back.
        cache: where the scores of single tokens are; None for a run that was read back.
    """

    results: RunResult
    data: tuple[EvalData | None, ...] = ()
    cache: Cache | None = None

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each model in the order of the specs; with several texts for each text and model.

        ``columns``: names as ``--columns`` takes them, each with its error, in this order; None: all fields of a row
        that are one value (``eval.results.ModelResult`` has their units), and its footnotes as ``notes``.  With several
        texts the column ``text`` has their names, and a text that failed is one row with its ``error``.  Unknown values
        are NaN, None or NA.
        InputError for the name of a column that does not exist.
        """
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for text in self.results.texts:
            for model in text.models:
                said = "; ".join(notes.model_notes(model, text)) or None
                rows.append({"text": text.name, **model.flat, "notes": said})
            if text.error:
                rows.append({"text": text.name, "error": text.error})
        types = {field.alias or name: dtype_of(field.annotation) for name, field in ModelResult.model_fields.items()
                 if name not in NESTED}  # fmt: skip
        chosen = [*types, "notes"] if columns is None else table_columns.fields_of(table_columns.checked(columns)) or []
        frame = pd.DataFrame(rows, columns=["text", *chosen], dtype=object)
        for name, dtype in types.items():
            if name in frame:
                frame[name] = (frame[name].fillna(False) if dtype == "bool" else frame[name]).astype(dtype)
        return frame if len(self.results.texts) > 1 else frame.drop(columns="text")

    def means(self) -> pd.DataFrame:
        """A row for each model: ``label``, ``mean_kld`` (nats), ``mean_ppl``, and ``..._stderr``: the macro means over
        the texts, NaN unless every text has a value."""
        import pandas as pd

        return pd.DataFrame(self.results.means).astype(
            {name: "float64" for name in self.results.means[0] if name != "label"}
        )

    def pairs(self) -> pd.DataFrame:
        """A row for each two models of each text: the ``first`` minus the ``second``, paired token by token.

        ``ln_ppl_ratio``: ln(PPL / PPL), ``kld``: difference of the mean KLDs, both in nats, each with ``..._stderr``
        and the ends ``..._low`` and ``..._high`` of the 95 % interval; NaN where they are not known.
        """
        import pandas as pd

        rows = []
        for text in self.results.scored:
            for first, second in itertools.combinations(text.models, 2):
                row: dict[str, Any] = {"text": text.name, "first": first.label, "second": second.label}
                for name, score in (("ln_ppl_ratio", "nll"), ("kld", "kld")):
                    found = difference_or_reason(first, second, score)
                    known = None if isinstance(found, str) else found
                    low, high = (known and known.limits) or (None, None)
                    row |= {name: known and known.value, f"{name}_stderr": known and known.stderr,
                            f"{name}_low": low, f"{name}_high": high}  # fmt: skip
                rows.append(row)
        frame = pd.DataFrame(rows)
        return frame if len(self.results.texts) > 1 or not rows else frame.drop(columns="text")

    def plot(self, file: str | Path | None = None, **options: Any) -> Figure:
        """The plot of ``-p``, which is written to ``file`` if that is given; InputError if there is nothing to draw.

        ``options``: ``measure`` ("kld", "ppl", "acc", "acc_norm"), ``x_axis`` ("bpw", "vram", "size"), ``title``,
        ``dark``, ``card``.
        """
        from compare_q.eval.plots import measures, scatter, style

        kind, size = options.pop("measure", None), options.pop("x_axis", None)
        try:
            measure = measures.chosen(self.results, kind, None)
            drawn = scatter.scatter_figure(
                *self.results.texts, size=measures.SIZES[size or "bpw"], measure=measure, **options
            )
        except (ValueError, KeyError) as error:
            raise InputError(f"plot: {one_line(error)}") from None
        if file is not None:
            style.save_figure(drawn, Path(file))
        return drawn

    def tokens(self, label: str, text: str | None = None) -> pd.DataFrame:
        """The scores of every token of a model, as ``--tokens-out`` writes them; of several texts of the named one.

        InputError for a run that was read back, whose windows are not known, and for a model without scores.
        """
        import pandas as pd

        names = [each.name for each in self.results.texts]
        if (text is None and len(names) > 1) or (text is not None and text not in names):
            raise InputError(f"tokens: name one of the texts: {', '.join(names)}")
        place = 0 if text is None else names.index(text)
        model = next((model for model in self.results.texts[place].models if model.label == label), None)
        if model is None:
            raise InputError(f"tokens: no model is called {label!r}; there are: {', '.join(self.results.labels)}")
        data = self.data[place] if self.data else None
        if data is None or self.cache is None:
            raise InputError("tokens: a run that was read back has none; compare the models again (from the cache)")
        stored = None if model.error else token_scores.of_row(self.cache, model.scores_key, data.windows)
        if stored is None:
            raise InputError(
                f"tokens: {label} has no scores of single tokens{f': {model.error}' if model.error else ''}"
            )
        return pd.DataFrame({**{name: getattr(stored, name) for name in token_scores.INDEX}, **stored.columns})

    def save(self, file: str | Path) -> None:
        """Write results.json, as ``-o`` does; ``load`` and ``show`` read it."""
        results = self.results
        if self.data and self.cache is not None:
            results = with_worst_tokens(results, self.data, self.cache)
        results.with_origin(["compare_q"]).write(Path(file))

    def __repr__(self) -> str:
        """Number of models and texts, and the first labels."""
        labels, texts = self.results.labels, len(self.results.texts)
        named = ", ".join([*labels[:4], *["..."] * (len(labels) > 4)])
        return f"<Comparison of {len(labels)} models on {texts} text{'s' * (texts > 1)}: {named}>"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        table = tables.tables_of(self.results)[0]
        head = "".join(f"<th>{html.escape(each.column.title)}</th>" for each in table.columns)
        rows = [
            "".join(f"<td>{html.escape(cell.shown + cell.marks + cell.plus_minus)}</td>" for cell in cells)
            for cells in zip(*(each.cells for each in table.columns), strict=True)
        ]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{html.escape(table.title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def dtype_of(annotation: Any) -> str:
    """The dtype of a column for the values of a field."""
    kinds = {annotation, *get_args(annotation), *(each for part in get_args(annotation) for each in get_args(part))}
    return next((dtype for kind, dtype in DTYPES.items() if kind in kinds), "object")


def compare(
    data: Spec | Sequence[Spec],
    models: Spec | Sequence[Spec],
    *,
    rows: int | None = None,
    logits_file: str | Path | None = None,
    cache_dir: str | Path | None = None,
    clear_cache: bool = False,
    divergences: bool = False,
    verbose: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Score models on a text, or on several; scores that are in the cache are not made again.

    ``data``, ``models``: spec files, or dicts with the same keys, whose relative paths start at the working directory.
    With several texts each model loads once.
    ``rows``: number of windows, 0 for all, None for the spec's ``max_rows``; ``logits_file``, ``cache_dir``,
    ``clear_cache``, ``divergences``, ``verbose``: as on the command line; ``quiet``: no progress on
    standard error.

    InputError (``compare_q.backends.common.errors``): bad input, one line for each problem, before any engine starts.
    A model that fails later is a row with its ``error``.
    """
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 0):
        raise InputError(f"rows: {rows!r}: expected a number of windows; 0 means all")
    config = local_config(
        Cache(Path(cache_dir) if cache_dir is not None else default_root()), Progress(quiet=quiet), clear=clear_cache,
        verbose=verbose, logits_file=Path(logits_file) if logits_file is not None else None, divergences=divergences,
    )  # fmt: skip
    named = spec_files.with_own_labels(specs_of(ModelSpec, models, "models"), config.progress.say)
    chosen, said = spec_files.one_reference(named)
    for line in said:
        if line != spec_files.NO_REFERENCE or config.logits_file is None:
            config.progress.say(line)
    specs = specs_of(DataSpec, data, "data")
    spec_files.check_labels(specs)
    texts = dict(zip(corpus.names_of(specs), specs, strict=True))
    finished = runner.run(config, texts, chosen, rows)
    if finished.signal:
        raise KeyboardInterrupt
    return Comparison(finished.results, finished.data, config.cache)


def load(*files: str | Path) -> Comparison:
    """A finished run (results.json or report.html), or the rows of several in one; InputError as of ``show``."""
    if not files or not all(isinstance(file, str | Path) for file in files):
        raise InputError("load: give at least one results.json or report.html, each by its name")
    return Comparison(run_results.load([Path(file) for file in files]))


def show(result: Comparison | str | Path, columns: Sequence[str] | None = None) -> Comparison:
    """Print the table of a run, or of a results.json, with its footnotes, as the command line does; returns the run.

    ``columns``: names as ``--columns`` takes them.
    """
    shown = result if isinstance(result, Comparison) else load(result)
    render.show(shown.results, Console(), None if columns is None else table_columns.checked(columns))
    render.conclude(shown.results, Console())
    return shown


def specs_of(kind: type[S], given: Spec | Sequence[Spec], name: str) -> list[S]:
    """Specs from files, which may hold several each (wildcards allowed), and from dicts, in this order."""
    listed = [given] if isinstance(given, str | Path | Mapping) else list(given)
    found: list[S] = []
    for number, each in enumerate(listed):
        if isinstance(each, Mapping):
            place = name if listed == [given] else f"{name}[{number}]"
            found += spec_files.specs_in(kind, as_json(each), Path(place))
        else:
            found += spec_files.load(kind, spec_files.expand([str(each)]))
    if not found:
        raise InputError(f"{name}: give a spec file or a dict, at least one")
    return found


def as_json(spec: Mapping[str, Any]) -> Any:
    """A dict as a JSON file would give it: paths as strings, tuples as lists."""
    try:
        return json.loads(json.dumps(dict(spec), default=os.fspath))
    except (TypeError, ValueError) as error:
        raise InputError(f"spec: holds what JSON cannot: {one_line(error)}") from None
