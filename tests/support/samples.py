"""Samples in lm-eval's layout, made by hand: 12 questions with three possible answers each.

===========  ===========  ===========  =========================
question     reference    new          counts as
===========  ===========  ===========  =========================
0, 1, 2, 3   right        right
4, 5, 6      right        wrong        lost
7            wrong        right        gained
8, 9         wrong        other wrong  other wrong
10, 11       wrong        the same
===========  ===========  ===========  =========================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# lm-eval's file names have "-" in place of ":" in the time.
DATE = "2026-01-02T03-04-05.000678"
RIGHT = 1
"""The number of the right answer to every question."""
REFERENCE = [1, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 0]
NEW = [1, 1, 1, 1, 0, 2, 0, 1, 2, 0, 2, 0]
"""The numbers of the chosen answers."""
ANSWERS = ("a", "bb", "ccc")

Line = dict[str, Any]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sample(number: int, choice: int) -> Line:
    """Return the sample of a question of which this answer was chosen, with a log-probability of
    -1; that of the others is -9.
    """
    requests = {}
    sums = []
    for index, answer in enumerate(ANSWERS):
        requests[f"gen_args_{index}"] = {"arg_0": f"Question {number}?", "arg_1": f" {answer}"}
        # lm-eval writes the numbers of responses as strings.
        logprob = "-9.0"
        if index == choice:
            logprob = "-1.0"
        sums.append([logprob, "False"])
    return {
        "doc_id": number,
        "doc": {"question": number},
        "target": str(RIGHT),
        "arguments": requests,
        "resps": [[pair] for pair in sums],
        "filtered_resps": sums,
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": digest(f"document {number}"),
        "prompt_hash": digest(f"Question {number}?"),
        "target_hash": digest(str(RIGHT)),
        "acc": float(choice == RIGHT),
    }


def lines_of(choices: Sequence[int]) -> list[Line]:
    """Return the samples of questions 0, 1, ... by their chosen answers."""
    return [sample(number, choice) for number, choice in enumerate(choices)]


def write(folder: Path, lines: Sequence[Line], task: str = "toy", date: str = DATE) -> Path:
    """Write samples as lm-eval does; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"samples_{task}_{date}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
