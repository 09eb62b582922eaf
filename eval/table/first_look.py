"""The first look: the table so far, which a terminal shows below the progress bars until the run ends."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from compare_q.backends.common.messages import printable
from compare_q.eval.results import ModelResult
from compare_q.eval.table.columns import label_of, number_cell
from compare_q.eval.table.registry import BY_NAME

SHOWN = ("bpw_layer", "ppl", "kld", "same_top")
AROUND = 12
"""Lines of a terminal that are left to the bars, the head of the table, and what was said before."""


class FirstLook:
    """The rows of every text, in their order, by what is known of them so far; called from the models' threads."""

    def __init__(self, labels: Sequence[str], texts: Sequence[str]) -> None:
        several = len(texts) > 1
        self.rows: dict[tuple[str, str], ModelResult | None] = {
            (text if several else "", label): None for label in labels for text in texts
        }

    def add(self, text: str, row: ModelResult) -> None:
        """A row is known; ``text``: its name where there are several, else empty."""
        self.rows[text, row.label] = row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        several = len({text for text, _ in self.rows}) > 1
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("label", *(["text"] if several else [])):
            table.add_column(title, overflow="fold")
        for name in SHOWN:
            table.add_column(BY_NAME[name].title, justify="right", no_wrap=True)
        room = max(console.height - AROUND, 3)
        known = sum(row is not None for row in self.rows.values())
        # Where not all have room: the first that wait, and before them those that were finished last in the order.
        first = min(max(known - room + 1, 0), max(len(self.rows) - room, 0))
        for (text, label), row in list(self.rows.items())[first : first + room]:
            name = printable(label if row is None else label_of(row))
            table.add_row(*map(Text, [name, text][: 1 + several]), *cells(row))
        yield table
        if left := len(self.rows) - room:
            yield Text(f"and {left} more rows, {known} of {len(self.rows)} are finished", "dim") if left > 0 else ""


def cells(row: ModelResult | None) -> list[Text]:
    """What is known of a row: numbers with their errors, or one word."""
    if row is None or row.estimates is None:
        return [Text(""), Text("waits", "dim") if row is None else Text("failed", "red"), Text(""), Text("")]
    flat = row.flat
    found = [number_cell(BY_NAME[name], row, flat, is_best=False) for name in SHOWN]
    return [Text(f"{cell.value}±{cell.error}" if cell.error else cell.value) for cell in found]
