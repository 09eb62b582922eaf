"""Which points a line joins, which no other beats, how that is put into words, and where unquantized ones stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compare_q.eval.plots.points import Point, at_edge, front_in_words, pareto_front, series
from tests.support.scatter_cases import TABLE


def points(*rows: tuple[str, float, float]) -> list[Point]:
    return [Point(label, x, y, unquantized=x >= 16) for label, x, y in rows]


def labels(found: list[Point]) -> list[str]:
    return [each.label for each in found]


def test_lines_join_one_scheme_in_order_of_size() -> None:
    found = series(
        points(
            ("GGUF Q6_K", 6.5, 1), ("GGUF Q4_K_M", 4.8, 2), ("GGUF Q3_K_S", 3.5, 3), ("GGUF Q4_0", 4.5, 2.5),
            ("GGUF Q8_0", 8.5, 0.5), ("GGUF IQ3_XXS", 3.1, 4), ("GGUF F16", 16, 0.1), ("GGUF BF16", 16, 0.1),
            ("EXL3 2.0 bpw", 2, 5), ("EXL3 2.25 bpw", 2.25, 4), ("W4A16 g32", 4.5, 1), ("NVFP4 W4A16", 4.5, 2),
            ("NVFP4 W4A4", 4.5, 3), ("FP8", 8, 1),
        )
    )  # fmt: skip
    assert [labels(each) for each in found] == [
        ["EXL3 2.0 bpw", "EXL3 2.25 bpw"],
        ["GGUF Q3_K_S", "GGUF Q4_K_M", "GGUF Q6_K"],
        ["GGUF Q4_0", "GGUF Q8_0"],
    ]


@pytest.mark.parametrize(
    ("rows", "gold"),
    [
        ([("a", 2, 5), ("b", 3, 5), ("c", 4, 1), ("d", 5, 2), ("e", 6, 0.5)], "ace"),
        ([("a", 4, 1), ("b", 4, 2), ("c", 4, 1)], "ac"),  # as good and as small: both
        ([("a", 4.5, 2), ("b", 4.501, 1), ("c", 4.53, 1)], "b"),  # 4.5 and 4.501 are alike, 4.53 is larger
        ([("a", 4, 1), ("bf16", 16, 0)], "a"),  # of quantized rows
        ([("bf16", 16, 0)], ""),
    ],
)
def test_the_front_by_hand(rows: list[tuple[str, float, float]], gold: str) -> None:
    assert "".join(labels(pareto_front(points(*rows)))) == gold


def test_the_front_of_the_table_is_what_no_other_row_beats() -> None:
    """By the definition, pair by pair."""
    quantized = [each for each in TABLE if each.label != "bf16"]
    beaten = {
        one.label for one in quantized for other in quantized
        if other.x <= 1.005 * one.x and other.y <= one.y and (other.y < one.y or 1.005 * other.x < one.x)
    }  # fmt: skip
    table = [replace(each, unquantized=each.label == "bf16") for each in TABLE]
    assert set(labels(pareto_front(table))) == {each.label for each in quantized} - beaten


def test_a_front_in_words() -> None:
    rows = points(("EXL3 2.0", 2, 9), ("EXL3 3.0", 3, 8), ("EXL3 4.0", 4, 7), ("FP8", 8, 6), ("GGUF Q8_0", 8.5, 5),
                  ("GGUF Q9_0", 9.5, 4))  # fmt: skip
    assert front_in_words(pareto_front(rows), rows) == "EXL3 2.0 to EXL3 4.0, FP8, GGUF Q8_0, GGUF Q9_0"
    beaten = [*rows, Point("EXL3 3.5", 3.5, 8.5)]
    assert front_in_words(pareto_front(beaten), beaten) == "EXL3 2.0, EXL3 3.0, EXL3 4.0, FP8, GGUF Q8_0, GGUF Q9_0"
    named = [replace(rows[3], label="W8A16 g128", group="INT")]
    assert front_in_words(named, named) == "W8A16 g128"  # nobody calls it INT W8A16 g128
    assert front_in_words([], rows) == ""


def test_unquantized_points_stand_beside_the_others() -> None:
    rows = points(("a", 2, 5), ("b", 8, 1), ("bf16", 16, 0), ("f16", 16.5, 0))
    moved, edge = at_edge(rows)
    assert edge == pytest.approx(8 + 0.1 * 6)
    assert [each.x for each in moved] == [2, 8, edge, edge]
    assert at_edge(rows[:2]) == (rows[:2], None)
    assert at_edge(rows[2:]) == (rows[2:], None)
    near = [*points(("b", 14, 1)), rows[2]]
    assert at_edge(near) == (near, None)
