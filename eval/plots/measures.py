"""Values that a plot can show on its axes, and their errors.

Imports no matplotlib, because the command line reads the names and file suffixes from here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest
from ..results import ModelResult, RunResult
from ..stats.block_sums import BlockSums, paired_difference
from ..table import columns
from ..table.numbers import (
    KLD_DIGITS,
    PPL_DIGITS,
    bound_text,
    decimals_of_error,
    number_text,
    significant_text,
)


class Size(NamedTuple):
    """An x axis.

    Attributes:
        name: in messages
        axis: title of the axis; a card leaves out its parentheses
        column: of the table
        unit: the axis shows the column's value divided by this
    """

    name: str
    axis: str
    column: str
    unit: float = 1.0

    def value_of(self, model: ModelResult) -> float | None:
        """Return the model's size; None if unknown."""
        value: float | None = columns.column_of(self.column).value(model)
        if value is None:
            return None
        return value / self.unit


class Measure(NamedTuple):
    """A y axis.

    Attributes:
        title: of the plot
        name: in messages
        axis: title of the axis
        field: of a row
        digits: significant digits of a value without an error; 0: as many as the table shows
    """

    title: str
    name: str
    axis: str
    field: str
    digits: int = 0

    @property
    def kld(self) -> bool:
        """Return True for a KL divergence, a mean or a percentile."""
        return self.field.startswith("kld")

    @property
    def is_percentile(self) -> bool:
        """Return True for a percentile of the KLD of tokens, whose error is unknown."""
        return self.kld and self.field != "kld"

    def value_of(self, model: ModelResult) -> float | None:
        """Return the model's value; None if unknown."""
        field = self.field
        if self.kld and model.reference:
            # Every KLD of the reference is 0, but only the mean is a field of its row.
            field = "kld"
        value: float | None = getattr(model, field)
        return value


SIZES = {
    "bpw": Size(
        "bits per weight", "Bits per weight (without embedding and output head)", "bpw_layer"
    ),
    "vram": Size("VRAM", "Stored weights / GiB (without embedding, with output head)", "vram_gib"),
    "size": Size("file size", "Weight files on disk / GB", "size", 1e9),
    "kv": Size("KV cache", "KV cache / MB (of 1,000 tokens)", "kv_mb"),
}
"""Values of ``--x-axis``."""
PPL = Measure("Perplexity", "PPL", "Perplexity", "ppl")
# Medians of 65,472 tokens are 0.3 to 0.4 % off by chance, 99.9 % KLDs 3 to 4 %.
KLD_VALUES = {
    "mean": Measure("KL divergence", "KLD", "KL divergence (nats, mean over tokens)", "kld"),
    "median": Measure("Median KLD", "median KLD", "Median KLD of tokens (nats)", "kld_median", 3),
    "p99": Measure(
        "99 % KLD", "99 % KLD", "99 % KLD (nats; 99 % of tokens have less)", "kld_p99", 2
    ),
    "p99.9": Measure(
        "99.9 % KLD", "99.9 % KLD", "99.9 % KLD (nats; 99.9 % of tokens have less)", "kld_p99_9", 2
    ),
}
"""Values of ``--kld-value``."""
BPW = SIZES["bpw"]
VRAM = SIZES["vram"]
FILE_SIZE = SIZES["size"]
KLD = KLD_VALUES["mean"]
BOUND_NOTE = "only a bound of the KLD is known, which is at least this"
"""The meaning of the arrow at a bound."""
TITLE_CHARACTERS = 70
"""Maximum characters of an axis title that names the reference."""
SUFFIXES: dict[str, dict[str, Any]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""File formats, each with the metadata that would otherwise hold the time of day."""


def size_of(word: str) -> Size:
    """Return the x axis of a value of ``--x-axis``: one of ``SIZES``, or ``memory:N``.

    InputError for another word.
    """
    if word.partition(":")[0] == "memory":
        tokens = columns.column_of(word).context
        parts = "weights, KV cache, activations of one sequence"
        return Size(
            f"memory for {tokens:,} tokens", f"Memory for {tokens:,} tokens / GB ({parts})", word
        )
    if word not in SIZES:
        names = ", ".join(SIZES)
        hint = nearest(word, SIZES)
        raise InputError(f"{word!r} is none of {names}, memory:N (as memory:32k){hint}")
    return SIZES[word]


def measure_of_flags(results: RunResult, kind: str | None, value: str | None) -> Measure:
    """Return the measure that ``-kld``, ``-ppl`` (``kind``) and ``--kld-value`` (``value``) select.

    Default: KLD if a model has a KLD that is not 0, or else perplexity.
    """
    if kind is None:
        kind = "ppl"
        if any(model.kld for model in results.models):
            kind = "kld"
    if kind == "kld":
        return KLD_VALUES[value or "mean"]
    return PPL


def error_of(run: RunResult, model: ModelResult, measure: Measure) -> tuple[float | None, bool]:
    """Return (standard error, True if it is the error of the difference from the reference).

    The error is None if it is not known, as that of percentiles.  Perplexity: PPL * standard error
    of ln(PPL / PPL of the reference).  This is the distance that the point would move if the
    reference stayed in place.  A model that was not compared with the reference (a server) is
    paired with it by blocks of the text.  An unpaired error is mostly about the choice of text,
    which all models share.
    """
    if measure.is_percentile:
        return None, True
    if measure.kld:
        return model.kld_stderr, True
    value = measure.value_of(model)
    if model.reference or value is None or model.blocks is None:
        return None, True
    relative = model.ln_ppl_ratio_stderr
    if not model.is_compared:
        difference = None
        reference_blocks = blocks_of_reference(run)
        if reference_blocks is not None:
            difference = paired_difference(model.blocks, reference_blocks, "nll")
        if difference is None:
            return model.ppl_stderr, False
        relative = difference.stderr
    if relative is None:
        return None, True
    return value * relative, True


def blocks_of_reference(run: RunResult) -> BlockSums | None:
    """Return the block sums of a run's reference; None if it has no row, or no blocks."""
    for model in run.models:
        if model.reference and model.blocks:
            return model.blocks
    return None


def value_text(
    value: float, error: float | None, measure: Measure, *, is_bound: bool = False
) -> str:
    """Return a value rounded at the first digit of its error: 0.44419 +- 0.0052 is 0.444.

    Without an error: with the measure's significant digits, or as in the table.  A bound is rounded
    down: >=0.444.
    """
    if error and 0 < abs(value) < 1e-5:
        if is_bound:
            return significant_text(value, 2, "bound")
        return f"{value:.1e}"
    if is_bound and not error and measure.digits:
        return significant_text(value, measure.digits, "bound")
    decimals = decimals_of_value(value, error, measure)
    if is_bound:
        return bound_text(value, decimals)
    return number_text(value, decimals)


def decimals_of_value(value: float, error: float | None, measure: Measure) -> int:
    """Return how many decimals ``value_text`` shows."""
    if error:
        return max(decimals_of_error(error) - 1, 0)
    if measure.digits:
        # The exponent is that of the rounded value: with two digits, 0.999 is 1.0.
        _, _, exponent = f"{value:.{measure.digits - 1}e}".partition("e")
        return max(measure.digits - 1 - int(exponent), 0)
    if measure.kld:
        return KLD_DIGITS
    return PPL_DIGITS - 1


def kld_axis(run: RunResult, measure: Measure = KLD) -> str:
    """Return the title of a KLD axis, with the reference's label if that fits."""
    if run.reference is None:
        return measure.axis
    axis_title = f"{measure.axis} against {run.reference['label']}"
    if len(axis_title) > TITLE_CHARACTERS:
        return measure.axis
    return axis_title
