"""Odd command lines, drawn by a seed: none ends in a traceback, and each refusal is an error in one
line or more.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from compare_q.eval.cli.flag_table import FLAGS, Flag
from tests.support.made import FAILED, QUANT, REF, run_of
from tests.support.toy import Run

VALUES = (
    "",
    "   ",
    "x" * 5000,
    "é𝄞\u202e",
    "\udcff",
    "\x1b[31m",
    "-",
    "--",
    "1e400",
    "-1e400",
    "nan",
    "-5",
    "0",
    "9" * 21,
    "٣",
    "all",
    "/nonexistent/f",
    "~nobody/x",
    "..",
    "/dev/null",
    "/dev/full",
    "a=b=c@d@e:f=g",
    "=",
    "@",
    "a@",
    "x=",
    "http://",
    "https://[::1",
    "*",
    "[",
    "a,b",
    ",",
    ";",
    "kld",
    "kld:",
    "kld > 1e400",
    "ppl>1",
    "memory:0",
    "memory:" + "9" * 12 + "k",
    "24GB@32k",
    "24@",
    "20GB",
    "1%",
    "1e400%",
    "wiki2",
    "p.png",
    "r.json",
    "out/x/y.json",
    "owner/repo/x.gguf",
    "engine.boost=1,2",
    "new:",
    "vllm_score=/nonexistent",
    "=x",
    "m=/bin/true",
)
COMMANDS = {
    "show": ["results.json"],
    "flips": ["results.json"],
    "cache": [],
    "check": ["nowhere", "-d", "nothing"],
    "run": ["nowhere"],
    "gate": ["nowhere", "-d", "nothing"],
    "pack": ["nowhere", "-o", "pack"],
    "windows": ["-d", "nothing", "-o", "windows.jsonl"],
    "engines": [],
}
"""Command -> words that it needs; models do not exist, so that nothing is scored."""
LINES = 120


def draw(choose: random.Random) -> list[str]:
    """Return a command with one or two odd options, and sometimes an odd word somewhere."""
    command = choose.choice(list(COMMANDS))
    words = [command, *COMMANDS[command]]
    flags: list[Flag] = []
    for group in FLAGS.values():
        flags += [flag for flag in group if command in flag.commands]
    for _ in range(choose.randint(1, 2)):
        flag = choose.choice(flags)
        odd_words = []
        if flag.names:
            odd_words.append(choose.choice(flag.names))
        if flag.metavar and choose.random() < 0.9:
            for _ in range(len(flag.metavar)):
                odd_words.append(choose.choice(VALUES))
        words += odd_words * choose.choice((1, 1, 1, 2))
    if choose.random() < 0.2:
        words.insert(choose.randint(1, len(words)), choose.choice(VALUES))
    return words


def test_no_command_line_ends_in_a_traceback(
    compare_q: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_of(REF, QUANT, FAILED).write(tmp_path / "results.json")
    choose = random.Random(24)
    for _ in range(LINES):
        words = draw(choose)
        ran = compare_q(*words)
        assert ran.status in (0, 1, 2, 4), words
        assert "Traceback" not in ran.err, words
        assert "\x1b[31m" not in ran.out + ran.err, words
        assert (ran.status != 2) or "error: " in ran.err, words
