"""compare_q from Python: the runs of the command line, as a pandas DataFrame.

from eval.api import compare, load

data = {"tokenizer_dir": "/models/bf16", "dataset": "text", "path": "text.txt", "eval_len": 2048, "eval_stride": 2048}
models = [
    {"load_fn": "vllm_score", "label": "bf16", "model_dir": "/models/bf16", "reference": True},
    {"load_fn": "vllm_score", "label": "NVFP4", "model_dir": "/models/nvfp4"},
]
table = compare(data, models, rows=16).frame()
print(table[["label", "bpw_layer", "ppl", "kld", "kld_stderr"]])

load("a/results.json", "b/results.json").frame()  # finished runs, merged as --from does
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.common.errors import InputError
from backends.common.messages import one_line
from eval.common.cache import Cache, default_root
from eval.common.progress import Progress
from eval.results import results_json, texts_json
from eval.results.run_result import ModelResult, RunResult
from eval.results.texts import TextsResult
from eval.run import hosts, runner
from eval.run.session import Session
from eval.specs import reading as spec_files
from eval.specs.types import DataSpec, ModelSpec
from eval.table import footnotes, registry
from eval.table.columns import fields_of
from eval.text import corpus

if TYPE_CHECKING:
    import pandas as pd

Spec = str | Path | Mapping[str, Any]
"""A spec file, or a dict with a spec's keys."""
RENAMED = {"layer_bpw": "bpw_layer", "head_bpw": "bpw_head", "vram_gb": "vram_gib"}
"""Fields whose names in results.json are upstream's -> their names in a frame."""
OTHERS = (
    "deviations", "ln_ppl_ratio", "ln_ppl_ratio_stderr", "word_perplexity", "tokens", "reference", "noise_floor",
    "from_cache", "error", "notes",
)  # fmt: skip
"""Fields of results.json that are no columns of a table."""
COLUMNS = (*(RENAMED.get(field, field) for each in registry.COLUMNS for field in each.fields), *OTHERS)
"""Columns of a frame: those that a table can have (``eval/table/registry.py``), with their errors, and ``OTHERS``."""
DTYPES = {
    **dict.fromkeys(COLUMNS, "float64"),
    **{each.name: "object" for each in registry.COLUMNS if each.digits is None},
    **dict.fromkeys(("deviations", "error", "notes"), "object"),
    **dict.fromkeys(("tokens", "non_finite", "file_bytes"), "Int64"),
    **dict.fromkeys(("reference", "noise_floor", "from_cache"), "bool"),
}


@dataclass(frozen=True)
class Comparison:
    """A finished run: ``run`` holds all, ``frame`` what most readers want; ``save`` makes a file for ``--from``."""

    run: RunResult

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each model, in the order of the specs; an unknown value is NaN, None or NA, and ``notes`` say why.

        ``columns``: names as ``--columns`` takes them, each with its error, in this order; None: all, and what else is
        known of a row.  InputError for a name that is none.

        ``where``: GPUs or CPU.  ``bpw_layer``, ``bpw_head``: stored bits per weight.  ``vram_gib``: stored layers and
        head, GiB.  ``ppl``: perplexity; ``ln_ppl_ratio``: ln(PPL / reference's PPL), nats, with the paired error.
        ``kld``: mean KL(reference || model) in nats a token, 0 for the reference; ``kld_median``, ``kld_p99``,
        ``kld_max``: of single tokens.  ``same_top``, ``top1``: shares from 0 to 1 of positions with the reference's
        most probable token, and with the text's.  ``entropy``: nats.  ``..._stderr``: one standard error.
        ``tokens``: scored tokens with a finite log-probability, ``non_finite``: without.  ``beside``: which rows loaded
        or were scored meanwhile.  ``deviations``: in which way layers ran otherwise than the checkpoint asks.
        ``error``: why a model failed.
        """
        return as_frame([row(model, self.run) for model in self.run.models], columns)

    def save(self, file: str | Path) -> None:
        """Write results.json, as ``-o`` does."""
        results_json.write_json(self.run, Path(file), ["eval.api"])


@dataclass(frozen=True)
class TextsComparison:
    """A finished run of several texts: ``texts`` holds all; ``frame`` and ``save`` as of ``Comparison``."""

    texts: TextsResult

    def frame(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A row for each text and model, as ``Comparison.frame`` has it, with the text's name in the column ``text``.

        A text that failed is one row with its ``error`` and without a label.
        """
        rows: list[dict[str, Any]] = []
        for text in self.texts.texts:
            flags = {"reference": False, "noise_floor": False, "from_cache": False}
            models = (
                [row(model, text.run) for model in text.run.models] if text.run else [flags | {"error": text.error}]
            )
            rows += [{"text": text.name, **each} for each in models]
        return as_frame(rows, columns, ("text",))

    def means(self) -> pd.DataFrame:
        """A row for each model: ``label``, ``mean_kld`` (nats), ``mean_ppl``, and ``..._stderr``: the macro means over
        the texts (``eval/results/texts.py``), NaN unless every text has a value."""
        import pandas as pd

        rows = [texts_json.means_json(self.texts, label) for label in self.texts.labels]
        return pd.DataFrame(rows).astype({name: "float64" for name in rows[0] if name != "label"})

    def save(self, file: str | Path) -> None:
        """Write results.json, as ``-o`` does."""
        texts_json.write_json(self.texts, Path(file), ["eval.api"])


def as_frame(rows: Sequence[dict[str, Any]], columns: Sequence[str] | None, first: Sequence[str] = ()) -> pd.DataFrame:
    """Rows by ``COLUMNS`` as a frame of these columns (None: all), with others ``first``."""
    import pandas as pd

    chosen = [*first, *(COLUMNS if columns is None else frame_names(columns))]
    types = {name: DTYPES.get(name, "object") for name in chosen}
    return pd.DataFrame(rows, columns=chosen, dtype=object).astype(types)


def row(model: ModelResult, run: RunResult) -> dict[str, Any]:
    """One model's values by ``COLUMNS``."""
    found = results_json.flat_json(model, run)
    return {RENAMED.get(name, name): value for name, value in found.items()} | {
        "notes": "; ".join(footnotes.model_notes(model, run)) or None
    }


def frame_names(columns: Sequence[str]) -> list[str]:
    """The columns of a frame for names of ``--columns``."""
    fields = fields_of(registry.checked(columns)) or []
    return [RENAMED.get(field, field) for field in fields]


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
) -> Comparison | TextsComparison:
    """Score models on a text, or on several; scores that are in the cache are not made again.

    ``data``, ``models``: spec files, or dicts with the same keys, whose relative paths start at the working directory.
    With several texts each model loads once, and the result is a ``TextsComparison``.
    ``rows``: number of windows, 0 for all, None for the spec's ``max_rows``; ``logits_file``, ``cache_dir``,
    ``clear_cache``, ``divergences``, ``verbose``: as on the command line; ``quiet``: no progress on standard error.

    InputError (``backends.common.errors``): bad input, one line for each problem, before any engine starts.  A model
    that fails later is a row with its ``error``.
    """
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 0):
        raise InputError(f"rows: {rows!r} is no number of windows; 0 means all")
    session = Session(
        Cache(Path(cache_dir) if cache_dir is not None else default_root()), Progress(quiet=quiet), clear=clear_cache,
        verbose=verbose, logits_file=Path(logits_file) if logits_file is not None else None,
        hosts=hosts.of_this_machine()[0], divergences=divergences,
    )  # fmt: skip
    chosen, said = spec_files.one_reference(model_specs(models))
    for line in said:
        if line != spec_files.NO_REFERENCE or session.logits_file is None:
            session.progress.say(line)
    specs = data_specs(data)
    if len(specs) > 1:
        of_texts = runner.run_texts(session, dict(zip(corpus.names_of(specs), specs, strict=True)), chosen, rows)
        if of_texts.signal:
            raise KeyboardInterrupt
        return TextsComparison(of_texts.results)
    finished = runner.run(session, specs[0], chosen, rows)
    if finished.signal:
        raise KeyboardInterrupt
    return Comparison(finished.results)


def load(*files: str | Path) -> Comparison | TextsComparison:
    """A finished run (results.json or report.html), or several of one text merged; InputError as of ``--from``."""
    if not files or not all(isinstance(file, str | Path) for file in files):
        raise InputError("load: give at least one results.json or report.html, each by its name")
    found, _ = texts_json.load([Path(file) for file in files])
    return TextsComparison(found) if isinstance(found, TextsResult) else Comparison(found)


def data_specs(data: Spec | Sequence[Spec]) -> list[DataSpec]:
    """Data specs from files, which may hold several each, and from dicts, in this order."""
    given = list(data) if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    found: list[DataSpec] = []
    for number, each in enumerate(given):
        if isinstance(each, Mapping):
            name = "data" if len(given) == 1 else f"data[{number}]"
            found.append(spec_files.parse_data_spec(as_json(each), Path(name)))
        elif isinstance(each, str | Path):
            found += spec_files.load_data_specs([Path(each)])
        else:
            raise InputError(f"data: must be a spec file or a dict, not {type(each).__name__}")
    if not found:
        raise InputError("data: give a spec file or a dict, at least one")
    spec_files.check_labels(found)
    return found


def model_specs(models: Spec | Sequence[Spec]) -> list[ModelSpec]:
    """Model specs from files (wildcards allowed) and dicts, in this order; dicts are checked as files are."""
    given = (
        [models] if isinstance(models, str | Path | Mapping) else list(models) if isinstance(models, Sequence) else []
    )
    if not given or not all(isinstance(each, str | Path | Mapping) for each in given):
        raise InputError("models: give spec files or dicts, at least one")
    with tempfile.TemporaryDirectory(prefix="compare_q.") as folder:  # dicts become files, so that one place checks all
        files: list[Path] = []
        for number, each in enumerate(given, 1):
            if isinstance(each, Mapping):
                files.append(Path(folder) / f"models[{number - 1}]")
                files[-1].write_text(json.dumps(as_json(each)), encoding="utf-8")
            else:
                files += spec_files.expand([str(each)])
        try:
            return spec_files.load_model_specs(files)
        except InputError as error:
            raise InputError(str(error).replace(f"{folder}/", "")) from None


def as_json(spec: Mapping[str, Any]) -> Any:
    """A dict as a JSON file would give it: paths as strings, tuples as lists."""

    def plain(value: object) -> str:
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"{value!r} is a {type(value).__name__}")

    try:
        return json.loads(json.dumps(dict(spec), default=plain))
    except (TypeError, ValueError) as error:
        raise InputError(f"spec: holds what JSON cannot: {one_line(error)}") from None
