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
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.eval import results as run_results
from compare_q.eval.common.cache import Cache, default_root
from compare_q.eval.common.progress import Progress
from compare_q.eval.ranking import Difference, difference_or_reason
from compare_q.eval.report.tokens import with_worst_tokens
from compare_q.eval.results import RunResult, TextResult
from compare_q.eval.run import hosts, runner, token_scores
from compare_q.eval.run.hosts import Session
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
OTHERS = (
    "deviations", "ln_ppl_ratio", "ln_ppl_ratio_stderr", "word_perplexity", "tokens", "reference", "noise_floor",
    "from_cache", "error", "notes",
)  # fmt: skip
"""Fields of results.json that are no columns of a table."""
COLUMNS = (*(field for each in table_columns.COLUMNS for field in each.fields), *OTHERS)
"""Columns of a frame: those that a table can have (``eval/table/columns.py``), with their errors, and ``OTHERS``."""
DTYPES = {
    **dict.fromkeys(COLUMNS, "float64"),
    **{each.name: "object" for each in table_columns.COLUMNS if each.digits is None},
    **dict.fromkeys(("deviations", "error", "notes"), "object"),
    **dict.fromkeys(("tokens", "non_finite", "file_bytes"), "Int64"),
    **dict.fromkeys(("reference", "noise_floor", "from_cache"), "bool"),
}
LABELS_IN_REPR = 4
"""Labels that a result's ``repr`` names."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """A finished run of one or more texts: ``results`` holds all, ``frame`` what most readers want.

    ``data`` and ``cache``: the windows of each text, and where the scores of their tokens are; a run that was read back
    has none.
    """

    results: RunResult
    data: tuple[EvalData | None, ...] = ()
    cache: Cache | None = None

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each model, in the order of the specs, of several texts for each text and model, with the text's
        name in the column ``text``.  An unknown value is NaN, None or NA, and ``notes`` say why; a text that failed is
        one row with its ``error`` and without a label.

        ``columns``: names as ``--columns`` takes them, each with its error, in this order; None: all, and what else is
        known of a row.  InputError for a name that is none.

        ``where``: GPUs or CPU.  ``bpw_layer``, ``bpw_head``: stored bits per weight.  ``vram_gib``: stored layers and
        head, GiB.  ``ppl``: perplexity; ``ln_ppl_ratio``: ln(PPL / reference's PPL), nats, with the paired error.
        ``kld``: mean KL(reference || model) in nats a token, 0 for the reference; ``kld_median``, ``kld_p99``,
        ``kld_max``: of single tokens.  ``same_top``, ``top1``: shares from 0 to 1 of positions with the reference's
        most probable token, and with the text's.  ``entropy``: nats.  ``..._stderr``: one standard error.
        ``tokens``: scored tokens with a finite log-probability, ``non_finite``: without.  ``deviations``: in which
        way layers ran otherwise than the checkpoint asks.  ``error``: why a model failed.
        """
        import pandas as pd

        chosen = COLUMNS if columns is None else table_columns.fields_of(table_columns.checked(columns)) or []
        names = [*(["text"] if len(self.results.texts) > 1 else []), *chosen]
        types = {name: DTYPES.get(name, "object") for name in names}
        rows = [row for text in self.results.texts for row in rows_of(text)]
        return pd.DataFrame(rows, columns=names, dtype=object).astype(types)

    def means(self) -> pd.DataFrame:
        """A row for each model: ``label``, ``mean_kld`` (nats), ``mean_ppl``, and ``..._stderr``: the macro means over
        the texts (``eval/results.py``), NaN unless every text has a value."""
        import pandas as pd

        rows = self.results.means
        return pd.DataFrame(rows).astype({name: "float64" for name in rows[0] if name != "label"})

    def pairs(self) -> pd.DataFrame:
        """A row for each two models: the ``first`` minus the ``second``, paired token by token.

        ``ln_ppl_ratio``: ln(PPL / PPL), ``kld``: difference of the mean KLDs, both in nats, each with
        ``..._stderr`` and the ends ``..._low`` and ``..._high`` of the 95 % interval; NaN where they are not known.
        Of several texts for each text, with its name in the column ``text``.
        """
        import pandas as pd

        several = len(self.results.texts) > 1
        rows = [
            {**({"text": text.name} if several else {}), "first": first.label, "second": second.label,
             **difference_fields("ln_ppl_ratio", difference_or_reason(first, second, "nll")),
             **difference_fields("kld", difference_or_reason(first, second, "kld"))}
            for text in self.results.scored for first, second in itertools.combinations(text.models, 2)
        ]  # fmt: skip
        return pd.DataFrame(rows)

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
        more = ", ..." if len(labels) > LABELS_IN_REPR else ""
        named = ", ".join(labels[:LABELS_IN_REPR])
        return f"<Comparison of {len(labels)} models on {texts} text{'s' * (texts > 1)}: {named}{more}>"

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


def rows_of(text: TextResult) -> list[dict[str, Any]]:
    """The values of a text's models by ``COLUMNS``, or its error."""
    if text.error:
        return [{"text": text.name, "reference": False, "noise_floor": False, "from_cache": False, "error": text.error}]
    return [
        {"text": text.name, **model.flat} | {"notes": "; ".join(notes.model_notes(model, text)) or None}
        for model in text.models
    ]


def difference_fields(name: str, difference: Difference | str) -> dict[str, float | None]:
    """A difference, its error and its interval."""
    known = None if isinstance(difference, str) else difference
    low, high = (known.limits if known else None) or (None, None)
    value, stderr = (known.value, known.stderr) if known else (None, None)
    return {name: value, f"{name}_stderr": stderr, f"{name}_low": low, f"{name}_high": high}


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
        raise InputError(f"rows: {rows!r} is no number of windows; 0 means all")
    session = Session(
        Cache(Path(cache_dir) if cache_dir is not None else default_root()), Progress(quiet=quiet), clear=clear_cache,
        verbose=verbose, logits_file=Path(logits_file) if logits_file is not None else None,
        hosts=hosts.of_this_machine()[0], divergences=divergences,
    )  # fmt: skip
    named = spec_files.with_own_labels(specs_of(ModelSpec, models, "models"), session.progress.say)
    chosen, said = spec_files.one_reference(named)
    for line in said:
        if line != spec_files.NO_REFERENCE or session.logits_file is None:
            session.progress.say(line)
    specs = specs_of(DataSpec, data, "data")
    spec_files.check_labels(specs)
    texts = dict(zip(corpus.names_of(specs), specs, strict=True))
    finished = runner.run(session, texts, chosen, rows)
    if finished.signal:
        raise KeyboardInterrupt
    return Comparison(finished.results, finished.data, session.cache)


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
