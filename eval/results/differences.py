"""Differences between two models of a run, with their errors: what the errors of single rows are far too large to say.

Both models were scored on the same tokens, so an easy block of the text is easy for both, and leaves the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.results.run_result import ModelResult
from eval.stats import estimates
from eval.stats.estimates import BlockSums
from eval.stats.uncertainty import interval, waves

SCORES = {"nll": "log-probability", "kld": "KL divergence", "same_top": "most probable token"}
"""What can be compared."""
LEAST = 2000
"""Tokens of text below which no model is called the best.  In simulated texts a KLD twice as large as another is told
apart from it in 34 % of 255 tokens, 53 % of 510 and 81 % of 2,000 (``benchmarks/told_apart.py``): where it is not, ★
stands at both."""


@dataclass(frozen=True)
class Difference:
    """One model's mean minus another's; ``stderr`` and the 95 % ``limits`` are None where they cannot be told."""

    value: float
    stderr: float | None
    limits: tuple[float, float] | None

    @property
    def is_seen(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.limits is not None and not self.limits[0] <= 0 <= self.limits[1]


def groups(blocks: BlockSums) -> int:
    """Blocks of text that errors come from."""
    return sum(count > 0 for count in blocks.tokens)


def between(a: BlockSums, b: BlockSums, name: str) -> Difference | None:
    """Mean of ``name`` (of ``SCORES``) of a minus that of b; None if they cannot be compared."""
    found = estimates.difference(a, b, name)
    if found is None or found.value is None:
        return None
    limits = None if found.stderr is None else interval(found.value, found.stderr, waves(groups(a), a.length))
    return Difference(found.value, found.stderr, limits)


def compared(a: ModelResult, b: ModelResult, name: str) -> Difference | str:
    """The difference of two models, or why it is not known."""
    for model in (a, b):
        if model.estimates is None:
            return f"{model.label} failed"
        if name == "kld" and model.is_reference:
            return f"{model.label} is the reference, from which KLD is measured"
        if getattr(model.estimates.blocks, name) is None:
            return f"{model.label} has no {SCORES[name]}"
        if name not in model.estimates.blocks.whole:
            return f"{model.label} has positions without a finite {SCORES[name]}"
    if name != "nll" and a.reference_key != b.reference_key:
        return "each was compared with the reference of its own machine"
    found = between(a.estimates.blocks, b.estimates.blocks, name) if a.estimates and b.estimates else None
    return "they were scored on different windows" if found is None else found


def several_references(models: Sequence[ModelResult]) -> bool:
    """Whether the KL divergences of a merged run are against references of different machines."""
    return len({model.reference_key for model in models if model.reference_key}) > 1


def candidates(models: Sequence[ModelResult], name: str) -> dict[str, BlockSums]:
    """Label -> sums of the models that may have the best ``name`` (of ``SCORES``): measured and quantized ones.

    The reference and noise floors are none, and neither are other unquantized models, which show what is lost by
    roundings alone.
    """
    return {
        model.label: model.estimates.blocks
        for model in models
        if model.estimates and getattr(model.estimates.blocks, name) is not None
        and model.is_quantized and not (model.is_reference or model.is_noise_floor)
    }  # fmt: skip


def too_short(models: Sequence[ModelResult]) -> int | None:
    """Tokens of a text of fewer than ``LEAST``, where there are models of which one could be called the best."""
    found = candidates(models, "nll").values()
    length = min((each.length for each in found if each.length), default=LEAST)
    return length if len(found) > 1 and length < LEAST else None


def best(models: Sequence[ModelResult], name: str) -> frozenset[str]:
    """Labels of the ``candidates`` with the best ``name``, and of those whose difference from it is not seen.

    One alone is not the best.  None where that cannot be told: the text is shorter than ``LEAST``, the best that was
    measured left scores out, or references differ (a merged run).
    """
    if name != "nll" and several_references(models):
        return frozenset()
    among = candidates(models, name)
    if len(among) < 2 or any(groups(found) < 2 or found.length < LEAST for found in among.values()):
        return frozenset()
    sign = -1 if name == "same_top" else 1
    means = {label: sign * sum(getattr(found, name)) / sum(found.tokens) for label, found in among.items()}
    first = among[min(means, key=lambda label: means[label])]
    # Nothing can be paired with a first that left scores out: then no row is marked.
    differences = {label: between(found, first, name) for label, found in among.items()}
    return frozenset(label for label, off in differences.items() if off is not None and not off.is_seen)
