"""Points of a scatter plot: values, errors, the lines between them, and the Pareto front."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from compare_q.backends.base import KldKind, Storage
from compare_q.backends.layers.groups import KVCache
from compare_q.eval.plots.measures import (
    BPW,
    FILE_SIZE,
    KLD,
    KLD_VALUES,
    PPL,
    SIZES,
    VRAM,
    error_of,
)
from compare_q.eval.plots.points import (
    Level,
    Point,
    levels_of,
    lines_of_schemes,
    pareto_front,
    points_of,
)
from compare_q.eval.stats.uncertainty import Mean, Perplexity
from tests.support.made import (
    BASE,
    FAILED,
    QUANT,
    REF,
    replace,
    run_of,
    with_against,
    with_ppl,
    with_sums,
)


def facts_of(points: list[Point]) -> list[tuple[object, ...]]:
    """Return what a picture shows of these points."""
    facts = []
    for point in points:
        facts.append((point.number, point.label, point.x, point.y, point.y_text, point.error))
    return facts


@pytest.mark.parametrize(
    ("rows", "gold"),
    [
        ([("a", 2, 5), ("b", 3, 5), ("c", 4, 1), ("d", 5, 2), ("e", 6, 0.5)], "ace"),
        # Equally good and small: both.
        ([("a", 4, 1), ("b", 4, 2), ("c", 4, 1)], "ac"),
        # 4.5 and 4.501 are equal, 4.53 is larger.
        ([("a", 4.5, 2), ("b", 4.501, 1), ("c", 4.53, 1)], "b"),
        # Only quantized rows.
        ([("a", 4, 1), ("bf16", 16, 0)], "a"),
        ([("bf16", 16, 0)], ""),
    ],
)
def test_the_front_by_hand(rows: list[tuple[str, float, float]], gold: str) -> None:
    points = [Point(label, x, y, unquantized=x >= 16) for label, x, y in rows]
    assert "".join(point.label for point in pareto_front(points)) == gold


@pytest.mark.parametrize(
    ("rows", "gold"),
    [
        # A bound may be below b, whose KLD is then not the best of its size.
        ([("a", 4, 1, "bound"), ("b", 4, 2, "exact")], ""),
        # Whatever the bounded KLD is, it is not below b.
        ([("a", 4, 2, "bound"), ("b", 4, 1, "exact")], "b"),
        # Nothing is as small as the bound.
        ([("a", 3, 5, "bound"), ("b", 4, 1, "exact")], "ab"),
        ([("a", 3, 0.5, "bound"), ("b", 4, 1, "exact")], "a"),
        # The bounded KLD may be above that of the smaller one.
        ([("a", 3, 5, "exact"), ("b", 4, 1, "bound")], "a"),
        ([("a", 4, 1, "estimate"), ("b", 4, 2, "exact")], "a"),
    ],
)
def test_the_front_holds_for_every_kld_that_bounds_allow(
    rows: list[tuple[str, float, float, KldKind]], gold: str
) -> None:
    points = [Point(label, x, y, kind=kind) for label, x, y, kind in rows]
    assert "".join(point.label for point in pareto_front(points)) == gold


def test_the_error_of_ppl_is_that_of_the_ratio_to_the_reference() -> None:
    """The error is PPL 8 times the error of ln(ratio), 0.002."""
    quant = with_ppl(
        with_against(QUANT, ln_ppl_ratio=Mean(0.1, 1.0, 10, 0, 0.002)),
        Perplexity(8.0, -20.8, 10, 0, 0.9),
    )
    run = run_of(REF, quant)
    assert error_of(run, REF, PPL) == (None, True)
    assert error_of(run, quant, PPL) == (0.016, True)
    without_error = with_against(quant, ln_ppl_ratio=Mean(0.1, 1.0, 10, 0))
    assert error_of(run, without_error, PPL) == (None, True)


def test_a_server_is_paired_with_the_reference_by_its_blocks() -> None:
    """The error of the blocks' differences is 0.115487, times PPL 8.

    The blocks' nll differ by (0, 0, 0, 4), 0.1 per token of 40, and deviate by (-1, -1, -1, 3);
    tests/eval/test_ranking.py has this error.
    """
    server = with_sums(
        with_ppl(BASE, Perplexity(8.0, -83.2, 40, 0, 0.9)), nll=(10.0, 20.0, 30.0, 40.0)
    )
    reference = with_sums(
        with_ppl(REF, Perplexity(5.0, -64.0, 40, 0, 0.8)), nll=(10.0, 20.0, 30.0, 36.0)
    )
    error, paired = error_of(run_of(reference, server), server, PPL)
    assert paired
    assert error == pytest.approx(8 * 0.115487, rel=1e-5)
    of_other_tokens = with_sums(server, tokens=(10, 10, 10, 9))
    with_holes = with_sums(server, whole=())
    for unpaired in (of_other_tokens, with_holes):
        assert error_of(run_of(reference, unpaired), unpaired, PPL) == (0.9, False)
    assert error_of(run_of(server, reference=None), server, PPL) == (0.9, False)


def test_points_are_what_is_known() -> None:
    sizeless = replace(QUANT, label="sizeless", storage=Storage(file_bytes=2_500_000_000))
    run = run_of(REF, QUANT, sizeless, BASE, FAILED)
    drawn, left_out = points_of(run, BPW, PPL)
    assert facts_of(drawn) == [
        (0, "bf16", 4.5, 7.5, "7.500", None),
        # The error is 7.5 times that of ln(ratio), 0.002.
        (1, "W4A16", 4.5, 7.5, "7.50", 0.015),
        # In every block the losses are the reference's: no difference, and no error of it.
        (3, "base", 4.5, 7.5, "7.500", 0.0),
    ]
    assert left_out == [
        "sizeless: not in the plot: bits per weight unknown",
        "broken: not in the plot: PPL unknown",
    ]
    drawn, left_out = points_of(run, VRAM, KLD)
    assert facts_of(drawn) == [
        (0, "bf16", 1.0, 0.0, "reference: 0", None),
        (1, "W4A16", 1.0, 0.01234567, "0.0123", 0.000452),
    ]
    assert left_out == [
        "sizeless: not in the plot: VRAM unknown",
        "base: not in the plot: KLD unknown",
        "broken: not in the plot: KLD unknown",
    ]


def test_points_of_file_sizes_and_percentiles() -> None:
    """The reference's KLD is 0; the quantized row's is 0.999, shown with two digits."""
    reference = replace(REF, storage=Storage(file_bytes=10**9))
    quant = replace(QUANT, storage=Storage(file_bytes=3 * 10**8))
    drawn, left_out = points_of(run_of(reference, quant, BASE), FILE_SIZE, KLD_VALUES["p99.9"])
    assert facts_of(drawn) == [
        (0, "bf16", 1.0, 0.0, "reference: 0", None),
        (1, "W4A16", 0.3, 0.999, "1.0", None),
    ]
    assert left_out == ["base: not in the plot: 99.9 % KLD unknown"]
    drawn, _ = points_of(run_of(reference, quant), FILE_SIZE, KLD_VALUES["median"])
    assert [point.y_text for point in drawn] == ["reference: 0", "0.500"]
    drawn, left_out = points_of(run_of(QUANT), FILE_SIZE, KLD)
    assert drawn == []
    assert left_out == ["W4A16: not in the plot: file size unknown"]


def test_points_of_kv_caches() -> None:
    cache = KVCache("*", 32, "fp8", prefill="", named=True, token_bytes=2048.0)
    quant = replace(QUANT, provenance={"kv_cache_layers": [asdict(cache)]})
    drawn, left_out = points_of(run_of(quant, BASE), SIZES["kv"], PPL)
    # 2,048 bytes * 32 layers * 1,000 tokens are 65.536 MB.
    assert [(point.label, point.x) for point in drawn] == [(QUANT.label, 65.536)]
    assert left_out == ["base: not in the plot: KV cache unknown"]


def test_lines_are_the_reference_and_the_noise_floor() -> None:
    floor = replace(QUANT, label="bf16 " + "noise " * 20, spec={"noise_floor": True})
    run = run_of(REF, floor)
    assert levels_of(run, PPL) == [Level(7.5, "reference 7.50", dotted=False)]
    name = "noise floor (bf16 noise noise noi...noise noise noise) 0.012"
    assert levels_of(run, KLD) == [Level(0.01234567, name, dotted=True)]
    assert [level.y for level in levels_of(run, KLD_VALUES["p99.9"])] == [0.999]
    assert levels_of(run_of(REF, QUANT), KLD) == []
    floor_of_zero = with_against(floor, kld=Mean(0.0, 0.0, 40, 0))
    assert levels_of(run_of(REF, floor_of_zero), KLD) == []
    assert levels_of(run_of(BASE, reference=None), PPL) == []


def test_a_bound_is_at_least_its_value_and_is_rounded_down() -> None:
    """0.01234567 ± 0.000452, and a 99.9 % KLD of 0.999, of which two digits are shown."""
    bound = replace(QUANT, kld_kind="bound")
    for measure, text in ((KLD, ">=0.0123"), (KLD_VALUES["p99.9"], ">=0.99"), (PPL, "7.50")):
        drawn, _ = points_of(run_of(REF, bound), BPW, measure)
        point = drawn[1]
        assert (point.label, point.y_text) == ("W4A16", text)
        assert point.is_bound == measure.kld
    drawn, _ = points_of(run_of(REF, replace(QUANT, kld_kind="estimate")), BPW, KLD)
    assert (drawn[1].y_text, drawn[1].is_bound) == ("0.0123", False)


def test_no_line_of_a_scheme_goes_through_a_bound() -> None:
    sizes = [Point(f"EXL3 {bits}", bits, 1 / bits) for bits in (2, 3, 4)]
    assert [len(line) for line in lines_of_schemes(sizes)] == [3]
    sizes[1] = replace(sizes[1], kind="bound")
    (line,) = lines_of_schemes(sizes)
    assert [point.x for point in line] == [2, 4]
