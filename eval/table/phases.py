"""The table of ``--phases``: a model's two phases in one row, and how far its decode is from its own prefill."""

from __future__ import annotations

from dataclasses import replace

from compare_q.eval.results.digits import number_with_error, two_digits
from compare_q.eval.results.phases import prefill_of
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.stats.phases import OwnPrefill
from compare_q.eval.table import columns
from compare_q.eval.table.columns import Cell, Filled, filled
from compare_q.eval.table.registry import LABEL

TITLE = "Decode beside prefill"
DIFFERS = "\N{DOUBLE EXCLAMATION MARK}"
"""Beside the label of a model whose decode differs from its own prefill by more than noise does."""
IN_BOTH = ("ppl", "kld", "speed")
"""What is shown of both phases."""
OWN = ("own_kld", "own_noise", "own_begins")
SPARE = ("kld_stderr", "ppl_stderr", "own_noise_stderr", "speed")
"""What a narrow terminal leaves out, the last one first."""


def compared(text: TextResult) -> list[tuple[ModelResult, ModelResult]]:
    """(the row in prefill, the row of the same model in decode) of those whose decode was compared with its prefill."""
    found = [(prefill_of(row, text.models), row) for row in text.models if row.own_prefill]
    return [(prefill, decode) for prefill, decode in found if prefill is not None]


def columns_of(text: TextResult) -> list[Filled]:
    """A row for each model in decode; empty if none was compared with its prefill."""
    pairs = compared(text)
    if not pairs:
        return []
    prefills, decodes = (replace(text, models=models) for models in zip(*pairs, strict=True))
    marked = (Cell(columns.label_of(row) + f" {DIFFERS}" * own_of(row).differs) for _, row in pairs)
    shown = [replace(each, cells=tuple(marked)) for each in filled(decodes, [LABEL])]
    for name in IN_BOTH:
        for rows, phase in ((prefills, "prefill"), (decodes, "decode")):
            if name != "kld" or text.reference:
                (each,) = filled(rows, [name])
                header = f"{each.column.title}\n{phase}"
                cells = tuple(replace(cell, is_best=False) for cell in each.cells)
                shown.append(Filled(replace(each.column, header=header), cells))
    *own, begins = filled(decodes, OWN)
    known = zip(begins.cells, (own_of(row) for _, row in pairs), strict=True)
    nowhere = tuple(Cell("nowhere") if each.noise and each.begins is None else cell for cell, each in known)
    return [*shown, *own, replace(begins, cells=nowhere)]


def own_of(row: ModelResult) -> OwnPrefill:
    """The comparison of a row that has one."""
    assert row.own_prefill is not None
    return row.own_prefill


def notes_of(text: TextResult) -> list[str]:
    """Which models decode otherwise than they prefill, and of which it is not known."""
    found = []
    for prefill, row in compared(text):
        own = own_of(row)
        if own.noise is None:
            found.append(f"{row.label}: noise n/a: {own.no_noise}")
        elif own.differs and own.kld.value is not None and own.noise.value:
            size, times = number_with_error(own.kld.value, own.kld.stderr, "nats"), own.kld.value / own.noise.value
            begins = "" if own.begins is None else f"; it shows from about token {own.begins:,} of a window on"
            found.append(
                f"{DIFFERS} {row.label}: KLD from {prefill.label} {size}, {two_digits(times):g} times what rounding "
                f"noise makes{begins}; generation is not what prefill measures"
            )
    return found
