"""What the names of segments and records say (``backends/worker/segments.py``); nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backends.common import owned

MORE = "-more"
"""At the end of the tag of segments that hold the divergences that have to be asked for."""
SEGMENT = re.compile(rf"(alone|[0-9a-f]{{16}}(?:{MORE})?)\.([0-9,-]+)\.([0-9a-f]{{40}})\.safetensors")
RECORD = re.compile(r"record\.([0-9A-Za-z_-]{1,64})\.json")
LONGEST, MOST = 160, 100_000
"""Most letters of ``windows`` in a name, which may have 255 bytes, and most windows that a name is believed to list."""


@dataclass(frozen=True)
class Named:
    """A segment by its name."""

    file: Path
    tag: str
    windows: frozenset[int]
    digest: str


def spelled(windows: Sequence[int]) -> str:
    """Sorted numbers of windows in a name, e.g. ``0-3,7``."""
    runs: list[list[int]] = []
    for index in windows:
        if runs and index == runs[-1][-1] + 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


def listed(text: str) -> frozenset[int]:
    """The windows of a name; none if ``spelled`` writes it otherwise, so that no name makes a list without end."""
    runs = [run.split("-") for run in text.split(",")]
    with suppress(ValueError):
        limits = [(int(run[0]), int(run[-1])) for run in runs]
        if sum(max(last - first, 0) for first, last in limits) < MOST:
            found = [index for first, last in limits for index in range(first, last + 1)]
            if spelled(found) == text and found == sorted(set(found)):
                return frozenset(found)
    return frozenset()


def named(folder: Path) -> Iterator[Named]:
    """The segments of a folder by their names, in the order of these; no link, folder or pipe is one."""
    for file in files_of(folder):
        match = SEGMENT.fullmatch(file.name)
        if match is not None and owned.is_regular(file):
            yield Named(file, match[1], listed(match[2]), match[3])


def files_of(folder: Path) -> list[Path]:
    """What lies in a folder, in the order of names; nothing if the folder is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_ours(file: Path) -> bool:
    """Whether a file, which is no link, has the name of a segment or a record."""
    return bool(SEGMENT.fullmatch(file.name) or RECORD.fullmatch(file.name)) and owned.is_regular(file)
