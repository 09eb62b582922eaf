"""The closing lines on precision: how well the KLDs of a part of a text are known, and what a
better precision costs.

Only windows that are spread over a text show how far their mean KLD is from the whole text's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...backends.common.message_text import amount, duration_in_words
from ..ranking import candidates_for_best, near_lossless
from ..results import ModelResult, RunResult, UsedText
from ..stats.windows_needed import LEAST_WINDOWS, TARGET, seconds_needed, windows_needed
from .numbers import two_digits

MOST_NAMED = 6
"""The largest number of rows whose precision is printed for each.  Of more rows, the best and the
worst are printed."""


@dataclass(frozen=True)
class Precision:
    """How precisely a row's KLD is known as the KLD of the whole text."""

    label: str
    error: float | None  # standard error relative to the KLD; None if it is not known
    reason: str = ""  # why it is not known


def precision_of(model: ModelResult) -> Precision:
    """Return the precision of a row that has a KLD."""
    if model.kld_non_finite:
        return Precision(
            model.marked_label,
            None,
            f"{amount(model.kld_non_finite, 'token')} without a finite KLD",
        )
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


def compared_rows(run: RunResult) -> list[ModelResult]:
    """Return the rows with a KLD, without the reference; none unless the windows are a part that is
    spread over a text.
    """
    if not run.is_sample:
        return []
    return [model for model in run.models if model.kld is not None and not model.reference]


def sentences(run: RunResult) -> list[str]:
    """Return a sentence on how precisely each row's KLD is known, if the windows are a part of a
    text.
    """
    rows = compared_rows(run)
    if not rows:
        return []
    whole = "text's" if len(run.texts) == 1 else "texts'"
    return [f"{in_words([precision_of(model) for model in rows], whole)}."]


def in_words(rows: Sequence[Precision], whole: str) -> str:
    """Return ``The whole text's KLD is known to 4.1 % (W4A16) and 6 % (W8A8)``, and the rows for
    which it is not.

    ``whole``: "text's", or "texts'" if there are several.
    """
    known = [(row.error, row.label) for row in rows if row.error is not None]
    if len(known) > MOST_NAMED:
        known = [min(known), max(known)]
    unknown = [f"{row.label} ({row.reason})" for row in rows if row.error is None]
    if not known:
        return f"How precisely the whole {whole} KLD is known: n/a for {joined(unknown)}"
    shown = [f"{percent(error)} ({label})" for error, label in known]
    sentence = f"The whole {whole} KLD is known to {joined(shown)}"
    if unknown:
        sentence += f"; n/a for {joined(unknown)}"
    return sentence


def advice(run: RunResult) -> list[str]:
    """Return a line on what to type for KLDs of the precision ``TARGET``, and how long that takes.

    There is none if all KLDs have it, or if no row's precision is known.
    """
    errors = [precision_of(model).error for model in deciding_rows(run)]
    known = [error for error in errors if error is not None]
    if not known:
        return []
    scored = int(run.data["windows"])
    available = run.available_windows
    needed = windows_needed(max(known), scored, available)
    if needed <= scored:
        return []
    stored = stored_windows(run, available)
    goal = f"for {percent(TARGET)}: "
    if stored <= scored:
        return [
            f"{goal}about {needed:,} windows are needed; the reference has only {amount(stored, 'window')}"
        ]
    if needed > stored:
        goal = f"the reference has only {amount(stored, 'window')}, of about {needed:,} for {percent(TARGET)}: "
        needed = stored
    number = windows_of_each_text(run.texts, needed)
    total = windows_with(run.texts, number)
    several = len(run.texts) > 1
    if total == available:
        flag = "-r all (the whole texts)" if several else "-r all (the whole text)"
    else:
        flag = f"-r {number} (of each text)" if several else f"-r {number}"
    seconds = seconds_of(run.models, total - scored)
    duration = f", about {duration_in_words(seconds)} more" if seconds else ""
    return [f"{goal}{flag}{duration}; what is scored already is not scored again"]


def windows_of_each_text(texts: Sequence[UsedText], needed: int) -> int:
    """Return the smallest N such that ``-r N`` scores as many windows as ``needed``, or all of
    them.
    """
    number = 1
    most = max(available_of(text) for text in texts)
    while number < most and windows_with(texts, number) < needed:
        number += 1
    return number


def windows_with(texts: Sequence[UsedText], number: int) -> int:
    """Return how many windows ``-r number`` scores, which counts for each text."""
    return sum(min(number, available_of(text)) for text in texts)


def available_of(text: UsedText) -> int:
    """Return how many windows a whole text has."""
    return text.windows_of_the_text or text.windows


def deciding_rows(run: RunResult) -> list[ModelResult]:
    """Return the rows whose KLDs the run should know precisely: quantized ones, or all compared
    ones if there are none.

    Nearly lossless rows and noise floors do not count: their KLDs are those of roundings, and a
    precise one would say no more.
    """
    near = near_lossless(run.models)
    compared = compared_rows(run)
    quantized = [model for model in candidates_for_best(run.models, "kld") if model in compared]
    rows = quantized or [model for model in compared if not model.noise_floor]
    return [model for model in rows if model.label not in near]


def stored_windows(run: RunResult, available: int) -> int:
    """Return how many windows can be compared: all of a finished reference store or pack, or all of
    the texts.
    """
    stored = (run.reference or {}).get("windows")
    return stored if isinstance(stored, int) else available


def seconds_of(models: Sequence[ModelResult], more: int) -> float:
    """Return the seconds for loading all models one after the other and scoring ``more`` windows
    with each.

    Models that failed or whose times are unknown do not count.
    """
    seconds = 0.0
    for model in models:
        if not model.error and model.windows and model.score_seconds is not None:
            seconds += seconds_needed(
                model.load_seconds or 0.0, model.score_seconds, model.windows, more
            )
    return seconds


def percent(share: float) -> str:
    """Return a share in percent with two significant digits."""
    return f"{two_digits(100 * share):g} %"


def joined(words: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
