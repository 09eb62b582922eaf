"""The table so far, on a terminal of a few lines and without one."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from compare_q.eval.common.progress import Progress
from compare_q.eval.table.first_look import AROUND, FirstLook
from tests.support.made import FAILED, QUANT, REF


def shown(look: FirstLook, height: int = 40) -> list[list[str]]:
    """The words of each line below the heads."""
    console = Console(file=io.StringIO(), width=100, height=height)
    console.print(look)
    return [line.split() for line in console.file.getvalue().splitlines()[3:] if line.strip()]


def test_rows_wait_then_have_numbers_or_failed() -> None:
    look = FirstLook(["bf16", "W4A16", "broken"], ["[/text]"])
    assert shown(look) == [["bf16", "waits"], ["W4A16", "waits"], ["broken", "waits"]]
    for row in (REF, QUANT, FAILED):
        look.add("", row)
    assert shown(look) == [
        ["bf16", "4.50", "7.5000±0.85", "ref", "ref"],
        ["W4A16", "4.50", "7.5000±0.85", "0.01235±0.00045", "98.77±0.52"],
        ["broken", "failed"],
    ]


def test_a_row_for_each_of_several_texts() -> None:
    look = FirstLook(["W4A16"], ["[/prose]", "code"])
    look.add("code", QUANT)
    assert [line[:3] for line in shown(look)] == [["W4A16", "[/prose]", "waits"], ["W4A16", "code", "4.50"]]


def test_a_low_terminal_shows_what_was_finished_last() -> None:
    look = FirstLook([f"m{i}" for i in range(9)], ["text"])
    for i in range(5):
        look.add("", replace(QUANT, label=f"m{i}"))
    lines = shown(look, AROUND + 3)
    assert [line[0] for line in lines[:3]] == ["m3", "m4", "m5"]
    assert lines[2] == ["m5", "waits"]
    assert " ".join(lines[3]) == "and 6 more rows, 5 of 9 are finished"


def test_it_is_shown_on_a_terminal_alone() -> None:
    """Below the bars, while they are there; elsewhere a finished phase is told, as ever, and nothing more."""
    for is_terminal in (True, False):
        screen, progress = io.StringIO(), Progress()
        progress.console = Console(file=screen, force_terminal=is_terminal, width=100)
        progress.below = FirstLook(["bf16"], ["text"])
        with progress.phase("loading bf16") as phase:
            pass
        assert ("waits" in screen.getvalue()) is is_terminal
        assert f"loading bf16: {phase.seconds:.1f} s" in screen.getvalue()
