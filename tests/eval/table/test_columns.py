"""Columns, cells, marks and order of the table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from compare_q.backends.base import Storage
from compare_q.backends.layers.groups import KVCache
from compare_q.eval.results import ModelResult, TextResult, Timing
from compare_q.eval.stats.uncertainty import Mean, Value
from compare_q.eval.table import columns
from compare_q.eval.table.columns import Cell
from compare_q.eval.table.footnotes import column_notes, kv_size_notes
from compare_q.eval.table.registry import BY_NAME, COLUMNS
from compare_q.eval.table.tables import tables_of
from tests.support.made import (
    BASE,
    FAILED,
    PPL,
    QUANT,
    REF,
    replace,
    results_of,
    run_of,
    run_result,
    storage_of,
    with_against,
    with_ppl,
    with_sums,
)


def cells(run: TextResult, label: str, names: Sequence[str] | None = None) -> dict[str, Cell]:
    """Title of a column of numbers -> cell of one model."""
    (row,) = [i for i, model in enumerate(run.models) if model.label == label]
    found = columns.table_columns(run, names)
    return {each.column.title: each.cells[row] for each in found if each.column.digits is not None}


OF_ANSWERS = (
    "ques-tions", "acc %", "acc norm %", "flips %", "flips norm %", "changed %", "changed norm %", "McNemar p",
    "McNemar norm p",
)  # fmt: skip


def test_every_cell_of_a_model() -> None:
    """Values with their usual decimals, errors with two significant digits."""
    sized = replace(QUANT, storage=replace(storage_of(QUANT), file_bytes=1_234_567_890), load_seconds=1.26)
    assert cells(run_of(REF, sized), "W4A16", tuple(BY_NAME)) == {
        "KV MB / 1k tok": Cell("n/a"), "layer bpw": Cell("4.50"), "head bpw": Cell("16.00"),
        "VRAM GiB": Cell("1.00"), "file GB": Cell("1.23"),
        "PPL": Cell("7.5000", "0.85"), "PPL vs ref %": Cell("+3.45", "0.21"), "KLD": Cell("0.01235", "0.00045"),
        "median KLD": Cell("0.50000"), "99 % KLD": Cell("0.9900"), "99.9 % KLD": Cell("0.9990"),
        "max KLD": Cell("2.0000"), "reverse KLD": Cell("n/a"), "JS": Cell("n/a"), "TV %": Cell("n/a"),
        "same top %": Cell("98.77", "0.52"), "top 5 %": Cell("n/a"), "hits %": Cell("50.00"), "entropy": Cell("1.2500"),
        "bits / byte": Cell("1.2500"), **dict.fromkeys(OF_ANSWERS, Cell("n/a")),
        "non-finite": Cell("0"), "load s": Cell("1.3"), "seconds": Cell("2.0"),
        "tok/s": Cell("20"),
    }  # fmt: skip


def test_every_column_shows_a_field_of_the_results() -> None:
    flat = QUANT.flat
    assert {field for each in COLUMNS for field in each.fields} <= flat.keys()
    assert all(len(each.header.split("\n")) < 3 for each in COLUMNS)


def test_columns_of_a_table_that_nobody_chose() -> None:
    """What is known, compared or different: file size before VRAM, the head's bits where they differ."""
    assert list(cells(run_of(REF, QUANT), "W4A16")) == [
        "layer bpw", "VRAM GiB", "PPL", "PPL vs ref %", "KLD", "99.9 % KLD", "same top %", "tok/s",
    ]  # fmt: skip
    sized = replace(BASE, storage=replace(storage_of(BASE), file_bytes=10**9))
    assert list(cells(run_of(sized, reference=None), "base")) == ["layer bpw", "file GB", "PPL", "tok/s"]
    other = replace(BASE, label="other", storage=replace(storage_of(BASE), bpw_head=4.5))
    assert "head bpw" in cells(run_of(sized, other, reference=None), "base")
    bare = narrowed(run_of(REF, QUANT))
    assert [each.column.name for each in bare] == ["label", "kernel", "bpw_layer", "vram_gib", "ppl", "kld", "same_top"]
    assert bare[-1].cells[1] == Cell("98.77")


def narrowed(run: TextResult) -> list[columns.Filled]:
    """The columns without all extras."""
    return columns.without(columns.table_columns(run), columns.possible_extras(run))


def test_sizes_of_kv_caches_have_a_column_only_if_they_differ() -> None:
    """32 layers of 8 heads of 128 numbers, keys and values, in bf16 and in fp8; one that has none says why."""

    def row(label: str, size: float, **more: Any) -> ModelResult:
        cache = KVCache("layers.*.attn", 32, "x", token_bytes=size, window=4096)
        return replace(QUANT, label=label, provenance={"kv_cache_layers": [asdict(cache)], **more})

    models = [row("bf16", 4096.0), row("fp8", 2048.0)]
    without = replace(QUANT, label="HF", provenance={"no_kv_cache": "windows are scored whole, without one"})
    (found,) = [each for each in columns.table_columns(run_of(*models, without)) if each.column.name == "kv_mb"]
    assert [cell.value for cell in found.cells] == ["131.1", "65.5", "n/a"]
    assert kv_size_notes(run_of(*models, without, QUANT)) == [
        "bf16, fp8: 32 of 32 layers hold the last 4,096 tokens",
        "HF: KV MB n/a: windows are scored whole, without one",
        "W4A16: KV MB n/a: the engine does not say",
    ]
    results = run_result((run_of(replace(QUANT, from_cache=True)),))
    gap = "W4A16: KV MB n/a: the engine does not say, or did not when this row was scored (-cc)"
    assert gap in tables_of(results, ("label", "kv_mb"))[0].notes
    assert gap not in tables_of(results)[0].notes
    assert "kv_mb" not in [each.column.name for each in columns.table_columns(run_of(models[0], without))]


def test_kv_caches_have_a_column_only_if_they_differ() -> None:
    """By what the engine tells."""
    told = [
        {"kv_cache": "fp8 +bfloat16"},
        {"kv_cache": "bfloat16"},
        {"kv_cache": "fp8_e4m3"},
        {},
    ]
    models = [replace(QUANT, label=str(i), provenance=each) for i, each in enumerate(told)]
    (found,) = [each for each in columns.table_columns(run_of(*models)) if each.column.name == "kv_cache"]
    assert [cell.value for cell in found.cells] == ["fp8 +bf16", "bf16", "fp8_e4m3", "n/a"]
    assert column_notes(run_of(*models))["kv_cache"].startswith("KV cache: ")
    alike = run_of(models[1], models[3])
    assert "kv_cache" not in [each.column.name for each in columns.table_columns(alike)]
    assert "kv_cache" not in column_notes(alike)


def test_what_is_not_known_is_not_available() -> None:
    silent = replace(BASE, storage=Storage(), score_seconds=None)
    assert {cell.value for key, cell in cells(run_of(REF, silent), "base").items() if key != "PPL"} == {"n/a"}
    bare = with_against(
        QUANT, kld=Mean(None, 0.0, 0, 40), ppl_ratio=Value(None), kld_percentiles={}, same_top=Mean(None, 0.0, 0, 40)
    )
    missing = cells(run_of(REF, bare), "W4A16", ("kld", "ratio", "kld_p99.9", "same_top"))
    assert list(missing.values()) == [Cell("n/a")] * 4
    errorless = with_ppl(with_against(QUANT, kld=Mean(0.5, 20.0, 40, 0)), replace(PPL, stderr=None))
    found = cells(run_of(REF, errorless), "W4A16")
    assert (found["PPL"], found["KLD"]) == (Cell("7.5000"), Cell("0.50000"))


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


def test_speeds_have_marks_and_a_note() -> None:
    """Of an earlier run (*)."""
    stored = replace(BASE, from_cache=True, score_seconds=1234.56)
    assert cells(run_of(stored), "base", ("seconds", "speed")) == {
        "seconds": Cell("1,234.6", marks="*"),
        "tok/s": Cell("0", marks="*"),
    }
    timing = Timing(0.0, 1.0, 1.0, 2.0, 5.0, 6.0)
    one, other = (replace(QUANT, label=label, timing=timing) for label in ("one", "other"))
    assert cells(run_of(one, other), "one")["tok/s"] == Cell("20")
    assert "25 %" in column_notes(run_of(one, other))["speed"]


def test_machines_have_letters_if_there_are_several() -> None:
    """llama.cpp names the CPU of its machine too, which makes no other machine of it, but where two are possible."""
    gpu, cpu, other = {"gpus": ["NVIDIA H200"]}, {"gpus": ["NVIDIA H200"], "cpu": "AMD EPYC"}, {"cpu": "Intel Xeon"}
    names = "NVIDIA H200", "NVIDIA H200, AMD EPYC", "Intel Xeon", "NVIDIA H200, Intel Xeon"

    def letters(*facts: dict[str, object]) -> dict[str, str]:
        models = [replace(BASE, label=str(i), provenance=each) for i, each in enumerate(facts)]
        return columns.machine_letters(run_of(*models))

    assert letters(gpu, cpu) == {}
    assert letters(gpu, cpu, other) == {names[0]: "A", names[1]: "A", names[2]: "B"}
    assert letters(gpu, cpu, gpu | other) == {names[0]: "A", names[1]: "B", names[3]: "C"}


def made(label: str, ppl: float, kld: float | None, bpw: float | None, gib: float | None) -> ModelResult:
    """A model to be sorted, its top tokens as good as its KLD; without KLD, one that was compared with nothing."""
    size = Storage(bpw, 16.0, None if gib is None else gib * 8 * 2.0**30)
    model = with_ppl(replace(QUANT if kld is not None else BASE, label=label, storage=size), replace(PPL, value=ppl))
    top = None if kld is None else Mean(1 - kld, 40 * (1 - kld), 40, 0)
    return model if kld is None else with_against(model, kld=Mean(kld, 40 * kld, 40, 0), same_top=top)


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("kld", ["bf16", "b", "A", "c", "broken"]), ("bpw_layer", ["c", "b", "bf16", "A", "broken"]),
        ("vram_gib", ["A", "c", "bf16", "b", "broken"]), ("ppl", ["c", "bf16", "A", "b", "broken"]),
        ("same_top", ["bf16", "b", "A", "c", "broken"]), ("js", ["bf16", "A", "b", "c", "broken"]),
        ("kernel", ["A", "b", "c", "bf16", "broken"]), ("label", ["A", "b", "bf16", "c", "broken"]),
        (None, ["A", "broken", "b", "c", "bf16"]),
    ],
)  # fmt: skip
def test_order_of_the_rows(key: str | None, order: list[str]) -> None:
    """The smallest first, or the largest where more is better; what is not known goes after what is, and what failed
    last; the reference's KLD is 0."""
    models = (made("A", 8.0, 0.5, None, 0.5), FAILED, made("b", 9.0, 0.25, 4.0, None), made("c", 7.0, None, 2.0, 0.75),
              replace(REF, label="bf16"))  # fmt: skip
    assert list(columns.ordered(results_of(run_of(*models)), key).labels) == order
