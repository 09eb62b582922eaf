"""Columns, cells, marks and order of the table's rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.base import Storage
from eval.results.run_result import ModelResult, RunResult
from eval.stats.uncertainty import Mean, Value
from eval.table import columns
from eval.table.columns import EXTRAS, Cell
from tests.support.made import BASE, FAILED, PPL, QUANT, REF, REFERENCE, run_of, with_against, with_ppl, with_sums


def cells(run: RunResult, label: str, chosen: tuple[str, ...] = EXTRAS) -> dict[str, Cell]:
    """Header -> cell of one model, the header on one line."""
    (row,) = [i for i, model in enumerate(run.models) if model.label == label]
    return {column.header.replace("\n", " "): column.cells[row] for column in columns.number_columns(run, chosen)}


def test_every_cell_of_a_model() -> None:
    """Values with their usual decimals, errors with two significant digits."""
    assert cells(run_of(REF, QUANT), "W4A16") == {
        "layer bpw": Cell("4.50"), "head bpw": Cell("16.00"), "VRAM GiB": Cell("1.00"), "PPL": Cell("7.5000", "0.85"),
        "PPL vs ref %": Cell("+3.45", "0.21"), "KLD": Cell("0.01235", "0.00045"), "KLD p99": Cell("0.9900"),
        "same top %": Cell("98.77", "0.52"), "seconds": Cell("2.0"),
    }  # fmt: skip


def test_the_reference_says_so() -> None:
    found = cells(run_of(REF, QUANT), "bf16")
    assert [key for key, cell in found.items() if cell == Cell("ref")] == [
        "PPL vs ref %",
        "KLD",
        "KLD p99",
        "same top %",
    ]
    assert found["PPL"] == Cell("7.5000", "0.85")


def test_columns_that_are_not_chosen() -> None:
    assert list(cells(run_of(REF, QUANT), "W4A16", ())) == ["layer bpw", "VRAM GiB", "PPL", "KLD", "same top %"]
    assert cells(run_of(REF, QUANT), "W4A16", ())["same top %"] == Cell("98.77")
    alone = run_of(BASE, reference=None)
    assert columns.possible_extras(alone) == ("head", "seconds")
    assert list(cells(alone, "base", columns.possible_extras(alone))) == [
        "layer bpw",
        "head bpw",
        "VRAM GiB",
        "PPL",
        "seconds",
    ]


def test_a_failed_model_has_one_text() -> None:
    found = cells(run_of(REF, QUANT, FAILED), "broken")
    assert {key: cell for key, cell in found.items() if cell != Cell("")} == {"PPL": Cell("failed")}


def test_what_is_not_known_is_not_available() -> None:
    silent = replace(BASE, storage=Storage(), score_seconds=None)
    assert {cell.value for key, cell in cells(run_of(REF, silent), "base").items() if key != "PPL"} == {"n/a"}
    bare = with_against(
        QUANT, kld=Mean(None, 0.0, 0, 40), ppl_ratio=Value(None), kld_percentiles={}, same_top=Mean(None, 0.0, 0, 40)
    )
    assert [cells(run_of(REF, bare), "W4A16")[key] for key in ("KLD", "PPL vs ref %", "KLD p99", "same top %")] == [
        Cell("n/a")
    ] * 4
    errorless = with_ppl(with_against(QUANT, kld=Mean(0.5, 20.0, 40, 0)), replace(PPL, stderr=None))
    found = cells(run_of(REF, errorless), "W4A16")
    assert (found["PPL"], found["KLD"]) == (Cell("7.5000"), Cell("0.50000"))


@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_non_finite_positions_have_a_column_only_if_there_are_any(reference: dict[str, object] | None) -> None:
    holes = with_ppl(replace(QUANT, label="holes"), replace(PPL, tokens=8, non_finite=1234))
    assert "non- finite" not in cells(run_of(QUANT, FAILED, reference=reference), "W4A16")
    run = run_of(QUANT, holes, reference=reference)
    assert [cells(run, label)["non- finite"].value for label in ("holes", "W4A16")] == ["1,234", "0"]


def test_the_best_of_each_column_is_marked() -> None:
    """Better by 4 of each 10 tokens' loss, worse by 4 of their KLD; its top token is the reference's as often."""
    other = with_sums(replace(QUANT, label="other"), nll=(6.0, 16.0, 26.0, 36.0), kld=(5.0, 5.0, 5.0, 5.0))
    run = run_of(REF, other, QUANT)
    found = {label: cells(run, label) for label in ("bf16", "other", "W4A16")}
    assert [[found[label][key].is_best for label in found] for key in ("PPL", "KLD", "same top %")] == [
        [False, True, False], [False, False, True], [False, True, True],
    ]  # fmt: skip
    assert found["other"]["PPL"].shown == "★7.5000"
    assert found["W4A16"]["PPL"].shown == "7.5000"


def test_seconds_of_a_stored_result() -> None:
    assert cells(run_of(replace(BASE, cached=True, score_seconds=1234.56)), "base")["seconds"] == Cell("1,234.6*")


def test_labels_have_their_marks() -> None:
    assert columns.label_of(replace(QUANT, spec={"noise_floor": True})) == "W4A16 ≈"
    assert columns.label_of(QUANT) == "W4A16"
    assert [columns.kernel_of(model) for model in (QUANT, replace(QUANT, provenance={}), FAILED)] == [
        "Linear",
        "n/a",
        "",
    ]


def made(label: str, ppl: float, kld: float | None, bpw: float | None, gib: float | None) -> ModelResult:
    """A model to be sorted; without KLD, one that was compared with nothing."""
    size = Storage(bpw, 16.0, None if gib is None else gib * 8 * 2.0**30)
    model = with_ppl(replace(QUANT if kld is not None else BASE, label=label, storage=size), replace(PPL, value=ppl))
    return model if kld is None else with_against(model, kld=Mean(kld, 40 * kld, 40, 0))


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("kld", ["bf16", "b", "A", "c", "broken"]), ("bpw", ["c", "b", "bf16", "A", "broken"]),
        ("vram", ["A", "c", "bf16", "b", "broken"]), ("ppl", ["c", "bf16", "A", "b", "broken"]),
        ("label", ["A", "b", "bf16", "c", "broken"]), (None, ["A", "broken", "b", "c", "bf16"]),
    ],
)  # fmt: skip
def test_order_of_the_rows(key: str | None, order: list[str]) -> None:
    """The smallest first; what is not known goes after what is, and what failed last; the reference's KLD is 0."""
    models = (made("A", 8.0, 0.5, None, 0.5), FAILED, made("b", 9.0, 0.25, 4.0, None), made("c", 7.0, None, 2.0, 0.75),
              replace(REF, label="bf16"))  # fmt: skip
    assert [model.label for model in columns.ordered(run_of(*models), key).models] == order
