"""The footnotes of a table: what is special to it, and the legend of its columns and marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compare_q.backends.checkpoint.config import ROPE, beyond
from compare_q.backends.layers import groups
from compare_q.eval import ranking
from compare_q.eval.ranking import LEAST_TOKENS, best_labels, near_lossless, too_short_for_best
from compare_q.eval.results import MARK, ModelResult, RunResult, TextResult
from compare_q.eval.stats.estimates import n_blocks, short_text_cautions
from compare_q.eval.stats.uncertainty import longest_documents
from compare_q.eval.table.columns import BEST, FLOOR, machine_letters
from compare_q.eval.table.numbers import KLD_DIGITS, PPL_DIGITS, number_text

COMMON_ERROR = (
    "the ± of PPL says how far another text of this kind would move all rows together: differences between rows are "
    "far more certain (--pairs)"
)
WORTH_SAYING = 0.1
"""Share of a row's seconds from which its first step, in which engines compile, is told."""
MEANS = (
    "mean: over the texts, each with the same weight, of KLD the arithmetic mean, of PPL the geometric mean, without "
    "answers; n/a where a text has no value; its ± takes the texts' errors as independent"
)


def footnotes(run: TextResult, *, letters: bool = True) -> list[str]:
    """What is special to a table, one line each; ``letters``: whether the table has letters for machines."""
    notes = [
        f"{MARK} {model.label}: {clause} on {machine_name(model)}"
        for model in run.models for clause in model.deviation_clauses
    ]  # fmt: skip
    fullest = {
        letter: machine for machine, letter in sorted(machine_letters(run).items(), key=lambda each: len(each[0]))
    }
    notes += [f"where {letter}: {machine}" for letter, machine in sorted(fullest.items()) if letters]
    notes += [*window_notes(run), *phase_notes(run), *rope_notes(run), *error_notes(run)]
    if run.reference is not None:
        if run.reference_ppl is not None and not any(model.reference for model in run.models):
            # So that a reference store of another text is noticed at once.
            ppl = number_text(run.reference_ppl, PPL_DIGITS)
            notes.append(f"the reference, {run.reference['label']}, has a PPL of {ppl} on these tokens")
        notes += text_rates(run)
    if (length := too_short_for_best(run.models)) is not None:
        reason = f"on {length:,} tokens of text even a KLD twice as large often cannot be told apart"
        notes.append(f"no {BEST}: {reason}; from {LEAST_TOKENS:,} tokens on it mostly can")
    notes += near_notes(run)
    if cached := sum(model.from_cache for model in run.models):
        notes.append(f"{cached} of {len(run.models)} rows come from the cache: an earlier run measured their speed (*)")
    return notes + [f"{model.label}: {note}" for model in run.models for note in model_notes(model, run)]


def legend(run: TextResult) -> list[str]:
    """What columns and marks mean, in every table that has them."""
    notes = []
    measured = [model.estimates for model in run.models if model.estimates]
    count = max((n_blocks(found.blocks) for found in measured), default=0)
    if count > 1:
        longest = longest_documents(max(found.blocks.length for found in measured))
        holds = f"; it is too small if documents of the text are longer than about {longest:,} tokens"
        is_short = short_text_cautions(measured, run.data.get("text_tokens"))
        notes = [f"±: one standard error, from {count} blocks of the text{'' if is_short else holds}", COMMON_ERROR]
    if run.reference is not None:
        label = run.reference["label"]
        notes.append(f"KLD (mean over tokens, in nats) and same top compare each model with {label}")
    if any(best_labels(run.models, name) for name in ("nll", "kld", "same_top")):
        notes.append(
            f"{BEST}: the best quantized model (below 16 bpw) of its column, and those that cannot be told apart from "
            "it (95 %, paired differences)"
        )
    if any(model.noise_floor for model in run.models):
        about = f"{FLOOR}: a noise floor, the reference's weights with other roundings"
        if run.noise_floor is not None:
            least = number_text(run.noise_floor.kld, KLD_DIGITS)
            about += f"; a KLD near or below its {least} says nothing about a quantization"
        notes.append(about)
    if run.is_answers:
        notes.append("acc and acc norm are counted as lm-eval does; their ± is one standard error over questions")
        if run.reference is not None:
            notes.append(
                f"flips: questions that only one of model and {run.reference['label']} has right (arXiv 2407.09141); "
                "McNemar p: how probable flips at least as one-sided are if neither is better (exact, two-sided, by "
                "acc)"
            )
    return notes


def column_notes(run: TextResult) -> dict[str, str]:
    """The footnotes that go with columns, by the column's name."""
    notes = {}
    if len({model.kv_cache for model in run.models if model.kv_cache}) > 1:
        notes["kv_cache"] = (
            "KV cache: the precision in which keys and values were kept while the text was scored; rows that differ in "
            "it differ in more than their weights"
        )
    if any(model.tokens_per_second for model in run.models):
        notes["speed"] = speed_note(run)
    return notes


def kv_size_notes(run: TextResult) -> list[str]:
    """Whose sizes of KV caches are not known, and why; whose caches hold the last tokens only."""
    labels: dict[str, list[str]] = {}
    for model in run.models:
        unknown = "the engine does not say" + (
            ", or did not when this row was scored (-cc)" if model.from_cache else ""
        )
        missing = f"KV MB n/a: {model.provenance.get(groups.NO_CACHE, unknown)}"
        said = missing if model.kv_mb is None else groups.kv_windows(model.kv_caches)
        if said and not model.error:
            labels.setdefault(said, []).append(model.label)
    return [f"{', '.join(named)}: {said}" for said, named in labels.items()]


def speed_note(run: TextResult) -> str:
    """What the speeds are."""
    timed = [model.timing for model in run.models if model.timing]
    first = max(((each.first_window - each.score_began) / each.scoring_seconds for each in timed), default=0.0)
    about = "tok/s: scored tokens per second, the first step included"
    about += f" (up to {100 * first:.0f} % of a row's seconds)" if first >= WORTH_SAYING else ""
    return about


def machine_name(model: ModelResult) -> str:
    """The GPU or CPU that a model ran on."""
    gpus = model.provenance.get("gpus")
    return str(gpus[0] if isinstance(gpus, list) and gpus else model.provenance.get("cpu", "an unknown machine"))


def window_notes(run: TextResult) -> list[str]:
    """How many windows and tokens were scored, and by which method they were cut."""
    method = run.data.get("method")
    if method == "answers":
        return answer_notes(run)
    cut = "conversations: " if method == "chat" else f"method {method}: " if method else ""
    scored = {(m.windows, m.estimates.ppl.tokens + m.estimates.ppl.non_finite) for m in run.models if m.estimates}
    whole = ranking.sampled_from(run)
    spread = f" of {whole:,}, spread over the text" if whole else ""
    lines = [f"{cut}{count:,} windows{spread}, {tokens:,} scored tokens" for count, tokens in sorted(scored)]
    return [*lines, *([sample_note(run, whole)] if whole else [])]


def sample_note(run: TextResult, whole: int) -> str:
    """How well spread windows know what all windows of the text would give."""
    worst = {"PPL": ranking.worst_ppl(run), f"KLD of every {ranking.kind_of_rows(run)}": ranking.worst_kld(run)}
    known = [
        f"{name} within {100 * each.error:.2g} %" for name, each in worst.items() if each and math.isfinite(each.error)
    ]
    within = f"{', '.join(known)} (one standard error; the table's ± is about other texts, too)" if known else "n/a"
    return f"what all {whole:,} windows of the text would give: {within}{ranking.rest_in_words(run)}"


def phase_notes(run: TextResult) -> list[str]:
    """What decode is, where rows were scored in its steps, and which those are if all were."""
    phases = {model.phase for model in run.models if model.phase} - {"prefill"}
    if not phases:
        return []
    everywhere = len(phases) == 1 and all(model.error or model.phase in phases for model in run.models)
    prompts = (
        "; behind prompts: what no score needs was computed as a prompt"
        if any("prompts" in phase for phase in phases)
        else ""
    )
    return [
        f"{f'all rows: {min(phases)}; ' if everywhere else ''}decode SxB: S tokens of each of B windows a step, as "
        f"generation computes them, with what came before in the KV cache{prompts}"
    ]


def rope_notes(run: TextResult) -> list[str]:
    """Whose windows reach beyond the context that the model had before its positions were scaled."""
    labels: dict[str, list[str]] = {}
    for model in run.models:
        scaling, tokens = model.provenance.get(ROPE), run.data.get("window_length")
        if isinstance(scaling, dict) and isinstance(tokens, int) and (said := beyond(scaling, tokens)):
            labels.setdefault(said, []).append(model.label)
    return [f"{', '.join(named)}: {said}" for said, named in labels.items()]


def answer_notes(run: TextResult) -> list[str]:
    """How many questions were asked, and what the columns of their answers are."""
    known = [model.estimates for model in run.models if model.estimates]
    asked = {found.answers.questions for found in known if found.answers}
    tokens = {found.ppl.tokens + found.ppl.non_finite for found in known}
    shots = (run.data.get("answers") or {}).get("num_fewshot")
    notes = [
        f"{questions:,} questions, {shots}-shot, {count:,} scored tokens of all answers, wrong ones too"
        for questions in sorted(asked) for count in sorted(tokens)
    ]  # fmt: skip
    if run.reference is not None and notes:
        compared = {m.label: m.estimates.answers for m in run.models if m.estimates and m.estimates.against}
        without = [label for label, own in compared.items() if own and own.acc.right and not own.acc.flips]
        why = "the reference's own scores leave the answer to a question open (no finite log-probability)"
        notes += [f"flips of {', '.join(without)} n/a: {why}"] if without else []
    return notes


def near_notes(run: TextResult) -> list[str]:
    """The rows that KLD does not rank."""
    near = near_lossless(run.models)
    labels = [model.marked_label for model in run.models if model.label in near]
    if len(labels) < 2:
        return []
    return [
        f"KLD cannot rank {', '.join(labels)}: each has a KLD of at most about twice the noise floor's, and KLDs so "
        "small say nothing about results of benchmarks (arXiv 2606.19558); answers that flip can rank them"
    ]


def error_notes(run: TextResult) -> list[str]:
    """Why no errors are known, or why they may be too small; no note if no model was measured."""
    measured = [model.estimates for model in run.models if model.estimates]
    if not measured:
        return []
    count = max(n_blocks(found.blocks) for found in measured)
    if count < 2:
        reason = "the text is too short to tell any" if count else "they were not measured with these results"
        return [f"errors n/a: {reason}"]
    return short_text_cautions(measured, run.data.get("text_tokens"))


def text_rates(run: TextResult) -> list[str]:
    """The reference's losses in units that no tokenizer changes."""
    rows = [(m.label, m.estimates.rates) for m in run.models if m.reference and m.estimates]
    return [
        f"{label}: {number_text(rates.bits_per_byte.value, 4)} bits per byte, byte perplexity "
        f"{number_text(rates.byte_perplexity.value, 4)}, word perplexity {number_text(rates.word_perplexity.value, 4)}"
        for label, rates in rows if rates
    ]  # fmt: skip


def model_notes(model: ModelResult, run: TextResult) -> list[str]:
    """One model's footnotes: failure, unknown size, non-finite scores, missing KLD, and the notes of the run."""
    failed, off, kld_off = bool(model.error), model.non_finite, model.kld_non_finite
    undecided = model.estimates.answers.undecided if model.estimates and model.estimates.answers else 0
    explained = failed or model.reference or model.kld_tokens is not None or bool(model.notes)
    notes = {
        f"failed: {model.error}": failed,
        f"size n/a: {model.storage_note}": bool(model.storage_note) and not failed,
        "kernel n/a: this engine does not say what it runs": not (failed or model.layers),
        "PPL n/a: it is too large for a number": model.estimates is not None and model.ppl is None,
        f"{off} positions had no finite log-probability; PPL leaves them out": off,
        f"{kld_off} positions had no finite KL divergence; KLD leaves them out": kld_off,
        f"acc n/a: {undecided:,} questions without finite log-probabilities to choose an answer by": undecided,
        "KLD n/a: this engine measured none": run.reference is not None and not explained,
    }
    return [*(note for note, holds in notes.items() if holds), *model.notes]


def notes_of_texts(results: RunResult) -> list[str]:
    """What is special to a table of several texts; the first note of each text's own says what it is."""
    notes = {text.name: [text.subtitle, *footnotes(text)] for text in results.scored}
    return [*(f"{text.name}: failed: {text.error}" for text in results.texts if text.error), *once(notes)]


def legend_of_texts(results: RunResult) -> list[str]:
    """What columns and marks of that table mean."""
    return [MEANS, *once({text.name: legend(text) for text in results.scored})]


def once(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """The notes of texts: what is not true of every text with the name of its text, and the rest once."""
    first, *others = notes.values()
    everywhere = [note for note in first if all(note in own for own in others)]
    return [*(f"{name}: {note}" for name, own in notes.items() for note in own if note not in everywhere), *everywhere]
