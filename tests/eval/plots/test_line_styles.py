"""Colour and dashes of lines: whatever is coloured can be told apart, on both papers, in grey and in any sight."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from compare_q.eval.plots import looks, style
from compare_q.eval.plots.looks import DASHES, MOST, MOST_OF_SCHEME, LineStyle, lightness, shades, told_apart

DEUTERANOPIA = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
"""Machado et al. 2009, severity 1, on linear light."""


def seen(colour: str) -> float:
    """L* of a colour as a deuteranope sees it."""
    linear = ((np.array(to_rgb(colour)) + 0.055) / 1.055) ** 2.4
    mixed = np.clip(DEUTERANOPIA @ linear, 0, 1)
    return float(lightness(np.where(mixed > 0, 1.055 * mixed ** (1 / 2.4) - 0.055, 0)))


def styles_of(schemes: list[tuple[str, str]], theme: style.Theme) -> list[LineStyle]:
    return looks.line_styles(schemes, [float(i) for i in range(len(schemes))], theme)


EVERYTHING = [(f"G{i}", "#") for i in range(len(DASHES)) for _ in range(MOST_OF_SCHEME)]


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_any_two_lines_differ_in_dashes_or_in_lightness(theme: style.Theme) -> None:
    """5 of L*, more than twice what is just seen, in grey and to deuteranopes; and 3:1 of contrast to the paper."""
    found = styles_of(EVERYTHING, theme)
    assert len({look.dashes for look in found}) == len(DASHES)
    for one, other in itertools.combinations(found, 2):
        if one.dashes == other.dashes:
            grey = abs(lightness(to_rgb(one.colour)) - lightness(to_rgb(other.colour)))
            assert min(grey, abs(seen(one.colour) - seen(other.colour))) > 5

    def light(colour: str) -> float:
        return float(((np.array(to_rgb(colour)) + 0.055) / 1.055) ** 2.4 @ [0.2126, 0.7152, 0.0722]) + 0.05

    for look in found:
        dim, bright = sorted((light(look.colour), light(theme.paper)))
        assert bright / dim > 2.9


def test_lightness_by_hand() -> None:
    """Black, white, and the grey of L* 50, whose Y is ((50 + 16) / 116)^3 = 0.184."""
    assert lightness([[0, 0, 0], [1, 1, 1]]).tolist() == pytest.approx([0, 100])
    grey = 1.055 * 0.18418652 ** (1 / 2.4) - 0.055
    assert float(lightness([grey] * 3)) == pytest.approx(50, abs=1e-3)


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_the_largest_of_a_scheme_is_the_nearest_to_the_ink(theme: style.Theme) -> None:
    colours = [look.colour for look in styles_of([("EXL3", "# bpw")] * 5, theme)]
    away = [abs(float(lightness(to_rgb(colour))) - float(lightness(to_rgb(theme.ink)))) for colour in colours]
    assert away == sorted(away, reverse=True)
    assert shades("#0072B2", 1, style.LIGHT) == ["#0072b2"]


def test_only_what_matters_is_coloured_where_not_all_can_be_told_apart() -> None:
    alone = [(f"G{i}", "") for i in range(20)]
    assert told_apart(alone[:8], range(8), 2) == list(range(8))
    assert told_apart(alone[:9], range(9), 2) == [0, 1]
    assert told_apart(alone, range(20), 10) == list(range(8))  # of ten that matter, eight hues
    sizes = [("EXL3", "# bpw")] * 9
    assert told_apart(sizes[:7], range(7), 1) == list(range(7))
    assert told_apart(sizes, range(9), 8) == list(range(7))
    assert len(told_apart(EVERYTHING, range(len(EVERYTHING)), 50)) == MOST
