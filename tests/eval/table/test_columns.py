"""Columns, cells and their numbers, marks and the order of rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.layers.groups import KVCache
from compare_q.eval.results import ModelResult, RunResult
from compare_q.eval.stats.slices import Slice
from compare_q.eval.stats.uncertainty import Mean, Value
from compare_q.eval.table import numbers
from compare_q.eval.table.columns import (
    BY_NAME,
    COLUMNS,
    check_slices,
    checked,
    named,
    no_order,
    ordered,
)
from compare_q.eval.table.tables import Cell, table_of
from tests.support import ROOT
from tests.support.made import (
    BASE,
    FAILED,
    PPL,
    QUANT,
    REF,
    replace,
    run_of,
    storage_of,
    with_against,
    with_ppl,
    with_sums,
)
from tests.support.several_texts import NAMES, three
from tests.support.toy import refusal


def names_of(run: RunResult) -> list[str]:
    """Return the default columns of a table."""
    return [each.column.name for each in table_of(run).columns]


def cells(run: RunResult, label: str, names: Sequence[str] | None = None) -> dict[str, Cell]:
    """Return column name -> cell of a model."""
    table = table_of(run, names)
    row = [model.label for model in run.models].index(label)
    return {each.column.name: each.cells[row] for each in table.columns}


def test_every_column_shows_a_field_of_a_row_and_is_described_in_the_docs() -> None:
    assert {field for column in COLUMNS for field in column.fields} <= QUANT.flat.keys()
    assert all(column.header.count("\n") < 2 for column in COLUMNS)
    page = (ROOT / "docs/outputs.md").read_text()
    assert re.findall(
        r"^\| `([\w.:]+)` \| (.*) \|$", page.split("### Columns")[1].split("\n## ")[0], re.MULTILINE
    ) == [
        (column.name, column.note.replace("|", "\\|"))
        for column in (*COLUMNS, named("memory:32k"), named("kld:special"))
    ]


def test_options_in_which_rows_differ_and_what_ran() -> None:
    """Options that all rows share are left out; a row that ran differently than its spec is marked."""
    ran = {
        "layers": [],
        "attention": "B",
        "engine_version": "e 1",
        "deviations": ["the spec asks for A, but B ran"],
    }
    specs = {
        "W4A16": {"engine": {"x": 1, "seed": 2}},
        "b": {"model_dir": ["m", {"x": 1, "y": None}]},
    }
    text = run_of(
        *(replace(QUANT, label=label, spec=spec, provenance=ran) for label, spec in specs.items())
    )
    names = ("label", "options", "attention", "version")
    found = [[cell.value for cell in cells(text, label, names).values()] for label in specs]
    assert found == [["W4A16 †", "seed=2", "B", "e 1"], ["b †", "y=null", "B", "e 1"]]


def test_every_cell_of_a_model() -> None:
    """Values with the decimals of their columns, errors with two significant digits."""
    size = replace(storage_of(QUANT), file_bytes=1_234_567_890)
    found = cells(
        run_of(REF, replace(QUANT, storage=size, load_seconds=1.26)), "W4A16", tuple(BY_NAME)
    )
    assert {
        name: (cell.value, cell.error) for name, cell in found.items() if cell.value != "n/a"
    } == {
        "label": ("W4A16", ""),
        "engine": ("fake", ""),
        "kernel": ("Linear", ""),
        "phase": ("prefill", ""),
        "options": ("-", ""),
        "bpw_layer": ("4.50", ""),
        "bpw_head": ("16.00", ""),
        "vram_gib": ("1.00", ""),
        "size": ("1.23", ""),
        "ppl": ("7.5000", "0.85"),
        "ratio": ("+3.45", "0.21"),
        "kld": ("0.01235", "0.00045"),
        "kld_median": ("0.50000", ""),
        "kld_p99": ("0.9900", ""),
        "kld_p99.9": ("0.9990", ""),
        "kld_max": ("2.0000", ""),
        "same_top": ("98.77", "0.52"),
        "top1": ("50.00", ""),
        "entropy": ("1.2500", ""),
        "bits_per_byte": ("1.2500", ""),
        "non_finite": ("0", ""),
        "load": ("1.3", ""),
        "seconds": ("2.0", ""),
        "speed": ("20", ""),
    }
    assert {
        name
        for name, cell in cells(run_of(REF, QUANT), "bf16", tuple(BY_NAME)).items()
        if cell.value == "ref"
    } == {column.name for column in COLUMNS if column.of_reference is not None}
    earlier = cells(
        run_of(replace(QUANT, from_cache=True)), "W4A16", ("ppl", "speed", "seconds", "load")
    )
    assert [cell.marks for cell in earlier.values()] == ["", "*", "*", "*"]
    failed = cells(run_of(REF, FAILED), "broken", ("engine", "speed", "ppl"))
    assert [cell.value for cell in failed.values()] == ["", "", "failed"]


@pytest.mark.parametrize(
    ("stderr", "text"),
    [
        (0.852, "0.85"),
        (12.34, "12"),
        (123.4, "120"),
        (1234.0, "1,200"),
        (3.55, "3.5"),
        (9.96, "10"),
        (0.0996, "0.10"),
        (0.000452, "0.00045"),
        (0.0001, "0.00010"),
        (0.0000999, "1.0e-4"),
        (0.00000446, "4.5e-6"),
        (1e-12, "1.0e-12"),
        (0.0, "0"),
        (None, ""),
        (1.7976931348623157e308, "inf"),
    ],
)
def test_errors_have_two_significant_digits(stderr: float | None, text: str) -> None:
    """3.55 is 3.54999... in binary, and must still be rounded up."""
    assert numbers.error_text(stderr) == text


def test_columns_of_a_table_that_nobody_chose() -> None:
    """Default columns are those with known or different values: file size, not VRAM; the head's
    bits if different.
    """
    compared = [
        "label",
        "kernel",
        "bpw_layer",
        "vram_gib",
        "ppl",
        "ratio",
        "kld",
        "kld_p99.9",
        "same_top",
        "speed",
    ]
    assert names_of(run_of(REF, QUANT)) == compared
    sized = replace(BASE, storage=replace(storage_of(BASE), file_bytes=10**9))
    assert names_of(run_of(sized, reference=None)) == [
        "label",
        "kernel",
        "bpw_layer",
        "size",
        "ppl",
        "speed",
    ]
    other = replace(BASE, label="other", storage=replace(storage_of(BASE), bpw_head=4.5))
    assert "bpw_head" in names_of(run_of(BASE, other))
    holes = with_ppl(QUANT, replace(PPL, non_finite=3))
    assert {*names_of(run_of(REF, holes))} - {*compared} == {"non_finite"}
    decode = replace(QUANT, label="decode", provenance={"phase": "decode 1x32"})
    assert {*names_of(run_of(QUANT, decode))} - {*compared} == {"phase"}


@pytest.mark.parametrize(
    ("provenances", "name", "values"),
    [
        (
            [{"kv_cache": "fp8 +bfloat16"}, {"kv_cache": "bfloat16"}, {}],
            "kv_cache",
            ["fp8 +bf16", "bf16", "n/a"],
        ),
        # 32 layers of 8 heads of 128 numbers, keys and values, in bf16 and in fp8
        (
            [
                {"kv_cache_layers": [asdict(KVCache("*", 32, "x", token_bytes=size))]}
                for size in (4096.0, 2048.0)
            ],
            "kv_mb",
            ["131.1", "65.5"],
        ),
        # llama.cpp also names the CPU: the same machine, unless two rows with different CPUs match
        (
            [{"gpus": ["H200"]}, {"gpus": ["H200"], "cpu": "EPYC"}, {"cpu": "Xeon"}],
            "where",
            ["A", "A", "B"],
        ),
        (
            [
                {"gpus": ["H200"]},
                {"gpus": ["H200"], "cpu": "EPYC"},
                {"gpus": ["H200"], "cpu": "Xeon"},
            ],
            "where",
            ["A", "B", "C"],
        ),
    ],
)
def test_columns_only_if_rows_differ(
    provenances: list[dict[str, Any]], name: str, values: list[str]
) -> None:
    rows = [replace(QUANT, label=str(i), provenance=each) for i, each in enumerate(provenances)]
    assert [cells(run_of(*rows), row.label)[name].value for row in rows] == values
    assert name not in names_of(run_of(rows[0], replace(rows[0], label="same")))
    assert "where" not in names_of(run_of(*rows[:2]))


def test_what_is_not_known_is_not_available() -> None:
    silent = replace(BASE, storage=Storage(), score_seconds=None, provenance={})
    found = cells(run_of(REF, silent), "base")
    assert {cell.value for name, cell in found.items() if name not in ("label", "ppl")} == {"n/a"}
    bare = with_against(
        QUANT, kld=Mean(None, 0.0, 0, 40), ppl_ratio=Value(None), kld_percentiles={}
    )
    found = cells(run_of(REF, bare), "W4A16", ("kld", "ratio", "kld_p99.9"))
    assert [cell.value for cell in found.values()] == ["n/a"] * 3
    errorless = with_ppl(with_against(QUANT, kld=Mean(0.5, 20.0, 40, 0)), replace(PPL, stderr=None))
    assert [cells(run_of(REF, errorless), "W4A16")[name].error for name in ("ppl", "kld")] == [
        "",
        "",
    ]


def test_the_best_of_each_column_is_marked() -> None:
    """Per 10 tokens, "other" has 4 nats less loss and 4 nats more KLD; its same top is equal."""
    other = with_sums(
        replace(QUANT, label="other"), nll=(6.0, 16.0, 26.0, 36.0), kld=(5.0, 5.0, 5.0, 5.0)
    )
    text = run_of(REF, other, QUANT)
    best = {
        name: [label for label in ("bf16", "other", "W4A16") if cells(text, label)[name].is_best]
        for name in ("ppl", "kld", "same_top")
    }
    assert best == {"ppl": ["other"], "kld": ["W4A16"], "same_top": ["other", "W4A16"]}
    assert cells(text, "other")["ppl"].shown == "★7.5000"


def test_names_of_columns_are_checked() -> None:
    assert checked(["kld", "ppl", "kld"]) == ("label", "kld", "ppl")
    assert "did you mean 'kld_p99'" in refusal(checked, ["p99"])
    assert "kld_p99.9" in refusal(checked, [])


def made(
    label: str, ppl: float, kld: float | None, bpw: float | None, gib: float | None
) -> ModelResult:
    """Return a row whose same top is 1 - KLD; kld None: it was not compared with a reference."""
    size = Storage(bpw, 16.0, None if gib is None else gib * 8 * 2.0**30)
    row = with_ppl(
        replace(BASE if kld is None else QUANT, label=label, storage=size), replace(PPL, value=ppl)
    )
    if kld is None:
        return row
    return with_against(
        row, kld=Mean(kld, 40 * kld, 40, 0), same_top=Mean(1 - kld, 40 * (1 - kld), 40, 0)
    )


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
    rows = (
        made("A", 8.0, 0.5, None, 0.5),
        FAILED,
        made("b", 9.0, 0.25, 4.0, None),
        made("c", 7.0, None, 2.0, 0.75),
        REF,
    )
    assert list(ordered(run_of(*rows), key).labels) == order


def test_order_of_the_rows_by_a_slice() -> None:
    """A row without a value of the slice, and then a failed row, are last; the reference's KLD is
    0.
    """
    run = three(failed={"noise": "out of memory"})
    assert ordered(run, "kld:chat").labels == ("bf16", "GGUF Q4_K", "EXL3 4.0", "noise")
    assert ordered(run, "kld:c4").labels == ("bf16", "EXL3 4.0", "GGUF Q4_K", "noise")
    assert ordered(run, "same_top:c4").labels[0] == "bf16"
    fewer = run.models[2].updated(slices={})
    without = run.updated(models=(fewer, *run.models[:2], run.models[3]))
    assert ordered(without, "kld:c4").labels == ("bf16", "GGUF Q4_K", "EXL3 4.0", "noise")


def test_a_column_without_values_orders_nothing() -> None:
    run = three(failed={"EXL3 4.0": "out of memory"})
    assert no_order(run, "ppl") is None
    assert no_order(run, "kld:chat") is None
    assert no_order(run_of(REF, FAILED), "kld") is not None
    assert no_order(run_of(REF, QUANT), "kld:chat") is not None


def test_columns_of_slices_show_the_numbers_of_the_slice() -> None:
    """Only the row's own columns have stars; the reference's cell is "ref" in columns that compare
    with it.
    """
    names = ("label", "kld", "kld:chat", "ppl:wiki2", "same_top:c4")
    found = cells(three(), "GGUF Q4_K", names)
    assert {
        name: (cell.value, cell.error, cell.is_best)
        for name, cell in found.items()
        if name != "label"
    } == {
        "kld": ("0.03000", "0.0030", True),
        "kld:chat": ("0.01000", "0.0010", False),
        "ppl:wiki2": ("20.800", "2.0", False),
        "same_top:c4": ("90.0", "2.0", False),
    }
    assert [cell.value for cell in cells(three(), "bf16", names).values()] == [
        "bf16",
        "ref",
        "ref",
        "20.000",
        "ref",
    ]
    few = Slice(7, 20.0, None, 0.5, None, None, None)
    row = replace(QUANT, slices={"few": few})
    found = cells(run_of(REF, row), "W4A16", ("kld:few", "ppl:few", "same_top:few"))
    assert [(cell.value, cell.error) for cell in found.values()] == [
        ("0.50000", ""),
        ("20.0000", ""),
        ("n/a", ""),
    ]
    assert [named(name).header for name in ("kld:chat", "same_top:chat")] == [
        "chat\nKLD",
        "chat\nsame top %",
    ]


def test_texts_are_columns_of_the_default_table() -> None:
    """KLDs of texts, and their PPLs if the texts are few or if there is no reference."""
    klds = [f"kld:{name}" for name in NAMES]
    ppls = [f"ppl:{name}" for name in NAMES]
    sliced = [name for name in names_of(three()) if ":" in name]
    assert sliced == klds + ppls
    run = three()
    texts = [*run.data["texts"], {"name": "code", "windows": 1}]
    more = run.updated(data={**run.data, "texts": texts})
    assert [name for name in names_of(more) if ":" in name] == [*klds, "kld:code"]
    assert [name for name in names_of(three(reference=False)) if ":" in name] == ppls
    assert not [name for name in names_of(run_of(REF, QUANT)) if ":" in name]


def test_slices_that_no_row_has_are_refused() -> None:
    """Which slices there are is known from the run: ``checked`` takes every name after a column
    that has slices.
    """
    assert checked(["kld:no such"]) == ("label", "kld:no such")
    assert "there are: chat, code" in refusal(check_slices, [named("kld:chta")], ["chat", "code"])
    assert "did you mean 'chat'" in refusal(check_slices, [named("kld:chta")], ["chat", "code"])
    check_slices([named("kld:chat"), named("kld"), named("memory:32k")], ["chat"])
    for name in (
        "speed:chat",
        "kld_p99:chat",
        "kld:",
        "ratio:chat",
        "memory",
        "memory:chat",
        "what:chat",
    ):
        assert refusal(checked, [name])
