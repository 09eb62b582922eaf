"""Rows as CSV."""

from __future__ import annotations

import csv
import io

import pytest

from compare_q.backends.common.message_text import printable
from compare_q.eval.table.csv_text import csv_of_run
from tests.support.made import FAILED, QUANT, REF, replace, run_of
from tests.support.several_texts import three


def test_rows_and_fields() -> None:
    """CSV has all flat fields unrounded, or the fields of the chosen columns with their errors."""
    run = run_of(FAILED, REF, replace(QUANT, notes=("a, b", "two")))
    failed, reference, row = csv.DictReader(io.StringIO(csv_of_run(run), newline=""))
    assert (row["notes"], float(row["kld"]), row["entropy"]) == ("a, b; two", QUANT.kld, "1.25")
    values = [reference[name] for name in ("reference", "kld", "kld_sum")]
    assert values == ["True", "0.0", ""]
    assert (failed["kld"], failed["error"]) == ("", "told to fail")
    assert not {"spec", "provenance", "blocks"} & row.keys()
    assert csv_of_run(run, ["label", "kld"]).splitlines()[2] == "bf16,0.0,"


def test_a_kld_that_is_not_exact_has_its_kind() -> None:
    run = run_of(REF, QUANT, replace(QUANT, label="served", kld_kind="bound"))
    lines = csv_of_run(run, ["label", "kld_max"]).splitlines()
    assert lines == ["label,kld_max,kld_kind", "bf16,,exact", "W4A16,2.0,exact", "served,2.0,bound"]
    assert csv_of_run(run, ["label", "ppl"]).splitlines()[0] == "label,ppl,ppl_stderr"
    *_, served = csv.DictReader(io.StringIO(csv_of_run(run), newline=""))
    assert served["kld_kind"] == "bound"


def test_chosen_slices_have_columns() -> None:
    """By default, there are no columns of slices."""
    assert ":" not in csv_of_run(three()).splitlines()[0]
    lines = csv_of_run(three(), ("label", "kld:chat", "ppl:c4")).splitlines()
    assert lines[0] == "label,kld:chat,kld:chat_stderr,ppl:c4,ppl:c4_stderr"
    assert lines[1] == "bf16,,,20.0,2.0"
    assert lines[3:] == ["EXL3 4.0,0.08,0.008,20.4,2.0", "GGUF Q4_K,0.01,0.001,20.8,2.0"]


# Spreadsheets run full-width signs, too.
@pytest.mark.parametrize("sign", [*"=+-@\t", "＝", "＋"])
def test_no_cell_is_a_formula(sign: str) -> None:
    """Text that a spreadsheet would run gets an apostrophe; a negative number stays a number."""
    text = f"{sign}HYPERLINK(A1)"
    run = run_of(REF, replace(QUANT, label=text, notes=(text,), windows=3))
    rows = list(csv.reader(io.StringIO(csv_of_run(run), newline="")))
    formulas = set()
    for row in rows:
        formulas |= {cell for cell in row if "HYPERLINK" in cell}
    assert formulas == {f"'{printable(text)}"}
    # The label and the notes.
    assert [sum(cell.startswith("'") for cell in row) for row in rows] == [0, 0, 2]
    # The sum of log-probabilities begins with a sign, but is a number.
    assert "-80.0" in rows[2]
