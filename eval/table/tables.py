"""Results -> the tables that they are shown as, which terminal, Markdown, report and notebooks print.

Of one text there is one, of several texts one with all of them side by side, or one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compare_q.eval.results import RunResult, TextResult
from compare_q.eval.table.columns import Filled, columns_of_texts, possible_extras, table_columns
from compare_q.eval.table.footnotes import (
    column_notes,
    footnotes,
    kv_size_notes,
    legend,
    legend_of_texts,
    notes_of_texts,
)


@dataclass(frozen=True)
class Table:
    """A table: its ``title``, columns and footnotes; of a text that failed there is only the ``error``.

    ``heading``: the name of its text, where each of several texts has a table.  ``notes``: what is special to it;
    ``legend``: what its marks mean; ``column_notes``: what columns mean, by their names.  ``spare``: columns, and
    errors of columns (``..._stderr``), that a narrow terminal leaves out, the last one first.
    """

    heading: str = ""
    title: str = ""
    columns: list[Filled] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    column_notes: dict[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    error: str = ""

    def legend_of(self, columns: Sequence[Filled]) -> list[str]:
        """What these columns of the table and its marks mean."""
        shown = {each.column.name for each in columns}
        return [*self.legend, *(note for name, note in self.column_notes.items() if name in shown)]


def tables_of(results: RunResult, names: Sequence[str] | None = None, *, by_text: bool = False) -> list[Table]:
    """The tables of a run with the columns of these names (None: those that tell something); ``by_text``: of several
    texts a table each."""
    if len(results.texts) == 1:
        return [table_of_text(results, results.texts[0], names)]
    if by_text:
        return [table_of_text(results, text, names, heading=text.name) for text in results.texts]
    title = f"{len(results.texts)} texts: {', '.join(text.name for text in results.texts)}"
    columns = columns_of_texts(results, names)
    notes = [*notes_of_texts(results), *notes_of_columns(results.scored[:1], columns)]
    return [Table("", title, columns, notes, legend_of_texts(results), spare=("kld_stderr", "ppl_stderr"))]


def table_of_text(
    results: RunResult, text: TextResult, names: Sequence[str] | None = None, *, heading: str = "", letters: bool = True
) -> Table:
    """The table of one text; ``letters``: whether machines have letters, and footnotes that explain them."""
    if text.error:
        return Table(heading, error=text.error)
    spare = possible_extras(text) if names is None else ()
    columns = table_columns(text, names)
    notes = [*footnotes(text, letters=letters), *notes_of_columns([text], columns)]
    return Table(heading, text.subtitle, columns, notes, legend(text), column_notes(text), spare)


def notes_of_columns(texts: Sequence[TextResult], columns: Sequence[Filled]) -> list[str]:
    """What is special to rows in columns that not every table has."""
    has_sizes = any(each.column.name == "kv_mb" for each in columns)
    return [note for text in texts for note in kv_size_notes(text) if has_sizes]
