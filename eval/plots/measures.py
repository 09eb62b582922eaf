"""What a scatter plot can show: sizes for its x axis, values for its y axis, and what each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Storage
from eval.results.run_result import ModelResult, RunResult
from eval.stats.uncertainty import Mean


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


def chosen(run: RunResult, kld: bool | None, value: str | None) -> Measure:
    """What ``-kld``, ``-ppl`` and ``--kld-value`` ask for; without them KLD where a model has one that is not 0."""
    wanted = any(model.mean_kld for model in run.models) if kld is None else kld
    return KLD_VALUES[value or "mean"] if wanted else PPL
