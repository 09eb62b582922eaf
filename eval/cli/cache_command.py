"""``compare-q cache`` and ``--cache-limit``: list the cache folder and keep it small.

The list has one line for each folder of scores.  ``--cache-limit`` deletes scores one segment at a
time: a folder may have windows that every run uses, and windows that no run has used for months.

Only files with the names that compare_q gives are listed and deleted (``eval/common/cache.py``),
also those of older versions, and nothing that a run uses is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from ..where import trial_file
from .commands import CacheCommand

CONTENTS = {
    "tokens": "tokenized text",
    "scores": "scores",
    "references": "reference",
    "trials": "scores of parts",
    "logs": "engine's log",
}
"""Section of the cache -> the content of its entries, in words."""
LARGE_BYTES = 20e9
"""Every run reports the size of a cache with more bytes."""


class Entry(NamedTuple):
    """An entry of the cache and the label of its model.

    ``size`` is in bytes, ``used`` is the last use in seconds since 1970.
    """

    section: str
    key: str
    path: Path
    size: int
    used: float
    label: str


def run(command: CacheCommand) -> int:
    """``cache``: list the cache, after ``--cache-limit``; return the exit status."""
    cache = Cache(command.cache_dir)
    note = cache.note_on_older()
    if note:
        say(note)
    if command.cache_limit is not None:
        say(limited(cache, command.cache_limit))
    lines = ["last used             size  what"]
    sizes: dict[str, list[int]] = {section: [] for section in ENTRY_NAMES}
    for entry in entries(cache):
        lines.append(line_on(entry))
        sizes[entry.section].append(entry.size)
    if len(lines) > 1:
        say(*lines)
    totals = []
    total = 0
    for section, entry_sizes in sizes.items():
        if entry_sizes:
            total_of_section = sum(entry_sizes)
            totals.append(f"{len(entry_sizes)} {section} {bytes_in_words(total_of_section)}")
            total += total_of_section
    totals.append(f"{bytes_in_words(total)} in all")
    say(f"{cache.root}: {', '.join(totals)}")
    return 0


def line_on(entry: Entry) -> str:
    """Return the line of the list on an entry."""
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    content = CONTENTS[entry.section]
    if entry.label:
        content += f" of {entry.label}"
    return f"{used}  {bytes_in_words(entry.size):>8}  {content}, {entry.key[:8]}"


def entries(cache: Cache) -> list[Entry]:
    """Return the entries of the cache; the one that was used last comes first."""
    listed = []
    for section, pattern in ENTRY_NAMES.items():
        # The folder of a section may not exist yet.
        with suppress(OSError):
            for path in (cache.root / section).iterdir():
                name = pattern.fullmatch(path.name)
                files = own_files(section, path)
                if name and files:
                    # Another process may delete files in the meantime.
                    with suppress(OSError):
                        listed.append(entry_of(section, name[1], path, files))
    return sorted(listed, key=lambda entry: (-entry.used, entry.path))


def entry_of(section: str, key: str, path: Path, files: Sequence[Path]) -> Entry:
    """Return the entry of a key from its files; OSError if a file does not exist."""
    size = 0
    for file in files:
        size += file.stat().st_size
    used = last_use(section, path, files)
    return Entry(section, key, path, size, used, label_of(section, path))


def last_use(section: str, path: Path, files: Sequence[Path]) -> float:
    """Return when compare_q's ``files`` at a path were used last, in seconds since 1970."""
    # Runs touch the folder of a reference, and each segment of scores, that they have read.
    touched = [*files, path]
    if section == "scores":
        touched = segments.scores_folder(path).own_tensor_files() or list(files)
    return max(file.stat().st_mtime for file in touched)


def label_of(section: str, path: Path) -> str:
    """Return the label of the model in the run that wrote an entry; empty if unknown."""
    labels: list[Any] = []
    with suppress(InputError):
        if section == "scores":
            for record in segments.records(path).values():
                labels.append(record.get("label"))
        elif section == "references":
            labels.append(read_manifest(path).identity.get("label"))
        elif section == trial_file.SECTION:
            facts = trial_file.facts_in(path)
            if facts is not None:
                labels.append(facts.label)
    for label in labels:
        if label:
            return str(label)
    return ""


@dataclass(frozen=True)
class Part:
    """Files that are deleted together.

    They are one segment of a folder of scores, or a whole entry of another section.
    """

    entry: Entry
    files: tuple[Path, ...]
    size: int  # bytes
    used: float  # last, in seconds since 1970


def parts_of(entry: Entry) -> list[Part]:
    """Return the parts of an entry.

    The records of a folder of scores belong to no part, and are deleted with its last one.
    """
    groups = [tuple(own_files(entry.section, entry.path))]
    if entry.section == "scores":
        segment_files = segments.scores_folder(entry.path).own_tensor_files()
        if segment_files:
            groups = [(file,) for file in segment_files]
    parts = []
    for files in groups:
        # Another process may delete files in the meantime.
        with suppress(OSError):
            used = entry.used
            if entry.section == "scores":
                used = max(file.stat().st_mtime for file in files)
            size = sum(file.stat().st_size for file in files)
            parts.append(Part(entry, files, size, used))
    return parts


def prune(cache: Cache, limit: int) -> tuple[int, int]:
    """Delete the least recently used parts until ``limit`` bytes remain.

    Returns (deleted bytes, remaining bytes).

    Entries that a run uses, locks or has claimed stay, also above the limit.
    """
    listed = entries(cache)
    before = sum(entry.size for entry in listed)
    remaining = before
    in_use = cache.used_by_runs()
    parts: list[Part] = []
    for entry in listed:
        if entry.key not in in_use:
            parts += parts_of(entry)
    parts.sort(key=lambda part: (part.used, part.entry.path, part.files))
    # In rounds: an entry may be in use when it is to be deleted; then the next parts go instead.
    next_part = 0
    while next_part < len(parts) and remaining > limit:
        oldest: dict[Entry, list[Part]] = {}
        planned = remaining
        while next_part < len(parts) and planned > limit:
            part = parts[next_part]
            oldest.setdefault(part.entry, []).append(part)
            planned -= part.size
            next_part += 1
        for entry, parts_of_entry in oldest.items():
            remaining -= delete(cache, entry, parts_of_entry)
    return before - remaining, remaining


def delete(cache: Cache, entry: Entry, parts: Sequence[Part]) -> int:
    """Delete parts of an entry; return the deleted bytes.

    With its last segment, everything else of the entry is deleted.

    Nothing is deleted if a run uses, locks or has claimed the entry.
    """
    files: list[Path] = []
    for part in parts:
        files += part.files
    before = size_of(entry)
    lock = lock_file(cache.path(entry.section, entry.key, ""))
    with suppress(Timeout, OSError):
        with cache.lock_at(lock).acquire(timeout=0):
            # A run may have started in the meantime; a run with another cache may use a store of
            # this one.
            if entry.key not in cache.used_by_runs() and not claimed_windows(entry.path):
                storage.delete(files)
                segment_files: list[Path] = []
                if entry.section == "scores":
                    segment_files = segments.scores_folder(entry.path).own_tensor_files()
                if not segment_files:
                    cache.remove(entry.section, entry.path)
        remove_lock(lock)
    return before - size_of(entry)


def size_of(entry: Entry) -> int:
    """Return the bytes that compare_q's files of an entry take now."""
    size = 0
    for file in own_files(entry.section, entry.path):
        size += storage.size_of(file) or 0
    return size


def large_cache_note(cache: Cache) -> str | None:
    """Return a line on the size of a cache above ``LARGE_BYTES``; None for a smaller one."""
    total = 0
    for section in ENTRY_NAMES:
        # The folder of a section may not exist yet.
        with suppress(OSError):
            for path in (cache.root / section).iterdir():
                for file in own_files(section, path):
                    total += storage.size_of(file) or 0
    if total < LARGE_BYTES:
        return None
    return (
        f"cache: {bytes_in_words(total)} in {cache.root}; compare-q cache lists it, and "
        "--cache-limit SIZE deletes what was not used for longest"
    )


def limited(cache: Cache, limit: int) -> str:
    """Prune the cache; return a line on what was deleted and what remains."""
    deleted, remaining = prune(cache, limit)
    line = f"cache: deleted {bytes_in_words(deleted)}; {bytes_in_words(remaining)} are left"
    if remaining > limit:
        line += f", over the limit of {bytes_in_words(limit)}: in use"
    return line
