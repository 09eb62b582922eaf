"""``--cache`` and ``--cache-limit``: what the cache folder holds, and keeping it small.

Only what compare_q itself wrote is listed and removed: files that have the names of ours (``eval/common/cache.py``).
What a run uses, be it this run or another run that still goes on, is never removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from rich.table import Table
from rich.text import Text

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import bytes_in_words
from compare_q.backends.reference.store import read_manifest
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import NAMES, SECTIONS, Cache, own_files, remove_lock

MEANING = {"tokens": "tokenized text", "scores": "scores", "references": "reference", "logs": "engine's log"}


@dataclass(frozen=True)
class Entry:
    """One thing that is kept at ``path``: its ``size`` in bytes, when it was last ``used`` (seconds since 1970).

    ``key``: 40 hexadecimal digits; ``label``: of the model that the entry belongs to.
    """

    section: str
    key: str
    path: Path
    size: int
    used: float
    label: str = ""


def entries(cache: Cache) -> list[Entry]:
    """Everything that the cache holds; the entry that was used last comes first."""
    every = [entry for section in SECTIONS for entry in section_entries(cache, section)]
    return sorted(every, key=lambda entry: -entry.used)


def section_entries(cache: Cache, section: str) -> Iterator[Entry]:
    """The entries of one section; files that vanish meanwhile are left out."""
    try:
        paths = sorted((cache.root / section).iterdir())
    except OSError:  # nothing was ever kept
        return
    for path in paths:
        name = NAMES[section].fullmatch(path.name)
        files = own_files(section, path)
        if name and (files or is_empty(path)):
            with suppress(OSError):
                stats = [file.stat() for file in files]
                used = max(stat.st_mtime for stat in [*stats, path.stat()])  # a run that uses an entry touches its path
                label = label_of(section, path)
                yield Entry(section, name[1], path, sum(stat.st_size for stat in stats), used, label)


def is_empty(path: Path) -> bool:
    """Whether a path is a folder in which nothing lies, as a killed run may leave one."""
    with suppress(OSError):  # another run has removed it meanwhile
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    return False


def label_of(section: str, path: Path) -> str:
    """The label of an entry's model in a run that wrote the entry; empty if that is not known."""
    if section == "scores":
        return str(next((record["label"] for record in segments.records(path).values() if record.get("label")), ""))
    if section == "references":
        with suppress(InputError):
            return str(read_manifest(path).identity.get("label") or "")
    return ""


def prune(cache: Cache, limit: int) -> tuple[list[Entry], int]:
    """(removed entries, bytes that remain): the entry that was used longest ago goes first, down to ``limit`` bytes.

    More than ``limit`` bytes remain where runs use them.
    """
    kept = entries(cache)
    remaining = sum(entry.size for entry in kept)
    removed = []
    for entry in reversed(kept):
        if remaining <= limit:
            break
        if remove(cache, entry):
            removed.append(entry)
            remaining -= entry.size
    return removed, remaining


def remove(cache: Cache, entry: Entry) -> bool:
    """Delete one entry and say whether it is gone; an entry that a run uses or locks, or that resists, stays."""
    try:
        with cache.lock(entry.section, entry.key).acquire(timeout=0):
            if entry.key in cache.used_by_runs():  # asked now: a run may have begun since the entries were listed
                return False
            cache.remove(entry.section, entry.path)
        remove_lock(cache.path(entry.section, entry.key, ".lock"))
    except (Timeout, OSError):
        return False
    return not own_files(entry.section, entry.path)


def limited(cache: Cache, limit: int) -> str:
    """Prune the cache, and say in one line what was removed and what remains."""
    removed, remaining = prune(cache, limit)
    freed = sum(entry.size for entry in removed)
    kept = f"{bytes_in_words(remaining)} are left" + (
        f", over the limit of {bytes_in_words(limit)}: in use" if remaining > limit else ""
    )
    return f"cache: removed {len(removed)} entries, {bytes_in_words(freed)}; {kept}"


def listing(cache: Cache) -> tuple[Table, str]:
    """(a table with a row for every entry, a line with the sums of each section)."""
    found = entries(cache)
    drawn = Table("what", "of", "size", "last used", "key")
    for entry in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        drawn.add_row(MEANING[entry.section], Text(entry.label), bytes_in_words(entry.size), when, entry.key[:8])
    return drawn, f"{cache.root}: {sums(found)}"


def sums(found: Iterable[Entry]) -> str:
    """``3 scores 1.2 MB, ..., 4 GB in all``."""
    listed = list(found)
    parts = []
    for section in SECTIONS:
        sizes = [entry.size for entry in listed if entry.section == section]
        if sizes:
            parts.append(f"{len(sizes)} {section} {bytes_in_words(sum(sizes))}")
    return ", ".join([*parts, f"{bytes_in_words(sum(entry.size for entry in listed))} in all"])
