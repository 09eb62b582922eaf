"""A row of the table in one value for each quantity, as results.json, CSV, the table's columns and Python have them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from compare_q.backends.common.messages import printable
from compare_q.backends.layers import groups
from compare_q.eval.results.run_result import ModelResult, Results
from compare_q.eval.stats.estimates import DIVERGENCES

FORMULAS = tuple("=+-@\t\r＝＋－＠")
"""How text begins that spreadsheets run; the last four are the signs as Japanese writes them."""


OF_ANSWERS = {
    "acc": "accuracy/value", "acc_stderr": "accuracy/stderr",
    "flips": "flips/flips/value", "flips_stderr": "flips/flips/stderr",
    "changed": "flips/changed/value", "changed_stderr": "flips/changed/stderr",
    "flips_lost": "flips/lost", "flips_won": "flips/won", "mcnemar_p": "flips/mcnemar_p",
}  # fmt: skip
"""Of answers to questions, by each of lm-eval's two rules."""
ESTIMATES = {
    "ppl": "ppl/value",
    "ppl_stderr": "ppl/stderr",
    "ppl_stderr_independent": "ppl/stderr_independent",
    "logprob_sum": "ppl/logprob_sum",
    "tokens": "ppl/tokens",
    "non_finite": "ppl/non_finite",
    "ln_ppl_ratio": "estimates/against/ln_ppl_ratio/value",
    "ln_ppl_ratio_stderr": "estimates/against/ln_ppl_ratio/stderr",
    "ppl_ratio": "estimates/against/ppl_ratio/value",
    "ppl_ratio_stderr": "estimates/against/ppl_ratio/stderr",
    "kld": "mean_kld",
    "kld_stderr": "kld/stderr",
    "kld_median": "estimates/against/kld_percentiles/50",
    "kld_p99": "estimates/against/kld_percentiles/99",
    "kld_p99.9": "estimates/against/kld_percentiles/99.9",
    "kld_max": "estimates/against/kld_percentiles/max",
    "kld_sum": "kld/total",
    "kld_tokens": "kld/tokens",
    "kld_non_finite": "kld/non_finite",
    "same_top": "same_top/value",
    "same_top_stderr": "same_top/stderr",
    "top1": "estimates/top1/value",
    "entropy": "estimates/entropy/value",
    "bits_per_byte": "estimates/rates/bits_per_byte/value",
    "byte_perplexity": "estimates/rates/byte_perplexity/value",
    "word_perplexity": "estimates/rates/word_perplexity/value",
    **{f"{name}{end}": f"estimates/against/{name}/{field}"
       for name in DIVERGENCES for end, field in (("", "value"), ("_stderr", "stderr"))},
    "questions": "estimates/answers/questions",
    **{f"{name.removesuffix('_stderr')}{rule}{'_stderr' * name.endswith('_stderr')}":
       f"estimates/answers/acc{rule}/{path}" for rule in ("", "_norm") for name, path in OF_ANSWERS.items()},
}  # fmt: skip
"""Field of results.json -> where a ``ModelResult`` has it; errors are those of
``eval.stats.uncertainty.clustered_error``, but for ``ppl_stderr_independent``."""


def flat_json(model: ModelResult) -> dict[str, Any]:
    """What results.json has of a model in one value each."""
    return {
        "label": model.label,
        "engine": model.engine,
        "where": model.where or None,
        "kernel": groups.kernel_of(model.layers) or None,
        "deviations": "; ".join(model.deviations) or None,
        "phase": None if model.error else model.phase,
        "kv_cache": model.kv_cache or None,
        "kv_mb": model.kv_mb,
        "bpw_layer": model.storage.bpw_layer,
        "bpw_head": model.storage.bpw_head,
        "vram_gib": model.storage.vram_gib,
        "vram_bits": model.storage.vram_bits,
        "file_bytes": model.storage.file_bytes,
        "storage_note": model.storage.note or None,
        **{name: value_at(model, path) for name, path in ESTIMATES.items()},
        "reference": model.is_reference,
        "noise_floor": model.is_noise_floor,
        "windows": model.windows,
        "load_seconds": model.load_seconds,
        "score_seconds": model.score_seconds,
        "tokens_per_second": model.tokens_per_second,
        "from_cache": model.cached,
        "error": model.error or None,
        "spec_sha256": model.spec_sha256,
        "scores_key": model.scores_key,
    }


def value_at(found: Any, path: str) -> Any:
    """What stands at a path of attributes and keys; None where a step of it is None, or a key is missing."""
    for step in path.split("/"):
        if found is None:
            return None
        found = found.get(step) if isinstance(found, dict) else getattr(found, step)
    return found


def csv_text(results: Results, fields: Sequence[str] | None = None) -> str:
    """These fields of every model as CSV, a line of names and a line a model; None: all flat fields, and the notes.

    Of several texts a line for each text and model, with the text's name before the fields, and of a text that failed
    one line with its name and, where all fields are asked for, its error.
    """
    rows = []
    for text in results.texts:
        for model in text.models:
            cells = {**flat_json(model), "notes": "; ".join(model.notes)}
            rows.append({"text": text.name, **cells})
        if text.error:
            rows.append({"text": text.name, "error": text.error})
    names = [name for name in next(row for row in rows if "label" in row) if name != "text"]
    stream = io.StringIO()
    columns = [*(["text"] if len(results.texts) > 1 else []), *(names if fields is None else fields)]
    writer = csv.DictWriter(stream, fieldnames=columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def csv_cell(value: Any) -> Any:
    """A value for a cell; text without control characters, and with an apostrophe where it would be a formula."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(FORMULAS) else printable(value)
