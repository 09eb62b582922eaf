"""RunResult objects of several texts, made by hand: a fixed KLD and perplexity for each model and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare_q.backends.base import Storage
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.stats.estimates import BlockSums
from compare_q.eval.stats.uncertainty import Mean, Perplexity
from tests.support import made
from tests.support.made import replace, run_result, text_result

BLOCKS = BlockSums((10,) * 5, (10.0, 20.0, 30.0, 40.0, 50.0), whole=("nll",), length=100_000)
"""Five blocks: errors are estimated from four cosines, and 95 % intervals are +- 2.776 errors."""
NAMES = ("wiki2", "c4", "chat")
KLDS: Mapping[str, Sequence[float | None]] = {
    "bf16": (None, None, None),
    "noise": (0.001, 0.002, 0.003),
    "EXL3 4.0": (0.05, 0.02, 0.08),
    "GGUF Q4_K": (0.04, 0.04, 0.01),
}
"""Label -> KLD for each text; None for the reference."""
SIZES = {"bf16": 16.0, "noise": 16.0, "EXL3 4.0": 4.0, "GGUF Q4_K": 4.5}


def model_of(label: str, kld: float | None, *, error: str = "", reference: bool = True) -> ModelResult:
    """Return a model with mean KLD ``kld`` (error: a tenth) and a perplexity of 20 * (1 + KLD) (error: 2)."""
    if error:
        return ModelResult.of(label, "fake", error=error)
    spec = {"noise_floor": True} if label == "noise" else {}
    ppl = Perplexity(20 * (1 + (kld or 0.0)), -80.0, 50, 0, 2.0)
    alone = replace(made.ALONE, ppl=ppl, blocks=BLOCKS)
    shared: dict[str, Any] = {"storage": Storage(SIZES.get(label)), "spec": spec,
                              "provenance": {"layers": [made.LAYERS]}}  # fmt: skip
    if kld is None or not reference:
        return made.row(label, alone, reference=reference and kld is None, **shared)
    mean = Mean(kld, 50 * kld, 50, 0, kld / 10)
    against = replace(made.AGAINST, kld=mean, ln_ppl_ratio=Mean(0.1, 5.0, 50, 0, 0.01))
    sums = replace(BLOCKS, kld=(10 * kld,) * 5, same_top=(9.0,) * 5, whole=("nll", "kld", "same_top"))
    return made.row(label, replace(alone, against=against, blocks=sums), **shared)


def text_of(name: str, place: int, *, failed: Mapping[str, str] | None = None, reference: bool = True) -> TextResult:
    """Return the result of text number ``place`` of ``KLDS``; ``failed``: label -> error of a model that failed."""
    models = tuple(
        model_of(label, klds[place], error=(failed or {}).get(label, ""), reference=reference)
        for label, klds in KLDS.items()
    )
    found = {"label": "bf16"} if reference else None
    return text_result(name, {"windows": 2}, f"{name}, 2 × 50 tokens", models, found)


def three(**failed: Mapping[str, str]) -> RunResult:
    """Return a run of three texts; ``failed``: name of a text -> label -> error."""
    return run_result(tuple(text_of(name, i, failed=failed.get(name)) for i, name in enumerate(NAMES)))


def with_failed_text(result: RunResult, name: str, error: str) -> RunResult:
    """Return the results with one failed text."""
    return replace(result, texts=tuple(text_result(name, error=error) if t.name == name else t for t in result.texts))
