"""Footnotes of tables: their facts, and the tables that have them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from compare_q.backends.layers.groups import KVCache
from compare_q.eval.results import ModelResult, RunResult, Timing
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table.row_marks import BEST
from compare_q.eval.table.tables import table_of
from tests.support.made import (
    BASE,
    FAILED,
    PPL,
    QUANT,
    REF,
    TEXT,
    replace,
    run_of,
    with_against,
    with_ppl,
    with_sums,
)
from tests.support.several_texts import three

FLOOR = replace(QUANT, label="noise", spec={"noise_floor": True})
YARN = {"rope": {"type": "yarn", "factor": 4.0, "original_context": 1024}}
DEVIATING = {
    "layers": "h.*.q",
    "count": 2,
    "weights": "nvfp4 g16",
    "activations": "bfloat16",
    "kernel": "MarlinNvFp4LinearKernel",
    "asked": "nvfp4 g16",
}
AS_ASKED = DEVIATING | {"asked": ""}
SHORT = [with_sums(replace(QUANT, label=label), length=510) for label in "ab"]
"""Two rows on a text of 510 tokens."""


def notes_of(run: RunResult, names: tuple[str, ...] | None = None) -> list[str]:
    """Return all footnotes of a run's table."""
    table = table_of(run, names)
    return [*table.notes, *table.legend_of(table.columns)]


def row(label: str, provenance: dict[str, Any] | None = None, **keys: Any) -> ModelResult:
    """Return a quantized row that ran as its checkpoint asks, or with this provenance."""
    if provenance is None:
        provenance = {"layers": [AS_ASKED]}
    return replace(QUANT, label=label, provenance=provenance, **keys)


def equal(options: dict[str, Any], model_dir: Any = "m") -> list[ModelResult]:
    """Return two rows with equal scores at every token; the second row has these options, or
    another model.
    """
    provenance = {"layers": [AS_ASKED], "dtype": "bfloat16"}
    spec = {"model_dir": model_dir, "engine": options}
    return [
        row("a", provenance, spec={"model_dir": "m"}, scores_digest="a"),
        row("b", provenance, spec=spec, scores_digest="a"),
    ]


@pytest.mark.parametrize(
    ("run", "facts"),
    [
        (run_of(REF, QUANT), ["2 windows, 40 scored"]),
        (run_of(REF, QUANT, texts=[{**TEXT, "method": "gptq"}]), ["method gptq: 2 windows"]),
        (run_of(REF, with_sums(QUANT, length=1000)), ["1,000 tokens"]),
        (
            run_of(REF, with_sums(QUANT, length=1000), texts=[{**TEXT, "text_tokens": 27_324}]),
            ["27,324", "-r"],
        ),
        (run_of(with_sums(BASE, tokens=(10,), nll=(5.0,)), reference=None), ["errors n/a"]),
        (run_of(QUANT), ["the reference, bf16, has a PPL of 7.2500"]),
        (run_of(REF, QUANT, FLOOR), ["≈: ", "0.01235"]),
        (run_of(REF, QUANT, replace(QUANT, label="same")), ["★: "]),
        (
            # A text of 510 tokens is too short for a star.
            run_of(REF, *SHORT),
            ["no ★: ", "510 tokens"],
        ),
        (run_of(REF, FLOOR, row("a"), row("b")), ["KLD cannot rank a, b"]),
        (
            run_of(REF, *equal({"seed": 1})),
            ["b: same scores at every token as a: was engine.seed applied?"],
        ),
        (
            run_of(REF, *equal({"seed": 1}, model_dir=["m", {"x": 1}])),
            ["as a: was engine.seed and engine.x applied?"],
        ),
        (run_of(REF, QUANT), ["bf16: the reference is quantized itself"]),
        (run_of(REF, *equal({})), ["b: same scores at every token as a\n"]),
        # Neither option explains other scores: bfloat16 is what ran anyway, and the other one only
        # places the model.
        (
            run_of(REF, *equal({"dtype": "bfloat16", "tensor_parallel_size": 2})),
            ["b: same scores at every token as a"],
        ),
        # Rows of two models: no option explains why their scores are equal.
        (
            run_of(REF, *equal({"seed": 1}, model_dir="other")),
            ["b: same scores at every token as a\n"],
        ),
        # The reference is the last row, and the others are nevertheless compared with it.
        (
            run_of(*equal({}), replace(REF, scores_digest="a")),
            ["a, b: same scores at every token as bf16\n"],
        ),
        (run_of(REF, replace(QUANT, from_cache=True)), ["1 of 2 rows come from the cache"]),
        (
            run_of(REF, row("a", {"layers": [DEVIATING], "gpus": ["H200"]})),
            ["† a: ", "MarlinNvFp4", "on H200"],
        ),
        (
            run_of(row("a", {"gpus": ["H200"]}), row("b", {"cpu": "Xeon"})),
            ["where A: H200", "where B: Xeon"],
        ),
        (run_of(REF, FAILED), ["broken: failed: told to fail"]),
        (run_of(REF, replace(BASE, notes=("KLD n/a: x",))), ["base: KLD n/a: x"]),
        (run_of(REF, replace(BASE, provenance={})), ["base: kernel n/a", "base: KLD n/a"]),
        (run_of(REF, with_ppl(QUANT, replace(PPL, non_finite=3))), ["W4A16: 3 positions"]),
        (run_of(REF, with_against(QUANT, kld=Mean(0.5, 4.0, 38, 2))), ["W4A16: 2 positions"]),
        (run_of(REF, row("a", {"phase": "decode 1x32"})), ["\ndecode SxB"]),
        (run_of(row("a", {"phase": "decode 1x32"}), FAILED), ["all rows: decode 1x32; decode SxB"]),
        (
            run_of(row("a", YARN), row("b", YARN), data={"window_length": 2048}),
            ["a, b: ", "2,048", "1,024"],
        ),
        (run_of(row("a", {"kv_cache": "fp8"}), row("b", {"kv_cache": "bfloat16"})), ["KV cache: "]),
        # Scoring took 4 s, from 1 to 5; the first window was there after 1 s of them.
        (run_of(replace(QUANT, timing=Timing(0.0, 1.0, 1.0, 2.0, 5.0))), ["25 % of"]),
    ],
)
def test_each_fact_has_a_note_and_only_then(run: RunResult, facts: list[str]) -> None:
    """The plain run of the first case has none of the notes of the others."""
    # Each note has a line break before it, so that a fact can be the beginning of a note.
    notes = "\n".join(["", *notes_of(run)])
    for fact in facts:
        assert fact in notes
    if run.models != (REF, QUANT):
        plain = "\n".join(["", *notes_of(run_of(REF, QUANT))])
        for fact in facts:
            assert fact not in plain


def test_sizes_of_kv_caches() -> None:
    """Notes on caches that hold only the last tokens, and on rows without a size; only if the
    column is shown.
    """
    cache = KVCache("*", 32, "x", token_bytes=4096.0, window=4096)
    windowed = row("a", {"kv_cache_layers": [asdict(cache)]})
    without = row("HF", {"no_kv_cache": "none is used"})
    run = run_of(windowed, without, replace(QUANT, from_cache=True))
    notes = "\n".join(notes_of(run, ("label", "kv_mb")))
    for fact in (
        "a: 32 of 32 layers",
        "4,096",
        "HF: KV MB n/a: none is used",
        "W4A16: KV MB n/a",
        "-cc",
    ):
        assert fact in notes
    assert "KV MB" not in "\n".join(notes_of(run))


def test_spread_windows() -> None:
    """The error of ln PPL is 0.02 at most."""
    texts = [{"name": "text", "windows": 2, "windows_of_the_text": 12, "method": "gptq"}]
    reference = replace(REF, ln_ppl_stderr_of_text=0.01)
    quantized = replace(QUANT, ln_ppl_stderr_of_text=0.02, kld_stderr_of_text=0.0006)
    windows, precision, *_ = notes_of(run_of(reference, quantized, texts=texts))
    assert "2 windows of 12" in windows
    assert "12 windows" in precision
    assert "PPL within 2 %" in precision
    unknown = replace(QUANT, ln_ppl_stderr_of_text=None, kld_stderr_of_text=None)
    assert "PPL within" not in "".join(notes_of(run_of(unknown, texts=texts)))


def test_notes_of_several_texts() -> None:
    """Facts about a text follow its name; notes on rows and meanings of marks appear once."""
    run = three(failed={"EXL3 4.0": "out of memory"})
    first, second, third = run.data["texts"]
    second = {**second, "windows_of_the_text": 12, "notes": ["a note"], "method": "gptq"}
    rows = []
    for model in run.models:
        if not model.error:
            model = replace(model, ln_ppl_stderr_of_text=0.02)
        rows.append(model)
    data = {**run.data, "texts": [first, second, third]}
    table = table_of(run.updated(data=data, models=tuple(rows)))
    notes = [*table.notes, *table.legend]
    assert len(notes) == len(set(notes))
    assert {
        "wiki2: 2 windows, 50 scored tokens",
        "c4: method gptq: 2 windows of 12, spread over the text, 50 scored tokens",
        "c4: a note",
        "EXL3 4.0: failed: out of memory",
    } <= {*notes}
    assert any(
        note.startswith("what all 16 windows of the texts would give: PPL within 2 %")
        for note in notes
    )
    assert sum(note.startswith("±: ") for note in notes) == 1


def test_bounds_and_estimates_have_a_note_and_bounds_no_star() -> None:
    """KLDs of 0.1 and 0.2 in every block, and bounds of 0.15 and of 0.05."""
    rows = []
    for label, kld, kind in (
        ("exact", 1.0, "exact"),
        ("guess", 2.0, "estimate"),
        ("high", 1.5, "bound"),
        ("low", 0.5, "bound"),
    ):
        model = with_sums(replace(QUANT, label=label, kld_kind=kind), kld=(kld,) * 4)
        rows.append(with_against(model, kld=Mean(kld / 10, kld * 4, 40, 0, 0.001)))
    notes = notes_of(run_of(REF, *rows))
    assert any(note.startswith("high, low: ") and "loses at least" in note for note in notes)
    assert any(note.startswith("guess: ") and "estimated" in note for note in notes)
    assert any(note.startswith(f"no {BEST} in KLD: whether low ") for note in notes)
    notes = notes_of(run_of(REF, *rows[:3]))
    assert any(note.startswith(f"high: no {BEST} in KLD") for note in notes)
    notes = notes_of(run_of(REF, *rows[:2]))
    assert not any(BEST in note and " in KLD" in note for note in notes)
    assert not any("bound" in note for note in notes)
    notes = notes_of(run_of(REF, *rows[2:]))
    assert any(note.startswith(f"no {BEST} in KLD: no more") for note in notes)
