"""What was computed once is kept: files that are named by a hash of all that they depend on, written atomically.

Layout: ``<cache>/<section>/<key>.<suffix>``, sections ``tokens``, ``scores`` and ``references`` (a folder each), engine
logs under ``logs``.  A key covers the content of models and texts, not the places where they lie; ``-cc``
removes the entries of a run's text and models.  Under ``runs`` every run that still goes on names the entries that it
uses, so that ``--cache-limit`` (``eval/cli/cache_listing.py``) leaves them alone.
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
        """Key of an entry, 40 hexadecimal digits: SHA-256 of the canonical JSON of all that the entry depends on."""
        return hashlib.sha256(json.dumps([section, identity], sort_keys=True).encode()).hexdigest()[:40]

    def path(self, section: str, key: str, suffix: str) -> Path:
        """Where an entry lies, whether it exists or not."""
        return self.root / section / f"{key}{suffix}"

    def log_file(self, label: str, key: str) -> Path:
        """The log file of the engine that computes an entry."""
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
        """Say that this run uses an entry: the entry counts as used now, and no run removes it before this run ends."""
        if self.running is None:
            self.running = FileLock(f"{self.run}.lock")
            self.running.acquire()
            weakref.finalize(self, remove_marks, self.run, self.running)
        with self.run.with_suffix(".keys").open("a", encoding="utf-8") as file:
            file.write(f"{key}\n")
        for entry in (self.path(section, key, suffix) for suffix in (".json", ".npz", "")):
            with suppress(OSError):
                os.utime(entry / MANIFEST if entry.is_dir() else entry)

    def used_by_runs(self) -> set[str]:
        """Keys of the entries that runs use, this run included; the marks of runs that were killed are removed."""
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


def remove_marks(run: Path, running: FileLock) -> None:
    """Remove the files that mark a run, which has ended; for a killed run the next ``--cache-limit`` removes them."""
    running.release()
    for suffix in (".keys", ".lock"):
        run.with_suffix(suffix).unlink(missing_ok=True)
