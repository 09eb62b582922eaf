"""What the plot of several texts shows of each model: values, intervals, sizes, the order, and what is missing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from compare_q.backends.base import Storage
from compare_q.eval.plots import dumbbell as rows
from compare_q.eval.plots import measures
from compare_q.eval.plots.measures import FILES, KLD, PPL
from tests.support.several_texts import NAMES, REACH, model_of, text_of, three, with_failed_text, with_text


def test_values_and_intervals_of_kld() -> None:
    """The reference is left out; the interval is t(0.975, 4 waves) errors wide on either side."""
    found = {row.label: row for row in rows.rows_of(three(), KLD, None)}
    assert list(found) == ["noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    row = found["EXL3 4.0"]
    assert [(spot.text, spot.value, spot.error) for spot in row.spots] == [
        (0, 0.05, 0.005), (1, 0.02, 0.002), (2, 0.08, 0.008)
    ]  # fmt: skip
    assert [spot.limits for spot in row.spots] == [
        pytest.approx((kld - REACH * kld / 10, kld + REACH * kld / 10)) for kld in (0.05, 0.02, 0.08)
    ]
    assert row.mean.value == pytest.approx(0.05)
    assert row.mean.stderr == pytest.approx(math.sqrt(0.005**2 + 0.002**2 + 0.008**2) / 3)
    assert row.size == "4.00 bpw"


def test_values_and_intervals_of_perplexity() -> None:
    """Errors are of the ratio to the reference's, 0.01 of each perplexity; the reference has none."""
    found = {row.label: row for row in rows.rows_of(three(), PPL, None)}
    assert list(found) == ["bf16", "noise ≈", "EXL3 4.0", "GGUF Q4_K"]
    assert [(spot.value, spot.error, spot.limits) for spot in found["bf16"].spots] == [(20.0, None, None)] * 3
    ppls = [20 * 1.05, 20 * 1.02, 20 * 1.08]
    row = found["EXL3 4.0"]
    assert [spot.value for spot in row.spots] == pytest.approx(ppls)
    reach = REACH * 0.01
    assert [spot.limits for spot in row.spots] == [pytest.approx((p * (1 - reach), p * (1 + reach))) for p in ppls]
    assert row.mean.value == pytest.approx(math.prod(ppls) ** (1 / 3))
    assert row.mean.stderr == pytest.approx(math.prod(ppls) ** (1 / 3) * 0.01 / math.sqrt(3))


def test_sizes_in_words() -> None:
    """Of a model whose bits are not known the files; what was asked for, and nothing else."""
    model = replace(model_of("x", 0.1), storage=Storage(file_bytes=2_500_000_000))
    assert [rows.size_words(model, size) for size in (None, FILES)] == ["2.50 GB", "2.50 GB"]
    assert rows.size_words(model_of("EXL3 4.0", 0.1), FILES) == ""
    assert rows.size_words(replace(model, storage=Storage()), None) == ""


def test_the_order_is_by_mean_and_rows_that_lack_a_text_are_last() -> None:
    """GGUF has the smallest mean of what it has, 0.03 of 0.03 and 0.05, but lacks a text."""
    placed = sorted(rows.rows_of(three(), KLD, None), key=lambda row: row.place)
    assert [row.label for row in placed] == ["noise ≈", "GGUF Q4_K", "EXL3 4.0"]
    lacking = three(c4={"noise": "out of memory"})
    placed = sorted(rows.rows_of(lacking, KLD, None), key=lambda row: row.place)
    assert [(row.label, row.mean.value is None) for row in placed] == [
        ("GGUF Q4_K", False), ("EXL3 4.0", False), ("noise ≈", True)
    ]  # fmt: skip


def test_what_is_missing_is_said_once_with_its_reason() -> None:
    assert rows.missing_note(three(), KLD) == ""
    one = three(c4={"EXL3 4.0": "out of memory"})
    assert rows.missing_note(one, KLD) == "n/a: EXL3 4.0 on c4 (out of memory)"
    assert rows.missing_note(one, PPL) == "n/a: EXL3 4.0 on c4 (out of memory)"
    always = three(**{name: {"noise": "no such folder"} for name in NAMES})
    assert rows.missing_note(always, KLD) == "n/a: noise (no such folder)"
    failed = with_failed_text(always, "chat", "c.jsonl: no such file")
    assert rows.missing_note(failed, KLD) == "n/a: chat (c.jsonl: no such file); noise (no such folder)"
    alone = with_text(three(), text_of("c4", 1, reference=False))
    assert rows.missing_note(alone, KLD) == "n/a: c4 (no reference)"
    assert rows.missing_note(alone, PPL) == ""
    several = ("noise", "EXL3 4.0", "GGUF Q4_K")
    many = three(c4=dict.fromkeys(several, "a"), chat=dict.fromkeys((*several, "bf16"), "b"))
    assert rows.missing_note(many, PPL).endswith("; and 1 more")
    both = three(c4={"noise": "a"}, chat={"noise": "a"})
    assert rows.missing_note(both, PPL) == "n/a: noise on c4, chat (a)"


def test_the_measure_is_kld_where_a_model_has_one() -> None:
    alone = three()
    for i, name in enumerate(NAMES):
        assert measures.chosen(alone, None, None) is KLD
        alone = with_text(alone, text_of(name, i, reference=False))
    assert measures.chosen(alone, None, None) is PPL
    assert rows.rows_of(alone, KLD, None) == []
    assert measures.chosen(three(), "ppl", None) is PPL


def test_the_noise_floor_is_at_its_mean() -> None:
    """And nowhere, if a text is missing."""
    assert rows.floor_of(three()) == ("noise", pytest.approx(0.002))
    assert rows.floor_of(with_failed_text(three(), "c4", "x")) is None
