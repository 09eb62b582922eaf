"""The tables of ``compare-q where``: order, marks, sentences."""

from __future__ import annotations

from rich.console import Console

from compare_q.eval.where import where_table
from compare_q.eval.where.results import FrontRow, Measured
from tests.support.where_results import part, result


def cells(name: str, *rows: object, **fields: object) -> list[str]:
    """Return the cells of a column, with their marks."""
    table = where_table.table_of_parts(result(*rows, **fields))  # type: ignore[arg-type]
    for filled in table.columns:
        if filled.column.name == name:
            return [cell.value + cell.marks for cell in filled.cells]
    return []


ROWS = (
    part("q", 0.002, 0.001),
    part("o", None),
    part("down", 0.3, 0.01),
    part("k", 0.001, 0.0001, stopped=True, windows=8),
)


def test_the_largest_share_comes_first_and_na_last() -> None:
    assert cells("label", *ROWS) == ["down", "q", "k", "o"]
    assert cells("share", *ROWS) == ["0.30000", "0.00200", "0.00100", "n/a"]
    assert cells("kld", *ROWS) == ["0.70000", "0.99800", "0.99900", "n/a"]
    assert cells("bpw", *ROWS) == ["4.50"] * 4


def test_marks_of_shares_that_cannot_be_told_from_0_and_of_parts_that_stopped() -> None:
    assert cells("percent", *ROWS) == ["30.0", "0.2~", "0.1", "n/a"]
    assert cells("windows", *ROWS) == ["8", "8", "8*", "8"]
    notes = where_table.table_of_parts(result(*ROWS)).notes
    assert any(note.startswith("~") for note in notes)
    assert any(note.startswith("*") for note in notes)
    assert any(note.startswith("o: n/a: not finite") for note in notes)


def test_the_closing_sentence_names_only_shares_that_can_be_told_from_0() -> None:
    """q, the second in size, cannot."""
    sentence = where_table.table_of_parts(result(*ROWS)).finding[1]
    assert sentence.endswith("down (30 %), k (0 %).")


def test_the_largest_share_is_named_first_if_it_cannot_be_told_from_0() -> None:
    rows = (part("down", 0.3, stderr=0.2), part("q", 0.002), part("k", 0.1))
    uncertain, certain = where_table.table_of_parts(result(*rows)).finding[1:3]
    assert "down (30 %)" in uncertain
    assert certain.endswith("k (10 %).")


def test_a_largest_share_that_is_below_0_for_certain_is_not_called_uncertain() -> None:
    (only,) = where_table.table_of_parts(result(part("v", -0.1))).finding[1:2]
    assert "above 0" in only
    assert "cannot be told" not in only


def test_with_only_there_is_no_kld_left() -> None:
    assert cells("kld", *ROWS, only=True) == []


def test_the_sum_is_unknown_if_a_share_is() -> None:
    known = [row for row in ROWS if row.name != "o"]
    with_sum = "\n".join(where_table.table_of_parts(result(*known)).finding)
    assert "0.30300" in with_sum
    assert "add up" not in "\n".join(where_table.table_of_parts(result(*ROWS)).finding)


def test_rows_of_the_front_name_the_parts_that_each_adds() -> None:
    front = (
        FrontRow(parts=("down",), kld=Measured(value=0.7, stderr=0.01), bits=295.0),
        FrontRow(parts=("down", "q", "k"), reason="not finite", bits=525.0),
    )
    table = where_table.table_of_front(result(*ROWS, front=front))
    assert table is not None
    by_name = {filled.column.name: filled.cells for filled in table.columns}
    assert [cell.value for cell in by_name["label"]] == ["down", "and q, k"]
    assert [cell.value for cell in by_name["kld"]] == ["0.70000", "n/a"]
    # Of 40 weights.
    assert [cell.value for cell in by_name["bpw"]] == ["7.38", "13.12"]


def test_a_terminal_shows_the_largest_of_many_parts() -> None:
    rows = [part(f"p{number:03}", 0.5 - 0.001 * number) for number in range(100)]
    console = Console(width=120, record=True, quiet=False)
    where_table.print_result(result(*rows), console)
    text = console.export_text()
    assert "p039" in text
    assert "p040" not in text
    assert "60 smaller parts" in text
    assert where_table.csv_text(result(*rows)).count("\n") == 101
