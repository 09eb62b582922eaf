"""The front of ``where --recipe``: KLD over bits per weight, with more and more parts kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..where.recipe import FULL_BITS
from ..where.results import Measured, Recipe, WhereResult
from . import picture_style
from .picture_style import Theme

HEIGHT = 6.4
"""Height of the picture (inches)."""
QUANTIZED = 2
REFERENCE = 8
"""Places of colours in ``Theme.families``: INT, unquantized."""
FRONT_SIGNS = "line: measured in 16 bits; dashes: whole KLD minus shares"
RINGS = "rings: recipes"
FORECAST_RINGS = "rings: recipes in 8 bits, which are forecasts"
ERROR_BARS = "error bars: ± one standard error"


class Point(NamedTuple):
    """A model: stored bits per weight, KLD in nats, and one standard error of the KLD or None."""

    bits: float
    kld: float
    stderr: float | None = None


def where_front(result: WhereResult, *, title: str | None = None, dark: bool = False) -> Figure:
    """Return the picture; ValueError if the KLD of the quantized model is not known."""
    if result.whole is None or not result.n_weights:
        raise ValueError("the KLD of the quantized model is not known")
    if title is None:
        title = title_of(result)
    subtitle = "\n".join(notes_of(result))
    with picture_style.canvas(HEIGHT, title, subtitle, dark=dark) as (figure, axes, theme):
        draw_axes(axes, result)
        draw_front(axes, result, theme)
        draw_targets(axes, result, theme)
        draw_ends(axes, result, theme)
        draw_recipes(axes, result, theme)
    return figure


def title_of(result: WhereResult) -> str:
    """Return the title of a picture without the user's title."""
    return f"Parts of {result.quantized.label} in more bits"


def notes_of(result: WhereResult) -> list[str]:
    """Return the lines below the title."""
    signs = []
    if result.front:
        signs.append(FRONT_SIGNS)
    if recipe_points(result):
        rings = RINGS
        if any(recipe.keep_bits != FULL_BITS for recipe in result.recipes):
            rings = FORECAST_RINGS
        signs.append(rings)
    lines = [result.subtitle, "; ".join(signs)]
    if any(point.stderr for point in front_points(result)):
        lines.append(ERROR_BARS)
    return lines


def point_of(bits: float, kld: Measured | None, result: WhereResult) -> Point | None:
    """Return the point of a model with these stored bits; None if its KLD is not known."""
    if kld is None:
        return None
    return Point(bits / result.n_weights, kld.value, kld.stderr)


def known(points: Sequence[Point | None]) -> list[Point]:
    """Return the points that are known."""
    return [point for point in points if point is not None]


def whole_point(result: WhereResult) -> Point:
    """Return the point of the quantized model."""
    point = point_of(result.bits, result.whole, result)
    assert point is not None
    return point


def reference_point(result: WhereResult) -> Point:
    """Return the point of the reference, whose KLD is 0."""
    bits = sum(module.reference_bits for module in result.modules)
    return Point(bits / result.n_weights, 0.0)


def front_points(result: WhereResult) -> list[Point]:
    """Return the measured points, the quantized model first."""
    points = [point_of(row.bits, row.kld, result) for row in result.front]
    return [whole_point(result), *known(points)]


def forecast_points(result: WhereResult) -> list[Point]:
    """Return the whole KLD minus shares, at the bits of the measured points."""
    points = [point_of(row.bits, row.forecast, result) for row in result.front]
    return [whole_point(result), *known(points)]


def recipe_points(result: WhereResult) -> list[Point]:
    """Return the points of the recipes that reach their targets by keeping parts."""
    points = []
    for recipe in result.recipes:
        if recipe.is_reached and recipe.parts:
            points.append(point_of(recipe.bits, kld_of(recipe), result))
    return known(points)


def kld_of(recipe: Recipe) -> Measured | None:
    """Return the measured KLD of a recipe; in 8 bits its forecast."""
    if recipe.keep_bits == FULL_BITS:
        return recipe.kld
    return recipe.forecast


def draw_axes(axes: Axes, result: WhereResult) -> None:
    """Set the labels and the ends of the axes."""
    axes.set_xlabel("bits per weight of the quantized modules, with scales")
    axes.set_ylabel(f"KLD from {result.reference.label} (nats)")
    axes.xaxis.set_major_formatter(lambda value, _: picture_style.tick_text(value))
    axes.yaxis.set_major_formatter(lambda value, _: picture_style.tick_text(value))
    axes.margins(x=0.08, y=0.1)


def draw_front(axes: Axes, result: WhereResult, theme: Theme) -> None:
    """Draw the measured points with their errors, and the forecast."""
    colour = theme.families[QUANTIZED]
    points = front_points(result)
    bits = [point.bits for point in points]
    axes.plot(bits, [point.kld for point in points], color=colour, lw=1.8, zorder=3, gid="front")
    for point in points:
        stderr = point.stderr or 0.0
        axes.errorbar(
            point.bits, point.kld, stderr, color=colour, marker="o", ms=5, lw=1.1, capsize=2
        )
    forecast = forecast_points(result)
    axes.plot(
        [point.bits for point in forecast],
        [point.kld for point in forecast],
        color=theme.muted,
        lw=1.1,
        dashes=(5, 3),
        gid="forecast",
    )


def draw_targets(axes: Axes, result: WhereResult, theme: Theme) -> None:
    """Draw a line with a name for each target."""
    for number, recipe in enumerate(result.recipes):
        key, _, text = recipe.target.partition("=")
        value = float(text)
        style: dict[str, Any] = {
            "color": theme.muted,
            "lw": 0.9,
            "dashes": (1, 2),
            "gid": f"target-{number}",
        }
        if key == "kld":
            axes.axhline(value, **style)
            place = (0.995, value)
            axes.annotate(
                recipe.target,
                place,
                (0, 3),
                ("axes fraction", "data"),
                "offset points",
                ha="right",
                color=theme.muted,
                size=10,
            )
        else:
            axes.axvline(value, **style)
            axes.annotate(
                recipe.target,
                (value, 0.985),
                (4, 0),
                ("data", "axes fraction"),
                "offset points",
                va="top",
                color=theme.muted,
                size=10,
            )


def draw_ends(axes: Axes, result: WhereResult, theme: Theme) -> None:
    """Draw the quantized model and the reference with their names."""
    ends = (
        (whole_point(result), result.quantized.label, QUANTIZED, "left", 8),
        (reference_point(result), result.reference.label, REFERENCE, "right", -8),
    )
    for point, label, colour, side, offset in ends:
        axes.plot(point.bits, point.kld, "o", color=theme.families[colour], ms=9, zorder=4)
        (name,) = picture_style.names_of([label])
        axes.annotate(
            name, (point.bits, point.kld), (offset, 9), textcoords="offset points", ha=side, size=12
        )


def draw_recipes(axes: Axes, result: WhereResult, theme: Theme) -> None:
    """Draw a ring around the point of each recipe that keeps parts."""
    for number, point in enumerate(recipe_points(result)):
        axes.plot(
            point.bits,
            point.kld,
            "o",
            mfc="none",
            mec=theme.ink,
            mew=1.6,
            ms=12,
            zorder=5,
            gid=f"recipe-{number}",
        )
