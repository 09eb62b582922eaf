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
from compare_q.eval.run.row import against_reference, fields_of
from compare_q.eval.stats.estimates import AgainstReference, BlockSums, Curve, Estimates, TextRates
from compare_q.eval.stats.uncertainty import Mean, Perplexity, Value

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
    label: str, estimates: Estimates, storage: Storage | None = None, **fields: Any
) -> ModelResult:
    """Return a row with these estimates."""
    return ModelResult.of(label, "fake", storage, **fields_of(estimates), **fields)


def replace(found: Any, **changes: Any) -> Any:
    """Return a copy with other values of some fields; the computed fields of a row are computed
    again.

    ``estimates``: other statistics of a row.
    """
    if isinstance(found, ModelResult):
        fields = {
            name: getattr(found, name) for name in ModelResult.model_fields if name not in COMPUTED
        }
        if "estimates" in changes:
            fields |= {name: ModelResult.model_fields[name].default for name in fields_of(COMPARED)}
            fields |= fields_of(changes.pop("estimates"))
        return ModelResult.of(**{"storage": storage_of(found), **fields, **changes})
    return (
        found.updated(**changes)
        if isinstance(found, Stored)
        else dataclasses.replace(found, **changes)
    )


def storage_of(row: ModelResult) -> Storage:
    """Return the ``Storage`` from which a row was made."""
    return Storage(
        row.bpw_layer, row.bpw_head, row.vram_bits, row.storage_note or "", row.file_bytes
    )


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
RATES = TextRates(
    Value(1.25, 0.05, 0.01), Value(2.378, 0.08, 0.02), Value(55.5, 3.0, 1.0), 160.0, 32.0
)
ALONE = Estimates(
    PPL, None, Mean(0.5, 20.0, 40, 0), Mean(1.25, 50.0, 40, 0), RATES, BLOCKS, Curve((1, 3), (2.0,))
)
AGAINST = AgainstReference(
    ref_ppl=Perplexity(7.25, -79.0, 40, 0, 0.8, 0.0111),
    ln_ppl_ratio=Mean(0.0339, 1.356, 40, 0, 0.002, 0.001),
    correlation=0.98765,
    ppl_ratio=Value(1.0345, 0.00207, 0.00103),
    ppl_difference=Value(0.25, 0.015, 0.0075),
    kld=Mean(0.01234567, 0.4938268, 40, 0, 0.000452, 0.0002),
    kld_percentiles=PERCENTILES,
    delta_p=Mean(-0.01, -0.4, 40, 0, 0.003, 0.002),
    delta_p_rms=Value(0.04, 0.006, 0.005),
    delta_p_percentiles=PERCENTILES,
    same_top=Mean(0.98765, 39.506, 40, 0, 0.00521, 0.004),
)
KLD_BLOCKS = replace(
    BLOCKS,
    kld=(1.0, 1.0, 1.0, 1.0),
    same_top=(9.0, 9.0, 9.0, 9.0),
    whole=("nll", "kld", "same_top"),
)
COMPARED = replace(ALONE, against=AGAINST, blocks=KLD_BLOCKS, curve=Curve((1, 3), (2.0,), (0.5,)))
BASE = row(
    "base",
    ALONE,
    SIZE,
    windows=2,
    load_seconds=1.0,
    score_seconds=2.0,
    provenance={"layers": [LAYERS]},
)
REF = replace(BASE, label="bf16", reference=True)
QUANT = replace(BASE, label="W4A16", estimates=COMPARED)
FAILED = ModelResult.of("broken", "fake", error="told to fail")


WORST = (
    WorstToken(
        window=1,
        position=7,
        kld=4.25,
        logprob=-4.605,
        ref_logprob=-0.693,
        before="before\n",
        token=" <i>",
        after=" after",
    ),
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


def with_ppl(model: Any, ppl: Perplexity) -> ModelResult:
    """The model with another perplexity."""
    return replace(
        model,
        ppl=ppl.value,
        ppl_stderr=ppl.stderr,
        ppl_stderr_independent=ppl.stderr_independent,
        logprob_sum=ppl.logprob_sum,
        tokens=ppl.tokens,
        non_finite=ppl.non_finite,
    )


def with_against(model: Any, **keys: Any) -> ModelResult:
    """The model with other statistics against the reference."""
    usual, other = against_reference(AGAINST), against_reference(replace(AGAINST, **keys))
    return replace(model, **{name: value for name, value in other.items() if value != usual[name]})


def with_sums(model: Any, **keys: Any) -> ModelResult:
    """The model with other sums over its blocks."""
    return replace(model, blocks=replace(model.blocks, **keys))


def raw_of(run: RunResult, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of a run's results.json."""
    return json.loads(run.with_origin(command).json_text())


def read_back(raw: Any, folder: Path) -> RunResult:
    """Return the run from a results.json with this content."""
    (folder / "r.json").write_text(json.dumps(raw))
    return RunResult.read(folder / "r.json")
