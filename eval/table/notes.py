"""The footnotes of a table: its special conditions, and the legend of its columns and marks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ...backends.checkpoint.checkpoint_config import ROPE, beyond
from ...backends.common.message_text import amount
from ...backends.layers import groups
from ..ranking import best_labels, candidates_for_best, near_lossless, too_short, why_unranked
from ..results import MARK, ModelResult, RunResult, deviations_of
from ..stats.block_sums import short_text_cautions
from ..stats.uncertainty import longest_documents
from . import columns as all_columns
from . import memory_fit
from .numbers import KLD_DIGITS, PPL_DIGITS, kld_in_words, number_text

BEST = "\N{BLACK STAR}"
"""Before the best value of a column."""
TOO_LARGE = "\N{BALLOT X}"
"""After the label of a row that ``--fit`` excludes."""
FLOOR = "\N{ALMOST EQUAL TO}"
"""After the label of a noise floor."""
COMMON_ERROR = (
    "the ± of PPL shows how far another text of this kind would move all rows together: differences between rows are "
    "far more precise (--pairs)"
)
NOTEWORTHY = 0.1
"""Smallest share of a row's seconds that the first step, in which engines compile, needs for the
note on speeds."""
PLACEMENT = re.compile(
    "parallel|memory|device|executor|gpu|offload|streaming|load|concurrency|timeout|retries|threads|batch|api_key|trust"
)
"""Parts of names of options about place and speed, which are not meant to change scores."""
OF_ALL_TEXTS = (
    "PPL, KLD and same top without a text's name are over all scored tokens of all texts: a text with more of them "
    "counts more"
)


def label_of(model: ModelResult) -> str:
    """Return the label with its marks."""
    marks = {FLOOR: model.noise_floor, TOO_LARGE: model.fits is False}
    return " ".join([model.marked_label, *(mark for mark, holds in marks.items() if holds)])


def machine_letters(run: RunResult) -> dict[str, str]:
    """Return a letter for each machine, in the order of the rows; empty if all rows ran on the same
    machine.

    A name that is a part of one other name is the same machine: "GPU" is the same as "GPU, CPU", as
    llama.cpp names it.
    """
    found: dict[str, str] = {}
    letters: dict[str, str] = {}
    names = dict.fromkeys(model.where for model in run.models if model.where)
    for name in names:
        fuller = [other for other in names if set(name.split(", ")) < set(other.split(", "))]
        found[name] = letters.setdefault(
            fuller[0] if len(fuller) == 1 else name, chr(ord("A") + len(letters))
        )
    return found if len(letters) > 1 else {}


def footnotes(run: RunResult, columns: Collection[str] = ()) -> list[str]:
    """Return the notes that are special to the table of a run with the columns of these names, one
    line each.
    """
    rows = run.models
    notes = [run.subtitle] if len(run.texts) > 1 else []
    for model in rows:
        gpus = model.provenance.get("gpus")
        machine = (
            gpus[0]
            if isinstance(gpus, list) and gpus
            else model.provenance.get("cpu", "an unknown machine")
        )
        notes += [
            f"{MARK} {model.label}: {clause} on {machine}"
            for clause in deviations_of(model.provenance)
        ]
    machines = sorted(machine_letters(run).items(), key=lambda each: len(each[0]))
    notes += [
        f"where {letter}: {machine}"
        for letter, machine in sorted({b: a for a, b in machines}.items())
    ]
    notes += window_notes(run)
    notes += [after_name(run, text.name, note) for text in run.texts for note in text.notes]
    phases = {model.phase or "" for model in rows if not model.error}
    if decode := phases - {"prefill"}:
        everywhere = f"all rows: {min(decode)}; " if len(phases) == 1 else ""
        notes.append(
            f"{everywhere}decode SxB: S tokens of each of B windows a step, as generation computes them, with what came"
            " before in the KV cache"
        )
    notes += same_notes(rows)
    tokens, ropes = (
        run.data.get("window_length"),
        [(model.label, model.provenance.get(ROPE)) for model in rows],
    )
    notes += by_note(
        (label, beyond(rope, tokens))
        for label, rope in ropes
        if isinstance(rope, dict) and isinstance(tokens, int)
    )
    measured = [model.blocks for model in rows if model.blocks]
    if max((blocks.held for blocks in measured), default=2) > 1:
        notes += short_text_cautions(measured, run.text_tokens)
    else:
        notes.append("errors n/a: the text is too short to estimate them")
    notes += reference_notes(run)
    candidates = candidates_for_best(rows, "nll")
    if len(candidates) > 1 and (reason := too_short(candidates)):
        notes.append(f"no {BEST}: {reason}")
    near = near_lossless(rows)
    if len(near) > 1:
        labels = ", ".join(model.marked_label for model in rows if model.label in near)
        notes.append(
            f"KLD cannot rank {labels}: each has a KLD of {why_unranked(rows)}, and such small KLDs say "
            "nothing about results of benchmarks (arXiv 2606.19558); answers that flip can rank them (compare-q flips)"
        )
    if cached := sum(model.from_cache for model in rows):
        notes.append(
            f"{cached} of {len(rows)} rows come from the cache: an earlier run measured their speed (*)"
        )
    notes += by_note((model.label, note) for model in rows for note in model_notes(model, run))
    return notes + memory_notes(run, columns)


def same_notes(rows: Sequence[ModelResult]) -> list[str]:
    """Return notes on rows with the same score at every token; they ask whether options that differ
    were applied.
    """
    said, firsts = [], dict[str, ModelResult]()
    for model in sorted(
        (row for row in rows if row.scores_digest), key=lambda row: not row.reference
    ):
        first = firsts.setdefault(model.scores_digest, model)
        if model is first:
            continue
        names = (
            []
            if model.loads != first.loads
            else [
                name
                for name in {**first.engine_options, **model.engine_options}
                if first.engine_options.get(name) != model.engine_options.get(name)
                and not PLACEMENT.search(name)
                and not (applied(first, name) and applied(model, name))
            ]
        )
        question = f": was engine.{' and engine.'.join(names)} applied?" if names else ""
        said.append((model.label, f"same scores at every token as {first.label}{question}"))
    return by_note(said)


def applied(model: ModelResult, name: str) -> bool:
    """Return True if the provenance has the value of the spec's option, or if the spec does not set
    it.
    """
    ran = model.provenance.get(name)
    return bool(model.engine_options.get(name, ran) == ran)


def after_name(run: RunResult, name: str, note: str) -> str:
    """Return a note on one text, which begins with the text's name if there are several."""
    return f"{name}: {note}" if len(run.texts) > 1 else note


def window_notes(run: RunResult) -> list[str]:
    """Return notes on the numbers of windows and scored tokens, and on the method that cut the
    windows, by text.
    """
    lines = []
    for text in run.texts:
        cut = (
            "conversations: "
            if text.method == "chat"
            else f"method {text.method}: "
            if text.method
            else ""
        )
        whole = text.windows_of_the_text
        spread = f" of {whole:,}, spread over the text" if whole else ""
        counts = {(text.windows, text.scored_tokens)}
        if len(run.texts) == 1:
            counts = {(model.windows, model.scored_tokens) for model in run.models if model.blocks}
        for windows, tokens in sorted(counts):
            line = f"{cut}{amount(windows, 'window')}{spread}, {amount(tokens, 'scored token')}"
            lines.append(after_name(run, text.name, line))
    if not run.is_sample:
        return lines
    of_text = [model.ln_ppl_stderr_of_text for model in run.models]
    errors = [error for error in of_text if error is not None]
    if errors:
        whose = "of the text" if len(run.texts) == 1 else "of the texts"
        within = f"PPL within {100 * max(errors):.2g} % (one standard error; the table's ± is for other texts, too)"
        lines.append(f"what all {run.available_windows:,} windows {whose} would give: {within}")
    return lines


def reference_notes(run: RunResult) -> list[str]:
    """Return notes: the reference's rates over bytes and words, or its PPL if it has no row; if it
    is quantized.
    """
    if run.reference is None:
        return []
    rows = [model for model in run.models if model.reference]
    if (
        not rows and run.reference_ppl is not None
    ):  # so that a reference store of another text is noticed at once
        ppl = number_text(run.reference_ppl, PPL_DIGITS)
        return [f"the reference, {run.reference['label']}, has a PPL of {ppl} on these tokens"]
    quantized = [
        f"{model.label}: the reference is quantized itself, so that a KLD is the distance from it, and not from the "
        "original"
        for model in rows
        if model.is_quantized and (model.layers or model.bpw_layer)
    ]
    return quantized + [
        f"{model.label}: {number_text(model.bits_per_byte, 4)} bits per byte, byte perplexity "
        f"{number_text(model.byte_perplexity, 4)}, word perplexity {number_text(model.word_perplexity, 4)}"
        for model in rows
        if model.bits_per_byte is not None
    ]


def memory_notes(run: RunResult, columns: Collection[str]) -> list[str]:
    """Return notes on the sizes of KV caches, and on the memory of serving, if the table has such
    columns.
    """
    notes = kv_size_notes(run) if "kv_mb" in columns else []
    if not any(name.startswith("memory:") for name in columns):
        return notes
    engine = "without what the engine reserves (GPU context, graphs, workspaces, room for more sequences)"
    lengths = [all_columns.named(name) for name in columns if name.startswith("memory:")]
    said: list[tuple[str, str]] = []
    for model in run.models:
        if model.error:
            continue
        facts = memory_fit.facts(model)
        for column in lengths:
            facts += memory_fit.too_long(model, column)
        said += [
            (model.label, fact) for fact in facts if not any(fact in note for note in model.notes)
        ]  # of --fit
    return [*notes, f"memory: {engine}", *by_note(said)]


def kv_size_notes(run: RunResult) -> list[str]:
    """Return notes on rows whose KV cache has an unknown size, or holds only the last tokens."""
    said = []
    for model in run.models:
        unknown = "the engine does not say"
        unknown += ", or did not when this row was scored (-cc)" if model.from_cache else ""
        missing = f"KV MB n/a: {model.provenance.get(groups.NO_CACHE, unknown)}"
        if not model.error:
            said.append(
                (
                    model.label,
                    missing if model.kv_mb is None else groups.kv_windows(model.kv_caches),
                )
            )
    return by_note(said)


def by_note(said: Iterable[tuple[str, str]]) -> list[str]:
    """Return the notes, each after its labels; ``said``: (label, note or "")."""
    labels: dict[str, list[str]] = {}
    for label, note in said:
        if note:
            labels.setdefault(note, []).append(label)
    return [f"{', '.join(named)}: {note}" for note, named in labels.items()]


def model_notes(model: ModelResult, run: RunResult) -> list[str]:
    """Return one model's footnotes: failure, unknown values with the reason, and the notes of its
    run.
    """
    failed = bool(model.error)
    explained = failed or model.reference or model.kld_tokens is not None or bool(model.notes)
    notes = {
        f"failed: {model.error}": failed,
        f"size n/a: {model.storage_note}": bool(model.storage_note) and not failed,
        "kernel n/a: this engine does not report its kernels": not (failed or model.layers),
        "PPL n/a: it is too large for a number": model.blocks is not None and model.ppl is None,
        f"{model.non_finite} positions had no finite log-probability; PPL leaves them out": model.non_finite,
        f"{model.kld_non_finite} positions had no finite KL divergence; KLD leaves them out": model.kld_non_finite,
        "KLD n/a: this engine measured none": run.reference is not None and not explained,
    }
    return [*(note for note, holds in notes.items() if holds), *model.notes]


def legend(run: RunResult) -> list[str]:
    """Return the meanings of the marks in a run's table."""
    notes: list[str] = []
    everywhere = [OF_ALL_TEXTS] if len(run.texts) > 1 else []
    measured = [model.blocks for model in run.models if model.blocks]
    count = max((blocks.held for blocks in measured), default=0)
    if count > 1:
        longest = longest_documents(max(blocks.length for blocks in measured))
        holds = (
            f"; it is too small if documents of the text are longer than about {longest:,} tokens"
        )
        is_short = short_text_cautions(measured, None)
        notes = [
            f"±: one standard error, from {count} blocks of the text{'' if is_short else holds}",
            COMMON_ERROR,
        ]
    reference = run.reference["label"] if run.reference else None
    if reference is not None:
        notes.append(
            f"KLD (mean over tokens, in nats) and same top compare each model with {reference}"
        )
    if any(best_labels(run.models, name) for name in ("nll", "kld", "same_top")):
        notes.append(
            f"{BEST}: the best quantized model (below 16 bpw) of its column, and those that do not differ from it "
            "significantly (95 %, paired differences)"
        )
    if any(model.noise_floor for model in run.models):
        about = f"{FLOOR}: a noise floor, the reference's weights with other roundings"
        if run.noise_floor is not None:
            floor = run.noise_floor.kld
            least = kld_in_words(floor or 0.0) or number_text(floor, KLD_DIGITS)
            about += f"; a KLD near or below its {least} says nothing about a quantization"
        notes.append(about)
    return everywhere + notes


def column_notes(run: RunResult) -> dict[str, str]:
    """Return the footnotes of columns, by the column's name."""
    notes = {}
    if len({model.kv_cache for model in run.models} - {None}) > 1:
        notes["kv_cache"] = (
            "KV cache: the precision in which keys and values were kept while the text was scored; rows that differ in "
            "it differ in more than their weights"
        )
    if any(model.tokens_per_second for model in run.models):
        timed = [model.timing for model in run.models if model.timing]
        first = max(
            [(each.first_window - each.score_began) / each.scoring_seconds for each in timed],
            default=0.0,
        )
        share = f" (up to {100 * first:.0f} % of a row's seconds)" if first >= NOTEWORTHY else ""
        notes["speed"] = f"tok/s: scored tokens per second, the first step included{share}"
    return notes
