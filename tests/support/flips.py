"""Damage: flipped bits, truncated files, and file operations that fail or are interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FLIPS = int(os.environ.get("COMPARE_Q_FLIPS", "150"))
"""Number of random bits that are flipped in each kind of file."""


def flips(files: list[Path], seed: int, count: int = FLIPS) -> Iterator[tuple[Path, int]]:
    """Yield (file, position) ``count`` times; one random bit of the file is flipped until the next
    step.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        file = files[rng.integers(len(files))]
        good = file.read_bytes()
        position = int(rng.integers(len(good)))
        bad = bytearray(good)
        bad[position] ^= 1 << int(rng.integers(8))
        file.write_bytes(bad)
        yield file, position
        file.write_bytes(good)


# A BaseException, so that no ``except Exception`` handles it.
class KilledError(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_at(operation: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """End the process before its n-th operation that changes a file; yield a list of the
    operations.

    Later code, even in ``finally``, cannot change files.
    """
    done: list[str] = []

    def stopping(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keys: Any) -> Any:
            if len(done) >= operation:
                raise KilledError(name)
            done.append(name)
            return real(*args, **keys)

        return run

    write_bytes = Path.write_bytes

    def torn(self: Path, data: bytes) -> int:
        """Write half of the file if the process ends during this operation."""
        if len(done) <= operation:
            done.append("write_bytes")
            if len(done) <= operation:
                return write_bytes(self, data)
            write_bytes(self, data[: len(data) // 2])
        raise KilledError("write_bytes")

    with patch.context() as patched:
        for name in ("replace", "mkdir", "unlink", "rmdir", "write"):
            patched.setattr(os, name, stopping(name, getattr(os, name)))
        patched.setattr(Path, "write_bytes", torn)
        yield done
