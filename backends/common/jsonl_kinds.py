"""The first line of compare_q's files of JSON Lines, which names the kind of the file.

The first line is a JSON object whose key ``compare_q`` has the kind, such as ``scores``.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import InputError
from .json_files import is_file, open_regular, parsed
from .message_text import is_name

KIND = "compare_q"
"""Key of the kind in the first line."""
ROLLOUTS = "rollouts"
"""Kind of a file that is a text and a model (``backends/scores_file/rollouts.py``)."""
WINDOWS = "windows"
"""Kind of a file of windows, which another engine is to score (``scores_file/format.py``)."""
SUFFIX = ".jsonl"
LARGEST_FIRST_LINE = 1 << 20
"""Bytes that are read to find the first line."""


def first_line(file: Path) -> dict[str, Any]:
    """Return the object in the first line of a file with the suffix ``.jsonl``.

    Empty if the file does not exist, or if its first line does not name a kind.
    """
    if file.suffix.lower() != SUFFIX or not is_file(file):
        return {}
    value: Any = None
    # The engine that reads the file reports what is wrong with it.
    with suppress(InputError, OSError), open_regular(file) as stream:
        value = parsed(stream.readline(LARGEST_FIRST_LINE), str(file))
    if not isinstance(value, dict) or not isinstance(value.get(KIND), str):
        return {}
    return value


def kind_of(file: Path) -> str:
    """Return the kind that the first line of a file names; "" without one."""
    return str(first_line(file).get(KIND, ""))


def label_of(file: Path) -> str:
    """Return the label in the first line of a file; "" without one that can be a name."""
    label = first_line(file).get("label")
    # The engine that reads the file refuses other labels.
    if isinstance(label, str) and is_name(label):
        return label
    return ""
