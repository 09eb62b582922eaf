"""``cache`` and ``--cache-limit``: what the cache folder holds, and keeping it small.

Only what compare_q itself wrote is listed and removed: files that have the names of ours (``eval/common/cache.py``).
What a run uses, be it this run or another run that still goes on, is never removed.
"""

from __future__ import annotations

import time
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
    """Everything that the cache holds, but for what vanishes meanwhile; the entry that was used last comes first."""
    found = []
    for section in SECTIONS:
        with suppress(OSError):  # nothing was ever kept
            for path in (cache.root / section).iterdir():
                if files := own_files(section, path):
                    with suppress(OSError):
                        stats, key = [file.stat() for file in files], NAMES[section].fullmatch(path.name)
                        used = max(stat.st_mtime for stat in [*stats, path.stat()])  # a run that uses it touches it
                        size = sum(stat.st_size for stat in stats)
                        found.append(Entry(section, key[1] if key else "", path, size, used, label_of(section, path)))
    return sorted(found, key=lambda entry: (-entry.used, entry.path))


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
    lock = cache.path(entry.section, entry.key, ".lock")
    with suppress(Timeout, OSError):
        with cache.lock_at(lock).acquire(timeout=0):
            if entry.key not in cache.used_by_runs():  # asked now: a run may have begun since the entries were listed
                cache.remove(entry.section, entry.path)
        remove_lock(lock)
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
    """(a table with a row for every entry, a line with the sums of each section: ``3 scores 1.2 MB, 4 GB in all``)."""
    drawn, sizes = Table("what", "of", "size", "last used", "key"), dict[str, list[int]]()
    for entry in entries(cache):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        drawn.add_row(MEANING[entry.section], Text(entry.label), bytes_in_words(entry.size), when, entry.key[:8])
        sizes.setdefault(entry.section, []).append(entry.size)
    parts = [f"{len(sizes[name])} {name} {bytes_in_words(sum(sizes[name]))}" for name in SECTIONS if name in sizes]
    return drawn, f"{cache.root}: {', '.join([*parts, f'{bytes_in_words(sum(map(sum, sizes.values())))} in all'])}"
