"""Results -> the tables that they are shown as, which terminal, Markdown, report and notebooks print.

Of one text there is one, of several texts one with all of them side by side, or one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compare_q.eval.results.run_result import Results, TextResult
from compare_q.eval.table.columns import Filled, columns_of_texts, possible_extras, table_columns
from compare_q.eval.table.footnotes import column_notes, footnotes, notes_of_texts


@dataclass(frozen=True)
class Table:
    """A table: its ``title``, columns and footnotes; of a text that failed there is only the ``error``.

    ``heading``: the name of its text, where each of several texts has a table.  ``column_notes``: footnotes by the
    column that they go with.  ``spare``: columns, and errors of columns (``..._stderr``), that a narrow terminal leaves
    out, the last one first.
    """

    heading: str = ""
    title: str = ""
    columns: list[Filled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    column_notes: dict[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    error: str = ""

    def notes_with(self, columns: Sequence[Filled]) -> list[str]:
        """The footnotes of the table with these columns."""
        shown = {each.column.name for each in columns}
        return [*self.notes, *(note for name, note in self.column_notes.items() if name in shown)]


def tables_of(results: Results, names: Sequence[str] | None = None, *, by_text: bool = False) -> list[Table]:
    """The tables of a run with the columns of these names (None: those that tell something); ``by_text``: of several
    texts a table each."""
    if len(results.texts) == 1:
        return [table_of_text(results, results.texts[0], names)]
    if by_text:
        return [table_of_text(results, text, names, heading=text.name) for text in results.texts]
    title = f"{len(results.texts)} texts: {', '.join(text.name for text in results.texts)}"
    columns = columns_of_texts(results, names)
    return [Table("", title, columns, notes_of_texts(results), spare=("kld_stderr", "ppl_stderr"))]


def table_of_text(
    results: Results, text: TextResult, names: Sequence[str] | None = None, *, heading: str = "", letters: bool = True
) -> Table:
    """The table of one text; ``letters``: whether machines have letters, and footnotes that explain them."""
    if text.error:
        return Table(heading, error=text.error)
    spare = possible_extras(text) if names is None else ()
    notes = footnotes(text, results.parts, letters=letters)
    return Table(heading, text.subtitle, table_columns(text, names), notes, column_notes(text), spare)
