"""Appearance of models: short names, colour and marker of each group, colour and dashes of each line."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import NDArray

from compare_q.eval.plots.style import DARK, Theme

NAME_CHARACTERS = 40
"""Longest label beside the axes or in the name of a line: 40 W take 6 of the 10.5 inches."""
TAILS = (17, 33, 4)
"""Characters kept after the cut of a longer label: the first number that keeps the labels different."""
MOST_FULL = 15
"""Largest number of models that have room for their whole labels in a scatter plot."""
SIZE = re.compile(r"(I?Q|TQ)?\d+(\.\d+)?(?![A-Za-z\d])")
"""Names that tell a model's size: "4.0 bpw", "Q4_K_M", "IQ2_XXS imatrix", but not "4bit-32g"."""

# Okabe-Ito, but grey for its yellow, which vanishes on white, and ink ("") for its black.
# Without red or green sight a lighter grey (#8C8C8C) is as good as the green beside it: 0.08 apart, this one 0.12.
COLOURS = ("#CC79A7", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#6B6B6B", "")
KNOWN = ("EXL3:o", "GGUF:s", "W4A16:^ INT:X VLLM:o", "EXL2:D W8A8:<", "NVFP4:v FP4:< AWQ:s", "FP8:P GPTQ:o",
         "BNB:X W8A16:> MXFP4:D", "BF16:p FP16:o")  # fmt: skip
"""Groups with a fixed marker, by colour; groups that are often drawn together differ in both."""
MARKERS = "os^DvPXp<>"

Styles = dict[str, tuple[str, str]]  # group -> colour, marker
Scheme = tuple[str, str]

DASHES: tuple[tuple[float, ...], ...] = (
    (6, 2), (1, 1.5), (6, 2, 1, 2), (12, 3), (6, 2, 1, 2, 1, 2), (3, 1.5), (12, 3, 2, 3), ()
)  # fmt: skip
"""Lengths of dashes and gaps, in widths of the line, for each of ``COLOURS``."""
MOST, MOST_OF_SCHEME = 12, 7
"""Most coloured lines of a picture, and of one scheme: seven are 6.5 of lightness apart, of which 2 can be seen."""
LIGHT_RANGE, DARK_RANGE = (22.0, 61.0), (44.0, 90.0)
"""Lightness (CIE L*) of lines on light and dark paper: a contrast of 3:1 (WCAG), but not yet black or white."""


def split_label(label: str, group: str = "") -> tuple[str, str]:
    """Return (group, name): "EXL3 4.0 [h8]" -> ("EXL3", "4.0"), "bf16" -> ("bf16", "bf16").

    A ``group`` from the spec replaces the first word, which then stays in the name unless it is the group.
    """
    text = _without_brackets(label)
    start = group.strip() or text.split()[0]
    return start, text.removeprefix(start).strip() if text.startswith(f"{start} ") else text


def drawn_names(models: Sequence[tuple[str, str]]) -> list[str]:
    """Return the name of each (label, group) in a plot: its label, without brackets at its end if it stays unique.

    Among more than ``MOST_FULL`` models a name that is a size ("4.0 bpw", "Q4_K_M") omits its group, which the legend
    has, unless another group has a model of that name.  Other names keep it: a "g32" alone says nothing.
    """
    labels = [label for label, _ in models]
    names = _distinct([(_without_brackets(label), label) for label in labels])
    if len(models) <= MOST_FULL:
        return names
    groups = [split_label(*each)[0] for each in models]
    sizes = [name.removeprefix(f"{group} ").strip() for name, group in zip(names, groups, strict=True)]
    owners: dict[str, set[str]] = defaultdict(set)
    for size, label in zip(sizes, labels, strict=True):
        owners[size].add(label)
    unclear = {group for group, size in zip(groups, sizes, strict=True) if len(owners[size]) > 1}
    shown = [size if SIZE.match(size) and group not in unclear else name
             for name, group, size in zip(names, groups, sizes, strict=True)]  # fmt: skip
    return _distinct(list(zip(shown, names, labels, strict=True)))


def _distinct(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return for each label (last in its list of texts) the first text that no other label has."""
    rank = [0] * len(texts)
    while True:
        found = [each[at] for each, at in zip(texts, rank, strict=True)]
        owners: dict[str, set[str]] = defaultdict(set)
        for text, each in zip(found, texts, strict=True):
            owners[text].add(each[-1])
        shared = [i for i, text in enumerate(found) if len(owners[text]) > 1 and rank[i] + 1 < len(texts[i])]
        if not shared:
            return found
        for i in shared:
            rank[i] += 1


def _without_brackets(label: str) -> str:
    return " ".join(re.sub(r"\s*\[[^\[\]]*\]\s*$", "", label).split() or label.split() or ["?"])


def short_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels cut in the middle to ``NAME_CHARACTERS``, since models differ in their last words.

    Labels that would become equal are cut nearer to the start or end, or not at all.
    """

    def cut(label: str, tail: int) -> str:
        too_long = len(label) > NAME_CHARACTERS
        return f"{label[: NAME_CHARACTERS - 3 - tail]}...{label[-tail:]}" if too_long else label

    return _distinct([(*(cut(" ".join(label.split()), tail) for tail in TAILS), label) for label in labels])


def group_styles(groups: Sequence[str], ink: str, *, distinct: bool = True) -> Styles:
    """Return colour and marker of each group, which depend on its name: a group looks the same in every picture.

    If two groups have one pair, the second by name gets the next marker of its colour.  With more groups than pairs,
    raise ValueError, or repeat pairs if not ``distinct`` (where each line has its name beside it).
    """
    owned = {name: (place, mark) for place, row in enumerate(KNOWN) for name, mark in re.findall(r"(\S+):(.)", row)}
    ranked = sorted(set(groups), key=lambda group: (group.upper() not in owned, group))
    if distinct and len(ranked) > len(COLOURS) * len(MARKERS):
        raise ValueError(f"{len(ranked)} groups, but only {len(COLOURS) * len(MARKERS)} can be told apart")
    styles: dict[str, tuple[int, str]] = {}
    for group in ranked:
        wanted = _pairs_of(group, owned)
        styles[group] = next((pair for pair in wanted if pair not in styles.values()), wanted[0])
    return {group: (COLOURS[place] or ink, mark) for group, (place, mark) in styles.items()}


def _pairs_of(group: str, owned: dict[str, tuple[int, str]]) -> list[tuple[int, str]]:
    """Return all pairs (index of a colour, marker): the group's own, then those of its colour; fixed pairs are last."""
    digest = zlib.crc32(group.upper().encode())
    first, turn = owned.get(group.upper(), (digest % len(COLOURS), ""))[0], digest // len(COLOURS) % len(MARKERS)
    marks = MARKERS[turn:] + MARKERS[:turn]
    pairs = [((first + step) % len(COLOURS), mark) for step in range(len(COLOURS)) for mark in marks]
    return sorted(pairs, key=lambda pair: (pair != owned.get(group.upper()), pair[0] != first, pair in owned.values()))


@dataclass(frozen=True)
class LineStyle:
    """Colour of a line, and lengths of its dashes and gaps; no lengths: a solid line."""

    colour: str
    dashes: tuple[float, ...] = ()


def distinguishable(schemes: Sequence[Scheme], ranked: Sequence[int], must: int) -> list[int]:
    """Return which of the ``ranked`` lines (the most important first) get a colour: all, if all can be distinguished.

    Otherwise return the subset of the first ``must`` lines that can still be distinguished.
    """
    kept: list[int] = []
    for i in ranked:
        counts = Counter(schemes[each] for each in [*kept, i])
        if len(kept) < MOST and len(counts) <= len(DASHES) and max(counts.values()) <= MOST_OF_SCHEME:
            kept.append(i)
    return kept if len(kept) == len(ranked) else [i for i in kept if i in ranked[:must]]


def line_styles(schemes: Sequence[Scheme], sizes: Sequence[float | None], theme: Theme) -> list[LineStyle]:
    """Return the style of each line [N] of at most eight schemes; a scheme's largest model is nearest to the ink.

    The first scheme of a group has the group's colour.
    """
    groups = group_styles([group for group, _ in schemes], theme.ink, distinct=False)
    hues = [colour or theme.ink for colour in COLOURS]
    free = sorted(hues, key=lambda hue: hue in {look[0] for look in groups.values()})  # other groups' are taken last
    found: dict[int, LineStyle] = {}
    for scheme in dict.fromkeys(schemes):
        colour = groups[scheme[0]][0] if groups[scheme[0]][0] in free else free[0]
        free.remove(colour)
        members = [i for i, each in enumerate(schemes) if each == scheme]
        members.sort(key=lambda i: -(sizes[i] or 0.0))
        for i, shade in zip(members, shades(colour, len(members), theme), strict=True):
            found[i] = LineStyle(shade, DASHES[hues.index(colour)])
    return [found[i] for i in range(len(schemes))]


def shades(colour: str, count: int, theme: Theme) -> list[str]:
    """Return shades of a colour at equal steps of lightness, nearest to the ink first; a single one is the colour."""
    low, high = DARK_RANGE if theme == DARK else LIGHT_RANGE
    wanted = np.linspace(low, high, count) if count > 1 else np.clip([lightness(to_rgb(colour))], low, high)
    grey = np.linspace(0, 1, 200)[:, None]
    middle = np.array(to_rgb(colour))
    path = np.vstack([grey * middle, middle + grey[1:] * (1 - middle)])  # from black to white
    place = np.interp(wanted, lightness(path), np.arange(len(path)))
    found = [to_hex(path[round(each)]) for each in place]
    return found[::-1] if theme == DARK else found


def lightness(rgb: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return CIE L* (0 to 100) of sRGB colours [..., 3] (0 to 1)."""
    channels = np.asarray(rgb, dtype=np.float64)
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    y = linear @ [0.2126, 0.7152, 0.0722]
    return np.asarray(np.where(y > 216 / 24389, 116 * np.cbrt(y) - 16, y * 24389 / 27))
