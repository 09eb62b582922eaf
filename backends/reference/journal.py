"""Writing a store, in a folder of its own, so that what is whole there survives the end of its writers.

Each process has its journal, ``part.<number>.jsonl``, to which it adds a line when a file has become whole: size and
checksum.  Each line carries its own checksum; a line that is torn or damaged is none.  The head, and a line that says
what it does, come last.  The next process goes on where ``recorded`` says that something is missing.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from backends.common import checked, owned
from backends.common.head import Contents, Head
from backends.reference import manifest, writing
from backends.reference.manifest import Stored

if TYPE_CHECKING:
    import torch

JOURNAL = re.compile(r"part\.[0-9a-f]{32}\.jsonl")
OLDER_JOURNAL = re.compile(r"part\.[0-9a-f]{32}\.json")
"""Of compare_q 0.2, whose unfinished stores nothing can be made of."""
MAKING = "part.making"
"""Says that the folder of the store is being made, by us."""


class Writer:
    """One process's share of a store that is being made; thread-safe for distinct windows.

    ``folder`` is there, and holds nothing but the shares of other and of earlier processes; ``reason`` says why logits
    are kept and not states.
    """

    def __init__(self, folder: Path, contents: Contents, reason: str = "") -> None:
        self.folder = folder
        self.contents = contents
        self.reason = reason
        self.journal = folder / f"part.{uuid.uuid4().hex}.jsonl"
        self.lock = Lock()
        self.began = False

    def window(self, index: int, tensor: torch.Tensor) -> None:
        """Write one window's states [T, H] or logits [T, V] bit for bit, in the dtype that the engine gave them."""
        self._write(manifest.window_file(index), {self.contents: tensor})

    def head(self, first: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write the head's entries from ``first`` on."""
        self._write(manifest.head_file(first), {"weight": weight} | ({} if bias is None else {"bias": bias}))

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._note({"file": name, "stored": asdict(writing.write(self.folder / name, tensors))})

    def close(self, head: Head) -> None:
        """Say that this process has written all that it had to."""
        self._note({"head": asdict(head)})

    def _note(self, line: Mapping[str, Any]) -> None:
        """Add a line; a line that a full disk cut off before it is no part of it."""
        with self.lock:
            began = {"kind": self.contents, "reason": self.reason, "began": time.time_ns()}
            lines = [line] if self.began else [began, line]
            descriptor = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                data = b"".join(b"\n" + checked.dump(each) for each in lines)
                if os.write(descriptor, data) != len(data):
                    raise OSError(f"{self.journal}: no space is left")
                self.began = True
            finally:
                os.close(descriptor)


@dataclass
class Share:
    """What one process has written: ``began`` in nanoseconds since 1970; ``head`` once it was closed."""

    contents: Contents
    reason: str
    began: int
    head: Head | None = None
    files: dict[str, Stored] = field(default_factory=dict)


def share_of(journal: Path) -> Share | None:
    """A journal's share, as far as it is whole; None if nothing can be told of it."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError):
        for written in journal.read_bytes().split(b"\n"):
            with suppress(ValueError):
                lines.append(checked.load(written + b"\n"))
    first = next((line for line in lines if line.get("kind") in ("states", "logits")), None)
    if first is None:
        return None
    share = Share(first["kind"], str(first.get("reason")), 0)
    with suppress(KeyError, ValueError, TypeError):
        share.began = int(first["began"])
        for line in lines:
            if "file" in line:
                share.files[line["file"]] = manifest.stored_of(line["file"], line["stored"])
            elif "head" in line:
                share.head = manifest.head_of(line["head"])
    return share


def shares(building: Path) -> list[Share]:
    """The shares in a folder, the newest first."""
    with suppress(OSError):
        journals = [path for path in building.iterdir() if JOURNAL.fullmatch(path.name) and owned.is_regular(path)]
        found = [share for path in sorted(journals) if (share := share_of(path)) is not None]
        return sorted(found, key=lambda share: -share.began)
    return []


@dataclass(frozen=True)
class Kept:
    """What several processes have left together: ``files`` are there and of the size that their writers noted.

    ``head``: None if no process came to its end.
    """

    contents: Contents
    reason: str
    head: Head | None
    files: dict[str, Stored]

    @property
    def closed(self) -> bool:
        """Whether a process came to its end, and left the head that states need."""
        heads = any(manifest.HEAD.fullmatch(name) for name in self.files)
        return self.head is not None and (heads or self.contents == "logits")


def kept(building: Path, folder: Path | None = None, *, read: bool = False) -> Kept | None:
    """What is whole in ``building``, or in ``folder`` where files were on their way when a process was killed.

    The newest share says what is kept: shares of other contents, with another head or files of another form do not
    count.  ``read``: every byte is checked, and not sizes alone.  None if there is nothing.
    """
    found = [share for share in shares(building) if share.files or share.head]
    if not found:
        return None
    newest = found[0]
    head = next((share.head for share in found if share.head and share.contents == newest.contents), None)
    agreeing = [share for share in found if share.contents == newest.contents and share.head in (None, head)]
    files: dict[str, Stored] = {}
    for name in {name for share in agreeing for name in share.files}:
        entries = list(dict.fromkeys(share.files[name] for share in agreeing if name in share.files))
        places = [place / name for place in (building, folder) if place is not None]
        whole = next((entry for place in places if (entry := entry_of(place, entries, read)) is not None), None)
        if whole is not None:
            files[name] = whole
    return Kept(newest.contents, newest.reason, head, of_one_form(files, newest, building, folder))


def entry_of(file: Path, entries: Iterable[Stored], read: bool) -> Stored | None:
    """Which of the entries, the newest first, a file has; None if it has none.

    Without ``read`` it is only read if its size leaves that open.
    """
    size = owned.size_of(file)
    fitting = [entry for entry in entries if entry.bytes == size]
    if fitting and (read or len(fitting) > 1):
        found = digest_of(file)
        return next((entry for entry in fitting if entry.sha256 == found), None)
    return fitting[0] if fitting else None


def digest_of(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def of_one_form(files: dict[str, Stored], newest: Share, building: Path, folder: Path | None) -> dict[str, Stored]:
    """The files less the windows whose dtype or width is not that of the newest share's windows."""
    forms: dict[str, tuple[str, int] | None] = {}
    for name in files:
        if manifest.WINDOW.fullmatch(name):
            place = building if (building / name).is_file() or folder is None else folder
            forms[name] = form_of(place / name, newest.contents)
    wanted = next((forms[name] for name in newest.files if forms.get(name)), None)
    if wanted is None:  # the newest has a head and no window
        wanted = next((form for form in forms.values() if form), None)
    return {name: entry for name, entry in files.items() if name not in forms or forms[name] == wanted}


def form_of(file: Path, contents: Contents) -> tuple[str, int] | None:
    """(dtype, width) of a window's file, from its header; None if that is damaged."""
    from safetensors import safe_open

    try:
        with safe_open(file, "np") as opened:
            part = opened.get_slice(contents)
            return str(part.get_dtype()), int(part.get_shape()[-1])
    except Exception:  # safetensors raises its own
        return None


def recorded(building: Path, folder: Path | None = None) -> frozenset[int]:
    """Windows that need not be recorded again: what an earlier run has left is checked by every byte.

    ``folder``: the place of the store, where ``seal`` may have been killed while it moved files.  As long as no process
    has come to its end, and so has left no head, one window is not among them: the run that records it writes the head.
    """
    found = kept(building, folder, read=True)
    if found is None:
        return frozenset()
    windows = manifest.windows_of(found.files)
    heads = {name for share in shares(building) for name in share.files if manifest.HEAD.fullmatch(name)}
    closed = found.closed and heads <= found.files.keys()
    return windows if closed or not windows else windows - {max(windows)}
