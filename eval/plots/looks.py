"""Appearance of models, the same in every picture: colour by family of formats, marker by engine, names."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from compare_q.backends import ENGINES
from compare_q.backends.layers.groups import PLAIN
from compare_q.eval.plots.style import LIGHT
from compare_q.eval.results import ModelResult

KNOWN = ("EXL3", "GGUF", "INT W4A16 GPTQ", "EXL2 AWQ", "FP4 NVFP4 MXFP4", "FP8", "NF4 BNB", "UNQUANTIZED BF16 FP16")
"""Families that always have the same colour, by its place in ``Theme.families``."""
FORMATS = (("EXL3", "exl3"), ("EXL2", "exl2"), ("FP4", r"\w*fp4"), ("FP8", "fp8"), ("INT", "int"), ("NF4", "nf4"),
           ("GGUF", r"(i?q|tq)\d"))  # fmt: skip
"""Families, and patterns of their formats of weights: "int4 g128", "nvfp4 g16", "q4_K"."""
MARKERS = "soD^vPX<>p"
"""Markers of engines, in the order of the registry."""
DASHES: tuple[tuple[float, ...], ...] = (
    (), (6, 2), (1, 1.5), (6, 2, 1, 2), (12, 3), (3, 1.5), (6, 2, 1, 2, 1, 2), (12, 3, 2, 3)
)  # fmt: skip
"""Dashes and gaps of the lines of one family, in widths of the line."""
NAME_CHARACTERS, TAIL = 40, 17
"""Longest name of a model, and how many characters of its end are kept."""


class Look(NamedTuple):
    """Family and engine of a model, the place of its colour in ``Theme.families``, and its marker."""

    family: str = ""
    engine: str = ""
    colour: int = 0
    marker: str = "o"


def family_of(model: ModelResult) -> str:
    """Return the group that a model's spec names, or the family of its weights' format, or its label's first word."""
    if model.group.strip():
        return model.group.strip()
    if not model.is_quantized:
        return "unquantized"
    quantized = [layer for layer in model.layers if layer.weights not in PLAIN]
    most = max(quantized, key=lambda layer: layer.count).weights if quantized else ""
    first_word = (model.label.split() or ["?"])[0]
    return next((family for family, pattern in FORMATS if re.match(pattern, most)), first_word)


def looks_of(models: Sequence[ModelResult]) -> list[Look]:
    """Return the look of each model of a run.  Families share a colour only if there are more than eight."""
    own = {name: place for place, names in enumerate(KNOWN) for name in names.split()}
    families = [family_of(model) for model in models]
    colours: dict[str, int] = {}
    for family in sorted(set(families), key=lambda each: (each.upper() not in own, each)):
        first = own.get(family.upper(), zlib.crc32(family.upper().encode()) % len(LIGHT.families))
        ring = [(first + step) % len(LIGHT.families) for step in range(len(LIGHT.families))]
        colours[family] = next((each for each in ring if each not in colours.values()), first)
    engines = list(dict.fromkeys([*ENGINES, *sorted(model.engine for model in models)]))
    marks = [MARKERS[engines.index(model.engine) % len(MARKERS)] for model in models]
    return [Look(family, model.engine, colours[family], mark)
            for family, model, mark in zip(families, models, marks, strict=True)]  # fmt: skip


def names_of(labels: Sequence[str]) -> list[str]:
    """Return the labels without brackets at their end, cut in the middle; longer where two would become equal."""
    forms = []
    for label in labels:
        whole = " ".join(label.split()) or "?"
        short = re.sub(r"(?<=.)\s*\[[^\[\]]*\](?= †$|$)", "", whole)
        cut = short if len(short) <= NAME_CHARACTERS else f"{short[: NAME_CHARACTERS - 3 - TAIL]}...{short[-TAIL:]}"
        forms.append((cut, short, whole, label))
    owners = defaultdict(set)
    for each in forms:
        for form in each:
            owners[form].add(each[-1])
    return [next((form for form in each if len(owners[form]) == 1), each[-1]) for each in forms]
