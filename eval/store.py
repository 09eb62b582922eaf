"""What was computed once is kept: files named by a hash of everything they depend on, written atomically.

Layout: ``<cache>/<kind>/<key>.<suffix>``, kinds ``tokens``, ``scores`` and ``references`` (a folder each), engine logs
under ``logs``.  A key covers content, not where it lies; ``-cc`` removes the entries of the text and the models.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from backends.base import InputError
from eval.files import replacing

ENVIRONMENT = "COMPARE_Q_CACHE"


def default_root() -> Path:
    """``$COMPARE_Q_CACHE``, else the user's cache folder."""
    chosen = os.environ.get(ENVIRONMENT)
    return Path(chosen) if chosen else user_cache_path("compare_q", appauthor=False)


class Store:
    """A folder of content-keyed files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            for kind in ("tokens", "scores", "references", "logs"):
                (root / kind).mkdir(parents=True, exist_ok=True)
            probe = root / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(f"--cache-dir: {root}: cannot be written: {error.strerror}") from None

    @staticmethod
    def key(kind: str, identity: Mapping[str, Any]) -> str:
        """Hex key of an entry: SHA-256 over the canonical JSON of what it depends on."""
        return hashlib.sha256(json.dumps([kind, identity], sort_keys=True).encode()).hexdigest()[:40]

    def path(self, kind: str, key: str, suffix: str) -> Path:
        """Where an entry lies, whether it exists or not."""
        return self.root / kind / f"{key}{suffix}"

    def log_file(self, label: str, key: str) -> Path:
        """Log of the engine that computed an entry."""
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in label)
        return self.root / "logs" / f"{name[:60]}.{key[:8]}.log"

    @contextmanager
    def write(self, kind: str, key: str, suffix: str) -> Iterator[Path]:
        """A temporary path that takes the entry's place when the block ends well, and vanishes if it does not."""
        with replacing(self.path(kind, key, suffix)) as file:
            yield file

    def lock(self, kind: str, key: str) -> FileLock:
        """Held while an entry is computed, so that two runs do not compute it twice."""
        return FileLock(str(self.path(kind, key, ".lock")))

    def clear(self, kind: str, key: str) -> None:
        """Remove an entry's files."""
        for suffix in (".json", ".parquet", ".npz"):
            self.path(kind, key, suffix).unlink(missing_ok=True)
