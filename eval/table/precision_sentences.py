"""The closing lines on precision: how well the KLDs of a part of a text are known, and what a
better precision costs.

Only windows that are spread over a text show how far their mean KLD is from the whole text's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...backends.common.message_text import amount, duration_in_words
from ..ranking import candidates_for_best, near_lossless
from ..results import ModelResult, RunResult, UsedText
from ..stats.windows_needed import LEAST_WINDOWS, TARGET, seconds_needed, windows_needed
from .wording import joined_words, possessive_of_texts, precision_in_words

MOST_PRECISIONS = 6
"""The largest number of rows whose precision is printed for each.  Of more rows, the best and the
worst are printed."""


@dataclass(frozen=True)
class Precision:
    """How precisely a row's KLD is known as the KLD of the whole text.

    ``error``: the standard error relative to the KLD; None if it is not known, for a ``reason``.
    """

    label: str
    error: float | None
    reason: str = ""


def precision_of(model: ModelResult) -> Precision:
    """Return the precision of a row that has a KLD."""
    label = model.marked_label
    if model.kld_non_finite:
        tokens = amount(model.kld_non_finite, "token")
        return Precision(label, None, f"{tokens} without a finite KLD")
    if model.has_bound:
        return Precision(label, None, "only a bound is known")
    if model.windows < LEAST_WINDOWS:
        return Precision(label, None, f"only {amount(model.windows, 'window')}")
    stderr = model.kld_stderr_of_text
    if stderr is None:
        return Precision(label, None, "its windows have no error")
    if stderr == 0:
        return Precision(label, 0.0)
    if not model.kld or model.kld < 0:
        if model.kld_kind == "estimate":
            return Precision(label, None, "its KLD is 0 within its error")
        return Precision(label, None, "its KLD is 0 within rounding")
    return Precision(label, stderr / model.kld)


def compared_rows(run: RunResult) -> list[ModelResult]:
    """Return the rows with a KLD, without the reference.

    Empty unless the windows are a part that is spread over a text.
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
    precisions = [precision_of(model) for model in rows]
    return [f"{precisions_in_words(precisions, possessive_of_texts(run))}."]


def precisions_in_words(rows: Sequence[Precision], texts: str) -> str:
    """Return ``The whole text's KLD is known to 4.1 % (W4A16) and 6 % (W8A8)``, and the rows for
    which it is not.

    ``texts``: "text's", or "texts'" if there are several.
    """
    errors = []
    unknown = []
    for row in rows:
        if row.error is None:
            unknown.append(f"{row.label} ({row.reason})")
        else:
            errors.append((row.error, row.label))
    if not errors:
        question = f"How precisely the whole {texts} KLD is known"
        return f"{question}: n/a for {joined_words(unknown)}"
    if len(errors) > MOST_PRECISIONS:
        errors = [min(errors), max(errors)]
    precisions = []
    for error, label in errors:
        precisions.append(f"{precision_in_words(error)} ({label})")
    sentence = f"The whole {texts} KLD is known to {joined_words(precisions)}"
    if unknown:
        sentence += f"; n/a for {joined_words(unknown)}"
    return sentence


def advice(run: RunResult) -> list[str]:
    """Return a line on what to type for KLDs of the precision ``TARGET``, and how long that takes.

    There is none if all KLDs have it, if no row's precision is known, or if no windows are left.
    """
    # A results.json of others may lack the number.
    scored = int(run.data.get("windows", 0))
    if not 0 < scored < run.available_windows:
        return []
    needed = windows_of_run(run, scored)
    if needed <= scored:
        return []
    stored = stored_windows(run)
    target = precision_in_words(TARGET)
    shortage = f"the reference has only {amount(stored, 'window')}"
    if stored <= scored:
        return [f"for {target}: about {needed:,} windows are needed; {shortage}"]
    goal = f"for {target}"
    # Windows that the reference does not have cannot be compared.
    if needed > stored:
        goal = f"{shortage}, of about {needed:,} for {target}"
        needed = stored
    number = windows_of_each_text(run.texts, needed)
    total = windows_with(run.texts, number)
    flag = rows_flag(run, number, total)
    seconds = seconds_of(run.models, total - scored)
    duration = ""
    if seconds:
        duration = f", about {duration_in_words(seconds)} more"
    return [f"{goal}: {flag}{duration}; what is scored already is not scored again"]


def windows_of_run(run: RunResult, scored: int) -> int:
    """Return how many windows give ``TARGET`` to every KLD that decides the run's precision.

    0 if no precision is known.
    """
    needed = 0
    for model in deciding_rows(run):
        error = precision_of(model).error
        if error is None:
            continue
        available: float = run.available_windows
        if model.kld_kind == "estimate":
            # Its values are draws: their error is not 0 with all windows.
            available = math.inf
        needed = max(needed, windows_needed(error, scored, available))
    return needed


def rows_flag(run: RunResult, number: int, total: int) -> str:
    """Return the flag for ``number`` windows of each text, ``total`` together."""
    has_several_texts = len(run.texts) > 1
    if total == run.available_windows:
        if has_several_texts:
            return "-r all (the whole texts)"
        return "-r all (the whole text)"
    if has_several_texts:
        return f"-r {number} (of each text)"
    return f"-r {number}"


def windows_of_each_text(texts: Sequence[UsedText], needed: int) -> int:
    """Return the smallest N such that ``-r N`` scores as many windows as ``needed``, or all."""
    number = 1
    # Beyond the longest text, a larger number adds no windows.
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
    more precise one would not help.
    """
    lossless_labels = near_lossless(run.models)
    compared = compared_rows(run)
    rows = []
    for model in candidates_for_best(run.models, "kld"):
        if model in compared:
            rows.append(model)
    if not rows:
        rows = [model for model in compared if not model.noise_floor]
    return [model for model in rows if model.label not in lossless_labels]


def stored_windows(run: RunResult) -> int:
    """Return how many windows can be compared: all of a finished reference store or pack, or all of
    the texts.
    """
    if run.reference is not None:
        stored = run.reference.get("windows")
        if isinstance(stored, int):
            return stored
    return run.available_windows


def seconds_of(models: Sequence[ModelResult], more: int) -> float:
    """Return the seconds for loading all models and scoring ``more`` windows with each.

    Models that failed or whose times are unknown do not count.
    """
    timed_models = []
    seconds = 0.0
    for model in models:
        if not model.error and model.windows and model.score_seconds is not None:
            timed_models.append(model)
            seconds += seconds_needed(0.0, model.score_seconds, model.windows, more)
    # Another run loads each model again.
    return seconds + loading_seconds(timed_models)


def loading_seconds(models: Sequence[ModelResult]) -> float:
    """Return the seconds for loading models; times at which several were loaded count once."""
    loads = []
    seconds = 0.0
    for model in models:
        load_seconds = model.load_seconds or 0.0
        if model.timing is None:
            seconds += load_seconds
        else:
            loads.append((model.timing.loaded - load_seconds, model.timing.loaded))
    last_end = -math.inf
    for begin, end in sorted(loads):
        seconds += max(end - max(begin, last_end), 0.0)
        last_end = max(last_end, end)
    return seconds
