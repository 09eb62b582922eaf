"""A result of ``compare-q where`` without a search."""

from __future__ import annotations

from typing import Any

from compare_q.eval.where.results import Measured, Model, Module, PartRow, WhereResult

MODEL = Model(label="q4", model="q4", load_fn="restoring")


def part(name: str, share: float | None, stderr: float = 0.001, **fields: Any) -> PartRow:
    """Return a row with a share, or with the reason why it has none."""
    values: dict[str, Any] = {
        "modules": (name,),
        "n_weights": 10,
        "bits": 45.0,
        "reference_bits": 160.0,
        "windows": 8,
        "reason": "not finite",
    }
    if share is not None:
        measured = Measured(
            value=share, stderr=stderr, low=share - 3 * stderr, high=share + 3 * stderr
        )
        percent = Measured(value=100 * share, stderr=100 * stderr)
        values |= {"share": measured, "percent": percent, "kld": Measured(value=1 - share)}
        values["reason"] = ""
    return PartRow(name=name, **{**values, **fields})


def result(*rows: PartRow, **fields: Any) -> WhereResult:
    """Return a result with these rows, of a whole KLD of 1 nat."""
    modules = []
    for row in rows:
        modules.append(Module(name=row.name, n_weights=10, bits=45.0, reference_bits=160.0))
    values: dict[str, Any] = {"by": "kind", **fields}
    return WhereResult(
        reference=MODEL.updated(label="ref"),
        quantized=MODEL,
        data={},
        windows=8,
        modules=tuple(modules),
        whole=Measured(value=1.0, stderr=0.01),
        rows=rows,
        **values,
    )
