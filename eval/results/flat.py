"""A row of the table in one value for each quantity, as results.json, CSV, the table's columns and Python have them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_q.backends.common.messages import printable
from compare_q.backends.layers import groups
from compare_q.eval.common.files import replacing
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from compare_q.eval.results.timing import shared_seconds
from compare_q.eval.stats.answers import AnswerEstimates
from compare_q.eval.stats.estimates import DIVERGENCES, AgainstReference
from compare_q.eval.stats.uncertainty import Value

LEAST = 0.01
"""Share of a row's seconds from which something counts as beside it: less than a hundredth slows by less."""
FORMULAS = tuple("=+-@\t\r＝＋－＠")
"""How text begins that spreadsheets run; the last four are the signs as Japanese writes them."""


def flat_json(model: ModelResult, models: Sequence[ModelResult]) -> dict[str, Any]:
    """What results.json has of a model in one value each; ``models``: all rows of its text."""
    return {
        "label": model.label,
        "engine": model.engine,
        "where": model.where or None,
        "kernel": groups.kernel_of(model.layers) or None,
        "deviations": "; ".join(model.deviations) or None,
        "kv_cache": model.kv_cache or None,
        "bpw_layer": model.storage.bpw_layer,
        "bpw_head": model.storage.bpw_head,
        "vram_gib": model.storage.vram_gib,
        "vram_bits": model.storage.vram_bits,
        "file_bytes": model.storage.file_bytes,
        "storage_note": model.storage.note or None,
        **flat_estimates(model),
        "reference": model.is_reference,
        "noise_floor": model.is_noise_floor,
        "windows": model.windows,
        "load_seconds": model.load_seconds,
        "score_seconds": model.score_seconds,
        "tokens_per_second": model.tokens_per_second,
        "beside": concurrent_rows_text(model, models) or None,
        "from_cache": model.cached,
        "error": model.error or None,
        "spec_sha256": model.spec_sha256,
        "scores_key": model.scores_key,
        "reference_key": model.reference_key or None,
    }


def flat_estimates(model: ModelResult) -> dict[str, Any]:
    """The estimates that most readers want, one key each; errors are the clustered ones but for one."""
    found = model.estimates
    ppl, kld, same_top, against = model.ppl, model.kld, model.same_top, found.against if found else None
    spread = against.kld_percentiles if against else {}
    top1, entropy, rates = (found.top1, found.entropy, found.rates) if found else (None, None, None)
    ratio, unknown = against.ln_ppl_ratio if against else None, Value(None)
    return {
        "ppl": ppl.value if ppl else None,
        "ppl_stderr": ppl.stderr if ppl else None,
        "ppl_stderr_independent": ppl.stderr_independent if ppl else None,
        "logprob_sum": ppl.logprob_sum if ppl else None,
        "tokens": ppl.tokens if ppl else None,
        "non_finite": ppl.non_finite if ppl else None,
        "ln_ppl_ratio": ratio.value if ratio else None,
        "ln_ppl_ratio_stderr": ratio.stderr if ratio else None,
        "ppl_ratio": against.ppl_ratio.value if against else None,
        "ppl_ratio_stderr": against.ppl_ratio.stderr if against else None,
        "kld": model.mean_kld,
        "kld_stderr": kld.stderr if kld else None,
        "kld_median": spread.get("50"),
        "kld_p99": spread.get("99"),
        "kld_p99.9": spread.get("99.9"),
        "kld_max": spread.get("max"),
        "kld_sum": kld.total if kld else None,
        "kld_tokens": kld.tokens if kld else None,
        "kld_non_finite": kld.non_finite if kld else None,
        "same_top": same_top.value if same_top else None,
        "same_top_stderr": same_top.stderr if same_top else None,
        "top1": top1.value if top1 else None,
        "entropy": entropy.value if entropy else None,
        "bits_per_byte": (rates.bits_per_byte if rates else unknown).value,
        "byte_perplexity": (rates.byte_perplexity if rates else unknown).value,
        "word_perplexity": (rates.word_perplexity if rates else unknown).value,
        **flat_divergences(against),
        **flat_answers(found.answers if found else None),
    }


def flat_answers(found: AnswerEstimates | None) -> dict[str, Any]:
    """Accuracy and flips, by lm-eval's two rules; None unless answers were scored."""
    flat: dict[str, Any] = {"questions": found.questions if found else None}
    for suffix, each in (("", found.acc if found else None), ("_norm", found.acc_norm if found else None)):
        accuracy, flips = each.accuracy if each else None, each.flips if each else None
        for name, share in (("acc", accuracy), ("flips", flips and flips.flips), ("changed", flips and flips.changed)):
            flat[f"{name}{suffix}"] = share.value if share else None
            flat[f"{name}{suffix}_stderr"] = share.stderr if share else None
        flat[f"flips_lost{suffix}"] = flips.lost if flips else None
        flat[f"flips_won{suffix}"] = flips.won if flips else None
        flat[f"mcnemar_p{suffix}"] = flips.mcnemar_p if flips else None
    return flat


def flat_divergences(against: AgainstReference | None) -> dict[str, Any]:
    """The means of what a run with ``--divergences`` measures, and their errors; None without it."""
    found: dict[str, Any] = {}
    for name in DIVERGENCES:
        mean = getattr(against, name, None)
        found |= {name: mean.value if mean else None, f"{name}_stderr": mean.stderr if mean else None}
    return found


def concurrent_rows_text(model: ModelResult, models: Sequence[ModelResult]) -> str:
    """Which of ``models`` loaded, or were scored, on the model's machine while it was scored, each with the share of
    the model's seconds; empty if none did, or if it is not known when the rows ran.

    A row from the cache is compared with the others at the time at which it was scored.
    """
    if model.timing is None:
        return ""
    mine, seconds, beside = model.timing.scored, model.timing.scoring_seconds, []
    for other in models:
        if other is model or other.timing is None:
            continue
        for what, span in (("scored", other.timing.scored), ("loading", other.timing.load)):
            share = shared_seconds(mine, span) / seconds
            if share >= LEAST and on_one_machine(model, other):
                beside.append(f"{other.label} {what} {100 * share:.0f} %")
    return ", ".join(beside)


def on_one_machine(one: ModelResult, other: ModelResult) -> bool:
    """Whether two rows ran on one machine, by its name, and in one run where several were merged.

    llama.cpp names the CPU behind the GPUs, where other engines name GPUs alone.
    """
    fewer, more = sorted((set(model.where.split(", ")) for model in (one, other)), key=len)
    return fewer <= more and one.part == other.part


def csv_text(results: Results, fields: Sequence[str] | None = None) -> str:
    """These fields of every model as CSV, a line of names and a line a model; None: all flat fields, and the notes.

    Of several texts a line for each text and model, with the text's name before the fields, and of a text that failed
    one line with its name and, where all fields are asked for, its error.
    """
    rows = [row for text in results.texts for row in rows_of(text)]
    first = ["text"] if len(results.texts) > 1 else []
    names = (
        [name for name in next(row for row in rows if "label" in row) if name != "text"] if fields is None else fields
    )
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=[*first, *names], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def rows_of(text: TextResult) -> list[dict[str, Any]]:
    """The name of a text, the flat fields of every model, and its notes; of a text that failed its error."""
    name = {"text": csv_cell(text.name)}
    if text.error:
        return [{**name, "error": csv_cell(text.error)}]
    return [
        {**name, **{key: csv_cell(value) for key, value in flat_json(model, text.models).items()}}
        | {"notes": csv_cell("; ".join(model.notes))}
        for model in text.models
    ]


def csv_cell(value: Any) -> Any:
    """A value for a cell; text without control characters, and with an apostrophe where it would be a formula."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(FORMULAS) else printable(value)


def write_csv(results: Results, file: Path, fields: Sequence[str] | None = None) -> None:
    """Write ``csv_text`` atomically."""
    with replacing(file) as part, part.open("w", encoding="utf-8", newline="") as stream:
        stream.write(csv_text(results, fields))
