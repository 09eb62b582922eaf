"""The table of ``--phases``: a model's two phases in one row, and how far its decode is from its own prefill."""

from __future__ import annotations

from dataclasses import replace

from compare_q.eval.results.digits import number_with_error, two_digits
from compare_q.eval.results.run_result import ModelResult, TextResult, prefill_of
from compare_q.eval.table import columns
from compare_q.eval.table.columns import Cell, Filled, filled
from compare_q.eval.table.registry import LABEL

TITLE = "Decode beside prefill"
DIFFERS = "\N{DOUBLE EXCLAMATION MARK}"
"""Beside the label of a model whose decode differs from its own prefill by more than noise does."""
IN_BOTH = ("ppl", "kld", "speed")
"""What is shown of both phases."""
OWN = ("own_kld", "own_noise", "own_begins")
NOT_MEASURED = "KLD from prefill n/a: not measured to the end; run again with --phases"
SPARE = ("kld_stderr", "ppl_stderr", "own_noise_stderr", "speed")
"""What a narrow terminal leaves out, the last one first."""


def compared(text: TextResult) -> list[tuple[ModelResult, ModelResult]]:
    """(the row in prefill, the row of the same model in decode) of every model that has both, if the decode of any of
    them was compared with its prefill."""
    pairs = [(prefill_of(row, text.models), row) for row in text.models if not row.error]
    found = [(prefill, decode) for prefill, decode in pairs if prefill is not None]
    return found if any(decode.own_prefill for _, decode in found) else []


def columns_of(text: TextResult) -> list[Filled]:
    """A row for each model in decode; empty if none was compared with its prefill."""
    pairs = compared(text)
    if not pairs:
        return []
    prefills, decodes = (replace(text, models=models) for models in zip(*pairs, strict=True))
    differs = (row.own_prefill is not None and row.own_prefill.differs for _, row in pairs)
    marked = (Cell(columns.label_of(row) + f" {DIFFERS}" * off) for (_, row), off in zip(pairs, differs, strict=True))
    shown = [replace(each, cells=tuple(marked)) for each in filled(decodes, [LABEL])]
    for name in IN_BOTH:
        for rows, phase in ((prefills, "prefill"), (decodes, "decode")):
            if name != "kld" or text.reference:
                (each,) = filled(rows, [name])
                header = f"{each.column.title}\n{phase}"
                cells = tuple(replace(cell, is_best=False) for cell in each.cells)
                shown.append(Filled(replace(each.column, header=header), cells))
    *own, begins = filled(decodes, OWN)
    places = tuple(
        Cell("nowhere") if is_nowhere(row) else cell for cell, (_, row) in zip(begins.cells, pairs, strict=True)
    )
    return [*shown, *own, replace(begins, cells=places)]


def is_nowhere(decode: ModelResult) -> bool:
    """Whether it is known that decode differs from some position on nowhere; one window alone does not tell."""
    own = decode.own_prefill
    return (
        own is not None and own.noise is not None and own.begins is None and not own.not_finite and decode.windows > 1
    )


def notes_of(text: TextResult) -> list[str]:
    """Which models decode otherwise than they prefill, and of which it is not known."""
    found, missing = [], dict[str, list[str]]()
    for prefill, row in compared(text):
        own = row.own_prefill
        if own is None:
            missing.setdefault(NOT_MEASURED, []).append(row.label)
        elif own.noise is None:
            missing.setdefault(f"KLD of noise n/a: {own.no_noise}", []).append(row.label)
        elif own.not_finite:
            found.append(
                f"{DIFFERS} {row.label}: {own.not_finite:,} more tokens than with rounding noise have no finite KLD "
                f"from {prefill.label}, and no part in the mean; generation is not what prefill measures"
            )
        elif own.differs and own.kld.value is not None and own.noise.value:
            size, times = number_with_error(own.kld.value, own.kld.stderr, "nats"), own.kld.value / own.noise.value
            begins = "" if own.begins is None else f"; it shows from about token {own.begins:,} of a window on"
            found.append(
                f"{DIFFERS} {row.label}: KLD from {prefill.label} {size}, {two_digits(times):g} times what rounding "
                f"noise makes{begins}; generation is not what prefill measures"
            )
    return [*found, *(f"{', '.join(labels)}: {what}" for what, labels in missing.items())]
