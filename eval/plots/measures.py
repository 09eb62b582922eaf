"""What a scatter plot can show: sizes for its x axis, values for its y axis, and what each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Storage
from eval.results.digits import KLD_DIGITS, PPL_DIGITS, decimals_of_error, number_text
from eval.results.run_result import ModelResult, RunResult, several_references
from eval.stats.estimates import paired_difference
from eval.stats.uncertainty import Mean, Value


@dataclass(frozen=True)
class Size:
    """What an x axis shows: its ``name`` in messages, its ``axis`` (short without what is in parentheses)."""

    name: str
    axis: str
    of: Callable[[Storage], float | None]


@dataclass(frozen=True)
class Measure:
    """What a y axis shows: its names in titles and in messages, its ``axis`` (short without what is in parentheses).

    ``percentile``: of the KLD of single tokens, a key of ``kld_percentiles``; empty for a mean and for perplexity.
    ``digits``: that are written of a value of unknown error, 0 for as many as the table has.
    """

    title: str
    name: str
    axis: str
    kld: bool = True
    percentile: str = ""
    digits: int = 0

    def of(self, model: ModelResult) -> float | None:
        """The model's value; a reference's KLD is 0 by definition."""
        if not self.kld:
            return model.ppl.value if model.ppl else None
        if not self.percentile or model.mean_kld is None or model.is_reference:
            return model.mean_kld
        against = model.estimates.against if model.estimates else None
        return against.kld_percentiles.get(self.percentile) if against else None

    def error(self, model: ModelResult) -> float | None:
        """The standard error of a mean KLD; None for a percentile, whose error is not known."""
        mean: Mean | None = None if self.percentile or not self.kld else model.kld
        return mean.stderr if mean else None


SIZES = {
    "bpw": Size(
        "bits per weight", "Bits per weight (without embedding and output head)", lambda found: found.bpw_layer
    ),
    "vram": Size("VRAM", "Stored weights / GiB (without embedding, with output head)", lambda found: found.vram_gib),
    "size": Size("file size", "Weight files on disk / GB", lambda found: found.file_gb),
}
"""``--x-axis``."""
PPL = Measure("Perplexity", "PPL", "Perplexity", kld=False)
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
AXIS_LETTERS = 70
"""Letters that a plot's height has room for."""


def chosen(run: RunResult, kld: bool | None, value: str | None) -> Measure:
    """What ``-kld``, ``-ppl`` and ``--kld-value`` ask for; without them KLD where a model has one that is not 0."""
    wanted = any(model.mean_kld for model in run.models) if kld is None else kld
    return KLD_VALUES[value or "mean"] if wanted else PPL


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


def ppl_error(run: RunResult, model: ModelResult) -> tuple[float | None, bool]:
    """(PPL(model) * standard error of ln(PPL(model) / PPL(reference)), True); (its own error, False) if unpaired.

    This error says how far the point would move if the reference stayed in place.  The error of the difference of both
    perplexities does not: it grows with the text's own error times (ratio - 1), and is 1.4 for a perplexity of 34 where
    the error returned here is 0.14.  The reference has no error.  A model that was not scored beside the reference (a
    server) is paired with it by blocks of the text.
    """
    if model.is_reference or model.estimates is None or model.ppl is None or model.ppl.value is None:
        return None, True
    ratio: Mean | Value | None = model.estimates.against.ln_ppl_ratio if model.estimates.against else None
    for other in run.models if ratio is None else ():
        if other.is_reference and other.estimates is not None:
            ratio = paired_difference(model.estimates.blocks, other.estimates.blocks, "nll")
    if ratio is None:
        return model.ppl.stderr, False
    return None if ratio.stderr is None else model.ppl.value * ratio.stderr, True


def kld_axis(run: RunResult, measure: Measure = KLD) -> str:
    """The KLD axis; it names the reference where that fits."""
    named = f"{measure.axis} against {run.reference['label']}" if run.reference else measure.axis
    if several_references(run.models):
        named = f"{measure.axis} against its machine's reference"
    return named if len(named) <= AXIS_LETTERS else measure.axis
