"""The group of a model's label, and colour and marker of each group, for the pictures and the HTML report."""

from __future__ import annotations

import re
from collections.abc import Sequence

NAME_LETTERS = 40
"""Letters of a label beside the axes or in the name of a line: 40 W would take 6 of the 10.5 inches."""

# Okabe-Ito, but grey for its yellow, which vanishes on white, and ink ("") for its black; the groups that prefer each.
# Without red or green sight a lighter grey (#8C8C8C) is as good as the green beside it: 0.08 apart, this one 0.12.
COLOURS = ("#CC79A7", "#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#6B6B6B", "")
KNOWN = ("EXL3", "GGUF", "VLLM W4A16", "EXL2 FP8", "AWQ NVFP4", "GPTQ W8A8", "BNB MXFP4", "BF16 FP16")
MARKERS = "os^DvPXp<>"

Styles = dict[str, tuple[str, str]]  # group -> colour, marker


def split_label(label: str, group: str = "") -> tuple[str, str]:
    """(group, point text): "EXL3 4.0 [h8]" -> ("EXL3", "4.0"), "bf16" -> ("bf16", "bf16").

    A ``group`` that the spec names takes the place of the first word; the text keeps that word unless it is the group.
    """
    words = re.sub(r"\s*\[[^\[\]]*\]\s*$", "", label).split() or label.split() or ["?"]
    text = " ".join(words)
    start = group.strip() or words[0]
    return start, text.removeprefix(start).strip() if text.startswith(f"{start} ") else text


def short_label(label: str) -> str:
    """A label of at most ``NAME_LETTERS``, cut in its middle: models differ in the last words, and a mark is last."""
    label = " ".join(label.split())
    tail = NAME_LETTERS // 2 - 3
    return label if len(label) <= NAME_LETTERS else f"{label[: NAME_LETTERS - 3 - tail]}...{label[-tail:]}"


def group_styles(groups: Sequence[str], ink: str, *, distinct: bool = True) -> Styles:
    """Colour and marker of each group: no pair twice, and no colour twice before all of them are taken.

    More groups than there are pairs: ValueError, or, not ``distinct`` (each line has its name), pairs that repeat.
    """
    known = {name: place for place, names in enumerate(KNOWN) for name in names.split()}
    ranked = sorted(set(groups), key=lambda group: (group.upper() not in known, group))
    if distinct and len(ranked) > len(COLOURS) * len(MARKERS):
        raise ValueError(f"{len(ranked)} groups, but only {len(COLOURS) * len(MARKERS)} can be told apart")
    styles, used = {}, [0] * len(COLOURS)
    for group in ranked:
        place = min(range(len(COLOURS)), key=lambda i: (used[i], i != known.get(group.upper())))
        styles[group] = (COLOURS[place] or ink, MARKERS[(place + used[place]) % len(MARKERS)])
        used[place] += 1
    return styles
