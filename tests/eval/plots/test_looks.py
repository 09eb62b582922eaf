"""Appearance of groups, names and lines: whatever is drawn can be told apart, on both papers and in any sight."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from compare_q.eval.plots import looks, style
from compare_q.eval.plots.looks import DASHES, MOST, MOST_OF_SCHEME, LineStyle, distinguishable, lightness, shades
from compare_q.eval.results import results_json


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("EXL3 4.0", ("EXL3", "4.0")),
        ("GGUF Q4_K_M imat", ("GGUF", "Q4_K_M imat")),
        ("bf16", ("bf16", "bf16")),
        ("EXL3 4.0 [h8]", ("EXL3", "4.0")),
        ("  EXL3   4.0 [head 8 bits]  ", ("EXL3", "4.0")),
        ("bf16 [vLLM]", ("bf16", "bf16")),
        ("EXL3 [h8] 4.0", ("EXL3", "[h8] 4.0")),
        ("[only this]", ("[only", "this]")),
        ("", ("?", "?")),
    ],
)
def test_split_label(label: str, expected: tuple[str, str]) -> None:
    assert looks.split_label(label) == expected


def test_a_named_group_stands_for_the_first_word() -> None:
    """The text beside the point keeps every word that the group does not begin with."""
    assert looks.split_label("vLLM NVFP4 W4A4", "NVFP4") == ("NVFP4", "vLLM NVFP4 W4A4")
    assert looks.split_label("EXL3 4.0 [h8]", "EXL3") == ("EXL3", "4.0")
    assert looks.split_label("GGUF Q4_K", "GGUF Q4") == ("GGUF Q4", "GGUF Q4_K")


def test_many_groups_never_share_colour_and_marker() -> None:
    names = [f"group{i}" for i in range(80)]
    styles = looks.group_styles([*names, *names], "#000000")
    assert list(styles) == sorted(names)
    assert len(set(styles.values())) == 80
    with pytest.raises(ValueError, match="81 groups"):
        looks.group_styles([*names, "one more"], "#000000")
    repeated = looks.group_styles([*names, "one more"], "#000000", distinct=False)
    assert (len(repeated), len(set(repeated.values()))) == (81, 80)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("EXL3  4.0", "EXL3 4.0"),
        ("a" * 20 + "b" * 20, "a" * 20 + "b" * 20),
        ("a" * 100 + "b" * 100, "a" * 20 + "..." + "b" * 17),
        ("word " * 20 + "Q4 †", "word word word word " + "..." + "rd word word Q4 †"),
    ],
)
def test_long_labels_keep_both_ends(label: str, expected: str) -> None:
    assert looks.short_labels([label]) == [expected]


def test_labels_that_differ_are_not_cut_to_one_text() -> None:
    model = "Llama-3.1-8B-Instruct W4A16 g128"
    labels = [f"{model} {words} compressed-tensors v0.9" for words in ("RTN", "GPTQ act")]
    assert looks.short_labels([*labels, labels[0], "bf16", f"{model} RTN, another label"]) == [
        "Llam... g128 RTN compressed-tensors v0.9", "Llam... GPTQ act compressed-tensors v0.9",
        "Llam... g128 RTN compressed-tensors v0.9", "bf16", "Llama-3.1-8B-Instruc...TN, another label",
    ]  # fmt: skip
    middle = [f"{'a' * 40}{i}{'b' * 40}" for i in range(3)]
    assert looks.short_labels(middle) == middle


def test_known_groups_look_the_same_in_every_company() -> None:
    known = [pair.partition(":")[0] for row in looks.KNOWN for pair in row.split()]
    together = looks.group_styles([*known, *(f"group{i}" for i in range(50))], "#000000")
    alone = {name: looks.group_styles([name], "#000000")[name] for name in known}
    assert {name: together[name] for name in alone} == alone
    assert len(set(alone.values())) == len(known)
    for often in ("bf16 EXL3 EXL2 GGUF INT FP4 FP8", "bf16 W4A16 W8A16 W8A8 FP8 NVFP4 EXL3 GGUF"):
        colours, markers = zip(*(alone[name.upper()] for name in often.split()), strict=True)
        assert len(set(colours)) == len(set(markers)) == len(often.split())
    lookalikes = looks.group_styles(["EXL3", "exl3", "BF16", "FP16"], "#000000")
    assert len(set(lookalikes.values())) == 4


def test_the_look_of_any_group_follows_from_its_name() -> None:
    """Its colour always, and its marker until another group has both."""
    names = ["mine", "theirs", "INT", "SmolLM2", "quip#", "HQQ", *(f"group{i}" for i in range(20))]
    alone = {name: looks.group_styles([name], "")[name] for name in names}
    together = looks.group_styles(names, "")
    assert {name: look[0] for name, look in together.items()} == {name: look[0] for name, look in alone.items()}
    lonely = [name for name in names if list(alone.values()).count(alone[name]) == 1]
    assert len(lonely) > len(names) / 2
    moved = [name for name in lonely if together[name] != alone[name]]
    assert all(alone[name] in [together[other] for other in names if other != name] for name in moved)
    assert looks.group_styles(names[:6], "") == looks.group_styles(names[5::-1], "")


FEW = (("bf16", ""), ("NVFP4 W4A16", ""), ("W4A16 g32", ""), ("W8A8 int8", ""), ("FP8 dynamic [vLLM]", ""),
       ("GGUF Q4_0", ""), ("W8A16 g128", "INT"))  # fmt: skip
MANY = (*FEW, *((f"EXL3 {bits}.0 bpw", "") for bits in range(2, 9)), ("GGUF IQ2_XXS imat", ""), ("GGUF F16", ""),
        ("AWQ 4bit-32g", ""))  # fmt: skip


def test_few_models_are_called_by_their_whole_labels() -> None:
    full = ["bf16", "NVFP4 W4A16", "W4A16 g32", "W8A8 int8", "FP8 dynamic", "GGUF Q4_0", "W8A16 g128"]
    assert looks.drawn_names(FEW) == full
    assert looks.drawn_names([("EXL3 4.0 [h6]", ""), ("EXL3 4.0 [h8]", ""), ("EXL3 5.0 [h8]", "")]) == [
        "EXL3 4.0 [h6]", "EXL3 4.0 [h8]", "EXL3 5.0"
    ]  # fmt: skip


def test_of_many_models_only_sizes_leave_their_group_to_the_legend() -> None:
    """Not where two groups have the same sizes; and nobody is called W4A16, g32, int8, dynamic, F16 or 4bit-32g."""
    found = looks.drawn_names(MANY)
    assert len(found) > looks.MOST_FULL
    assert found[:7] == ["bf16", "NVFP4 W4A16", "W4A16 g32", "W8A8 int8", "FP8 dynamic", "Q4_0", "W8A16 g128"]
    assert found[7:] == [*(f"{bits}.0 bpw" for bits in range(2, 9)), "IQ2_XXS imat", "GGUF F16", "AWQ 4bit-32g"]
    both = looks.drawn_names([*MANY, ("EXL2 4.0 bpw", "")])
    assert both[7:14] == [f"EXL3 {bits}.0 bpw" for bits in range(2, 9)]
    assert both[-1] == "EXL2 4.0 bpw"
    assert both[5] == "Q4_0"


@pytest.mark.parametrize(
    "labels",
    [
        ["EXL3 4.0 [h8]", "EXL3 4.0 [h6]", "EXL3 4.0"],
        ["EXL3 4.0 bpw", "4.0 bpw", "4.0 bpw [h8]"],
        ["EXL3 4.0 [h8] [a]", "EXL3 4.0 [h8]", "EXL3 4.0", "EXL3 4.0"],
    ],
)
def test_labels_that_differ_are_drawn_as_different_texts(labels: list[str]) -> None:
    run = results_json.load(Path(__file__).parents[3] / "results/h200/table/results.json")[0].texts[0]
    table = [model.label for model in run.models]
    for every in (labels, labels + table, [f"{label}{head}" for label in table for head in ("", " [h6]", " [h8]")]):
        for group in ("", "EXL3"):
            drawn = looks.drawn_names([(label, group) for label in every])
            assert len(set(drawn)) == len(set(every)) == len(set(zip(every, drawn, strict=True)))


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


def test_only_what_matters_is_coloured_where_not_all_can_be_distinguishable() -> None:
    alone = [(f"G{i}", "") for i in range(20)]
    assert distinguishable(alone[:8], range(8), 2) == list(range(8))
    assert distinguishable(alone[:9], range(9), 2) == [0, 1]
    assert distinguishable(alone, range(20), 10) == list(range(8))  # of ten that matter, eight hues
    sizes = [("EXL3", "# bpw")] * 9
    assert distinguishable(sizes[:7], range(7), 1) == list(range(7))
    assert distinguishable(sizes, range(9), 8) == list(range(7))
    assert len(distinguishable(EVERYTHING, range(len(EVERYTHING)), 50)) == MOST
