"""``compare-q cache`` and ``--cache-limit``: list the cache folder and keep it small.

Only files with the names that compare_q gives are listed and removed (``eval/common/cache.py``), and nothing that a
run uses is removed.
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
    """One entry of the cache.

    Attributes:
        section: one of ``SECTIONS``.
        key: 40 hexadecimal digits.
        size: bytes.
        used: when it was last used, in seconds since 1970.
        label: the label of its model.
    """

    section: str
    key: str
    path: Path
    size: int
    used: float
    label: str = ""


def entries(cache: Cache) -> list[Entry]:
    """Return the entries of the cache; the one that was used last comes first."""
    found = []
    for section in SECTIONS:
        with suppress(OSError):  # the folder does not exist
            for path in (cache.root / section).iterdir():
                if files := own_files(section, path):
                    with suppress(OSError):
                        stats, key = [file.stat() for file in files], NAMES[section].fullmatch(path.name)
                        used = max(stat.st_mtime for stat in [*stats, path.stat()])  # runs touch what they use
                        size = sum(stat.st_size for stat in stats)
                        found.append(Entry(section, key[1] if key else "", path, size, used, label_of(section, path)))
    return sorted(found, key=lambda entry: (-entry.used, entry.path))


def label_of(section: str, path: Path) -> str:
    """Return the label of the model in the run that wrote an entry; empty if unknown."""
    if section == "scores":
        return str(next((record["label"] for record in segments.records(path).values() if record.get("label")), ""))
    if section == "references":
        with suppress(InputError):
            return str(read_manifest(path).identity.get("label") or "")
    return ""


def prune(cache: Cache, limit: int) -> tuple[list[Entry], int]:
    """Remove the least recently used entries until ``limit`` bytes remain; return (removed entries, remaining bytes).

    More than ``limit`` bytes remain if runs use them.
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
    """Delete an entry unless a run uses or locks it; return True if it is gone."""
    lock = cache.path(entry.section, entry.key, ".lock")
    with suppress(Timeout, OSError):
        with cache.lock_at(lock).acquire(timeout=0):
            if entry.key not in cache.used_by_runs():  # a run may have started meanwhile
                cache.remove(entry.section, entry.path)
        remove_lock(lock)
    return not own_files(entry.section, entry.path)


def limited(cache: Cache, limit: int) -> str:
    """Prune the cache; return a line on what was removed and what remains."""
    removed, remaining = prune(cache, limit)
    freed = sum(entry.size for entry in removed)
    kept = f"{bytes_in_words(remaining)} are left" + (
        f", over the limit of {bytes_in_words(limit)}: in use" if remaining > limit else ""
    )
    return f"cache: removed {len(removed)} entries, {bytes_in_words(freed)}; {kept}"


def listing(cache: Cache) -> tuple[Table, str]:
    """Return (a table of all entries, a line with the size of each section: ``3 scores 1.2 MB, 4 GB in all``)."""
    drawn, sizes = Table("what", "of", "size", "last used", "key"), dict[str, list[int]]()
    for entry in entries(cache):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        drawn.add_row(MEANING[entry.section], Text(entry.label), bytes_in_words(entry.size), when, entry.key[:8])
        sizes.setdefault(entry.section, []).append(entry.size)
    parts = [f"{len(sizes[name])} {name} {bytes_in_words(sum(sizes[name]))}" for name in SECTIONS if name in sizes]
    return drawn, f"{cache.root}: {', '.join([*parts, f'{bytes_in_words(sum(map(sum, sizes.values())))} in all'])}"
