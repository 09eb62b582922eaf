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
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...backends.common import json_files, storage
from ...backends.common.errors import InputError
from ..common.cache import LOCK_POLL_S, Cache


@contextmanager
def claimed(
    cache: Cache,
    folder: Path,
    windows: Collection[str],
    check: Callable[[], None],
    waits: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Claim windows, by their digests, while the block runs, after waiting for runs that have
    claimed one of them.

    While waiting, ``waits`` is called once, and ``check`` often; it raises StoppedError if the run
    was stopped.  In a folder that cannot be written, or on a full disk, nothing is claimed: what is
    complete is served from there.
    """
    waited = False
    with ExitStack() as held:
        while windows and os.access(folder.parent, os.W_OK):
            check()
            with short_lock(cache, folder, check):
                storage.sweep(folder.parent)  # claims of killed runs
                if not claimed_windows(folder) & set(windows):
                    write_claim(held, folder, windows)
                    break
            if not waited:
                waits()
            waited = True
            time.sleep(LOCK_POLL_S)
        yield


@contextmanager
def short_lock(cache: Cache, folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder of scores or of a store; no run holds it while a model loads or
    scores.
    """
    with cache.locked([lock_file(folder)], check):
        yield


def lock_file(folder: Path) -> Path:
    """The lock file of a folder, next to it, because runs with other caches may share a store."""
    absolute = Path(os.path.abspath(folder))
    is_key = len(absolute.name) == 40 and all(
        digit in "0123456789abcdef" for digit in absolute.name
    )
    return absolute.with_name(f"{absolute.name}.lock" if is_key else f".{absolute.name}.lock")


def write_claim(held: ExitStack, folder: Path, windows: Collection[str]) -> None:
    """Write the claim of this run, which ends with ``held``; nothing on a full disk."""
    try:
        file = held.enter_context(storage.temporary_next_to(Path(os.path.abspath(folder))))
        file.write_text(
            json.dumps({"claim": folder.name, "windows": sorted(windows)}), encoding="utf-8"
        )
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise


def is_shared(folder: Path) -> bool:
    """Return True if another run, next to the one that asks and has a claim itself, has claimed
    windows of a folder.
    """
    return len(claims_on(folder)) > 1


def claimed_windows(folder: Path) -> set[str]:
    """Return the windows of a folder that running runs, this one among them, have claimed."""
    windows: set[str] = set()
    for claim in claims_on(folder):
        windows |= claim
    return windows


def claims_on(folder: Path) -> list[set[str]]:
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
            continue  # another temporary file, or deleted in the meantime
    return claims
