"""``--doctor --against``: the matrices that lost most, and the kinds of layers, as tables in a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from backends.checkpoint.doctor.comparison import LayerError, worst_first
from backends.common.errors import InputError
from backends.common.messages import printable

WORST = 10
"""Matrices in the table; the picture has all."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def show(errors: Sequence[LayerError], console: Console) -> None:
    """Print the table of the worst matrices, that of the kinds of layers, and what was not compared.

    InputError if nothing was compared.
    """
    ranked = worst_first(errors)
    if ranked:
        show_compared(ranked, console)
    left_out = Counter(each.note for each in errors if each.error is None)
    for note, count in left_out.items():
        name = next(each.name for each in errors if each.note == note)
        more = f" (and {count - 1:,} more)" if count > 1 else ""
        console.print(f"{printable(name)}{more}: {printable(note)}", markup=False, highlight=False, soft_wrap=True)
    if not ranked:
        raise InputError("--against: no matrix of the model could be compared with the reference's")


def show_compared(ranked: Sequence[LayerError], console: Console) -> None:
    """Print both tables."""
    worst = drawn("worst matrices", "stored", "relative error", "scale")
    for each in ranked[:WORST]:
        worst.add_row(printable(each.name), each.stored, f"{each.error:.5f}", f"{each.scale:.5f}")
    console.print(worst)
    kinds = drawn("kind of layer", "matrices", "median error", "largest")
    for kind, found in by_kind(ranked).items():
        values = [each.error or 0.0 for each in found]
        kinds.add_row(printable(kind), f"{len(found):,}", f"{median(values):.5f}", f"{max(values):.5f}")
    console.print(kinds)


def drawn(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=None)
    table.add_column(title, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def by_kind(errors: Sequence[LayerError]) -> dict[str, list[LayerError]]:
    """Name with ``*`` for its numbers -> the matrices with such a name; the kind with the worst median comes first."""
    found: dict[str, list[LayerError]] = {}
    for each in errors:
        found.setdefault(NUMBER.sub("*", each.name), []).append(each)
    return dict(sorted(found.items(), key=lambda item: -median(each.error or 0.0 for each in item[1])))
