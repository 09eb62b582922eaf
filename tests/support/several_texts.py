"""RunResult objects of several texts, made by hand: a fixed KLD and perplexity for each model and
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare_q.backends.base import Storage
from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.stats.block_sums import BlockSums
from compare_q.eval.stats.row_statistics import average_fields
from compare_q.eval.stats.slices import Slice
from compare_q.eval.stats.uncertainty import Mean, Perplexity
from tests.support import made
from tests.support.made import replace, run_of

TEXT_NAMES = ("wiki2", "c4", "chat")
TOKENS_OF_TEXT = 50
"""Scored tokens of each text, in five blocks."""
BLOCKS_OF_TEXT = BlockSums(
    (10,) * 15, tuple(10.0 * number for number in range(1, 16)), whole=("nll",), length=100_000
)
KLDS: Mapping[str, Sequence[float] | None] = {
    "bf16": None,
    "noise": (0.001, 0.002, 0.003),
    "EXL3 4.0": (0.05, 0.02, 0.08),
    "GGUF Q4_K": (0.04, 0.04, 0.01),
}
"""Label -> KLD of each text; None for the reference.  The row's own KLD is their mean, since texts
are equally long."""
SIZES = {"bf16": 16.0, "noise": 16.0, "EXL3 4.0": 4.0, "GGUF Q4_K": 4.5}


def slice_of(kld: float | None) -> Slice:
    """Return a slice with this KLD (error: a tenth) and 90 % same top.

    Its perplexity is 20 * (1 + KLD), with an error of 2.
    """
    if kld is None:
        return Slice(TOKENS_OF_TEXT, 20.0, 2.0)
    return Slice(TOKENS_OF_TEXT, 20 * (1 + kld), 2.0, kld, kld / 10, 0.9, 0.02)


def model_of(label: str, klds: Sequence[float] | None, *, reference: bool = True) -> ModelResult:
    """Return a model with these KLDs of the texts; its own KLD is their mean.

    ``reference``: models are compared with one; that row has no KLDs.
    """
    compared = reference and klds is not None
    kld = 0.0
    if klds:
        kld = sum(klds) / len(klds)
    ppl = Perplexity(20 * (1 + kld), -240.0, 3 * TOKENS_OF_TEXT, 0, 2.0)
    alone = {**average_fields("ppl", ppl), "blocks": BLOCKS_OF_TEXT}
    slices = {}
    for number, name in enumerate(TEXT_NAMES):
        text = slice_of(None)
        if klds:
            text = slice_of(klds[number])
        if not compared:
            text = Slice(text.tokens, text.ppl, text.ppl_stderr)
        slices[name] = text
    spec = {}
    if label == "noise":
        spec["noise_floor"] = True
    fields: dict[str, Any] = {
        "storage": Storage(SIZES.get(label)),
        "spec": spec,
        "provenance": {"layers": [made.LAYERS]},
        "slices": slices,
    }
    if not compared:
        return made.row(label, replace(made.ALONE, **alone), reference=reference, **fields)
    mean = Mean(kld, 3 * TOKENS_OF_TEXT * kld, 3 * TOKENS_OF_TEXT, 0, kld / 10)
    sums = {"kld": (10 * kld,) * 15, "same_top": (9.0,) * 15, "whole": ("nll", "kld", "same_top")}
    statistics = replace(
        made.COMPARED,
        **{**alone, "blocks": replace(BLOCKS_OF_TEXT, **sums)},
        **average_fields("kld", mean),
        **average_fields("ln_ppl_ratio", Mean(0.1, 15.0, 3 * TOKENS_OF_TEXT, 0, 0.01)),
        curve=made.ALONE.curve,
    )
    return made.row(label, statistics, **fields)


def three(*, failed: Mapping[str, str] | None = None, reference: bool = True) -> RunResult:
    """Return a run of three texts; ``failed``: label -> error of a model that failed."""
    errors = failed or {}
    models = []
    for label, klds in KLDS.items():
        if label in errors:
            models.append(ModelResult.of(label, "fake", error=errors[label]))
        else:
            models.append(model_of(label, klds, reference=reference))
    texts = [{"name": name, "windows": 2, "scored_tokens": TOKENS_OF_TEXT} for name in TEXT_NAMES]
    facts = None
    if reference:
        facts = {"label": "bf16"}
    return run_of(
        *models,
        reference=facts,
        texts=texts,
        subtitle=f"{len(TEXT_NAMES)} texts: {', '.join(TEXT_NAMES)}",
    )
