"""Columns, their names, and the order of rows."""

from __future__ import annotations

import re

import pytest

from compare_q.backends.base import Storage
from compare_q.eval.results import ModelResult
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.columns import (
    COLUMNS,
    check_slices,
    column_names,
    column_of,
    no_order,
    sorted_rows,
)
from tests.support import ROOT
from tests.support.made import (
    BASE,
    FAILED,
    PPL,
    QUANT,
    REF,
    replace,
    run_of,
    with_against,
    with_ppl,
)
from tests.support.several_texts import three
from tests.support.toy import refusal


def test_every_column_shows_a_field_of_a_row_and_is_described_in_the_docs() -> None:
    fields: set[str] = set()
    for column in COLUMNS:
        fields |= {*column.fields}
        assert column.header.count("\n") < 2
    assert fields <= QUANT.flat.keys()
    page = (ROOT / "docs/outputs.md").read_text()
    section = page.split("### Columns")[1].split("\n## ")[0]
    described = re.findall(r"^\| `([\w.:]+)` \| (.*) \|$", section, re.MULTILINE)
    columns = (*COLUMNS, column_of("memory:32k"), column_of("kld:special"))
    # A vertical line ends a cell of a Markdown table.
    assert described == [(column.name, column.note.replace("|", "\\|")) for column in columns]


def test_names_of_columns_are_checked() -> None:
    assert column_names(["kld", "ppl", "kld"]) == ("label", "kld", "ppl")
    assert "did you mean 'kld_p99'" in refusal(column_names, ["p99"])
    assert "kld_p99.9" in refusal(column_names, [])


def test_a_column_of_a_slice_names_it() -> None:
    assert column_of("kld:chat").header == "chat\nKLD"
    assert column_of("same_top:chat").header == "chat\nsame top %"


def test_slices_that_no_row_has_are_refused() -> None:
    """Which slices exist is known from the run: ``column_names`` takes every name after a column
    that has slices.
    """
    assert column_names(["kld:no such"]) == ("label", "kld:no such")
    message = refusal(check_slices, [column_of("kld:chta")], ["chat", "code"])
    assert "there are: chat, code" in message
    assert "did you mean 'chat'" in message
    columns = [column_of(name) for name in ("kld:chat", "kld", "memory:32k")]
    check_slices(columns, ["chat"])


@pytest.mark.parametrize(
    "name",
    ["speed:chat", "kld_p99:chat", "kld:", "ratio:chat", "memory", "memory:chat", "what:chat"],
)
def test_parameters_that_a_column_does_not_take_are_refused(name: str) -> None:
    assert refusal(column_names, [name])


def row(
    label: str, ppl: float, kld: float | None, bpw: float | None, gib: float | None
) -> ModelResult:
    """Return a row whose same top is 1 - KLD; kld None: it was not compared with a reference."""
    bits = None
    if gib is not None:
        bits = gib * 8 * 2.0**30
    model = BASE
    if kld is not None:
        same_top = Mean(1 - kld, 40 * (1 - kld), 40, 0)
        model = with_against(QUANT, kld=Mean(kld, 40 * kld, 40, 0), same_top=same_top)
    model = replace(model, label=label, storage=Storage(bpw, 16.0, bits))
    return with_ppl(model, replace(PPL, value=ppl))


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("kld", ["bf16", "b", "A", "c", "broken"]),
        ("bpw_layer", ["c", "b", "bf16", "A", "broken"]),
        ("vram_gib", ["A", "c", "bf16", "b", "broken"]),
        ("same_top", ["bf16", "b", "A", "c", "broken"]),
        ("kernel", ["A", "b", "c", "bf16", "broken"]),
        ("label", ["A", "b", "bf16", "c", "broken"]),
        (None, ["A", "broken", "b", "c", "bf16"]),
    ],
)
def test_order_of_the_rows(key: str | None, order: list[str]) -> None:
    """The smallest values are first, or the largest if more is better; then unknown values, then
    failures.  The reference's KLD is 0.
    """
    run = run_of(
        row("A", 8.0, 0.5, None, 0.5),
        FAILED,
        row("b", 9.0, 0.25, 4.0, None),
        row("c", 7.0, None, 2.0, 0.75),
        REF,
    )
    assert list(sorted_rows(run, key).labels) == order


def test_order_of_the_rows_by_a_slice() -> None:
    """A row without a value of the slice, and then a failed row, are last; the reference's KLD is
    0.
    """
    run = three(failed={"noise": "out of memory"})
    assert sorted_rows(run, "kld:chat").labels == ("bf16", "GGUF Q4_K", "EXL3 4.0", "noise")
    assert sorted_rows(run, "kld:c4").labels == ("bf16", "EXL3 4.0", "GGUF Q4_K", "noise")
    assert sorted_rows(run, "same_top:c4").labels[0] == "bf16"
    without_slices = run.models[2].updated(slices={})
    run = run.updated(models=(without_slices, *run.models[:2], run.models[3]))
    assert sorted_rows(run, "kld:c4").labels == ("bf16", "GGUF Q4_K", "EXL3 4.0", "noise")


def test_a_column_without_values_orders_nothing() -> None:
    run = three(failed={"EXL3 4.0": "out of memory"})
    assert no_order(run, "ppl") is None
    assert no_order(run, "kld:chat") is None
    assert no_order(run_of(REF, FAILED), "kld") is not None
    assert no_order(run_of(REF, QUANT), "kld:chat") is not None
