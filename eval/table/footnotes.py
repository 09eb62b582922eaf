"""What a table needs said below it: marks, windows, errors, the reference, and each model's own notes."""

from __future__ import annotations

from eval.results import merge
from eval.results.differences import LEAST, best, groups, too_short
from eval.results.digits import KLD_DIGITS, PPL_DIGITS, cell
from eval.results.results_json import StoredRun
from eval.results.run_result import MARK, ModelResult, RunResult
from eval.stats.estimates import cautions
from eval.stats.uncertainty import documents
from eval.table.columns import BEST, FLOOR, places


def footnotes(run: RunResult, *, letters: bool = True) -> list[str]:
    """Every footnote of a table, one line each.  ``letters``: whether the table has letters for machines."""
    notes = [
        f"{MARK} {model.label}: {clause} on {machine_name(model)}"
        for model in run.models for clause in model.deviations
    ]  # fmt: skip
    notes += [f"where {letter}: {machine}" for machine, letter in places(run).items() if letters]
    notes += [*merge.notes(run), *windows(run), *error_notes(run)]
    if run.reference is not None:
        notes.append(f"KLD (nats, mean over tokens) and same top: against {run.reference['label']}{reference_ppl(run)}")
        notes += text_rates(run)
    notes += best_notes(run)
    if any(model.is_noise_floor for model in run.models):
        notes.append(f"{FLOOR} marked as the noise floor, the reference's weights with other roundings{floor_kld(run)}")
    if cached := sum(model.cached for model in run.models):
        notes.append(f"{cached} of {len(run.models)} rows come from the cache; their seconds (*) are of an earlier run")
    return notes + [f"{model.label}: {note}" for model in run.models for note in model_notes(model, run)]


def machine_name(model: ModelResult) -> str:
    """The GPU or CPU that a model ran on."""
    gpus = model.provenance.get("gpus")
    return str(gpus[0] if gpus else model.provenance.get("cpu", "an unknown machine"))


def windows(run: RunResult) -> list[str]:
    """How many windows and tokens were scored, and by which method they were cut."""
    method = run.data.get("method")
    cut = f"method {method}: " if method else ""
    scored = {(model.windows, model.ppl.tokens + model.ppl.non_finite) for model in run.models if model.ppl}
    return [f"{cut}{count:,} windows, {tokens:,} scored tokens" for count, tokens in sorted(scored)]


def best_notes(run: RunResult) -> list[str]:
    """What the mark of the best means, or why there is none."""
    if (length := too_short(run.models)) is not None:
        reason = f"even a KLD twice as large is often not told apart on {length:,} tokens of text"
        return [f"no {BEST}: {reason} (from {LEAST:,} on it mostly is)"]
    if not any(best(run.models, name) for name in ("nll", "kld", "same_top")):
        return []
    return [
        f"{BEST} the best of its column among quantized models (below 16 bpw), and what cannot be told from it "
        "(95 %, paired differences)"
    ]


def error_notes(run: RunResult) -> list[str]:
    """What the errors are; nothing without a model."""
    measured = [model.estimates for model in run.models if model.estimates]
    if not measured:
        return []
    count = max(groups(found.blocks) for found in measured)
    if count < 2:
        reason = "the text is too short to tell any" if count else "they were not measured with these results"
        return [f"errors n/a: {reason}"]
    longest = documents(max(found.blocks.length for found in measured))
    short = cautions(measured, run.data.get("text_tokens"))
    holds = "" if short else f" (too small if its documents are longer than some {longest:,} tokens)"
    about = (
        f"± one standard error, from {count} blocks of the text{holds}; that of PPL is about the text and common to "
        "all rows: differences between rows are far more certain (--pairs)"
    )
    return [about, *short, *older_errors(run)]


def older_errors(run: RunResult) -> list[str]:
    """What must be said of errors that compare_q 0.1 wrote: 0.2 finds up to 1.9 times as large ones on short texts."""
    if not isinstance(run, StoredRun):
        return []
    origins = [part.origin for part in run.parts] or [run.origin]
    # 0.1 wrote its version only where it was installed.
    written = [str(origin["versions"].get("compare-q", "0.1.0")) for origin in origins]
    if not any(version.startswith("0.1.") for version in written):
        return []
    return ["the ± in the table are by the rule of compare_q 0.1, and too small; ★ and --pairs are by today's"]


def reference_ppl(run: RunResult) -> str:
    """The perplexity of a reference that has no row, so that a store of another text shows at once."""
    if run.reference_ppl is None or any(model.is_reference for model in run.models):
        return ""
    return f", whose own PPL on these tokens is {cell(run.reference_ppl, PPL_DIGITS)}"


def text_rates(run: RunResult) -> list[str]:
    """What the reference's row says in units that no tokenizer changes."""
    rows = [(m.label, m.estimates.rates) for m in run.models if m.is_reference and m.estimates]
    return [
        f"{label}: {cell(rates.bits_per_byte.value, 4)} bits per byte, byte perplexity "
        f"{cell(rates.byte_perplexity.value, 4)}, word perplexity {cell(rates.word_perplexity.value, 4)}"
        for label, rates in rows if rates
    ]  # fmt: skip


def floor_kld(run: RunResult) -> str:
    """What the noise floor's KLD means, if it has one."""
    floor = run.noise_floor
    if floor is None or floor.kld is None:
        return ""
    return f"; a KLD near or below its {cell(floor.kld.value, KLD_DIGITS)} says nothing about a quantization"


def model_notes(model: ModelResult, run: RunResult) -> list[str]:
    """One model's footnotes: failure, unknown size, non-finite scores, missing KLD, and what the run noted."""
    notes = []
    if model.error:
        notes.append(f"failed: {model.error}")
    elif model.storage.note:
        notes.append(f"size n/a: {model.storage.note}")
    if not (model.error or model.layers):
        notes.append("kernel n/a: this engine does not say what it runs")
    if model.ppl is not None and model.ppl.value is None:
        notes.append("PPL n/a: it is too large for a number")
    if model.ppl is not None and model.ppl.non_finite:
        notes.append(f"{model.ppl.non_finite} positions had no finite log-probability; PPL leaves them out")
    if model.kld is not None and model.kld.non_finite:
        notes.append(f"{model.kld.non_finite} positions had no finite KL divergence; KLD leaves them out")
    unexplained = not (model.error or model.is_reference or model.kld or model.notes)
    if run.reference is not None and unexplained:
        notes.append("KLD n/a: this engine measured none")
    return [*notes, *model.notes]
