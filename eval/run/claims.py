"""Claims: which windows of a folder of scores, or of a reference store, a run is working on.

Two runs of one model need the same windows, or others.  A run that needs a window that another run
has claimed waits for it; runs on different windows do not wait for each other.

A claim is a temporary file next to the folder.  Its process holds a lock on it, so that the claim
of a killed run ends with the run (``backends/common/storage.py``).  It lists the digests of the
windows.  A run holds the folder's own lock only while it looks at the claims of others and writes
its own, or changes several files of the folder at once.

A run claims the windows of a model's scores first, then those of the store that the model records.
Who holds a claim on a store never waits for another claim, so that two runs never wait for each
other.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...backends.common import json_files, storage
from ...backends.common.errors import InputError
from ..common.cache import LOCK_POLL_S, Cache

KEY = re.compile("[0-9a-f]{40}")
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
"""Errors of a full disk, or of a folder that cannot be written."""


@contextmanager
def claimed(
    cache: Cache,
    folder: Path,
    windows: Collection[str],
    check: Callable[[], None],
    waits: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Claim windows, by their digests, while the block runs.

    Waits for runs that have claimed one of them.  While waiting, ``waits`` is called once, and
    ``check`` often; it raises StoppedError if the run was stopped.  In a folder that cannot be
    written, or on a full disk, nothing is claimed: what is complete is served from there.
    """
    has_waited = False
    with ExitStack() as claim:
        while windows and os.access(folder.parent, os.W_OK):
            check()
            with short_lock(cache, folder, check):
                # Delete the claims of killed runs.
                storage.sweep(folder.parent)
                if not claimed_windows(folder) & set(windows):
                    write_claim(claim, folder, windows)
                    break
            if not has_waited:
                waits()
            has_waited = True
            time.sleep(LOCK_POLL_S)
        yield


@contextmanager
def short_lock(cache: Cache, folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder of scores or of a store.

    No run holds it while a model loads or scores.
    """
    with cache.locked([lock_file(folder)], check):
        yield


def lock_file(folder: Path) -> Path:
    """The lock file of a folder, next to it, because runs with other caches may share a store."""
    absolute = Path(os.path.abspath(folder))
    # The cache locks an entry by the name of its key; a folder of the user gets a hidden lock file.
    if KEY.fullmatch(absolute.name):
        return absolute.with_name(f"{absolute.name}.lock")
    return absolute.with_name(f".{absolute.name}.lock")


def write_claim(claim: ExitStack, folder: Path, windows: Collection[str]) -> None:
    """Write the claim of this run, which ends with ``claim``; nothing on a full disk."""
    try:
        file = claim.enter_context(storage.temporary_next_to(Path(os.path.abspath(folder))))
        content = json.dumps({"claim": folder.name, "windows": sorted(windows)})
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise


def is_shared(folder: Path) -> bool:
    """Return True if another run has claimed windows of a folder, on which this run has a claim."""
    return len(windows_by_claim(folder)) > 1


def claimed_windows(folder: Path) -> set[str]:
    """Return the windows of a folder that running runs, this one among them, have claimed."""
    windows: set[str] = set()
    for windows_of_claim in windows_by_claim(folder):
        windows |= windows_of_claim
    return windows


def windows_by_claim(folder: Path) -> list[set[str]]:
    """Return the windows of each claim on a folder."""
    claims = []
    for file in storage.files_in(folder.parent):
        if not storage.TEMPORARY.fullmatch(file.name) or not storage.is_held(file):
            continue
        try:
            claim = json.loads(json_files.read_bytes(file))
            if claim["claim"] == folder.name:
                claims.append(set(claim["windows"]))
        except (InputError, ValueError, KeyError, TypeError):
            # Another temporary file, or deleted in the meantime.
            continue
    return claims
