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
from eval.results import merge, results_json
from eval.results.run_result import ModelResult, RunResult
from eval.run import hosts, runner
from eval.run.session import Session
from eval.specs import reading as spec_files
from eval.specs.types import DataSpec, ModelSpec
from eval.table import footnotes

if TYPE_CHECKING:
    import pandas as pd

Spec = str | Path | Mapping[str, Any]
"""A spec file, or a dict with a spec's keys."""
COLUMNS = (
    "label", "engine", "where", "kernel", "deviations", "bpw_layer", "bpw_head", "vram_gib", "ppl", "ppl_stderr",
    "ln_ppl_ratio", "ln_ppl_ratio_stderr", "kld", "kld_stderr", "kld_median", "kld_p99", "kld_max", "same_top",
    "same_top_stderr", "top1", "entropy", "bits_per_byte", "word_perplexity", "tokens", "non_finite", "reference",
    "noise_floor", "load_seconds", "score_seconds", "from_cache", "error", "notes",
)  # fmt: skip
"""Columns of a frame."""
DTYPES = dict.fromkeys(COLUMNS, "float64")
DTYPES |= dict.fromkeys(("label", "engine", "where", "kernel", "deviations", "error", "notes"), "object")
DTYPES |= dict.fromkeys(("tokens", "non_finite"), "Int64") | dict.fromkeys(
    ("reference", "noise_floor", "from_cache"), "bool"
)
RESULTS_NAMES = {"bpw_layer": "layer_bpw", "bpw_head": "head_bpw", "vram_gib": "vram_gb"}
"""Columns whose names in results.json are upstream's."""


@dataclass(frozen=True)
class Comparison:
    """A finished run: ``run`` holds all, ``frame`` what most readers want; ``save`` makes a file for ``--from``."""

    run: RunResult

    def frame(self) -> pd.DataFrame:
        """A row for each model, in the order of the specs; an unknown value is NaN, None or NA, and ``notes`` say why.

        ``where``: GPUs or CPU.  ``bpw_layer``, ``bpw_head``: stored bits per weight.  ``vram_gib``: stored layers and
        head, GiB.  ``ppl``: perplexity; ``ln_ppl_ratio``: ln(PPL / reference's PPL), nats, with the paired error.
        ``kld``: mean KL(reference || model) in nats a token, 0 for the reference; ``kld_median``, ``kld_p99``,
        ``kld_max``: of single tokens.  ``same_top``, ``top1``: shares from 0 to 1 of positions with the reference's
        most probable token, and with the text's.  ``entropy``: nats.  ``..._stderr``: one standard error.
        ``tokens``: scored tokens with a finite log-probability, ``non_finite``: without.  ``deviations``: in which way
        layers ran otherwise than the checkpoint asks.  ``error``: why a model failed.
        """
        import pandas as pd

        rows = [row(model, self.run) for model in self.run.models]
        return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object).astype(DTYPES)

    def save(self, file: str | Path) -> None:
        """Write results.json, as ``-o`` does."""
        results_json.write_json(self.run, Path(file), ["eval.api"])


def row(model: ModelResult, run: RunResult) -> dict[str, Any]:
    """One model's values by ``COLUMNS``."""
    found = results_json.model_json(model)
    return {name: found[RESULTS_NAMES.get(name, name)] for name in COLUMNS} | {
        "notes": "; ".join(footnotes.model_notes(model, run)) or None
    }


def compare(
    data: Spec,
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
    """Score models on a text; scores that are in the cache are not made again.

    ``data``, ``models``: spec files, or dicts with the same keys, whose relative paths start at the working directory.
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
    finished = runner.run(session, data_spec(data), chosen, rows)
    if finished.signal:
        raise KeyboardInterrupt
    return Comparison(finished.results)


def load(*files: str | Path) -> Comparison:
    """A finished run (results.json or report.html), or several merged; InputError as ``--from`` gives it."""
    if not files or not all(isinstance(file, str | Path) for file in files):
        raise InputError("load: give at least one results.json or report.html, each by its name")
    return Comparison(merge.load([Path(file) for file in files])[0])


def data_spec(data: Spec) -> DataSpec:
    """A data spec from a file or a dict."""
    if not isinstance(data, str | Path | Mapping):
        raise InputError(f"data: must be a spec file or a dict, not {type(data).__name__}")
    if isinstance(data, Mapping):
        return spec_files.parse_data_spec(as_json(data), Path("data"))
    return spec_files.load_data_spec(Path(data))


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
