"""Colour and dashes of lines, so that any two models can be told apart: in grey, and without red or green sight, too.

Each scheme has a hue and dashes of its own, and lightness tells its sizes apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import NDArray

from eval.plots import grouping
from eval.plots.style import DARK, Theme

Scheme = tuple[str, str]

DASHES: tuple[tuple[float, ...], ...] = (
    (6, 2), (1, 1.5), (6, 2, 1, 2), (12, 3), (6, 2, 1, 2, 1, 2), (3, 1.5), (12, 3, 2, 3), ()
)  # fmt: skip
"""Lengths of lines and gaps, in widths of the line; the pattern of each of ``grouping.COLOURS``."""
MOST, MOST_OF_SCHEME = 12, 7
"""Coloured lines of a picture, and of one scheme: seven have steps of 6.5 of lightness, of which 2 can be seen."""
LIGHT_RANGE, DARK_RANGE = (22.0, 61.0), (44.0, 90.0)
"""Lightness (CIE L*) of lines on either paper: 3:1 of contrast to the paper (WCAG), and not yet black or white."""


@dataclass(frozen=True)
class LineStyle:
    """A colour, and lengths of lines and gaps; no lengths: a solid line."""

    colour: str
    dashes: tuple[float, ...] = ()


def told_apart(schemes: Sequence[Scheme], ranked: Sequence[int], must: int) -> list[int]:
    """Which of ``ranked`` lines, the most important first, get a colour: all if all can be told apart.

    Else only the first ``must`` count, as many of them as can be told apart.
    """
    kept: list[int] = []
    for i in ranked:
        counts = Counter(schemes[each] for each in [*kept, i])
        if len(kept) < MOST and len(counts) <= len(DASHES) and max(counts.values()) <= MOST_OF_SCHEME:
            kept.append(i)
    return kept if len(kept) == len(ranked) else [i for i in kept if i in ranked[:must]]


def line_styles(schemes: Sequence[Scheme], sizes: Sequence[float | None], theme: Theme) -> list[LineStyle]:
    """The style of each line [N] of at most eight schemes; the largest model of a scheme is the nearest to the ink.

    The first scheme of a group has the group's colour in the other pictures.
    """
    groups = grouping.group_styles([group for group, _ in schemes], theme.ink, distinct=False)
    hues = [colour or theme.ink for colour in grouping.COLOURS]
    free = sorted(hues, key=lambda hue: hue in {look[0] for look in groups.values()})  # others' are taken last
    found: dict[int, LineStyle] = {}
    for scheme in dict.fromkeys(schemes):
        colour = groups[scheme[0]][0] if groups[scheme[0]][0] in free else free[0]
        free.remove(colour)
        dashes = DASHES[hues.index(colour)]
        members = [i for i, each in enumerate(schemes) if each == scheme]
        members.sort(key=lambda i: -(sizes[i] or 0.0))
        found |= {
            i: LineStyle(shade, dashes) for i, shade in zip(members, shades(colour, len(members), theme), strict=True)
        }
    return [found[i] for i in range(len(schemes))]


def shades(colour: str, count: int, theme: Theme) -> list[str]:
    """Shades of a colour at equal steps of lightness, the nearest to the ink first; one is the colour if that shows."""
    low, high = DARK_RANGE if theme == DARK else LIGHT_RANGE
    wanted = np.linspace(low, high, count) if count > 1 else np.clip([lightness(to_rgb(colour))], low, high)
    grey = np.linspace(0, 1, 200)[:, None]
    middle = np.array(to_rgb(colour))
    path = np.vstack([grey * middle, middle + grey[1:] * (1 - middle)])  # from black to white
    place = np.interp(wanted, lightness(path), np.arange(len(path)))
    found = [to_hex(path[round(each)]) for each in place]
    return found[::-1] if theme == DARK else found


def lightness(rgb: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*, 0 to 100, of sRGB colours [..., 3] from 0 to 1."""
    channels = np.asarray(rgb, dtype=np.float64)
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.asarray(np.where(y > 216 / 24389, 116 * np.cbrt(y) - 16, y * 24389 / 27))
