"""RunResult objects made by hand, small enough to compute every printed number by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare_q.backends.base import Storage
from compare_q.eval.common.stored import Stored
from compare_q.eval.results import ModelResult, RunResult, WorstToken
from compare_q.eval.stats.block_sums import BlockSums
from compare_q.eval.stats.curve import Curve
from compare_q.eval.stats.row_statistics import (
    Average,
    RowStatistics,
    average_fields,
    kld_percentile_fields,
)
from compare_q.eval.stats.uncertainty import Perplexity

COMPUTED = {
    "where",
    "kernel",
    "deviations",
    "attention",
    "engine_version",
    "options",
    "phase",
    "kv_cache",
    "kv_mb",
    "bpw_layer",
    "bpw_head",
    "vram_gib",
    "vram_bits",
    "file_bytes",
    "storage_note",
    "fits",
    "noise_floor",
    "tokens_per_second",
    "seconds",
}
"""Fields of a row that are computed from its storage, spec, provenance and other fields."""


def row(
    label: str, statistics: RowStatistics, storage: Storage | None = None, **fields: Any
) -> ModelResult:
    """Return a row with these statistics."""
    return ModelResult.of(label, "fake", storage, **{**statistics.computed(), **fields})


def replace(original: Any, **changes: Any) -> Any:
    """Return a copy with other values of some fields; fields of a row that follow are updated."""
    if isinstance(original, ModelResult):
        fields = {"storage": storage_of(original)}
        for name in ModelResult.model_fields:
            if name not in COMPUTED:
                fields[name] = getattr(original, name)
        return ModelResult.of(**{**fields, **changes})
    if isinstance(original, Stored):
        return original.updated(**changes)
    return dataclasses.replace(original, **changes)


def storage_of(row: ModelResult) -> Storage:
    """Return the ``Storage`` from which a row was made."""
    return Storage(
        row.bpw_layer, row.bpw_head, row.vram_bits, row.storage_note or "", row.file_bytes
    )


# The weights in VRAM are 8 * 2^30 bits = 1 GiB.
SIZE = Storage(4.5, 16.0, 8 * 2.0**30)
REFERENCE = {"label": "bf16", "contents": "states", "key": "f" * 40}
LAYERS = {
    "layers": "h.*",
    "count": 2,
    "weights": "float16",
    "activations": "float16",
    "kernel": "Linear",
    "asked": "",
}
PERCENTILES = {
    "min": -0.5,
    "0.1": 0.001,
    "1": 0.01,
    "5": 0.05,
    "10": 0.1,
    "25": 0.25,
    "50": 0.5,
    "75": 0.75,
    "90": 0.9,
    "95": 0.95,
    "99": 0.99,
    "99.9": 0.999,
    "max": 2.0,
}
TOKENS = (10, 10, 10, 10)
BLOCKS = BlockSums(TOKENS, (10.0, 20.0, 30.0, 40.0), whole=("nll",), length=100_000)
PPL = Perplexity(7.5, -80.0, 40, 0, 0.852, 0.0123)
ALONE = RowStatistics(
    **average_fields("ppl", PPL),
    top1=0.5,
    entropy=1.25,
    bits_per_byte=1.25,
    # 2^1.25, from ``bits_per_byte``.
    byte_perplexity=2.378,
    word_perplexity=55.5,
    blocks=BLOCKS,
    curve=Curve((1, 3), (2.0,)),
)
"""Statistics of a model without a reference."""
KLD_BLOCKS = replace(
    BLOCKS,
    kld=(1.0, 1.0, 1.0, 1.0),
    same_top=(9.0, 9.0, 9.0, 9.0),
    whole=("nll", "kld", "same_top"),
)
COMPARED = replace(
    ALONE,
    ref_ppl=7.25,
    ref_ppl_tokens=40,
    # ln(7.5 / 7.25) = 0.0339 and 7.5 / 7.25 = 1.0345, whose error is 1.0345 * 0.002.
    ln_ppl_ratio=0.0339,
    ln_ppl_ratio_stderr=0.002,
    ppl_ratio=1.0345,
    ppl_ratio_stderr=0.00207,
    ppl_difference=0.25,
    # 7.5 * 0.002.
    ppl_difference_stderr=0.015,
    correlation=0.98765,
    kld=0.01234567,
    kld_stderr=0.000452,
    # 40 * 0.01234567.
    kld_sum=0.4938268,
    kld_tokens=40,
    kld_non_finite=0,
    **kld_percentile_fields(PERCENTILES),
    delta_p=-0.01,
    delta_p_stderr=0.003,
    delta_p_rms=0.04,
    delta_p_rms_stderr=0.006,
    delta_p_percentiles=PERCENTILES,
    same_top=0.98765,
    same_top_stderr=0.00521,
    blocks=KLD_BLOCKS,
    curve=Curve((1, 3), (2.0,), (0.5,)),
)
"""Statistics of a model that was compared with a reference."""
RECORD: dict[str, Any] = {
    "windows": 2,
    "load_seconds": 1.0,
    "score_seconds": 2.0,
    "provenance": {"layers": [LAYERS]},
}
BASE = row("base", ALONE, SIZE, **RECORD)
REF = replace(BASE, label="bf16", reference=True)
QUANT = row("W4A16", COMPARED, SIZE, **RECORD)
FAILED = ModelResult.of("broken", "fake", error="told to fail")


WORST = (
    WorstToken(
        window=1,
        position=7,
        kld=4.25,
        # ln 0.01, and ln 0.5 for the reference.
        logprob=-4.605,
        ref_logprob=-0.693,
        before="before\n",
        token=" <i>",
        after=" after",
    ),
    # In a page, a token must not end the script that it is in.
    WorstToken(window=0, position=9, kld=3.0, logprob=-9.0, after="</script>"),
)


TEXT = {"name": "text", "windows": 2}
"""Facts about the only text of a run."""


def data_of(*texts: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """Return the ``data`` of a run: ``texts``, facts about each text, and ``facts`` about all
    windows.
    """
    windows = sum(text.get("windows", 0) for text in texts)
    return {"texts": list(texts), "windows": windows, **facts}


def run_of(
    *models: ModelResult,
    reference: dict[str, Any] | None = REFERENCE,
    texts: Sequence[dict[str, Any]] = (TEXT,),
    data: dict[str, Any] | None = None,
    subtitle: str = "letters",
    **fields: Any,
) -> RunResult:
    """Return a run of these models.

    ``texts``: facts about each text; ``data``: facts about all windows; ``fields``: others of the
    run, as its title.
    """
    return RunResult(
        data=data_of(*texts, **data or {}),
        subtitle=subtitle,
        reference=reference,
        models=models,
        **fields,
    )


def with_ppl(model: ModelResult, ppl: Perplexity) -> ModelResult:
    """Return the model with another perplexity."""
    return replace(model, **average_fields("ppl", ppl))


def with_against(model: ModelResult, **statistics: Any) -> ModelResult:
    """Return the model with other statistics against the reference.

    ``statistics``: by their fields in a row; an average sets the fields of its errors and counts
    too, and ``kld_percentiles`` the single percentiles.
    """
    fields: dict[str, Any] = {}
    for name, value in statistics.items():
        if isinstance(value, Average):
            fields |= average_fields(name, value)
        elif name == "kld_percentiles":
            fields |= kld_percentile_fields(value)
        else:
            fields[name] = value
    return replace(model, **fields)


def with_sums(model: ModelResult, **sums: Any) -> ModelResult:
    """Return the model with other sums over its blocks."""
    return replace(model, blocks=replace(model.blocks, **sums))


def raw_of(run: RunResult, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a run's results.json."""
    return json.loads(run.with_origin(command).json_text())


def read_back(raw: Any, folder: Path) -> RunResult:
    """Return the run from a results.json with this content."""
    (folder / "r.json").write_text(json.dumps(raw))
    return RunResult.read(folder / "r.json")
