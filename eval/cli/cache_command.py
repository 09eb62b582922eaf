"""``compare-q cache`` and ``--cache-limit``: list the cache folder and keep it small.

The list has one line for each folder of scores.  ``--cache-limit`` deletes scores one segment at a
time: a folder may have windows that every run uses, and windows that no run has used for months.

Only files with the names that compare_q gives are listed and deleted (``eval/common/cache.py``),
also those of older versions, and nothing that a run uses is deleted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import Timeout

from ...backends.common import storage
from ...backends.common.errors import InputError
from ...backends.common.message_text import bytes_in_words
from ...backends.reference.store import read_manifest
from ...backends.scoring import segments
from ..common.cache import ENTRY_NAMES, Cache, own_files, remove_lock
from ..common.terminal import say
from ..run.claims import claimed_windows, lock_file

MEANING = {
    "tokens": "tokenized text",
    "scores": "scores",
    "references": "reference",
    "logs": "engine's log",
}
LARGE = 20e9
"""Every run reports the size of a cache with more bytes."""


class Entry(NamedTuple):
    """One entry: ``size`` in bytes, ``used`` last in seconds since 1970, the ``label`` of its
    model.
    """

    section: str
    key: str
    path: Path
    size: int
    used: float
    label: str


def run(args: argparse.Namespace) -> int:
    """``cache``: list the cache, after ``--cache-limit``."""
    cache = Cache(args.cache_dir)
    note = cache.note_on_older()
    if note:
        say(note)
    if args.cache_limit is not None:
        say(limited(cache, args.cache_limit))
    lines = ["last used             size  what"]
    sizes: dict[str, list[int]] = {section: [] for section in ENTRY_NAMES}
    for entry in entries(cache):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        what = f"{MEANING[entry.section]}{f' of {entry.label}' if entry.label else ''}, {entry.key[:8]}"
        lines.append(f"{when}  {bytes_in_words(entry.size):>8}  {what}")
        sizes[entry.section].append(entry.size)
    say(*(lines if len(lines) > 1 else ()))
    parts = [
        f"{len(each)} {section} {bytes_in_words(sum(each))}"
        for section, each in sizes.items()
        if each
    ]
    say(
        f"{cache.root}: {', '.join([*parts, bytes_in_words(sum(map(sum, sizes.values()))) + ' in all'])}"
    )
    return 0


def entries(cache: Cache) -> list[Entry]:
    """Return the entries of the cache; the one that was used last comes first."""
    found = []
    for section, pattern in ENTRY_NAMES.items():
        with suppress(OSError):  # the folder does not exist
            for path in (cache.root / section).iterdir():
                name = pattern.fullmatch(path.name)
                files = own_files(section, path)
                if name and files:
                    with suppress(OSError):  # deleted in the meantime
                        size = sum(file.stat().st_size for file in files)
                        used = last_use(section, path, files)
                        found.append(
                            Entry(section, name[1], path, size, used, label_of(section, path))
                        )
    return sorted(found, key=lambda entry: (-entry.used, entry.path))


def last_use(section: str, path: Path, files: Sequence[Path]) -> float:
    """Return when compare_q's ``files`` at a path were used last, in seconds since 1970.

    Runs touch segments of scores that they have read, and the folders of references.
    """
    touched = [*files, path]
    if section == "scores":
        touched = segments.scores_folder(path).own_tensor_files() or list(files)
    return max(file.stat().st_mtime for file in touched)


def label_of(section: str, path: Path) -> str:
    """Return the label of the model in the run that wrote an entry; empty if unknown."""
    labels: Iterable[Any] = ()
    with suppress(InputError):
        if section == "scores":
            labels = (record.get("label") for record in segments.records(path).values())
        elif section == "references":
            labels = [read_manifest(path).identity.get("label")]
    return str(next(filter(None, labels), ""))


@dataclass(frozen=True)
class Part:
    """Files that are deleted together: a segment of a folder of scores, or a whole entry of another
    section.
    """

    entry: Entry
    files: tuple[Path, ...]
    size: int  # bytes
    used: float  # last, in seconds since 1970


def parts_of(entry: Entry) -> list[Part]:
    """Return the parts of an entry; the records of a folder of scores belong to no part, and go
    with its last one.
    """
    groups = [tuple(own_files(entry.section, entry.path))]
    if entry.section == "scores":
        scores = segments.scores_folder(entry.path).own_tensor_files()
        if scores:
            groups = [(file,) for file in scores]
    parts = []
    for files in groups:
        with suppress(OSError):  # deleted in the meantime
            used = entry.used
            if entry.section == "scores":
                used = max(file.stat().st_mtime for file in files)
            size = sum(file.stat().st_size for file in files)
            parts.append(Part(entry, files, size, used))
    return parts


def prune(cache: Cache, limit: int) -> tuple[int, int]:
    """Delete the least recently used parts until ``limit`` bytes remain; return (deleted bytes,
    remaining bytes).

    Entries that a run uses, locks or has claimed stay, also above the limit.
    """
    listed = entries(cache)
    before = sum(entry.size for entry in listed)
    remaining = before
    in_use = cache.used_by_runs()
    parts = [part for entry in listed if entry.key not in in_use for part in parts_of(entry)]
    parts.sort(key=lambda part: (part.used, part.entry.path, part.files))
    next_part = 0
    while next_part < len(parts) and remaining > limit:
        chosen: dict[Entry, list[Part]] = {}
        planned = remaining
        while next_part < len(parts) and planned > limit:
            part = parts[next_part]
            chosen.setdefault(part.entry, []).append(part)
            planned -= part.size
            next_part += 1
        for entry, doomed in chosen.items():
            remaining -= delete(cache, entry, doomed)
    return before - remaining, remaining


def delete(cache: Cache, entry: Entry, parts: Sequence[Part]) -> int:
    """Delete parts of an entry, and what is left of it with its last segment; return the deleted
    bytes.

    Nothing is deleted if a run uses, locks or has claimed the entry.
    """
    before = size_of(entry)
    lock = lock_file(cache.path(entry.section, entry.key, ""))
    with suppress(Timeout, OSError):
        with cache.lock_at(lock).acquire(timeout=0):
            # A run may have started in the meantime; a run with another cache may use a store of
            # this one.
            if entry.key not in cache.used_by_runs() and not claimed_windows(entry.path):
                storage.delete(file for part in parts for file in part.files)
                if (
                    entry.section != "scores"
                    or not segments.scores_folder(entry.path).own_tensor_files()
                ):
                    cache.remove(entry.section, entry.path)
        remove_lock(lock)
    return before - size_of(entry)


def size_of(entry: Entry) -> int:
    """Return the bytes that compare_q's files of an entry take now."""
    return sum(storage.size_of(file) or 0 for file in own_files(entry.section, entry.path))


def large_cache_note(cache: Cache) -> str | None:
    """Return a line on the size of a cache above ``LARGE``; None for a smaller one."""
    total = 0
    for section in ENTRY_NAMES:
        with suppress(OSError):  # the folder does not exist
            for path in (cache.root / section).iterdir():
                for file in own_files(section, path):
                    total += storage.size_of(file) or 0
    if total < LARGE:
        return None
    return (
        f"cache: {bytes_in_words(total)} in {cache.root}; compare-q cache lists it, and --cache-limit SIZE deletes "
        "what was not used for longest"
    )


def limited(cache: Cache, limit: int) -> str:
    """Prune the cache; return a line on what was deleted and what remains."""
    deleted, remaining = prune(cache, limit)
    line = f"cache: deleted {bytes_in_words(deleted)}; {bytes_in_words(remaining)} are left"
    if remaining > limit:
        line += f", over the limit of {bytes_in_words(limit)}: in use"
    return line
