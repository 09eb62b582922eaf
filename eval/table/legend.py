"""The legend of a table: the meanings of its marks, and footnotes on its columns."""

from __future__ import annotations

from collections.abc import Sequence

from ..ranking import best_labels
from ..results import ModelResult, RunResult
from ..stats.block_sums import short_text_cautions
from ..stats.uncertainty import longest_documents
from .measured_rows import blocks_of
from .numbers import KLD_DIGITS, kld_in_words, number_text
from .row_marks import BEST, FLOOR_MARK

COMMON_ERROR = (
    "the ± of PPL shows how far another text of this kind would move all rows together: "
    "differences between rows are far more precise (--pairs)"
)
NOTEWORTHY = 0.1
"""Smallest share of a row's seconds that the first step, in which engines compile, needs for the
note on speeds."""
OF_ALL_TEXTS = (
    "PPL, KLD and same top without a text's name are over all scored tokens of all texts: "
    "a text with more of them counts more"
)


def legend(run: RunResult) -> list[str]:
    """Return the meanings of the marks in a run's table."""
    notes = []
    if len(run.texts) > 1:
        notes.append(OF_ALL_TEXTS)
    notes += error_legend(run)
    if run.reference is not None:
        reference = run.reference["label"]
        scores = "KLD (mean over tokens, in nats) and same top"
        notes.append(f"{scores} compare each model with {reference}")
    if any(best_labels(run.models, score) for score in ("nll", "kld", "same_top")):
        notes.append(
            f"{BEST}: the best quantized model (below 16 bpw) of its column, and those that do not "
            "differ from it significantly (95 %, paired differences)"
        )
    return notes + noise_floor_legend(run)


def error_legend(run: RunResult) -> list[str]:
    """Return the meaning of ±; empty if no errors are known."""
    blocks = blocks_of(run.models)
    count = max((sums.held for sums in blocks), default=0)
    if count < 2:
        return []
    meaning = f"±: one standard error, from {count} blocks of the text"
    # A short text already has a footnote which says that its errors are too small.
    if not short_text_cautions(blocks, None):
        longest = longest_documents(max(sums.length for sums in blocks))
        documents = f"documents of the text are longer than about {longest:,} tokens"
        meaning += f"; it is too small if {documents}"
    return [meaning, COMMON_ERROR]


def noise_floor_legend(run: RunResult) -> list[str]:
    """Return the meaning of a noise floor's mark; empty without one."""
    if not any(model.noise_floor for model in run.models):
        return []
    meaning = f"{FLOOR_MARK}: a noise floor, the reference's weights with other roundings"
    if run.noise_floor is not None:
        kld = kld_in_words(run.noise_floor.kld or 0.0, run.noise_floor.kld_kind)
        if not kld:
            kld = number_text(run.noise_floor.kld, KLD_DIGITS)
        meaning += f"; a KLD near or below its {kld} says nothing about a quantization"
    return [meaning]


def column_footnotes(run: RunResult) -> dict[str, str]:
    """Return the footnotes of columns, by the column's name."""
    notes = {}
    caches = {model.kv_cache for model in run.models if model.kv_cache is not None}
    if len(caches) > 1:
        notes["kv_cache"] = (
            "KV cache: the precision in which keys and values were kept while the text was scored; "
            "rows that differ in it differ in more than their weights"
        )
    if any(model.tokens_per_second for model in run.models):
        notes["speed"] = speed_footnote(run.models)
    return notes


def speed_footnote(models: Sequence[ModelResult]) -> str:
    """Return the footnote of the column of speeds, with the largest share of a first step."""
    largest_share = 0.0
    for model in models:
        if model.timing is not None:
            first_step = model.timing.first_window - model.timing.score_began
            largest_share = max(largest_share, first_step / model.timing.scoring_seconds)
    note = "tok/s: scored tokens per second, the first step included"
    if largest_share >= NOTEWORTHY:
        note += f" (up to {100 * largest_share:.0f} % of a row's seconds)"
    return note
