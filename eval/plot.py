"""Scatter plot of a quality measure (perplexity, KLD) over the size of a model (bits per weight, GiB).

Every point carries its name and value. Labels never overlap each other or a point: adjustText gives a first
arrangement, in which each label in turn then moves to the cheapest of many places around its point.
Boxes are [x0, y0, x1, y1] and segments [xa, ya, xb, yb], in pixels, y upwards, one per row of an array.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from adjustText import adjust_text
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from eval.files import replacing

Rows = NDArray[np.float64]
Styles = dict[str, tuple[str, str]]  # group -> colour, marker
Theme = tuple[str, str, str, str]  # colours of paper, ink, muted ink, grid

SIZE, DPI = (13.0, 9.0), 160  # inches, pixels per inch
FONT_SIZES = (10.5, 9.0, 7.5, 6.0)  # points; the first at which all labels fit is taken
MARKER_SIZE = 9.0  # points
COVERED = 10.0  # pixels, half a marker, within which a later point covers one
PADDING = np.array([-6, -3, 6, 3])  # pixels kept free around a label
LEADER_FROM = 12.0  # pixels between point and label from which on a line joins them
SUFFIXES: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # metadata
LIGHT: Theme = ("#ffffff", "#1b1f24", "#5b6470", "#e9ebee")
DARK: Theme = ("#14171c", "#e8eaed", "#9aa3ad", "#2a2f37")

# Okabe-Ito, but grey for its yellow, which vanishes on white, and ink ("") for its black; the groups that prefer each.
COLOURS = ("#CC79A7", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#8C8C8C", "")
KNOWN = ("EXL3", "GGUF", "VLLM W4A16", "EXL2 FP8", "AWQ NVFP4", "GPTQ W8A8", "BNB MXFP4", "BF16 FP16")
MARKERS = "os^DvPXp<>"

# Costs of a label's place: a leader through a label or point, leaders that cross, a group's line through the label,
# another point about as near as its own (each times their number), and a pixel between label and point.
COSTS = np.array([40.0, 25.0, 8.0, 10.0, 0.1])


@dataclass(frozen=True)
class Point:
    """One model: label ("EXL3 4.0 [h8]"), x its size (bits per weight or GiB), y its perplexity or KLD, and how the
    plot writes y (empty: with three decimals)."""

    label: str
    x: float
    y: float
    shown: str = ""


def split_label(label: str) -> tuple[str, str]:
    """(group, point text): "EXL3 4.0 [h8]" -> ("EXL3", "4.0"), "bf16" -> ("bf16", "bf16")."""
    words = re.sub(r"\s*\[[^\[\]]*\]\s*$", "", label).split() or label.split() or ["?"]
    return words[0], " ".join(words[1:]) or words[0]


def select(points: Sequence[Point], max_x: float | None, max_y: float | None) -> list[Point]:
    """The points with finite x and y, neither above its limit (None: no limit), in their order."""
    finite = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    return [p for p in finite if (max_x is None or p.x <= max_x) and (max_y is None or p.y <= max_y)]


def scatter(
    points: Sequence[Point], *, x_label: str, y_label: str, title: str, subtitle: str = "", dark: bool = False,
    from_zero: bool = False, to_scale: float = -math.inf,
) -> Figure:  # fmt: skip
    """The finished plot. A y far above all others is drawn hollow on the upper edge, and its label says so.

    ``from_zero`` starts the y axis at 0; a y up to ``to_scale`` is never taken for one that is far above.
    """
    if not points:
        raise ValueError("no points to plot")
    theme = DARK if dark else LIGHT
    points = sorted(points, key=lambda p: (p.x, p.y, p.label))
    styles = group_styles([split_label(p.label)[0] for p in points], theme[1])
    top, below = _ceiling([p.y for p in points], to_scale), textwrap.fill(subtitle, 130)
    with style.context(["default", _settings(*theme)]):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
        axes.set_title(textwrap.fill(title, 85), loc="left", pad=16 + 17 * len(below.splitlines()))  # points
        axes.annotate(below, (0, 1), (0, 12), "axes fraction", "offset points", va="bottom", size=12, color=theme[2])
        axes.update_datalim([(p.x, min(p.y, top)) for p in points])
        axes.autoscale_view()
        axes.autoscale(False)
        if from_zero:
            axes.set_ylim(bottom=min(0.0, *(p.y for p in points)))
        _draw_groups(axes, points, styles)
        drawn = _draw_points(axes, points, styles, theme)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # labels are placed to the pixel: nothing may move any more
        _place_labels(axes, *zip(*drawn, strict=True))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes PNG, SVG or PDF by suffix, whole or not at all, the same bytes for the same figure."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"cannot write {path.name}: its suffix must be one of {', '.join(SUFFIXES)}")
    with replacing(path) as part, style.context(["default", {"svg.hashsalt": "plot"}]):
        figure.savefig(part, format=suffix[1:], dpi=DPI, metadata=SUFFIXES[suffix])


def label_boxes(figure: Figure, kind: str = "label") -> list[Bbox]:
    """Pixel boxes of the labels (or of the points: kind "point"), in the order of their points' (x, y, label)."""
    found = figure.findobj(lambda artist: (artist.get_gid() or "").startswith(f"{kind}-"))
    return [artist.get_window_extent() for artist in found]


def group_styles(groups: Sequence[str], ink: str) -> Styles:
    """Colour and marker of each group: no pair twice, and no colour twice before all of them are taken."""
    known = {name: place for place, names in enumerate(KNOWN) for name in names.split()}
    ranked = sorted(set(groups), key=lambda group: (group.upper() not in known, group))
    if len(ranked) > len(COLOURS) * len(MARKERS):
        raise ValueError(f"{len(ranked)} groups, but only {len(COLOURS) * len(MARKERS)} can be told apart")
    styles, used = {}, [0] * len(COLOURS)
    for group in ranked:
        place = min(range(len(COLOURS)), key=lambda i: (used[i], i != known.get(group.upper())))
        styles[group] = (COLOURS[place] or ink, MARKERS[(place + used[place]) % len(MARKERS)])
        used[place] += 1
    return styles


def _ceiling(values: Sequence[float], least: float) -> float:
    """The largest value to draw to scale: with any beyond it, half or more would share a tenth of the axis."""
    ranked = sorted(values)
    for below, value in zip(ranked[(len(ranked) - 1) // 2 :], ranked[(len(ranked) + 1) // 2 :], strict=False):
        if 0 < 10 * (below - ranked[0]) < value - ranked[0] and value > max(1.5 * below, least):
            return below
    return ranked[-1]


def _settings(paper: str, ink: str, muted: str, grid: str) -> dict[str, Any]:
    off = "axes.spines.top", "axes.spines.right", "axes.formatter.useoffset", "legend.frameon", "text.parse_math"
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), paper),
        **dict.fromkeys(("axes.labelcolor", "text.color"), ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), muted),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 11.5),
        **dict.fromkeys(("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.2),
        **dict.fromkeys(off, False),
        **{"axes.grid": True, "axes.axisbelow": True, "grid.color": grid, "axes.labelsize": 13, "axes.labelpad": 9},
        **{"axes.titlesize": 18, "axes.titleweight": "bold", "axes.xmargin": 0.07, "axes.ymargin": 0.1},
    }


def _draw_groups(axes: Axes, points: Sequence[Point], styles: Styles) -> None:
    """A dotted line through each group of several points, and the legend, outside where it cannot cover anything."""
    handles = []
    for group, (colour, marker) in styles.items():
        members = [p for p in points if split_label(p.label)[0] == group]
        look: dict[str, Any] = {"color": colour, "ls": ":" if len(members) > 1 else "", "lw": 1.3}
        axes.plot([p.x for p in members], [p.y for p in members], alpha=0.75, zorder=2, **look)
        handles.append(Line2D([], [], marker=marker, ms=MARKER_SIZE, **look))
    columns = math.ceil(len(handles) / 30)
    legend = axes.legend(handles, ["-"] * len(handles), loc="upper left", bbox_to_anchor=(1.01, 1.01), ncols=columns)
    for text, group in zip(legend.get_texts(), styles, strict=True):
        text.set_text(textwrap.fill(group, 24))  # not passed above, as a legend hides labels that start with "_"


def _draw_points(axes: Axes, points: Sequence[Point], styles: Styles, theme: Theme) -> list[tuple[Line2D, Text]]:
    """Each point with its label, which still lies right on top of it."""
    (paper, ink, *_), drawn = theme, []
    spots = axes.transData.transform([(point.x, point.y) for point in points])
    for i, point in enumerate(points):
        (group, name), y = split_label(point.label), min(point.y, axes.get_ylim()[1])
        colour, marker = styles[group]
        face, edge, width, note = (colour, paper, 0.8, "") if y == point.y else (paper, colour, 1.8, " (off the scale)")
        covering = (np.hypot(*(spots[i + 1 :] - spots[i]).T) < COVERED).sum()
        size = MARKER_SIZE + 5 * covering  # of points at about one place, each shows around the next
        mark = axes.plot(point.x, y, marker, color=colour, ms=size, mfc=face, mec=edge, mew=width, clip_on=False)[0]
        mark.set(zorder=4, gid=f"point-{i}")
        lines = f"{textwrap.fill(name, 24)}\n{point.shown or f'{point.y:.3f}'}{note}"
        text = axes.text(point.x, y, lines, ha="center", va="center")
        text.set(color=tuple(np.add(to_rgb(colour), to_rgb(ink)) / 2), zorder=5, gid=f"label-{i}")
        text.set(path_effects=[withStroke(linewidth=2.5, foreground=paper)], linespacing=1.05, in_layout=False)
        drawn.append((mark, text))
    return drawn


def _place_labels(axes: Axes, marks: Sequence[Line2D], texts: Sequence[Text]) -> None:
    """Moves each label to a free place, flush with its point, with a leader if that is far away."""
    spots = np.array([mark.get_window_extent().extents for mark in marks])
    boxes, clear = _fit(axes, texts, spots)
    to_data, centres = axes.transData.inverted(), (boxes[:, :2] + boxes[:, 2:]) / 2
    leaders = to_data.transform(_leaders(boxes, spots).reshape(-1, 2)).reshape(-1, 2, 2)
    sides = np.sign(centres[:, 0] - np.clip(centres[:, 0], spots[:, 0], spots[:, 2]))  # left -1, right 1
    for i in np.flatnonzero(clear):
        flush = {-1: "right", 0: "center", 1: "left"}[sides[i]]
        texts[i].set(position=to_data.transform(centres[i]), multialignment=flush)
        if _gaps(boxes[i : i + 1], spots[i : i + 1]) > LEADER_FROM:
            axes.plot(*leaders[i].T, color=marks[i].get_color(), lw=0.8, alpha=0.7, zorder=3)
    for i in np.flatnonzero(~clear):
        texts[i].remove()
    if not clear.all():
        note = f"no room for {(~clear).sum()} of {len(texts)} labels"
        axes.annotate(note, (1, 1.01), xycoords="axes fraction", ha="right")


def _fit(axes: Axes, texts: Sequence[Text], spots: Rows) -> tuple[Rows, NDArray[np.bool_]]:
    """Sets the largest font in which all labels fit; their boxes [N, 4], and which of them do fit [N]."""
    home = [text.get_position() for text in texts]
    paths = [axes.transData.transform(line.get_xydata()) for line in axes.lines if not line.get_gid()]
    lines = np.vstack([np.hstack([path[:-1], path[1:]]) for path in paths])
    obstacles = [Bbox(spot.reshape(2, 2)) for spot in spots]
    for size in FONT_SIZES:
        for text, position in zip(texts, home, strict=True):
            text.set(fontsize=size, position=position)
        adjust_text(list(texts), objects=obstacles, ax=axes, iter_lim=50, prevent_crossings=False)
        boxes = np.array([text.get_window_extent().extents for text in texts]) + PADDING
        boxes = _arrange(boxes, np.array(axes.bbox.extents), spots, lines)
        clear = np.isfinite(boxes[:, 0]) & ~np.tril(_gaps(boxes, boxes) == 0, -1).any(axis=1)
        if clear.all():
            break
    return boxes, clear


def _arrange(boxes: Rows, area: Rows, spots: Rows, lines: Rows) -> Rows:
    """Moves one label [N, 4] at a time, the most crowded first, to its cheapest free place (nan: it has no place)."""
    boxes, order = boxes.copy(), np.argsort(-(_gaps(spots, spots) < 150).sum(axis=1), kind="stable")
    places = [_places(i, box, area, spots) for i, box in enumerate(boxes)]
    for i in np.tile(order, 5):
        taken = (_gaps(places[i], np.delete(boxes, i, axis=0)) == 0).sum(axis=1)
        options = places[i][taken == min(taken, default=0)][:200]  # the nearest are enough
        boxes[i] = options[np.argmin(_costs(i, options, boxes, spots, lines))] if len(options) else np.nan
    return boxes


def _places(i: int, box: Rows, area: Rows, spots: Rows) -> Rows:
    """Boxes [P, 4] for label i, as large as this one, in the area and clear of all points, the nearest first."""
    half, reach = (box[2:] - box[:2]) / 2, (spots[i, 2:] - spots[i, :2]) / 2 + 1
    steps = np.arange(-3, 4) / 3
    rim = sorted(((x, y) for x in -steps for y in steps if max(abs(x), abs(y)) == 1), key=lambda xy: np.abs(xy).sum())
    rings = [(spots[i, :2] + spots[i, 2:]) / 2 + np.array(rim) * (half + reach + 2 * step**1.5) for step in range(40)]
    low, high = area[:2] + half, area[2:] - half
    grid = np.mgrid[low[0] : high[0] : half[0], low[1] : high[1] : half[1]].reshape(2, -1).T
    centres = np.vstack([*rings, grid])
    centres = centres[np.all((centres >= low) & (centres <= high), axis=1)]
    boxes = np.hstack([centres - half, centres + half])
    boxes = boxes[(_gaps(boxes, spots) > 0).all(axis=1)]
    return boxes[np.argsort(_gaps(boxes, spots)[:, i], kind="stable")]


def _costs(i: int, options: Rows, boxes: Rows, spots: Rows, lines: Rows) -> Rows:
    """Cost [P] of label i in each box of options [P, 4], the other labels being where boxes [N, 4] say."""
    others, strangers = np.delete(boxes, i, axis=0), np.delete(spots, i, axis=0)
    distance = _gaps(options, spots[i : i + 1])[:, 0]
    leaders, other_leaders = _leaders(options, spots[i : i + 1]), _leaders(others, strangers)
    covered = _through(leaders, np.vstack([others, strangers])).sum(axis=1)
    covered += _through(other_leaders, options).sum(axis=0)
    crossed, on_lines = _crossings(leaders, other_leaders).sum(axis=1), _through(lines, options).sum(axis=0)
    ambiguous = (_gaps(options, strangers) < 1.5 * distance[:, None] + 14).sum(axis=1)
    return np.asarray(COSTS @ np.stack([covered, crossed, on_lines, ambiguous, distance]))


def _gaps(a: Rows, b: Rows) -> Rows:
    """Distances [A, B] between boxes; 0 where they touch or overlap."""
    a, b = a.T[:, :, None], b.T[:, None]
    return np.asarray(np.hypot(*np.maximum(np.maximum(a[:2] - b[2:], b[:2] - a[2:]), 0)))


def _leaders(boxes: Rows, spots: Rows) -> Rows:
    """Segments [N, 4] from the centres of spots ([N, 4] or [1, 4]) to the nearest places in boxes [N, 4]."""
    centres = np.broadcast_to((spots[:, :2] + spots[:, 2:]) / 2, (len(boxes), 2))
    return np.hstack([centres, np.clip(centres, boxes[:, :2], boxes[:, 2:])])


def _through(segments: Rows, boxes: Rows) -> NDArray[np.bool_]:
    """Which segments touch which boxes [S, B]: those that are between the sides in both directions at once."""
    start, way = segments.T[:2, :, None], (segments[:, 2:] - segments[:, :2]).T[:, :, None] + 1e-9
    one, other = (boxes.T[:2, None] - start) / way, (boxes.T[2:, None] - start) / way
    enter, leave = np.maximum(*np.minimum(one, other)), np.minimum(*np.maximum(one, other))
    return np.asarray((enter <= leave) & (leave >= 0) & (enter <= 1))


def _crossings(a: Rows, b: Rows) -> NDArray[np.bool_]:
    """Which segments of a cross which of b [A, B]: the lines through them meet between the ends of both."""
    start, way = a.T[:2, :, None] - b.T[:2, None], (a[:, 2:] - a[:, :2]).T[:, :, None]
    other = (b[:, 2:] - b[:, :2]).T[:, None]
    across = way[0] * other[1] - way[1] * other[0] + 1e-9
    on_a = (start[1] * other[0] - start[0] * other[1]) / across
    on_b = (start[1] * way[0] - start[0] * way[1]) / across
    return np.asarray((on_a > 0) & (on_a < 1) & (on_b > 0) & (on_b < 1))
