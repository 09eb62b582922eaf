"""Recipes: the greedy order, the spread of measured points, and prefixes that reach a target."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from compare_q.backends.common.errors import InputError
from compare_q.eval.where import recipe
from compare_q.eval.where.recipe import Target
from compare_q.eval.where.results import Module, PartRow
from tests.support.where_results import part


def modules_of(rows: tuple[PartRow, ...], formats: Mapping[str, str] = {}) -> list[Module]:
    """Return a module for each part, by default in int4 g32."""
    modules = []
    for row in rows:
        weights = formats.get(row.name, "int4 g32")
        module = Module(
            name=row.name,
            n_weights=row.n_weights,
            weights=weights,
            bits=row.bits,
            reference_bits=row.reference_bits,
        )
        modules.append(module)
    return modules


ROWS = (
    # 115 bits are added at 10 weights: 0.004 nats per bit.
    part("o", 0.46, 0.01),
    # 230 bits, 0.003 nats per bit.
    part("down", 0.69, 0.01, n_weights=20, bits=90.0, reference_bits=320.0),
    # 11.5 bits, 0.01 nats per bit.
    part("v", 0.115, 0.01, n_weights=1, bits=4.5, reference_bits=16.0),
    # Its interval holds 0.
    part("q", 0.5, 0.4),
    part("k", None),
    part("up", -0.3, 0.01),
)


def test_parts_are_in_the_order_of_their_share_per_added_bit() -> None:
    order = recipe.greedy_order(ROWS, modules_of(ROWS), 16)
    assert [each.row.name for each in order] == ["v", "o", "down"]
    assert [each.bits for each in order] == [11.5, 115.0, 230.0]
    assert [each.gain_per_bit for each in order] == pytest.approx([0.01, 0.004, 0.003])


def test_eight_bits_leave_a_part_of_the_share_by_the_number_of_bits() -> None:
    formats = {"down": "int6 g64", "v": "int2"}
    order = recipe.greedy_order(ROWS, modules_of(ROWS, formats), 8)
    gains = {each.row.name: (each.bits, each.gain) for each in order}
    # 4, 2 and 6 more bits per weight; the error falls by 4 for each.
    assert gains == {
        "o": (40.0, pytest.approx(0.46 * 255 / 256)),
        "down": (40.0, pytest.approx(0.69 * 15 / 16)),
        "v": (6.0, pytest.approx(0.115 * 4095 / 4096)),
    }


@pytest.mark.parametrize("weights", ["exl3 4.0", "", "int8", "float8_e4m3", "q4_K"])
def test_eight_bits_are_not_forecast_for_other_formats(weights: str) -> None:
    order = recipe.greedy_order(ROWS, modules_of(ROWS, {"o": weights}), 8)
    assert {each.row.name for each in order} == {"v", "down"}


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "int4 g128"])
def test_four_bits(weights: str) -> None:
    assert recipe.bits_of_format(weights) == 4


def test_a_share_of_modules_in_several_formats_is_not_forecast() -> None:
    row = part("layer", 0.5, modules=("a", "b"))
    modules = []
    for name, weights in (("a", "int4 g32"), ("b", "int3 g32")):
        module = Module(name=name, n_weights=5, weights=weights, bits=1.0, reference_bits=2.0)
        modules.append(module)
    assert recipe.greedy_order([row], modules, 8) == ()
    assert len(recipe.greedy_order([row], modules, 16)) == 1


def test_points_are_spread_over_the_front() -> None:
    assert recipe.spread_counts(0, has_recipes=True) == []
    assert recipe.spread_counts(4, has_recipes=True) == [1, 2, 3, 4]
    assert recipe.spread_counts(210, has_recipes=True) == [
        *(1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144),
        210,
    ]
    assert recipe.spread_counts(210, has_recipes=False) == [1, 2, 3, 5, 8]
    assert recipe.spread_counts(2, has_recipes=False) == [1, 2]


def test_the_shortest_prefix_is_bisected_between_the_points() -> None:
    asked = []

    def kld_of(count: int) -> float | None:
        asked.append(count)
        return 1 - count / 100

    assert recipe.shortest_prefix([0, 10, 50, 100], kld_of, 0.885) == 12
    assert asked[:3] == [0, 10, 50]
    assert min(asked[3:]) > 10
    assert len(asked) <= 3 + 6
    assert recipe.shortest_prefix([0, 10, 50, 100], kld_of, 1.0) == 0
    assert recipe.shortest_prefix([0, 10, 50, 100], kld_of, 0.9) == 10
    assert recipe.shortest_prefix([0, 10], kld_of, 0.895) is None


def test_an_unknown_kld_does_not_reach_a_target() -> None:
    klds = {0: 1.0, 1: None, 2: 0.2, 3: 0.1}
    assert recipe.shortest_prefix([0, 1, 2, 3], klds.__getitem__, 0.5) == 2
    assert recipe.shortest_prefix([0, 1], klds.__getitem__, 0.5) is None


def test_the_longest_prefix_that_fits() -> None:
    assert recipe.longest_prefix([4.5, 5.0, 8.0], 4.9) == 0
    assert recipe.longest_prefix([4.5, 5.0, 8.0], 5.0) == 1
    assert recipe.longest_prefix([4.5, 5.0, 8.0], 100) == 2


def test_targets() -> None:
    assert recipe.target_of("kld=0.1") == Target("kld", 0.1)
    assert str(recipe.target_of("bpw=5.50")) == "bpw=5.5"
    assert recipe.target_of(str(Target("kld", 1e-7))) == Target("kld", 1e-7)


@pytest.mark.parametrize(
    "word", ["kld=", "kld", "kld=-1", "kld=0", "kld=nan", "bpw=inf", "bpw=4bit", "ppl=5", "=1", ""]
)
def test_wrong_targets_are_refused(word: str) -> None:
    with pytest.raises(InputError):
        recipe.target_of(word)


def test_a_size_below_that_of_the_quantized_model_is_refused() -> None:
    modules = modules_of(ROWS)
    recipe.check_targets([Target("bpw", 4.5), Target("kld", 0.1)], modules)
    with pytest.raises(InputError, match=r"bpw=4\.4"):
        recipe.check_targets([Target("bpw", 4.4)], modules)
