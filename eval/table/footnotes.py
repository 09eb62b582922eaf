"""The footnotes of a table: marks, windows, errors, the reference, each model's own notes, and the means of texts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from compare_q.eval.results import sampled
from compare_q.eval.results.differences import LEAST_TOKENS, best_labels, near_lossless, too_short_for_best
from compare_q.eval.results.digits import KLD_DIGITS, PPL_DIGITS, number_text
from compare_q.eval.results.flat import concurrent_rows_text
from compare_q.eval.results.run_result import MARK, ModelResult, Part, Results, TextResult
from compare_q.eval.stats.estimates import n_blocks, short_text_cautions
from compare_q.eval.stats.uncertainty import longest_documents
from compare_q.eval.table.columns import BESIDE, BEST, FLOOR, machine_letters

COMMON_ERROR = (
    "the error of PPL is mostly the text's, and common to all rows: differences between rows are far more certain "
    "(--pairs)"
)
WORTH_SAYING = 0.1
"""Share of a row's seconds from which its first step, in which engines compile, is told."""
MEANS = (
    "mean: over the texts, which weigh alike, of KLD the mean of the texts' means, of PPL the geometric mean, "
    "without answers; "
    "n/a unless every text has a value; its ± takes the texts' errors as independent"
)


def footnotes(run: TextResult, parts: Sequence[Part] = (), *, letters: bool = True) -> list[str]:
    """Every footnote of a table but those of columns, one line each; ``parts``: the runs that it was merged from.

    ``letters``: whether the table has letters for machines.
    """
    notes = [
        f"{MARK} {model.label}: {clause} on {machine_name(model)}"
        for model in run.models for clause in model.deviations
    ]  # fmt: skip
    fullest = {
        letter: machine for machine, letter in sorted(machine_letters(run).items(), key=lambda each: len(each[0]))
    }
    notes += [f"where {letter}: {machine}" for letter, machine in sorted(fullest.items()) if letters]
    notes += [*merge_notes(parts), *window_notes(run), *phase_notes(run), *error_notes(run)]
    if run.reference is not None:
        about = f"KLD (nats, mean over tokens) and same top: against {run.reference['label']}"
        if run.reference_ppl is not None and not any(model.is_reference for model in run.models):
            # So that a reference store of another text is noticed at once.
            about += f", whose own PPL on these tokens is {number_text(run.reference_ppl, PPL_DIGITS)}"
        notes += [about, *text_rates(run)]
    notes += best_notes(run)
    if any(model.is_noise_floor for model in run.models):
        about = f"{FLOOR} marked as the noise floor, the reference's weights with other roundings"
        if run.noise_floor is not None and run.noise_floor.kld is not None:
            least = number_text(run.noise_floor.kld.value, KLD_DIGITS)
            about += f"; a KLD near or below its {least} says nothing about a quantization"
        notes.append(about)
    notes += near_notes(run)
    if cached := sum(model.cached for model in run.models):
        notes.append(f"{cached} of {len(run.models)} rows come from the cache; their speed (*) is of an earlier run")
    return notes + [f"{model.label}: {note}" for model in run.models for note in model_notes(model, run)]


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


def speed_note(run: TextResult) -> str:
    """What the speeds are, and what ran beside the rows."""
    timed = [model.timing for model in run.models if model.timing]
    first = max(((each.first_window - each.score_began) / each.scoring_seconds for each in timed), default=0.0)
    about = "tok/s: scored tokens a second, the first step included"
    about += f" (up to {100 * first:.0f} % of a row's seconds)" if first >= WORTH_SAYING else ""
    if any(concurrent_rows_text(model, run.models) for model in run.models):
        about += f"; {BESIDE} while other rows loaded or were scored on the same machine (--columns speed,beside)"
    if any(model.tokens_per_second and model.timing is None for model in run.models):
        about += "; of rows of compare_q 0.2 it is not known what ran beside them"
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
    scored = {(model.windows, model.ppl.tokens + model.ppl.non_finite) for model in run.models if model.ppl}
    whole = sampled.available(run)
    spread = f" of {whole:,}, spread over the text" if whole else ""
    lines = [f"{cut}{count:,} windows{spread}, {tokens:,} scored tokens" for count, tokens in sorted(scored)]
    return [*lines, *([sample_note(run, whole)] if whole else [])]


def sample_note(run: TextResult, whole: int) -> str:
    """How well spread windows know what all windows of the text would give."""
    worst = {"PPL": sampled.worst_ppl(run), f"KLD of every {sampled.kind_of_rows(run)}": sampled.worst_kld(run)}
    known = [
        f"{name} within {100 * each.error:.2g} %" for name, each in worst.items() if each and math.isfinite(each.error)
    ]
    within = f"{', '.join(known)} (one standard error; ± is about other texts like this one too)" if known else "n/a"
    return f"the same of all {whole:,} windows: {within}{sampled.rest_in_words(run)}"


def phase_notes(run: TextResult) -> list[str]:
    """What decode is, where rows were scored in its steps, and which those are if all were."""
    phases = {model.phase for model in run.models if not model.error} - {"prefill"}
    if not phases:
        return []
    everywhere = len(phases) == 1 and all(model.error or model.phase in phases for model in run.models)
    return [
        f"{f'all rows: {min(phases)}; ' if everywhere else ''}decode SxB: S tokens of each of B windows a step, as "
        "generation computes them, with what came before in the KV cache"
    ]


def answer_notes(run: TextResult) -> list[str]:
    """How many questions were asked, and what the columns of their answers are."""
    known = [model.estimates for model in run.models if model.estimates]
    asked = {found.answers.questions for found in known if found.answers}
    tokens = {found.ppl.tokens + found.ppl.non_finite for found in known}
    shots = (run.data.get("answers") or {}).get("num_fewshot")
    notes = [
        f"{questions:,} questions, {shots}-shot, {count:,} scored tokens: all answers, wrong ones too; acc and acc "
        "norm: as lm-eval, ± one standard error over questions"
        for questions in sorted(asked) for count in sorted(tokens)
    ]  # fmt: skip
    if run.reference is not None and notes:
        notes.append(
            f"flips: questions that either the model or {run.reference['label']} has right (arXiv 2407.09141); "
            "McNemar p: how probable flips so one-sided are if neither is better (exact, two-sided; by acc)"
        )
        compared = {m.label: m.estimates.answers for m in run.models if m.estimates and m.estimates.against}
        without = [label for label, own in compared.items() if own and own.acc.right and not own.acc.flips]
        why = "the reference's own scores leave the answer to a question open (no finite log-probability)"
        notes += [f"flips of {', '.join(without)} n/a: {why}"] if without else []
    return notes


def best_notes(run: TextResult) -> list[str]:
    """The meaning of the mark of the best, or why no row has it."""
    if (length := too_short_for_best(run.models)) is not None:
        reason = f"even a KLD twice as large is often not told apart on {length:,} tokens of text"
        return [f"no {BEST}: {reason} (from {LEAST_TOKENS:,} on it mostly is)"]
    if not any(best_labels(run.models, name) for name in ("nll", "kld", "same_top")):
        return []
    return [
        f"{BEST} the best of its column among quantized models (below 16 bpw), and what cannot be told from it "
        "(95 %, paired differences)"
    ]


def near_notes(run: TextResult) -> list[str]:
    """The rows that KLD does not rank."""
    near = near_lossless(run.models)
    labels = [model.marked_label for model in run.models if model.label in near]
    if len(labels) < 2:
        return []
    return [
        f"KLD cannot rank {', '.join(labels)}: they are within twice the noise floor's, where it does not go with "
        "results of benchmarks (arXiv 2606.19558); answers that flip, and more text, can"
    ]


def error_notes(run: TextResult) -> list[str]:
    """What the errors are; no note if no model was measured."""
    measured = [model.estimates for model in run.models if model.estimates]
    if not measured:
        return []
    count = max(n_blocks(found.blocks) for found in measured)
    if count < 2:
        reason = "the text is too short to tell any" if count else "they were not measured with these results"
        return [f"errors n/a: {reason}"]
    longest = longest_documents(max(found.blocks.length for found in measured))
    short = short_text_cautions(measured, run.data.get("text_tokens"))
    holds = "" if short else f" (too small if the documents of the text are longer than about {longest:,} tokens)"
    about = f"± is one standard error, from {count} blocks of the text{holds}; {COMMON_ERROR}"
    return [about, *short]


def merge_notes(parts: Sequence[Part]) -> list[str]:
    """Footnotes of a merged run: its parts, the versions in which they differ, and the references of their KLDs."""
    if not parts:
        return []
    runs = [f"{part.file} ({part.origin['created'][:10]}, {part.where}; rows: {len(part.labels)})" for part in parts]
    versions = [part.origin["versions"] for part in parts]
    off = [
        f"{name} " + ", ".join(own.get(name, "none") for own in versions)
        for name in dict.fromkeys(itertools.chain(*versions)) if len({own.get(name) for own in versions}) > 1
    ]  # fmt: skip
    return [
        f"merged from {len(parts)} runs: {'; '.join(runs)}",
        *([f"their versions differ, in this order: {'; '.join(off)}"] if off else []),
        *reference_notes(parts),
    ]


def reference_notes(parts: Sequence[Part]) -> list[str]:
    """Where runs had references of their own: how far these references are apart."""
    first: dict[Any, Part] = {}
    for part in parts:
        if part.reference is not None:
            first.setdefault(part.reference_key, part)
    if len(first) < 2:
        return []
    found = [f"{number_text(part.reference_ppl, PPL_DIGITS)} on {part.where} ({part.file})" for part in first.values()]
    known = [part.reference_ppl for part in first.values() if part.reference_ppl]
    apart = f", {100 * (max(known) / min(known) - 1):.3f} % apart" if len(known) == len(first) else ""
    return [
        "KLD and same top of each row are against the reference as the row's own run measured it (the same model, "
        f"engine and options), PPL {'; '.join(found)}{apart}; KLDs against two of them are not paired, and have no star"
    ]


def text_rates(run: TextResult) -> list[str]:
    """The reference's losses in units that no tokenizer changes."""
    rows = [(m.label, m.estimates.rates) for m in run.models if m.is_reference and m.estimates]
    return [
        f"{label}: {number_text(rates.bits_per_byte.value, 4)} bits per byte, byte perplexity "
        f"{number_text(rates.byte_perplexity.value, 4)}, word perplexity {number_text(rates.word_perplexity.value, 4)}"
        for label, rates in rows if rates
    ]  # fmt: skip


def model_notes(model: ModelResult, run: TextResult) -> list[str]:
    """One model's footnotes: failure, unknown size, non-finite scores, missing KLD, and the notes of the run."""
    ppl, kld, failed = model.ppl, model.kld, bool(model.error)
    undecided = model.estimates.answers.undecided if model.estimates and model.estimates.answers else 0
    explained = failed or model.is_reference or bool(kld) or bool(model.notes)
    notes = {
        f"failed: {model.error}": failed,
        f"size n/a: {model.storage.note}": bool(model.storage.note) and not failed,
        "kernel n/a: this engine does not say what it runs": not (failed or model.layers),
        "PPL n/a: it is too large for a number": ppl is not None and ppl.value is None,
        f"{ppl and ppl.non_finite} positions had no finite log-probability; PPL leaves them out": ppl
        and ppl.non_finite,
        f"{kld and kld.non_finite} positions had no finite KL divergence; KLD leaves them out": kld and kld.non_finite,
        f"acc n/a: {undecided:,} questions without finite log-probabilities to choose an answer by": undecided,
        "KLD n/a: this engine measured none": run.reference is not None and not explained,
    }
    return [*(note for note, holds in notes.items() if holds), *model.notes]


def notes_of_texts(results: Results) -> list[str]:
    """The footnotes: what is true of every text once, and what is not with the name of its text.

    The first of a text's own says what it is; what ± is stands below the table once.
    """
    notes = {
        text.name: [text.subtitle, *(note.removesuffix(f"; {COMMON_ERROR}") for note in footnotes(text))]
        for text in results.scored
    }
    first, *others = notes.values()
    everywhere = [note for note in first if all(note in own for own in others)]
    lines = [f"{text.name}: failed: {text.error}" for text in results.texts if text.error]
    lines += [f"{name}: {note}" for name, own in notes.items() for note in own if note not in everywhere]
    has_errors = any(model.ppl and model.ppl.stderr is not None for text in results.scored for model in text.models)
    return [*lines, *([COMMON_ERROR] if has_errors else []), MEANS, *everywhere]
