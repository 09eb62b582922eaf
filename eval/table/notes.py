"""The footnotes of a table: what is special about its run, rows and columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from ...backends.checkpoint.checkpoint_config import ROPE, rope_note
from ...backends.common.message_text import amount
from ...backends.layers import groups
from ..ranking import candidates_for_best, near_lossless, ranking, too_short, why_unranked
from ..results import MARK, ModelResult, RunResult, UsedText, deviations_of
from ..stats.block_sums import short_text_cautions
from ..text.slice_names import SPECIAL
from . import memory_fit
from .columns import column_of
from .measured_rows import blocks_of, measured_rows
from .numbers import AT_LEAST, PPL_DIGITS, number_text
from .row_marks import BEST, machine_letters
from .wording import texts_of, with_text_name

PLACEMENT = re.compile(
    "parallel|memory|device|executor|gpu|offload|streaming|load|concurrency|timeout|retries|threads"
    "|batch|api_key|trust"
)
"""Parts of names of options about place and speed, which are not meant to change scores."""
LabelledNote = tuple[str, str]
"""A row's label and a note on it; the note may be empty."""


def texts_note(run: RunResult) -> list[str]:
    """Return the names of several texts, and how much of them was scored."""
    if len(run.texts) > 1:
        return [run.subtitle]
    return []


def deviation_notes(run: RunResult) -> list[str]:
    """Return a note for each way in which a row ran differently from its checkpoint or spec."""
    notes = []
    for model in run.models:
        gpus = model.provenance.get("gpus")
        if isinstance(gpus, list) and gpus:
            machine = gpus[0]
        else:
            machine = model.provenance.get("cpu", "an unknown machine")
        for clause in deviations_of(model.provenance):
            notes.append(f"{MARK} {model.label}: {clause} on {machine}")
    return notes


def machine_notes(run: RunResult) -> list[str]:
    """Return the machine of each letter, by its longest name."""
    machines: dict[str, str] = {}
    for name, letter in machine_letters(run).items():
        if len(name) >= len(machines.get(letter, "")):
            machines[letter] = name
    return [f"where {letter}: {machines[letter]}" for letter in sorted(machines)]


def window_notes(run: RunResult) -> list[str]:
    """Return notes on the numbers of windows and scored tokens, and on the method that cut the
    windows, by text.
    """
    notes = []
    for text in run.texts:
        method = method_in_words(text)
        spread = ""
        if text.windows_of_the_text:
            spread = f" of {text.windows_of_the_text:,}, spread over the text"
        for windows, tokens in scored_counts(run, text):
            counts = f"{amount(windows, 'window')}{spread}, {amount(tokens, 'scored token')}"
            notes.append(with_text_name(run, text.name, method + counts))
    return notes


def method_in_words(text: UsedText) -> str:
    """Return the method that cut a text into windows; empty for the usual one."""
    if text.method == "chat":
        return "conversations: "
    if text.method == "sampled":
        return "sampled text: "
    if text.method:
        return f"method {text.method}: "
    return ""


def scored_counts(run: RunResult, text: UsedText) -> list[tuple[int, int]]:
    """Return the numbers of windows and scored tokens of a text; several if rows differ in them."""
    # A row's numbers are over all texts together.
    if len(run.texts) > 1:
        return [(text.windows, text.scored_tokens)]
    counts = set()
    for model in measured_rows(run.models):
        counts.add((model.windows, model.scored_tokens))
    return sorted(counts)


def sample_note(run: RunResult) -> list[str]:
    """Return how well the PPL of all windows is known, if the scored ones are a part of them."""
    if not run.is_sample:
        return []
    errors = []
    for model in run.models:
        if model.ln_ppl_stderr_of_text is not None:
            errors.append(model.ln_ppl_stderr_of_text)
    if not errors:
        return []
    windows = f"what all {run.available_windows:,} windows of the {texts_of(run)} would give"
    precision = f"PPL within {100 * max(errors):.2g} %"
    return [f"{windows}: {precision} (one standard error; the table's ± is for other texts, too)"]


def text_notes(run: RunResult) -> list[str]:
    """Return the notes that cutting has made on each text."""
    notes = []
    for text in run.texts:
        for note in text.notes:
            notes.append(with_text_name(run, text.name, note))
    return notes


def decode_note(run: RunResult) -> list[str]:
    """Return what decode is, if a row was scored in it."""
    phases = {model.phase or "" for model in run.models if not model.error}
    decode_phases = phases - {"prefill"}
    if not decode_phases:
        return []
    all_rows = ""
    # The column of the phase is not in the table if all rows have the same one.
    if len(phases) == 1:
        all_rows = f"all rows: {min(decode_phases)}; "
    step = "S tokens of each of B windows a step, as generation computes them"
    return [f"{all_rows}decode SxB: {step}, with what came before in the KV cache"]


def same_scores_notes(run: RunResult) -> list[str]:
    """Return notes on rows with the same score at every token.

    They ask whether options that differ were applied.
    """
    scored = [model for model in run.models if model.scores_digest]
    # The others are compared with the reference, wherever its row is.
    scored.sort(key=lambda model: not model.reference)
    first_rows: dict[str, ModelResult] = {}
    notes = []
    for model in scored:
        first = first_rows.setdefault(model.scores_digest, model)
        if first is model:
            continue
        note = f"same scores at every token as {first.label}"
        options = ineffective_options(first, model)
        if options:
            note += f": was {' and '.join(options)} applied?"
        notes.append((model.label, note))
    return by_note(notes)


def ineffective_options(first: ModelResult, second: ModelResult) -> list[str]:
    """Return the options in which two rows with the same scores differ, and that may not have been
    applied: ``engine.seed``.
    """
    if first.loads != second.loads:
        return []
    options = []
    for name in first.engine_options | second.engine_options:
        if first.engine_options.get(name) == second.engine_options.get(name):
            continue
        if PLACEMENT.search(name):
            continue
        if not (is_applied(first, name) and is_applied(second, name)):
            options.append(f"engine.{name}")
    return options


def is_applied(model: ModelResult, name: str) -> bool:
    """Return True if the provenance has the value of the spec's option, or if the spec does not set
    it.
    """
    ran = model.provenance.get(name)
    return bool(model.engine_options.get(name, ran) == ran)


def rotary_notes(run: RunResult) -> list[str]:
    """Return notes on rows whose scaled rotary embedding changes windows of this length."""
    tokens = run.data.get("window_length")
    if not isinstance(tokens, int):
        return []
    notes = []
    for model in run.models:
        scaling = model.provenance.get(ROPE)
        if isinstance(scaling, dict):
            notes.append((model.label, rope_note(scaling, tokens)))
    return by_note(notes)


def short_text_notes(run: RunResult) -> list[str]:
    """Return notes on errors that are not known, or too small, because the text is short."""
    blocks = blocks_of(run.models)
    if blocks and max(sums.held for sums in blocks) <= 1:
        return ["errors n/a: the text is too short to estimate them"]
    return short_text_cautions(blocks, run.text_tokens)


def reference_ppl_note(run: RunResult) -> list[str]:
    """Return the reference's PPL if it has no row.

    A user then notices at once that a reference store is of another text.
    """
    if run.reference is None or reference_rows(run) or run.reference_ppl is None:
        return []
    ppl = number_text(run.reference_ppl, PPL_DIGITS)
    return [f"the reference, {run.reference['label']}, has a PPL of {ppl} on these tokens"]


def quantized_reference_note(run: RunResult) -> list[str]:
    """Return a note on a reference that is quantized itself."""
    notes = []
    for model in reference_rows(run):
        # A row whose layers and sizes are unknown counts as quantized, but may not be.
        if model.is_quantized and (model.layers or model.bpw_layer):
            notes.append(
                f"{model.label}: the reference is quantized itself, so that a KLD is the distance "
                "from it, and not from the original"
            )
    return notes


def reference_rates_note(run: RunResult) -> list[str]:
    """Return the reference's rates over bytes and words."""
    notes = []
    for model in reference_rows(run):
        if model.bits_per_byte is not None:
            bits = f"{number_text(model.bits_per_byte, 4)} bits per byte"
            of_bytes = f"byte perplexity {number_text(model.byte_perplexity, 4)}"
            of_words = f"word perplexity {number_text(model.word_perplexity, 4)}"
            notes.append(f"{model.label}: {bits}, {of_bytes}, {of_words}")
    return notes


def reference_rows(run: RunResult) -> list[ModelResult]:
    """Return the row of the reference; empty if the run has no reference, or if it has no row."""
    if run.reference is None:
        return []
    return [model for model in run.models if model.reference]


def no_star_note(run: RunResult) -> list[str]:
    """Return why no row is marked as the best, if the text is too short for that."""
    candidates = candidates_for_best(run.models, "nll")
    if len(candidates) < 2:
        return []
    reason = too_short(candidates)
    if not reason:
        return []
    return [f"no {BEST}: {reason}"]


def kinds_note(run: RunResult) -> list[str]:
    """Return what KLDs that are bounds or estimates mean, and which stars they cost."""
    bounds = []
    estimates = []
    for model in run.models:
        if model.has_bound:
            bounds.append(model)
        elif model.kld is not None and model.kld_kind == "estimate":
            estimates.append(model)
    notes = []
    if bounds:
        note = f"{labels_of(bounds)}: {AT_LEAST} marks a bound of the KLD"
        notes.append(f"{note}: the model loses at least this, and may lose more")
        notes += bounds_without_star(run, bounds)
    if estimates:
        note = f"{labels_of(estimates)}: KLD is estimated from a part of the log-probabilities"
        notes.append(f"{note}; its ± contains the error of this estimate")
    return notes


def bounds_without_star(run: RunResult, bounds: Sequence[ModelResult]) -> list[str]:
    """Return which stars of KLD the rows with bounds cost; empty if they cost none."""
    candidates = candidates_for_best(run.models, "kld")
    bounded = [model for model in candidates if model in bounds]
    if not bounded or len(candidates) < 2 or too_short(candidates):
        return []
    ranked = ranking(candidates, "kld", near_lossless(run.models))
    if ranked.best.has_bound:
        return [f"no {BEST} in KLD: no more than bounds are known"]
    if ranked.undecided:
        rows = labels_of(ranked.undecided)
        return [f"no {BEST} in KLD: whether {rows} would have it is not known"]
    return [f"{labels_of(bounded)}: no {BEST} in KLD, because only a bound is known"]


def labels_of(models: Sequence[ModelResult]) -> str:
    """Return the labels of rows, with commas."""
    return ", ".join(model.label for model in models)


def near_lossless_note(run: RunResult) -> list[str]:
    """Return a note on several rows that KLD cannot rank, because they are nearly lossless."""
    lossless_labels = near_lossless(run.models)
    if len(lossless_labels) < 2:
        return []
    labels = ", ".join(model.marked_label for model in run.models if model.label in lossless_labels)
    return [
        f"KLD cannot rank {labels}: each has a KLD of {why_unranked(run.models)}, and such small "
        "KLDs say nothing about results of benchmarks (arXiv 2606.19558); answers that flip can "
        "rank them (compare-q flips)"
    ]


def cache_note(run: RunResult) -> list[str]:
    """Return a note on rows that an earlier run has scored."""
    count = sum(model.from_cache for model in run.models)
    if not count:
        return []
    rows = f"{count} of {len(run.models)} rows"
    return [f"{rows} come from the cache: an earlier run measured their speed (*)"]


def notes_of_rows(run: RunResult) -> list[str]:
    """Return the notes of all rows, each after the labels of its rows."""
    notes = []
    for model in run.models:
        for note in model_notes(model, run):
            notes.append((model.label, note))
    return by_note(notes)


def model_notes(model: ModelResult, run: RunResult) -> list[str]:
    """Return one model's footnotes: failure, unknown values with the reason, and the notes of its
    run.
    """
    if model.error:
        return [f"failed: {model.error}", *score_notes(model), *model.notes]
    notes = []
    if model.storage_note:
        notes.append(f"size n/a: {model.storage_note}")
    if not model.layers:
        notes.append("kernel n/a: this engine does not report its kernels")
    notes += score_notes(model)
    is_explained = model.reference or model.kld_tokens is not None or model.notes
    if run.reference is not None and not is_explained:
        notes.append("KLD n/a: this engine measured none")
    return [*notes, *model.notes]


def score_notes(model: ModelResult) -> list[str]:
    """Return a model's footnotes on scores that are not finite."""
    notes = []
    if model.blocks is not None and model.ppl is None:
        notes.append("PPL n/a: it is too large for a number")
    if model.non_finite:
        positions = f"{model.non_finite} positions"
        notes.append(f"{positions} had no finite log-probability; PPL leaves them out")
    if model.kld_non_finite:
        positions = f"{model.kld_non_finite} positions"
        notes.append(f"{positions} had no finite KL divergence; KLD leaves them out")
    return notes


def kv_size_notes(run: RunResult, columns: Collection[str]) -> list[str]:
    """Return notes on rows whose KV cache has an unknown size, or holds only the last tokens."""
    if "kv_mb" not in columns:
        return []
    notes = []
    for model in run.models:
        if model.error:
            continue
        if model.kv_mb is not None:
            notes.append((model.label, groups.kv_windows(model.kv_caches)))
            continue
        unknown = "the engine does not say"
        if model.from_cache:
            unknown += ", or did not when this row was scored (-cc)"
        reason = model.provenance.get(groups.NO_CACHE, unknown)
        notes.append((model.label, f"KV MB n/a: {reason}"))
    return by_note(notes)


def estimate_notes(run: RunResult, columns: Collection[str]) -> list[str]:
    """Return why columns of the table have no value for a row whose KLD is an estimate."""
    reasons = []
    for name in columns:
        column = column_of(name)
        if not column.shows_kld:
            continue
        if column.slice == SPECIAL:
            reasons.append(
                f"{name} n/a: the KLD is an estimate, which needs tokens that are not chosen by "
                "what they are"
            )
        elif not column.error:
            reasons.append(
                f"{column.title} n/a: the KLD is an estimate, whose values of single tokens are no "
                "KLDs"
            )
    notes = []
    for model in run.models:
        if model.kld is not None and model.kld_kind == "estimate":
            notes += [(model.label, reason) for reason in reasons]
    return by_note(notes)


def memory_notes(run: RunResult, columns: Collection[str]) -> list[str]:
    """Return notes on the memory of serving."""
    memory_columns = []
    for name in columns:
        if name.startswith("memory:"):
            memory_columns.append(column_of(name))
    if not memory_columns:
        return []
    notes: list[LabelledNote] = []
    for model in run.models:
        if model.error:
            continue
        facts = memory_fit.memory_facts(model)
        for column in memory_columns:
            facts += memory_fit.too_long(model, column)
        for fact in facts:
            # A note of --fit may have the fact already.
            if not any(fact in note for note in model.notes):
                notes.append((model.label, fact))
    without = "GPU context, graphs, workspaces, room for more sequences"
    return [f"memory: without what the engine reserves ({without})", *by_note(notes)]


NOTES_ON_RUN: tuple[Callable[[RunResult], list[str]], ...] = (
    texts_note,
    deviation_notes,
    machine_notes,
    window_notes,
    sample_note,
    text_notes,
    decode_note,
    same_scores_notes,
    rotary_notes,
    short_text_notes,
    reference_ppl_note,
    quantized_reference_note,
    reference_rates_note,
    no_star_note,
    kinds_note,
    near_lossless_note,
    cache_note,
    notes_of_rows,
)
"""The functions that make the notes on a run, in the order of the notes."""
NOTES_ON_COLUMNS: tuple[Callable[[RunResult, Collection[str]], list[str]], ...] = (
    kv_size_notes,
    estimate_notes,
    memory_notes,
)
"""The functions that make the notes on columns, which follow."""


def footnotes(run: RunResult, columns: Collection[str] = ()) -> list[str]:
    """Return the notes that are special to the table of a run with the columns of these names, one
    line each.
    """
    notes: list[str] = []
    for notes_of_run in NOTES_ON_RUN:
        notes += notes_of_run(run)
    for notes_of_columns in NOTES_ON_COLUMNS:
        notes += notes_of_columns(run, columns)
    return notes


def by_note(labelled_notes: Iterable[LabelledNote]) -> list[str]:
    """Return the notes, each after the labels of its rows; empty notes are left out."""
    labels_by_note: dict[str, list[str]] = {}
    for label, note in labelled_notes:
        if note:
            labels_by_note.setdefault(note, []).append(label)
    return [f"{', '.join(labels)}: {note}" for note, labels in labels_by_note.items()]
