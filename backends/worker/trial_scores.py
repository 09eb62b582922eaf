"""The file of the scores of trials (``backends/restoring.py``), one JSON object a line.

    {"trial": Trial.digest, "window": Window.digest, "kld": 1.25, "tokens": 511, "non_finite": 0}

Lines are only appended.  A killed worker may leave the last line incomplete: it is not read, and
the next line begins after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from ..restoring import TrialScore


class Place(NamedTuple):
    """A trial and a window, by their digests."""

    trial: str
    window: str


@dataclass(frozen=True)
class Line:
    """A line of the file."""

    trial: str
    window: str
    kld: Annotated[float, Field(allow_inf_nan=False)]
    tokens: Annotated[int, Field(ge=0)]
    non_finite: Annotated[int, Field(ge=0)]


LINE = TypeAdapter(Line)


def read(file: Path) -> dict[Place, TrialScore]:
    """Return the scores of a file by trial and window; empty if it does not exist.

    Lines that are not complete scores are left out, so that they are scored again.  The indices of
    the scores are 0.
    """
    scores: dict[Place, TrialScore] = {}
    if not file.is_file():
        return scores
    for line in file.read_bytes().splitlines():
        try:
            fields = LINE.validate_json(line)
        except ValueError:
            continue
        place = Place(fields.trial, fields.window)
        scores[place] = TrialScore(0, 0, fields.kld, fields.tokens, fields.non_finite)
    return scores


def append(file: Path, scores: Iterable[tuple[Place, TrialScore]]) -> None:
    """Append scores to a file, which is created if it does not exist."""
    lines = []
    for place, score in scores:
        fields = {
            "trial": place.trial,
            "window": place.window,
            "kld": score.kld,
            "tokens": score.tokens,
            "non_finite": score.non_finite,
        }
        lines.append(json.dumps(fields) + "\n")
    with file.open("ab+") as stream:
        end = stream.seek(0, os.SEEK_END)
        if end:
            stream.seek(end - 1)
            if stream.read(1) != b"\n":
                lines.insert(0, "\n")
        # One write: another run may append to the same file.
        stream.write("".join(lines).encode())
