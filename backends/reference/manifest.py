"""What a reference store says of itself: ``reference.json``, and the names that its files have.

This file reads and writes no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from backends.common import checked, owned
from backends.common.errors import InputError
from backends.common.head import Contents, Head
from backends.common.messages import one_line

VERSION = 2
"""Version of the layout.

1: one file a window, one or more for the head, and a manifest that names them; compare_q 0.1 wrote it.  It is not read:
   the manifest has no checksum, and says by what the logits are scaled.
2: the manifest carries its own checksum, a store grows, and ``made`` says whose the folder is.
"""
MANIFEST = "reference.json"
CONTENTS_KEY = "kind"
"""What the manifest calls a store's contents."""
WINDOW = re.compile(r"row\.(\d{6,9})\.safetensors")
HEAD = re.compile(r"head\.(\d{6,9})\.safetensors")
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Stored:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A store's ``identity``, contents, why logits are kept (``reason``), head, and ``files`` by name.

    ``made``: compare_q made the folder, and may delete it once it is empty.
    """

    identity: dict[str, Any]
    contents: Contents
    reason: str
    head: Head
    files: dict[str, Stored]
    made: bool = False

    @property
    def windows(self) -> frozenset[int]:
        """Windows of which there is a file."""
        return windows_of(self.files)

    @property
    def heads(self) -> dict[str, Stored]:
        """The files of the head, in the order of their entries."""
        return {name: entry for name, entry in sorted(self.files.items()) if HEAD.fullmatch(name)}


def window_file(index: int) -> str:
    """File of a window."""
    return f"row.{index:06d}.safetensors"


def head_file(first: int) -> str:
    """File of the head's entries from ``first`` on."""
    return f"head.{first:06d}.safetensors"


def windows_of(files: Mapping[str, Any]) -> frozenset[int]:
    """The windows among names of files."""
    return frozenset(int(match[1]) for name in files if (match := WINDOW.fullmatch(name)))


def unbroken(windows: frozenset[int]) -> int:
    """n, where windows 0 to n - 1 are there and window n is not."""
    return next(index for index in range(len(windows) + 1) if index not in windows)


def write(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in the place of the one that is there, whole or not at all."""
    files = {name: asdict(entry) for name, entry in sorted(manifest.files.items())}
    content = {
        "version": VERSION, "identity": manifest.identity, CONTENTS_KEY: manifest.contents, "reason": manifest.reason,
        "head": asdict(manifest.head), "made": manifest.made, "files": files,
    }  # fmt: skip
    owned.write_whole(folder / MANIFEST, checked.dump(content, indent=1))


def read(folder: Path) -> Manifest:
    """The manifest of a store; InputError if it is missing, damaged or of another version."""
    file = folder / MANIFEST
    try:
        if not file.is_file():
            raise ValueError("it is not there")
        found = checked.load(file.read_bytes())
        if (version := found["version"]) != VERSION:
            raise InputError(f"{file}: layout {version}, this compare_q reads {VERSION}; delete the store")
        return of_json(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file}: not a reference store: {one_line(error)}; delete it") from None


def of_json(found: Mapping[str, Any]) -> Manifest:
    """The manifest in a JSON object; ValueError, KeyError or TypeError if it is none."""
    contents = found[CONTENTS_KEY]
    if contents not in ("states", "logits"):
        raise ValueError(f"{CONTENTS_KEY} is {str(contents)[:40]!r}")
    texts_and_objects = isinstance(found["identity"], dict) and isinstance(found["reason"], str)
    if not texts_and_objects or not isinstance(found["files"], dict):
        raise TypeError("identity, reason or files is of another type")
    return Manifest(
        found["identity"], cast(Contents, contents), found["reason"], head_of(found["head"]),
        {name: stored_of(name, entry) for name, entry in found["files"].items()}, found["made"] is True,
    )  # fmt: skip


def head_of(found: Any) -> Head:
    """The head in a JSON object; TypeError or ValueError if it is none."""
    head = Head(**found)
    numbers = (head.scale, *(() if head.soft_cap is None else (head.soft_cap,)))
    right = type(head.vocab_size) is int and isinstance(head.dtype, str) and head.vocab_size >= 0
    if not right or any(type(number) not in (int, float) for number in numbers):
        raise TypeError("head has a value of another type")
    return head


def stored_of(name: str, entry: Any) -> Stored:
    """A file's size and checksum; TypeError or ValueError if these are none, or the file no file of a store."""
    stored = Stored(entry["bytes"], entry["sha256"])
    if not WINDOW.fullmatch(name) and not HEAD.fullmatch(name):
        raise ValueError(f"it lists a file {name[:40]!r}")
    if type(stored.bytes) is not int or stored.bytes < 0 or not DIGEST.fullmatch(stored.sha256):
        raise ValueError(f"size or checksum of {name} is none")
    return stored
