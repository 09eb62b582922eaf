"""Values that a plot can show on its axes, and their errors.

Imports no matplotlib, because the command line reads the names and file suffixes from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compare_q.eval.results import ModelResult, RunResult, TextResult, macro_mean
from compare_q.eval.stats.answers import Accuracy, difference_error
from compare_q.eval.stats.estimates import paired_difference
from compare_q.eval.stats.uncertainty import Mean, Value
from compare_q.eval.table.numbers import KLD_DIGITS, PPL_DIGITS, decimals_of_error, number_text


@dataclass(frozen=True)
class Size:
    """An x axis: ``name`` in messages, and the title of the axis, whose parentheses a small picture leaves out."""

    name: str
    axis: str
    of: Callable[[ModelResult], float | None]


@dataclass(frozen=True)
class Measure:
    """A y axis: ``title`` of the plot, ``name`` in messages, and the title of the axis, as in ``Size``.

    ``percentile``: key of ``kld_percentiles`` for a percentile of the tokens' KLD; empty for means.
    ``digits``: significant digits of a value without an error; 0: as many as the table shows.
    """

    title: str
    name: str
    axis: str
    kind: Literal["kld", "ppl", "acc", "acc_norm"] = "kld"
    percentile: str = ""
    digits: int = 0

    @property
    def kld(self) -> bool:
        """Return True for a KL divergence."""
        return self.kind == "kld"

    @property
    def more(self) -> bool:
        """Return True if larger values are better (accuracy)."""
        return self.kind in ("acc", "acc_norm")

    def accuracy(self, model: ModelResult) -> Accuracy | None:
        """Return the model's accuracy of this kind; None without answers."""
        answers = model.estimates.answers if model.estimates else None
        return None if answers is None else answers.acc if self.kind == "acc" else answers.acc_norm

    def of(self, model: ModelResult) -> float | None:
        """Return the model's value, None if unknown; accuracy is in percent, the reference's KLD is 0."""
        if self.more:
            found = self.accuracy(model)
            return None if found is None or found.accuracy.value is None else 100 * found.accuracy.value
        if not self.kld:
            return model.ppl
        if not self.percentile or model.kld is None or model.reference:
            return model.kld
        against = model.estimates.against if model.estimates else None
        return against.kld_percentiles.get(self.percentile) if against else None


SIZES = {
    "bpw": Size("bits per weight", "Bits per weight (without embedding and output head)",
                lambda model: model.bpw_layer),
    "vram": Size("VRAM", "Stored weights / GiB (without embedding, with output head)",
                 lambda model: model.vram_gib),
    "size": Size("file size", "Weight files on disk / GB",
                 lambda model: None if model.file_bytes is None else model.file_bytes / 1e9),
    "kv": Size("KV cache", "KV cache / MB (of 1,000 tokens)", lambda model: model.kv_mb),
}  # fmt: skip
"""Values of ``--x-axis``."""
PPL = Measure("Perplexity", "PPL", "Perplexity", "ppl")
ACCURACIES = {
    "acc": Measure("Accuracy", "acc", "Accuracy / % (acc: the answer of the largest log-probability)", "acc", digits=3),
    "acc_norm": Measure("Accuracy", "acc norm", "Accuracy / % (acc norm: log-probability per character)", "acc_norm",
                        digits=3),
}  # fmt: skip
"""Values of ``-acc`` and ``-acc_norm``."""
# Medians of 65,472 tokens are 0.3 to 0.4 % off by chance, 99.9 % KLDs 3 to 4 %.
KLD_VALUES = {
    "mean": Measure("KL divergence", "KLD", "KL divergence (nats, mean over tokens)"),
    "median": Measure("Median KLD", "median KLD", "Median KLD of tokens (nats)", percentile="50", digits=3),
    "p99": Measure("99 % KLD", "99 % KLD", "99 % KLD (nats; 99 % of tokens have less)", percentile="99", digits=2),
    "p99.9": Measure("99.9 % KLD", "99.9 % KLD", "99.9 % KLD (nats; 99.9 % of tokens have less)",
                     percentile="99.9", digits=2),
}  # fmt: skip
"""Values of ``--kld-value``."""
BPW, VRAM, FILES = SIZES["bpw"], SIZES["vram"], SIZES["size"]
KLD = KLD_VALUES["mean"]
SUFFIXES: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""File formats, each with the metadata that would otherwise hold the time of day."""
AXIS_CHARACTERS = 70
"""Longest title of a y axis."""


def chosen(results: RunResult, kind: str | None, value: str | None) -> Measure:
    """Return the measure that ``-kld``, ``-ppl``, ``-acc`` (``kind``) and ``--kld-value`` (``value``) select.

    Default: accuracy if all texts are answers; else KLD if a model has one that is not 0; else perplexity.
    """
    if kind is None and results.scored and all(text.is_answers for text in results.scored):
        kind = "acc"
    if kind in ACCURACIES:
        return ACCURACIES[kind]
    models = (model for text in results.scored for model in text.models)
    wanted = any(model.kld for model in models) if kind is None else kind == "kld"
    return KLD_VALUES[value or "mean"] if wanted else PPL


def mean_over_texts(texts: Sequence[TextResult], number: int, measure: Measure) -> tuple[Value, bool]:
    """Return (mean over the texts of model ``number``, True if its error is of the difference from the reference).

    Each text counts equally.  Perplexity: the geometric mean of the texts that are not answers; accuracy: the mean of
    those that are.  Unknown unless every such text has a value.
    """
    if len(texts) > 1:
        texts = [text for text in texts if text.error or measure.kld or text.is_answers == measure.more]
    models = [None if text.error else text.models[number] for text in texts]
    values = [measure.of(model) if model else None for model in models]
    found = [error_of(text, model, measure) for text, model in zip(texts, models, strict=True) if model]
    errors, paired = [error for error, _ in found], all(is_paired for _, is_paired in found)
    if not texts or None in values:
        return Value(None), True
    if len(texts) == 1:
        return Value(values[0], errors[0]), paired
    if measure is not PPL:
        return macro_mean(values, errors), paired
    ppls = [value for value in values if value]
    mean = macro_mean([math.log(ppl) for ppl in ppls], [e and e / ppl for e, ppl in zip(errors, ppls, strict=True)])
    ppl = math.exp(mean.value or 0.0)
    return Value(ppl, None if mean.stderr is None else ppl * mean.stderr), paired


def error_of(text: TextResult, model: ModelResult, measure: Measure) -> tuple[float | None, bool]:
    """Return (standard error, True if it is the error of the difference from the reference); percentiles have none."""
    if measure.more:
        return accuracy_error(text, model, measure)
    if not measure.kld:
        return ppl_error(text, model)
    return None if measure.percentile else model.kld_stderr, True


def ppl_error(text: TextResult, model: ModelResult) -> tuple[float | None, bool]:
    """Return (PPL(model) * standard error of ln(PPL(model) / PPL(reference)), True), or (the PPL's own error, False).

    This error tells how far the point would move if the reference stayed in place.  The error of the difference of both
    perplexities does not: it grows with the text's own error times (ratio - 1), to 1.4 for a perplexity of 34 where the
    error returned here is 0.14.  The reference has no error.  A model that was not scored beside the reference (a
    server) is paired with it by blocks of the text.
    """
    if model.reference or model.estimates is None or model.ppl is None:
        return None, True
    ratio: Mean | Value | None = model.estimates.against.ln_ppl_ratio if model.estimates.against else None
    for other in text.models if ratio is None else ():
        if other.reference and other.estimates is not None:
            ratio = paired_difference(model.estimates.blocks, other.estimates.blocks, "nll")
    if ratio is None:
        return model.ppl_stderr, False
    return None if ratio.stderr is None else model.ppl * ratio.stderr, True


def accuracy_error(text: TextResult, model: ModelResult, measure: Measure) -> tuple[float | None, bool]:
    """Return (error of the difference from the reference's accuracy, True), or (the accuracy's own error, False).

    Both in percentage points.  The own error is mostly about the choice of questions, which all models share.
    """
    own = measure.accuracy(model)
    if model.reference or own is None:
        return None, True
    for other in text.models:
        found = measure.accuracy(other) if other.reference else None
        if found is not None and own.right and len(found.right) == len(own.right):
            stderr = difference_error(own.right, found.right)
            return None if stderr is None else 100 * stderr, True
    return None if own.accuracy.stderr is None else 100 * own.accuracy.stderr, False


def value_text(value: float, error: float | None, measure: Measure) -> str:
    """Return a value rounded at the first digit of its error: 0.44419 +- 0.0052 is 0.444.

    Without an error: with the measure's significant digits, or as in the table.
    """
    if error:
        return number_text(value, max(decimals_of_error(error) - 1, 0))
    if measure.digits:
        size = int(f"{value:.{measure.digits - 1}e}".partition("e")[2])  # of the rounded value: 0.999 is 1.0
        return number_text(value, max(measure.digits - 1 - size, 0))
    return number_text(value, KLD_DIGITS if measure.kld else PPL_DIGITS - 1)


def kld_axis(text: TextResult, measure: Measure = KLD) -> str:
    """Return the title of a KLD axis, with the reference's label if that fits."""
    named = f"{measure.axis} against {text.reference['label']}" if text.reference else measure.axis
    return named if len(named) <= AXIS_CHARACTERS else measure.axis
