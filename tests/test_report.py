"""Table, footnotes, JSON, CSV and points of hand-made results, with and without a reference."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backends.base import Storage
from eval import report
from eval.estimates import Mean, Perplexity
from eval.plot import Point
from eval.results import ModelResult, RunResult

SIZE = Storage(4.5, 16.0, 8 * 2.0**30)
REFERENCE = {"label": "bf16", "kind": "states", "key": "f" * 40}
LAYERS = {"layers": "h.*", "count": 2, "weights": "float16", "activations": "float16", "kernel": "Linear", "asked": ""}
BASE = ModelResult(
    "base", "fake", SIZE, Perplexity(7.5, -20.0, 10, 0), rows=2, load_seconds=1.0, score_seconds=2.0,
    provenance={"layers": [LAYERS]},
)  # fmt: skip
REF = replace(BASE, label="bf16", is_reference=True, top1=Mean(0.5, 5.0, 10, 0), entropy=Mean(1.25, 12.5, 10, 0))
QUANT = replace(
    BASE,
    label="W4A16",
    kld=Mean(0.01234567, 0.1234567, 10, 0),
    same_top=Mean(0.98765, 9.8765, 10, 0),
    top1=Mean(0.4, 4.0, 10, 0),
    entropy=Mean(1.5, 15.0, 10, 0),
)
FAILED = ModelResult("broken", "fake", error="told to fail")


def run_of(*models: ModelResult, reference: dict[str, Any] | None = REFERENCE) -> RunResult:
    return RunResult({"rows": 2}, "letters", models, reference)


def shown(run: RunResult, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    report.show(run, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def row(run: RunResult, label: str) -> str:
    """The table's row of a label without spaces, one space between its cells."""
    (words,) = [line.split() for line in shown(run).splitlines() if line.split()[:1] == [label]]
    return " ".join(words)


def written(run: RunResult, folder: Path) -> dict[str, Any]:
    """results.json, read strictly: NaN and Infinity are no JSON."""
    report.write_json(run, folder / "r.json", ["compare_q.py"])
    text = (folder / "r.json").read_text()
    found: dict[str, Any] = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    return found


def test_rows_with_a_reference() -> None:
    run = run_of(REF, QUANT, FAILED)
    assert row(run, "bf16") == "bf16 Linear 4.50 16.00 1.00 7.5000 ref ref 2.0"
    assert row(run, "W4A16") == "W4A16 Linear 4.50 16.00 1.00 7.5000 0.01235 98.77 2.0"
    assert row(run, "broken") == "broken failed"
    assert report.headers(run)[3:6] == ["PPL", "KLD", "same\ntop %"]
    assert report.footnotes(run) == [
        "2 windows, 10 scored tokens",
        "KLD (nats, mean over tokens) and same top: against bf16",
        "broken: failed: told to fail",
    ]


def test_rows_that_ran_otherwise_than_asked_are_marked(tmp_path: Path) -> None:
    """Label and plot carry a mark, one footnote says what ran instead; the kernel is that of the quantized layers."""
    layers = [
        {"layers": "h.*.q", "count": 2, "weights": "nvfp4 g16", "activations": "bfloat16",
         "kernel": "MarlinNvFp4LinearKernel", "asked": "nvfp4 g16"},
        {"layers": "lm_head", "count": 9, "weights": "bfloat16", "activations": "bfloat16",
         "kernel": "UnquantizedEmbeddingMethod", "asked": ""},
    ]  # fmt: skip
    marked = replace(QUANT, provenance={"layers": layers, "gpus": ["H200"], "driver": "1"})
    plain = replace(QUANT, label="same", provenance={"layers": [{**layer, "asked": ""} for layer in layers]})
    run = run_of(REF, marked, plain)
    sentence = "the checkpoint asks for nvfp4 activations, but MarlinNvFp4 left them unquantized (bfloat16, 2 layers)"
    assert row(run, "W4A16").startswith("W4A16 † MarlinNvFp4 4.50")
    assert row(run, "same").startswith("same MarlinNvFp4 4.50")
    assert report.footnotes(run)[0] == f"† W4A16: {sentence} on H200"
    assert sum("†" in note for note in report.footnotes(run)) == 1
    assert [point.label for point in report.points(run, vram=False)[0]] == ["bf16", "W4A16 †", "same"]
    assert [(model["kernel"], model["deviations"]) for model in written(run, tmp_path)["models"]] == [
        ("Linear", None), ("MarlinNvFp4", sentence), ("MarlinNvFp4", None),
    ]  # fmt: skip


def test_a_kernel_that_is_not_known_is_explained() -> None:
    run = run_of(replace(BASE, provenance={}), reference=None)
    assert row(run, "base").startswith("base n/a 4.50")
    assert report.footnotes(run)[1:] == ["base: kernel n/a: this engine does not say what it runs"]


def test_without_a_reference_there_is_no_kld_column() -> None:
    run = run_of(replace(QUANT, kld=None, same_top=None), reference=None)
    assert row(run, "W4A16") == "W4A16 Linear 4.50 16.00 1.00 7.5000 2.0"
    assert "KLD" not in shown(run)
    assert report.footnotes(run) == ["2 windows, 10 scored tokens"]


def test_missing_kld_is_explained() -> None:
    noted = replace(BASE, label="noted", notes=("KLD n/a: another vocabulary",))
    silent = replace(BASE, label="silent")
    run = run_of(REF, noted, silent)
    assert row(run, "noted") == "noted Linear 4.50 16.00 1.00 7.5000 n/a n/a 2.0"
    assert report.footnotes(run)[2:] == [
        "noted: KLD n/a: another vocabulary",
        "silent: KLD n/a: this engine measured none",
    ]
    assert report.footnotes(run_of(silent, reference=None)) == ["2 windows, 10 scored tokens"]


def test_notes_are_printed_without_a_reference_too() -> None:
    run = run_of(replace(BASE, notes=("one [thing]", "another")), reference=None)
    assert shown(run).splitlines()[-2:] == ["base: one [thing]", "base: another"]


@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_non_finite_positions_have_a_column_only_if_there_are_any(reference: dict[str, Any] | None) -> None:
    holes = replace(QUANT, label="holes", ppl=Perplexity(7.5, -20.0, 8, 1234))
    assert "non-" not in shown(run_of(QUANT, FAILED, reference=reference))
    run = run_of(QUANT, holes, reference=reference)
    assert row(run, "holes").endswith(" 1,234 2.0")
    assert row(run, "W4A16").endswith(" 0 2.0")
    assert "holes: 1234 positions had no finite log-probability; PPL leaves them out" in report.footnotes(run)


def test_non_finite_kld_is_said(tmp_path: Path) -> None:
    some, none = replace(QUANT, kld=Mean(0.5, 4.0, 8, 2)), replace(QUANT, label="none", kld=Mean(None, 0.0, 0, 10))
    run = run_of(REF, some, none)
    assert report.footnotes(run)[2:] == [
        "W4A16: 2 positions had no finite KL divergence; KLD leaves them out",
        "none: 10 positions had no finite KL divergence; KLD leaves them out",
    ]
    assert row(run, "none").split()[6] == "n/a"
    _, first, second = written(run, tmp_path)["models"]
    assert [first[key] for key in ("kld", "kld_sum", "kld_tokens", "kld_non_finite")] == [0.5, 4.0, 8, 2]
    assert [second[key] for key in ("kld", "kld_sum", "kld_tokens", "kld_non_finite")] == [None, 0.0, 0, 10]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0004, "0.00040"), (0.5, "0.50000"), (12.3456789, "12.34568"), (-1e-9, "0.00000"), (-2e-5, "-0.00002")],
)
def test_kld_is_written_with_five_decimals(value: float, text: str) -> None:
    """An 8-bit format keeps two digits; what rounding takes below 0 is no minus sign, what is truly below 0 is."""
    run = run_of(REF, replace(QUANT, kld=Mean(value, 10 * value, 10, 0)))
    assert row(run, "W4A16").split()[6] == text


@pytest.mark.parametrize("reference", [None, REFERENCE])
def test_eighty_columns_hold_every_number(reference: dict[str, Any] | None) -> None:
    """Large numbers in every column, non-finite positions too: only the label wraps."""
    large = replace(
        QUANT,
        label="vLLM Llama-3.1-70B-Instruct W4A16 g128",
        storage=Storage(16.25, 16.0, 8 * 131.5 * 2**30),
        ppl=Perplexity(1234.5678, -1.0, 1_199_542, 12),
        rows=586,
        score_seconds=1234.5,
        cached=True,
    )
    text = shown(run_of(REF, large, reference=reference))
    lines = text[: text.index("586 windows")].splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in text
    numbers = ["16.25", "16.00", "131.50", "1,234.5678", "12", "1,234.5*"]
    numbers[4:4] = ["0.01235", "98.77"] if reference else []
    assert any(line.split()[-len(numbers) :] == numbers for line in lines), text


def test_json_of_the_reference_and_of_a_model(tmp_path: Path) -> None:
    found = written(run_of(REF, replace(QUANT, notes=("a", "b")), FAILED), tmp_path)
    assert (found["format"], found["reference"]) == (3, REFERENCE)
    reference, quant, failed = found["models"]
    keys = ("reference", "kld", "kld_sum", "kld_tokens", "kld_non_finite", "same_top", "top1", "entropy", "notes")
    assert [reference[key] for key in keys] == [True, 0.0, None, None, None, None, 0.5, 1.25, []]
    assert [quant[key] for key in keys] == [False, 0.01234567, 0.1234567, 10, 0, 0.98765, 0.4, 1.5, ["a", "b"]]
    assert [failed[key] for key in keys] == [False, *[None] * 7, []]
    assert (quant["ppl"], quant["tokens"], quant["layer_bpw"], quant["vram_gb"]) == (7.5, 10, 4.5, 1.0)


def test_json_without_a_reference(tmp_path: Path) -> None:
    found = written(run_of(BASE, reference=None), tmp_path)
    assert found["reference"] is None
    assert [found["models"][0][key] for key in ("reference", "kld", "same_top", "error")] == [False, None, None, None]


def test_a_failed_reference_has_no_kld(tmp_path: Path) -> None:
    run = run_of(replace(FAILED, is_reference=True), replace(BASE, notes=("KLD n/a: the reference failed",)))
    assert row(run, "broken") == "broken failed"
    assert [model["kld"] for model in written(run, tmp_path)["models"]] == [None, None]
    assert report.points(run, vram=False, kld=True) == ([], [
        "broken: not in the plot: KLD unknown", "base: not in the plot: KLD unknown",
    ])  # fmt: skip


def test_csv_is_flat(tmp_path: Path) -> None:
    report.write_csv(run_of(REF, replace(QUANT, notes=("a, b", "c")), FAILED), tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as stream:
        reference, quant, failed = csv.DictReader(stream)
    assert (reference["reference"], reference["kld"], reference["kld_sum"]) == ("True", "0.0", "")
    assert [quant[key] for key in ("kld", "kld_sum", "kld_tokens", "kld_non_finite", "same_top", "top1")] == [
        "0.01234567", "0.1234567", "10", "0", "0.98765", "0.4",
    ]  # fmt: skip
    assert (quant["entropy"], quant["notes"]) == ("1.5", "a, b; c")
    assert (failed["kld"], failed["error"]) == ("", "told to fail")
    assert not {"spec", "provenance"} & quant.keys()


def test_points_of_both_plots() -> None:
    run = run_of(REF, QUANT, replace(QUANT, label="sizeless", storage=Storage()), FAILED)
    ppl, left_out = report.points(run, vram=False)
    assert ppl == [Point("bf16", 4.5, 7.5), Point("W4A16", 4.5, 7.5)]
    assert left_out == ["sizeless: not in the plot: size unknown", "broken: not in the plot: PPL unknown"]
    kld, left_out = report.points(run, vram=True, kld=True)
    assert kld == [Point("bf16", 1.0, 0.0, "reference"), Point("W4A16", 1.0, 0.01234567, "0.01235")]
    assert left_out == ["sizeless: not in the plot: size unknown", "broken: not in the plot: KLD unknown"]
