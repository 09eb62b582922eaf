"""What was computed once is kept: files named by a hash of everything they depend on, written atomically.

Layout: ``<cache>/<section>/<key>.<suffix>``, sections ``tokens``, ``scores`` and ``references`` (a folder each), engine
logs under ``logs``.  A key covers content, not where it lies; ``-cc`` removes the entries of the text and the
models.  Under ``runs`` every run that goes on names what it uses, so that ``--cache-limit``
(``eval/cli/cache_listing.py``) leaves that alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from backends.common.errors import InputError
from backends.reference.store import MANIFEST
from eval.common.files import replacing

ENVIRONMENT = "COMPARE_Q_CACHE"
SECTIONS = ("tokens", "scores", "references", "logs")


def default_root() -> Path:
    """``$COMPARE_Q_CACHE``, else the user's cache folder."""
    chosen = os.environ.get(ENVIRONMENT)
    return Path(chosen) if chosen else user_cache_path("compare_q", appauthor=False)


class Cache:
    """A folder of content-keyed files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = root / "runs" / uuid.uuid4().hex
        self.running: FileLock | None = None
        try:
            for section in (*SECTIONS, "runs"):
                (root / section).mkdir(parents=True, exist_ok=True)
            trial = root / f".trial.{os.getpid()}"
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise InputError(f"--cache-dir: {root}: cannot be written: {error.strerror}") from None

    @staticmethod
    def key(section: str, identity: Mapping[str, Any]) -> str:
        """Hex key of an entry: SHA-256 over the canonical JSON of what it depends on."""
        return hashlib.sha256(json.dumps([section, identity], sort_keys=True).encode()).hexdigest()[:40]

    def path(self, section: str, key: str, suffix: str) -> Path:
        """Where an entry lies, whether it exists or not."""
        return self.root / section / f"{key}{suffix}"

    def log_file(self, label: str, key: str) -> Path:
        """Log of the engine that computed an entry."""
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in label)
        return self.root / "logs" / f"{name[:60]}.{key}.log"

    @contextmanager
    def write(self, section: str, key: str, suffix: str) -> Iterator[Path]:
        """A temporary path that takes the entry's place when the block ends well, and vanishes if it does not."""
        with replacing(self.path(section, key, suffix)) as file:
            yield file

    def lock(self, section: str, key: str) -> FileLock:
        """Held while an entry is computed, so that two runs do not compute it twice."""
        return FileLock(str(self.path(section, key, ".lock")))

    def use(self, section: str, key: str) -> None:
        """Say that this run uses an entry: it counts as used now, and no other run removes it before this one ends."""
        if self.running is None:
            self.running = FileLock(f"{self.run}.lock")
            self.running.acquire()
            weakref.finalize(self, ended, self.run, self.running)
        with self.run.with_suffix(".keys").open("a", encoding="utf-8") as file:
            file.write(f"{key}\n")
        for entry in (self.path(section, key, suffix) for suffix in (".json", ".npz", "")):
            with suppress(OSError):
                os.utime(entry / MANIFEST if entry.is_dir() else entry)

    def used_by_runs(self) -> set[str]:
        """Keys of the entries that runs use, this one's too; what runs left that have ended is removed."""
        keys: set[str] = set()
        for file in (self.root / "runs").glob("*.keys"):
            lock = file.with_suffix(".lock")
            if file.stem != self.run.name:
                with suppress(Timeout), FileLock(str(lock), timeout=0):
                    file.unlink(missing_ok=True)
                    lock.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                keys.update(file.read_text(encoding="utf-8").split())
        return keys

    @staticmethod
    def read_json(file: Path) -> dict[str, Any]:
        """A JSON object in the cache; empty if it is not there or damaged."""
        with suppress(OSError, ValueError):
            found = json.loads(file.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def clear(self, section: str, key: str) -> None:
        """Remove an entry's files."""
        for suffix in (".json", ".parquet", ".npz"):
            self.path(section, key, suffix).unlink(missing_ok=True)


def ended(run: Path, running: FileLock) -> None:
    """A run's mark is taken away when it ends; of one that was killed the next ``--cache-limit`` does it."""
    running.release()
    for suffix in (".keys", ".lock"):
        run.with_suffix(suffix).unlink(missing_ok=True)
