"""``compare-q cache`` and ``--cache-limit``: list the cache folder and keep it small.

Only files with the names that compare_q gives are listed and removed (``eval/common/cache.py``), and nothing that a
run uses is removed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import Timeout

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import bytes_in_words
from compare_q.backends.reference.store import read_manifest
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import NAMES, Cache, own_files, remove_lock
from compare_q.eval.common.terminal import say

MEANING = {"tokens": "tokenized text", "scores": "scores", "references": "reference", "logs": "engine's log"}


class Entry(NamedTuple):
    """One entry: ``size`` in bytes, ``used`` last in seconds since 1970, the ``label`` of its model."""

    section: str
    key: str
    path: Path
    size: int
    used: float
    label: str


def run(args: argparse.Namespace) -> int:
    """``cache``: list the cache, after ``--cache-limit``."""
    cache = Cache(args.cache_dir)
    if args.cache_limit is not None:
        say(limited(cache, args.cache_limit))
    lines = ["last used             size  what"]
    sizes: dict[str, list[int]] = {section: [] for section in NAMES}
    for entry in entries(cache):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        what = f"{MEANING[entry.section]}{f' of {entry.label}' if entry.label else ''}, {entry.key[:8]}"
        lines.append(f"{when}  {bytes_in_words(entry.size):>8}  {what}")
        sizes[entry.section].append(entry.size)
    say(*(lines if len(lines) > 1 else ()))
    parts = [f"{len(each)} {section} {bytes_in_words(sum(each))}" for section, each in sizes.items() if each]
    say(f"{cache.root}: {', '.join([*parts, bytes_in_words(sum(map(sum, sizes.values()))) + ' in all'])}")
    return 0


def entries(cache: Cache) -> list[Entry]:
    """Return the entries of the cache; the one that was used last comes first."""
    found = []
    for section, pattern in NAMES.items():
        with suppress(OSError):  # the folder does not exist
            for path in (cache.root / section).iterdir():
                name, files = pattern.fullmatch(path.name), own_files(section, path)
                if name and files:
                    with suppress(OSError):
                        stats = [file.stat() for file in files]
                        used = max(stat.st_mtime for stat in [*stats, path.stat()])  # runs touch what they use
                        size = sum(stat.st_size for stat in stats)
                        found.append(Entry(section, name[1], path, size, used, label_of(section, path)))
    return sorted(found, key=lambda entry: (-entry.used, entry.path))


def label_of(section: str, path: Path) -> str:
    """Return the label of the model in the run that wrote an entry; empty if unknown."""
    labels: Iterable[Any] = ()
    with suppress(InputError):
        if section == "scores":
            labels = (record.get("label") for record in segments.records(path).values())
        elif section == "references":
            labels = [read_manifest(path).identity.get("label")]
    return str(next(filter(None, labels), ""))


def prune(cache: Cache, limit: int) -> tuple[list[Entry], int]:
    """Remove the least recently used entries until ``limit`` bytes remain; return (removed entries, remaining bytes).

    Entries that a run uses or locks stay, also above the limit.
    """
    kept, removed = entries(cache), list[Entry]()
    remaining = sum(entry.size for entry in kept)
    while kept and remaining > limit:
        entry = kept.pop()
        lock = cache.path(entry.section, entry.key, ".lock")
        with suppress(Timeout, OSError):
            with cache.lock_at(lock).acquire(timeout=0):
                if entry.key not in cache.used_by_runs():  # a run may have started in the meantime
                    cache.remove(entry.section, entry.path)
            remove_lock(lock)
        if not own_files(entry.section, entry.path):
            removed.append(entry)
            remaining -= entry.size
    return removed, remaining


def limited(cache: Cache, limit: int) -> str:
    """Prune the cache; return a line on what was removed and what remains."""
    removed, remaining = prune(cache, limit)
    freed, kept = sum(entry.size for entry in removed), f"{bytes_in_words(remaining)} are left"
    if remaining > limit:
        kept += f", over the limit of {bytes_in_words(limit)}: in use"
    return f"cache: removed {len(removed)} entries, {bytes_in_words(freed)}; {kept}"
