"""Appearance of groups, names and lines: whatever is drawn can be told apart, on both papers and in any sight."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare_q.eval.plots import looks
from compare_q.eval.results import RunResult


def test_many_groups_never_share_colour_and_marker() -> None:
    names = [f"group{i}" for i in range(80)]
    styles = looks.group_styles([*names, *names], "#000000")
    assert list(styles) == sorted(names)
    assert len(set(styles.values())) == 80
    with pytest.raises(ValueError, match="81 groups"):
        looks.group_styles([*names, "one more"], "#000000")
    repeated = looks.group_styles([*names, "one more"], "#000000", distinct=False)
    assert (len(repeated), len(set(repeated.values()))) == (81, 80)


def test_labels_that_differ_are_not_cut_to_one_text() -> None:
    model = "Llama-3.1-8B-Instruct W4A16 g128"
    labels = [f"{model} {words} compressed-tensors v0.9" for words in ("RTN", "GPTQ act")]
    assert looks.short_labels([*labels, labels[0], "bf16", f"{model} RTN, another label"]) == [
        "Llam... g128 RTN compressed-tensors v0.9", "Llam... GPTQ act compressed-tensors v0.9",
        "Llam... g128 RTN compressed-tensors v0.9", "bf16", "Llama-3.1-8B-Instruc...TN, another label",
    ]  # fmt: skip
    middle = [f"{'a' * 40}{i}{'b' * 40}" for i in range(3)]
    assert looks.short_labels(middle) == middle


@pytest.mark.parametrize(
    "labels",
    [
        ["EXL3 4.0 [h8]", "EXL3 4.0 [h6]", "EXL3 4.0"],
        ["EXL3 4.0 bpw", "4.0 bpw", "4.0 bpw [h8]"],
        ["EXL3 4.0 [h8] [a]", "EXL3 4.0 [h8]", "EXL3 4.0", "EXL3 4.0"],
    ],
)
def test_labels_that_differ_are_drawn_as_different_texts(labels: list[str]) -> None:
    run = RunResult.read(Path(__file__).parents[3] / "results/h200/table/results.json").texts[0]
    table = [model.label for model in run.models]
    for every in (labels, labels + table, [f"{label}{head}" for label in table for head in ("", " [h6]", " [h8]")]):
        for group in ("", "EXL3"):
            drawn = looks.drawn_names([(label, group) for label in every])
            assert len(set(drawn)) == len(set(every)) == len(set(zip(every, drawn, strict=True)))
