"""What a text's spread windows say of all its windows: how far their means may be off, and what the rest would cost."""

from __future__ import annotations

import math
from typing import NamedTuple

from compare_q.eval.results.differences import ROUNDINGS, kld_limit
from compare_q.eval.results.run_result import ModelResult, TextResult


class Worst(NamedTuple):
    """The largest relative standard error of the rows' means, and the label of its row."""

    error: float
    label: str


def available(text: TextResult) -> int | None:
    """How many windows the whole text has; None where all of them were scored, or the first ones."""
    found: int | None = text.data.get("windows_of_the_text")
    return found


def compared(text: TextResult) -> list[ModelResult]:
    """The rows whose KLD is asked for, the smallest first: of the quantized models if there are any, since others show
    what roundings alone lose (the reference's weights in another engine), and else of all but the reference."""
    rows = [model for model in text.models if model.mean_kld is not None and not model.is_reference]
    quantized = [model for model in rows if model.is_quantized and not model.is_noise_floor]
    return sorted(quantized or rows, key=lambda model: model.mean_kld or 0.0)


def kind_of_rows(text: TextResult) -> str:
    """What ``compared`` has: all rows, or those of quantized models."""
    known = sum(model.mean_kld is not None and not model.is_reference for model in text.models)
    return "quantized row" if len(compared(text)) < known else "row"


def least_kld(text: TextResult) -> float:
    """The KLD (nats) up to which a row is as near to the reference as roundings are, and need not be known better."""
    return kld_limit(text.models) or ROUNDINGS


def worst_kld(text: TextResult) -> Worst | None:
    """Of the KLDs, relative to the KLD or to ``least_kld``; infinite where an error is not known, None without KLDs."""
    return max((Worst(kld_error(model) / max(model.mean_kld or 0.0, least_kld(text)), model.label)
                for model in compared(text)), default=None)  # fmt: skip


def kld_error(model: ModelResult) -> float:
    """The standard error of a row's KLD as the whole text's, nats."""
    found = model.estimates.sampled if model.estimates else None
    return math.inf if found is None or found.kld is None else found.kld


def worst_ppl(text: TextResult) -> Worst | None:
    """Of the perplexities; None where none is known."""
    found = [(model.estimates.sampled, model.label) for model in text.models if model.estimates]
    return max((Worst(each.nll, label) for each, label in found if each and each.nll is not None), default=None)


def rest_in_words(text: TextResult) -> str:
    """What all windows would have cost beyond those that were scored, at the rows' speeds and one row after the other,
    as the end of a sentence; empty where it is not known, and where nothing was left out."""
    left = (available(text) or 0) - text.data.get("windows", 0)
    seconds = sum(left * (model.score_seconds or 0.0) / model.windows for model in text.models if model.windows)
    return f"; the other {left:,} would take about {seconds:,.0f} s of scoring" if left > 0 < seconds else ""
