"""The columns of a table, their cells and marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.layers.groups import KVCache
from compare_q.eval.results import RunResult
from compare_q.eval.stats.slices import Slice
from compare_q.eval.stats.uncertainty import Mean, Perplexity, Value
from compare_q.eval.table.columns import BY_NAME, COLUMNS
from compare_q.eval.table.tables import Cell, table_of
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
from tests.support.several_texts import TEXT_NAMES, three

COMPARED = [
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
"""The default columns of a run with a reference."""


def columns_by_default(run: RunResult) -> list[str]:
    """Return the names of the default columns of a table."""
    return [filled.column.name for filled in table_of(run).columns]


def slices_by_default(run: RunResult) -> list[str]:
    """Return the names of the default columns that are over a slice."""
    return [name for name in columns_by_default(run) if ":" in name]


def cells(run: RunResult, label: str, names: Sequence[str] | None = None) -> dict[str, Cell]:
    """Return column name -> cell of a model."""
    row = run.labels.index(label)
    return {filled.column.name: filled.cells[row] for filled in table_of(run, names).columns}


def values(run: RunResult, label: str, names: Sequence[str] | None = None) -> list[str]:
    """Return the text of each cell of a model."""
    return [cell.value for cell in cells(run, label, names).values()]


def test_options_in_which_rows_differ_and_what_ran() -> None:
    """Options that all rows share are left out; a row that ran differently from its spec is
    marked.
    """
    provenance = {
        "layers": [],
        "attention": "B",
        "engine_version": "e 1",
        "deviations": ["the spec asks for A, but B ran"],
    }
    # Users write options in ``engine`` or after the path in ``model_dir``; both rows have x.
    first = {"engine": {"x": 1, "seed": 2}}
    second = {"model_dir": ["m", {"x": 1, "y": None}]}
    run = run_of(
        replace(QUANT, label="W4A16", spec=first, provenance=provenance),
        replace(QUANT, label="b", spec=second, provenance=provenance),
    )
    names = ("label", "options", "attention", "version")
    assert values(run, "W4A16", names) == ["W4A16 †", "seed=2", "B", "e 1"]
    assert values(run, "b", names) == ["b †", "y=null", "B", "e 1"]


def test_every_cell_of_a_model() -> None:
    """Values with the decimals of their columns, errors with two significant digits."""
    size = replace(storage_of(QUANT), file_bytes=1_234_567_890)
    run = run_of(REF, replace(QUANT, storage=size, load_seconds=1.26))
    known = {}
    for name, cell in cells(run, "W4A16", tuple(BY_NAME)).items():
        if cell.value != "n/a":
            known[name] = (cell.value, cell.error)
    assert known == {
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


def test_cells_of_the_reference() -> None:
    """In columns that compare models with the reference, its own cell is "ref"."""
    reference = cells(run_of(REF, QUANT), "bf16", tuple(BY_NAME))
    comparing = [column.name for column in COLUMNS if column.of_reference is not None]
    assert [name for name, cell in reference.items() if cell.value == "ref"] == comparing


def test_times_that_an_earlier_run_measured_are_marked() -> None:
    run = run_of(replace(QUANT, from_cache=True))
    row = cells(run, "W4A16", ("ppl", "speed", "seconds", "load"))
    assert [cell.marks for cell in row.values()] == ["", "*", "*", "*"]


def test_a_failed_model_is_named_so_in_one_column() -> None:
    run = run_of(REF, FAILED)
    assert values(run, "broken", ("engine", "speed", "ppl")) == ["", "", "failed"]
    assert values(run, "broken", ("label", "speed", "kld")) == ["broken", "failed", ""]


def test_columns_of_a_table_that_nobody_chose() -> None:
    """Default columns are those with known or different values: file size, not VRAM; the head's
    bits if different.
    """
    assert columns_by_default(run_of(REF, QUANT)) == COMPARED
    sized = replace(BASE, storage=replace(storage_of(BASE), file_bytes=10**9))
    without_reference = run_of(sized, reference=None)
    names = ["label", "kernel", "bpw_layer", "size", "ppl", "speed"]
    assert columns_by_default(without_reference) == names
    other_head = replace(BASE, label="other", storage=replace(storage_of(BASE), bpw_head=4.5))
    assert "bpw_head" in columns_by_default(run_of(BASE, other_head))
    holes = with_ppl(QUANT, replace(PPL, non_finite=3))
    assert {*columns_by_default(run_of(REF, holes))} - {*COMPARED} == {"non_finite"}
    decode = replace(QUANT, label="decode", provenance={"phase": "decode 1x32"})
    assert {*columns_by_default(run_of(QUANT, decode))} - {*COMPARED} == {"phase"}


def kv_caches(token_bytes: float) -> dict[str, Any]:
    """Return the provenance of a model with 32 layers' caches of this size."""
    cache = KVCache("*", 32, "x", token_bytes=token_bytes)
    return {"kv_cache_layers": [asdict(cache)]}


@pytest.mark.parametrize(
    ("provenances", "name", "values"),
    [
        (
            [{"kv_cache": "fp8 +bfloat16"}, {"kv_cache": "bfloat16"}, {}],
            "kv_cache",
            ["fp8 +bf16", "bf16", "n/a"],
        ),
        # 32 layers of 8 heads of 128 numbers, keys and values, in bf16 and in fp8
        # 2 * 8 * 128 * 2 = 4,096 bytes; 4,096 * 32 layers * 1,000 tokens = 131.1 MB
        ([kv_caches(4096.0), kv_caches(2048.0)], "kv_mb", ["131.1", "65.5"]),
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
    rows = []
    for number, provenance in enumerate(provenances):
        rows.append(replace(QUANT, label=str(number), provenance=provenance))
    assert [cells(run_of(*rows), row.label)[name].value for row in rows] == values
    assert name not in columns_by_default(run_of(rows[0], replace(rows[0], label="same")))
    assert "where" not in columns_by_default(run_of(*rows[:2]))


def test_what_is_not_known_is_not_available() -> None:
    silent = replace(BASE, storage=Storage(), score_seconds=None, provenance={})
    row = cells(run_of(REF, silent), "base")
    assert {cell.value for name, cell in row.items() if name not in ("label", "ppl")} == {"n/a"}
    bare = with_against(
        QUANT, kld=Mean(None, 0.0, 0, 40), ppl_ratio=Value(None), kld_percentiles={}
    )
    assert values(run_of(REF, bare), "W4A16", ("kld", "ratio", "kld_p99.9")) == ["n/a"] * 3
    errorless = with_ppl(with_against(QUANT, kld=Mean(0.5, 20.0, 40, 0)), replace(PPL, stderr=None))
    row = cells(run_of(REF, errorless), "W4A16")
    assert (row["ppl"].error, row["kld"].error) == ("", "")


def test_the_best_of_each_column_is_marked() -> None:
    """Per 10 tokens, "other" has 4 nats less loss and 4 nats more KLD; its same top is equal."""
    other = with_sums(
        replace(QUANT, label="other"), nll=(6.0, 16.0, 26.0, 36.0), kld=(5.0, 5.0, 5.0, 5.0)
    )
    run = run_of(REF, other, QUANT)
    best: dict[str, list[str]] = {"ppl": [], "kld": [], "same_top": []}
    for label in run.labels:
        row = cells(run, label)
        for name, labels in best.items():
            if row[name].is_best:
                labels.append(label)
    assert best == {"ppl": ["other"], "kld": ["W4A16"], "same_top": ["other", "W4A16"]}
    assert cells(run, "other")["ppl"].shown == "★7.5000"


def test_columns_of_slices_show_the_numbers_of_the_slice() -> None:
    """Only the row's own columns have stars; the reference's cell is "ref" in columns that compare
    with it.
    """
    names = ("kld", "kld:chat", "ppl:wiki2", "same_top:c4")
    row = cells(three(), "GGUF Q4_K", ("label", *names))
    numbers = {name: (row[name].value, row[name].error, row[name].is_best) for name in names}
    assert numbers == {
        "kld": ("0.03000", "0.0030", True),
        "kld:chat": ("0.01000", "0.0010", False),
        "ppl:wiki2": ("20.800", "2.0", False),
        "same_top:c4": ("90.0", "2.0", False),
    }
    assert values(three(), "bf16", names) == ["ref", "ref", "20.000", "ref"]


def test_bounds_are_at_least_and_rounded_down() -> None:
    """The KLD 0.01234567 has the error 0.000452, and its median, 0.5, and largest value none."""
    bound = replace(QUANT, kld_kind="bound", slices={"few": Slice(7, 20.0, None, 0.12999, 0.01)})
    names = ("kld", "kld_median", "kld_max", "kld:few", "same_top", "ppl")
    row = cells(run_of(REF, bound), "W4A16", names)
    shown = {name: row[name].value for name in names}
    assert shown == {
        "kld": ">=0.01234",
        "kld_median": ">=0.50000",
        "kld_max": ">=2.0000",
        "kld:few": ">=0.129",
        "same_top": "98.77",
        "ppl": "7.5000",
    }
    assert row["kld"].error == "0.00045"
    exact = cells(run_of(REF, QUANT), "W4A16", ("kld",))
    assert exact["kld"].value == "0.01235"


def test_an_estimate_has_no_percentiles_and_says_why() -> None:
    none = dict.fromkeys(("kld_median", "kld_p99", "kld_p99_9", "kld_max"))
    estimate = replace(QUANT, kld_kind="estimate", kld_percentiles={}, **none)
    special = Slice(7, 20.0, None, None, None)
    run = run_of(REF, replace(estimate, slices={"special": special}))
    names = ("label", "kld", "kld_max", "kld:special")
    assert values(run, "W4A16", names) == ["W4A16", "0.01235", "n/a", "n/a"]
    notes = [note for note in table_of(run, names).notes if " n/a: the KLD is an estimate" in note]
    assert [note.partition(" n/a")[0] for note in notes] == [
        "W4A16: max KLD",
        "W4A16: kld:special",
    ]


def test_unknown_numbers_of_a_slice() -> None:
    few = Slice(7, 20.0, None, 0.5, None, None, None)
    run = run_of(REF, replace(QUANT, slices={"few": few}))
    row = cells(run, "W4A16", ("kld:few", "ppl:few", "same_top:few"))
    numbers = [(cell.value, cell.error) for cell in row.values()]
    assert numbers == [("0.50000", ""), ("20.0000", ""), ("n/a", "")]


def test_texts_are_columns_of_the_default_table() -> None:
    """KLDs of texts, and their PPLs if the texts are few or if there is no reference."""
    klds = [f"kld:{name}" for name in TEXT_NAMES]
    ppls = [f"ppl:{name}" for name in TEXT_NAMES]
    assert slices_by_default(three()) == klds + ppls
    run = three()
    # With a fourth text, columns of PPL would be too many.
    texts = [*run.data["texts"], {"name": "code", "windows": 1}]
    more = run.updated(data={**run.data, "texts": texts})
    assert slices_by_default(more) == [*klds, "kld:code"]
    assert slices_by_default(three(reference=False)) == ppls
    assert slices_by_default(run_of(REF, QUANT)) == []


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((26.0, 31.0), ["294.45", "305.13"]),
        ((2.6, 3.1), ["294.453", "305.131"]),
        ((0.26, 3.1), ["294.4529", "305.1307"]),
        ((None, 26.0), ["294.4529", "305.1307"]),
    ],
)
def test_digits_follow_the_errors_of_a_column(
    errors: tuple[float | None, float], expected: list[str]
) -> None:
    """PPL has two digits more than its smallest error, and never more than four."""
    rows = []
    for label, value, stderr in zip("ab", (294.4529, 305.1307), errors, strict=True):
        row = with_ppl(QUANT, Perplexity(value, -80.0, 40, 0, stderr, stderr))
        rows.append(replace(row, label=label))
    run = run_of(*rows)
    assert [cells(run, label)["ppl"].value for label in "ab"] == expected
