"""How models look: the group of a label, names that fit, colour and marker of a group, colour and dashes of a line."""

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

NAME_LETTERS = 40
"""Letters of a label beside the axes or in the name of a line: 40 W would take 6 of the 10.5 inches."""
TAILS = (17, 33, 4)
"""How many of them may be behind the cut."""
MOST_FULL = 15
"""So many models have room for their whole labels in a scatter plot."""
SIZE = re.compile(r"(I?Q|TQ)?\d+(\.\d+)?(?![A-Za-z\d])")
"""A name that says how large its model is: "4.0 bpw", "Q4_K_M", "IQ2_XXS imatrix", but not "4bit-32g"."""

# Okabe-Ito, but grey for its yellow, which vanishes on white, and ink ("") for its black.
# Without red or green sight a lighter grey (#8C8C8C) is as good as the green beside it: 0.08 apart, this one 0.12.
COLOURS = ("#CC79A7", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#6B6B6B", "")
KNOWN = ("EXL3:o", "GGUF:s", "W4A16:^ INT:X VLLM:o", "EXL2:D W8A8:<", "NVFP4:v FP4:< AWQ:s", "FP8:P GPTQ:o",
         "BNB:X W8A16:> MXFP4:D", "BF16:p FP16:o")  # fmt: skip
"""The groups of each colour whose marker is theirs alone; those that are often drawn together differ in both."""
MARKERS = "os^DvPXp<>"

Styles = dict[str, tuple[str, str]]  # group -> colour, marker
Scheme = tuple[str, str]

DASHES: tuple[tuple[float, ...], ...] = (
    (6, 2), (1, 1.5), (6, 2, 1, 2), (12, 3), (6, 2, 1, 2, 1, 2), (3, 1.5), (12, 3, 2, 3), ()
)  # fmt: skip
"""Lengths of lines and gaps, in widths of the line; the pattern of each of ``COLOURS``."""
MOST, MOST_OF_SCHEME = 12, 7
"""Coloured lines of a picture, and of one scheme: seven have steps of 6.5 of lightness, of which 2 can be seen."""
LIGHT_RANGE, DARK_RANGE = (22.0, 61.0), (44.0, 90.0)
"""Lightness (CIE L*) of lines on either paper: 3:1 of contrast to the paper (WCAG), and not yet black or white."""


def split_label(label: str, group: str = "") -> tuple[str, str]:
    """(group, point text): "EXL3 4.0 [h8]" -> ("EXL3", "4.0"), "bf16" -> ("bf16", "bf16").

    A ``group`` that the spec names takes the place of the first word; the text keeps that word unless it is the group.
    """
    text = _without_brackets(label)
    start = group.strip() or text.split()[0]
    return start, text.removeprefix(start).strip() if text.startswith(f"{start} ") else text


def drawn_names(models: Sequence[tuple[str, str]]) -> list[str]:
    """What a plot calls each model (label, group): its label, without the brackets at its end if that is no other's.

    Among more than ``MOST_FULL`` a name that is a size, "4.0 bpw" or "Q4_K_M", leaves its group to the legend, unless
    models of another group have such a name.  No other does: "NVFP4 W4A16" is no "W4A16", and nobody knows a "g32".
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
    """For each label the first of its texts that no other label has; the last of them is the whole label."""
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
    """The labels of a picture, cut in the middle to ``NAME_LETTERS``: models differ in the last words, a mark is last.

    Labels that would be one text are cut nearer to their beginning or end, or not at all.
    """
    return _distinct([(*(_cut(" ".join(label.split()), tail) for tail in TAILS), label) for label in labels])


def _cut(label: str, tail: int) -> str:
    """A label of at most ``NAME_LETTERS``, ``tail`` of them its last."""
    return label if len(label) <= NAME_LETTERS else f"{label[: NAME_LETTERS - 3 - tail]}...{label[-tail:]}"


def group_styles(groups: Sequence[str], ink: str, *, distinct: bool = True) -> Styles:
    """Colour and marker of each group, which follow from its name: it looks the same in every picture, in any company.

    No pair twice: of groups of one pair the first by name has it, and the other the next marker of the same colour.
    More groups than there are pairs: ValueError, or, not ``distinct`` (each line has its name), pairs that repeat.
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
    """All pairs (number of a colour, marker), the group's own first, then those of its colour; known groups' last."""
    digest = zlib.crc32(group.upper().encode())
    first, turn = owned.get(group.upper(), (digest % len(COLOURS), ""))[0], digest // len(COLOURS) % len(MARKERS)
    marks = MARKERS[turn:] + MARKERS[:turn]
    pairs = [((first + step) % len(COLOURS), mark) for step in range(len(COLOURS)) for mark in marks]
    return sorted(pairs, key=lambda pair: (pair != owned.get(group.upper()), pair[0] != first, pair in owned.values()))


def text_styles(names: Sequence[str], ink: str) -> Styles:
    """Colour and marker of each text of a run (or kind of layers), in its order; beyond forty pairs repeat."""
    looks = ((COLOURS[i % len(COLOURS)] or ink, MARKERS[i % len(MARKERS)]) for i in range(len(names)))
    return dict(zip(names, looks, strict=True))


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
    groups = group_styles([group for group, _ in schemes], theme.ink, distinct=False)
    hues = [colour or theme.ink for colour in COLOURS]
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
