"""Groups of models that can be told apart, and their labels."""

import pytest

from eval.plots import grouping


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
    assert grouping.split_label(label) == expected


def test_a_named_group_stands_for_the_first_word() -> None:
    """The text beside the point keeps every word that the group does not begin with."""
    assert grouping.split_label("vLLM NVFP4 W4A4", "NVFP4") == ("NVFP4", "vLLM NVFP4 W4A4")
    assert grouping.split_label("EXL3 4.0 [h8]", "EXL3") == ("EXL3", "4.0")
    assert grouping.split_label("GGUF Q4_K", "GGUF Q4") == ("GGUF Q4", "GGUF Q4_K")


def test_many_groups_never_share_colour_and_marker() -> None:
    names = [f"group{i}" for i in range(80)]
    styles = grouping.group_styles([*names, *names], "#000000")
    assert list(styles) == sorted(names)
    assert len(set(styles.values())) == 80
    assert len({styles[name][0] for name in sorted(names)[:8]}) == 8
    with pytest.raises(ValueError, match="81 groups"):
        grouping.group_styles([*names, "one more"], "#000000")
    repeated = grouping.group_styles([*names, "one more"], "#000000", distinct=False)
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
    assert grouping.short_label(label) == expected


def test_known_groups_look_the_same_in_every_company() -> None:
    alone = {name: grouping.group_styles([name], "#000000")[name] for name in ("EXL3", "GGUF", "AWQ", "vLLM", "bf16")}
    assert len(set(alone.values())) == 5
    together = grouping.group_styles(["aaa", "bf16", "vLLM", "AWQ", "GGUF", "EXL3", "zzz"], "#000000")
    assert {name: together[name] for name in alone} == alone
    assert len({colour for colour, _ in together.values()}) == 7
    lookalikes = grouping.group_styles(["EXL3", "exl3", "BF16", "FP16"], "#000000")
    assert len({colour for colour, _ in lookalikes.values()}) == 4
