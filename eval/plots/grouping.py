"""The group of a model's label, and colour and marker of each group, for the pictures and the HTML report."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence

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
    """Colour and marker of each text of a run, in its order; beyond forty texts pairs repeat."""
    looks = ((COLOURS[i % len(COLOURS)] or ink, MARKERS[i % len(MARKERS)]) for i in range(len(names)))
    return dict(zip(names, looks, strict=True))
