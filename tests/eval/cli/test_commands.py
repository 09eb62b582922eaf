"""The subcommands: their help, their flags, and the messages for misspelled words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare_q.eval.cli.flag_table import COMMANDS, PAGE, flags_of
from tests.support.toy import Run, assert_refused


def test_the_page_fits_a_screen(compare_q: Run) -> None:
    ran = compare_q("--help")
    assert (ran.status, ran.out, ran.err) == (0, PAGE, "")
    lines = PAGE.splitlines()
    # A terminal has 24 lines of 80 characters.
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for name in COMMANDS:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1, name
    assert compare_q("help").out == PAGE
    nothing = compare_q()
    assert (nothing.status, nothing.out, nothing.err) == (2, "", PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_page_with_its_own_flags_alone(compare_q: Run, command: str) -> None:
    ran = compare_q(command, "--help")
    assert ran.status == 0
    assert ran.out.startswith(f"usage: compare-q {command}")
    foreign_flags = set()
    for other in COMMANDS:
        foreign_flags |= flags_of(other).keys() - flags_of(command).keys()
    words = {word.rstrip(".,;:)") for word in ran.out.split()}
    assert not words & foreign_flags
    assert len(ran.out.splitlines()) <= 80


@pytest.mark.parametrize(
    "shown", ["-cc, --clear_cache", "-r, --rows N", "-d, --dataspec TEXT ...", "--pair A B"]
)
def test_help_shows_what_a_flag_takes(compare_q: Run, shown: str) -> None:
    """A switch takes nothing, other flags take a word, several words or two."""
    lines = compare_q("run", "--help").out.splitlines()
    assert sum(line.startswith(f"  {shown}  ") for line in lines) == 1


def test_a_model_that_is_called_like_a_command(
    compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("show").symlink_to(toy_model)
    ran = compare_q("check", "./show@transformers_auto", "-d", toy_text)
    assert ran.status == 0, ran.err
    assert "show: transformers_auto (as asked)" in ran.err


def test_show_has_the_rows_that_a_mask_leaves(
    compare_q: Run, finished: Path, tmp_path: Path
) -> None:
    """The reference's row stays, because the other rows are compared with it; written files have
    the same rows.
    """
    labels = [model["label"] for model in json.loads(finished.read_text())["models"]]
    assert labels == ["bf16", "W4A16", "broken"]
    ran = compare_q(
        "show", finished, "-mask", "w4", "-o", tmp_path / "r.json", "--html", tmp_path / "r.html"
    )
    assert ran.status == 0, ran.err
    assert "broken" not in ran.out
    for name in ("r.json", "r.html"):
        assert compare_q("show", tmp_path / name).out.splitlines()[:4] == ran.out.splitlines()[:4]
    models = json.loads((tmp_path / "r.json").read_text())["models"]
    assert [model["label"] for model in models] == ["bf16", "W4A16"]
    assert_refused(
        compare_q("show", finished, "-mask", "awq"),
        "--mask: 'awq' matches no label; there are: bf16, W4A16",
    )
