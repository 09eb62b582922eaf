"""The closing lines on precision: how well the KLDs of a part of a text are known, and what a better precision costs.

Only windows that are spread over a text say how far their mean KLD is from that of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compare_q.backends.common.messages import amount
from compare_q.eval.ranking import candidates_for_best, near_lossless
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.stats.precision import LEAST_WINDOWS, TARGET, seconds_needed, windows_needed
from compare_q.eval.table.numbers import two_digits

MOST_NAMED = 6
"""The largest number of rows whose precision is printed for each.  Of more rows, the best and the worst are printed."""


@dataclass(frozen=True)
class Precision:
    """How precisely a row's KLD is known as the KLD of the whole text."""

    label: str
    error: float | None  # standard error relative to the KLD; None if it is not known
    reason: str = ""  # why it is not known


def precision_of(model: ModelResult) -> Precision:
    """Return the precision of a row that has a KLD."""
    if model.kld_non_finite:
        return Precision(model.marked_label, None, f"{amount(model.kld_non_finite, 'token')} without a finite KLD")
    if model.windows < LEAST_WINDOWS:
        return Precision(model.marked_label, None, f"only {amount(model.windows, 'window')}")
    stderr = model.kld_stderr_of_text
    if stderr is None:
        return Precision(model.marked_label, None, "its windows have no error")
    if stderr == 0:
        return Precision(model.marked_label, 0.0)
    if not model.kld or model.kld < 0:
        return Precision(model.marked_label, None, "its KLD is 0 within rounding")
    return Precision(model.marked_label, stderr / model.kld)


def compared_rows(text: TextResult) -> list[ModelResult]:
    """Return the rows with a KLD, without the reference; none unless the windows are a part that is spread over the
    text."""
    if not text.data.get("windows_of_the_text"):
        return []
    return [model for model in text.models if model.kld is not None and not model.reference]


def sentences(run: RunResult) -> list[str]:
    """Return a sentence for each text with spread windows: how precisely each row's KLD is known."""
    lines: list[str] = []
    for text in run.scored:
        rows = compared_rows(text)
        if rows:
            title = f"{text.name}: " if len(run.texts) > 1 else ""
            lines.append(f"{title}{in_words([precision_of(model) for model in rows])}.")
    return lines


def in_words(rows: Sequence[Precision]) -> str:
    """Return ``The whole text's KLD is known to 4.1 % (W4A16) and 6 % (W8A8)``, and the rows for which it is not."""
    known = [(row.error, row.label) for row in rows if row.error is not None]
    if len(known) > MOST_NAMED:
        known = [min(known), max(known)]
    unknown = [f"{row.label} ({row.reason})" for row in rows if row.error is None]
    if not known:
        return f"How precisely the whole text's KLD is known: n/a for {joined(unknown)}"
    shown = [f"{percent(error)} ({label})" for error, label in known]
    sentence = f"The whole text's KLD is known to {joined(shown)}"
    if unknown:
        sentence += f"; n/a for {joined(unknown)}"
    return sentence


def advice(run: RunResult) -> list[str]:
    """Return a line for each text whose KLDs are less precise than ``TARGET``: what to type, and how long it takes."""
    lines: list[str] = []
    for text in run.scored:
        line = advice_on(text)
        if line:
            title = f"{text.name}: " if len(run.texts) > 1 else ""
            lines.append(f"{title}{line}")
    return lines


def advice_on(text: TextResult) -> str:
    """Return what to type for KLDs of the precision ``TARGET``; empty if they have it, or if none is known."""
    errors = [precision_of(model).error for model in deciding_rows(text)]
    known = [error for error in errors if error is not None]
    if not known:
        return ""
    scored = int(text.data["windows"])
    available = int(text.data["windows_of_the_text"])
    needed = windows_needed(max(known), scored, available)
    stored = stored_windows(text, available)
    goal = f"for {percent(TARGET)}: "
    if needed <= scored:
        return ""
    if stored <= scored:
        return f"{goal}about {needed:,} windows are needed; the reference has only {amount(stored, 'window')}"
    if needed > stored:
        goal = f"the reference has only {amount(stored, 'window')}, of about {needed:,} for {percent(TARGET)}: "
        needed = stored
    windows = f"-r {needed}"
    if needed == available:
        windows = "-r all (the whole text)"
    seconds = seconds_of(text.models, needed - scored)
    duration = f", about {duration_in_words(seconds)} more" if seconds else ""
    return f"{goal}{windows}{duration}; what is scored already is not scored again"


def deciding_rows(text: TextResult) -> list[ModelResult]:
    """Return the rows whose KLDs the run should know precisely: quantized ones, or all compared ones if there are none.

    Nearly lossless rows and noise floors do not count: their KLDs are those of roundings, and a precise one would say
    no more.
    """
    near = near_lossless(text.models)
    compared = compared_rows(text)
    quantized = [model for model in candidates_for_best(text.models, "kld") if model in compared]
    rows = quantized or [model for model in compared if not model.noise_floor]
    return [model for model in rows if model.label not in near]


def stored_windows(text: TextResult, available: int) -> int:
    """Return how many windows can be compared: those of a finished reference store or pack, or all of the text."""
    stored = (text.reference or {}).get("windows")
    return stored if isinstance(stored, int) else available


def seconds_of(models: Sequence[ModelResult], more: int) -> float:
    """Return the seconds for loading all models one after the other and scoring ``more`` windows with each.

    Models that failed or whose times are unknown do not count.
    """
    seconds = 0.0
    for model in models:
        if not model.error and model.windows and model.score_seconds is not None:
            seconds += seconds_needed(model.load_seconds or 0.0, model.score_seconds, model.windows, more)
    return seconds


def duration_in_words(seconds: float) -> str:
    """Return ``40 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{two_digits(seconds / 3600):g} h"


def percent(share: float) -> str:
    """Return a share in percent with two significant digits."""
    return f"{two_digits(100 * share):g} %"


def joined(words: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
