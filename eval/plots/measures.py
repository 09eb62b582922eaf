"""What a plot can show: sizes for its x axis, values for its y axis, the errors of these, and what each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from compare_q.eval.results.digits import KLD_DIGITS, PPL_DIGITS, decimals_of_error, number_text
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from compare_q.eval.stats.answers import Accuracy, difference_error
from compare_q.eval.stats.estimates import paired_difference
from compare_q.eval.stats.uncertainty import Mean, Value


@dataclass(frozen=True)
class Size:
    """What an x axis shows: its ``name`` in messages, its ``unit``, its ``axis`` (short without the parentheses)."""

    name: str
    unit: str
    axis: str
    of: Callable[[ModelResult], float | None]


@dataclass(frozen=True)
class Measure:
    """What a y axis shows: its names in titles and in messages, its ``axis`` (short without what is in parentheses).

    ``percentile``: of the KLD of single tokens, a key of ``kld_percentiles``; empty for a mean and for other kinds.
    ``digits``: that are written of a value of unknown error, 0 for as many as the table has.
    """

    title: str
    name: str
    axis: str
    kind: Literal["kld", "ppl", "acc", "acc_norm"] = "kld"
    percentile: str = ""
    digits: int = 0

    @property
    def kld(self) -> bool:
        """Whether it is a KL divergence."""
        return self.kind == "kld"

    @property
    def more(self) -> bool:
        """Whether more is better, as of accuracy."""
        return self.kind in ("acc", "acc_norm")

    @property
    def distance(self) -> str:
        """What the error of a value that is paired with the reference's is an error of."""
        return "the difference from the reference's" if self.more else "the ratio to the reference's"

    def accuracy(self, model: ModelResult) -> Accuracy | None:
        """The model's accuracy of this kind; None if it did not answer questions."""
        answers = model.estimates.answers if model.estimates else None
        return None if answers is None else answers.acc if self.kind == "acc" else answers.acc_norm

    def of(self, model: ModelResult) -> float | None:
        """The model's value, of accuracy in percent; a reference's KLD is 0 by definition."""
        if self.more:
            found = self.accuracy(model)
            return None if found is None or found.accuracy.value is None else 100 * found.accuracy.value
        if not self.kld:
            return model.ppl.value if model.ppl else None
        if not self.percentile or model.mean_kld is None or model.is_reference:
            return model.mean_kld
        against = model.estimates.against if model.estimates else None
        return against.kld_percentiles.get(self.percentile) if against else None


SIZES = {
    "bpw": Size("bits per weight", "bpw", "Bits per weight (without embedding and output head)",
                lambda model: model.storage.bpw_layer),
    "vram": Size("VRAM", "GiB", "Stored weights / GiB (without embedding, with output head)",
                 lambda model: model.storage.vram_gib),
    "size": Size("file size", "GB", "Weight files on disk / GB", lambda model: model.storage.file_gb),
    "kv": Size("KV cache", "MB", "KV cache / MB (of 1,000 tokens)", lambda model: model.kv_mb),
}  # fmt: skip
"""``--x-axis``."""
PPL = Measure("Perplexity", "PPL", "Perplexity", "ppl")
ACCURACIES = {
    "acc": Measure("Accuracy", "acc", "Accuracy / % (acc: the answer of the largest log-probability)", "acc", digits=3),
    "acc_norm": Measure("Accuracy", "acc norm", "Accuracy / % (acc norm: log-probability per character)", "acc_norm",
                        digits=3),
}  # fmt: skip
"""``-acc`` and ``-acc_norm``."""
# Of the 65,472 tokens of results/cpu, as if independent, medians are 0.3 to 0.4 % off by chance, 99.9 % KLDs 3 to 4 %.
KLD_VALUES = {
    "mean": Measure("KL divergence", "KLD", "KL divergence (nats, mean over tokens)"),
    "median": Measure("Median KLD", "median KLD", "Median KLD of tokens (nats)", percentile="50", digits=3),
    "p99": Measure("99 % KLD", "99 % KLD", "99 % KLD (nats; 99 % of tokens have less)", percentile="99", digits=2),
    "p99.9": Measure("99.9 % KLD", "99.9 % KLD", "99.9 % KLD (nats; 99.9 % of tokens have less)",
                     percentile="99.9", digits=2),
}  # fmt: skip
"""``--kld-value``."""
BPW, VRAM, FILES = SIZES["bpw"], SIZES["vram"], SIZES["size"]
KLD = KLD_VALUES["mean"]
SUFFIXES: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Formats that can be written, each with the metadata that would change with the time of day.  They stand here, where
nothing imports matplotlib: file names are checked before it is needed."""
AXIS_LETTERS = 70
"""Letters that a plot's height has room for."""


def chosen(results: Results, kind: str | None, value: str | None) -> Measure:
    """What ``-kld``, ``-ppl``, ``-acc`` and ``--kld-value`` ask for.

    Without them accuracy if all texts are answers, whose perplexity is over wrong ones too; else KLD where a model has
    one that is not 0, and perplexity where none has.
    """
    if kind is None and results.scored and all(text.is_answers for text in results.scored):
        kind = "acc"
    if kind in ACCURACIES:
        return ACCURACIES[kind]
    models = (model for text in results.scored for model in text.models)
    wanted = any(model.mean_kld for model in models) if kind is None else kind == "kld"
    return KLD_VALUES[value or "mean"] if wanted else PPL


def error_of(text: TextResult, model: ModelResult, measure: Measure) -> tuple[float | None, bool]:
    """The standard error that a plot draws, and whether it is of the distance from the reference (paired).

    None for a percentile, whose error is not known.
    """
    if measure.more:
        return accuracy_error(text, model, measure)
    if not measure.kld:
        return ppl_error(text, model)
    mean: Mean | None = None if measure.percentile else model.kld
    return mean.stderr if mean else None, True


def value_text(value: float, error: float | None, measure: Measure) -> str:
    """A value with as many decimals as its error has until its first digit: 0.44419 +- 0.0052 is 0.444.

    Without an error: with the measure's significant digits, or as in the table.
    """
    if error:
        return number_text(value, max(decimals_of_error(error) - 1, 0))
    if measure.digits:
        size = int(f"{value:.{measure.digits - 1}e}".partition("e")[2])  # of the rounded value: 0.999 is 1.0
        return number_text(value, max(measure.digits - 1 - size, 0))
    return number_text(value, KLD_DIGITS if measure.kld else PPL_DIGITS - 1)


def ppl_error(text: TextResult, model: ModelResult) -> tuple[float | None, bool]:
    """(PPL(model) * standard error of ln(PPL(model) / PPL(reference)), True); (its own error, False) if unpaired.

    This error says how far the point would move if the reference stayed in place.  The error of the difference of both
    perplexities does not: it grows with the text's own error times (ratio - 1), and is 1.4 for a perplexity of 34 where
    the error returned here is 0.14.  The reference has no error.  A model that was not scored beside the reference (a
    server) is paired with it by blocks of the text.
    """
    if model.is_reference or model.estimates is None or model.ppl is None or model.ppl.value is None:
        return None, True
    ratio: Mean | Value | None = model.estimates.against.ln_ppl_ratio if model.estimates.against else None
    for other in text.models if ratio is None else ():
        if other.is_reference and other.estimates is not None:
            ratio = paired_difference(model.estimates.blocks, other.estimates.blocks, "nll")
    if ratio is None:
        return model.ppl.stderr, False
    return None if ratio.stderr is None else model.ppl.value * ratio.stderr, True


def accuracy_error(text: TextResult, model: ModelResult, measure: Measure) -> tuple[float | None, bool]:
    """(percentage points: error of the difference from the reference's accuracy, True); (its own error, False) else.

    The own error is mostly about which questions were asked, and common to all models.
    """
    own = measure.accuracy(model)
    if model.is_reference or own is None:
        return None, True
    for other in text.models:
        found = measure.accuracy(other) if other.is_reference else None
        if found is not None and own.right and len(found.right) == len(own.right):
            stderr = difference_error(own.right, found.right)
            return None if stderr is None else 100 * stderr, True
    return None if own.accuracy.stderr is None else 100 * own.accuracy.stderr, False


def kld_axis(text: TextResult, measure: Measure = KLD) -> str:
    """The KLD axis; it names the reference where that fits."""
    named = f"{measure.axis} against {text.reference['label']}" if text.reference else measure.axis
    return named if len(named) <= AXIS_LETTERS else measure.axis
