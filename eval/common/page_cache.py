"""Read files into the system's page cache before a model is loaded from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

MEMORY = Path("/proc/meminfo")
LARGEST_SHARE = 0.5
"""Share of the available memory that the files may take, so that they drop no other pages."""
CHUNK_BYTES = 8 << 20


def read_ahead(files: Sequence[Path], check: Callable[[], None]) -> None:
    """Read files, so that the next reader finds them in memory.

    ``check`` is called again and again, and raises an error that ends the reading.  Nothing is read
    if the available memory is too small, or unknown.  OSError for a file that cannot be read.
    """
    n_bytes = sum(file.stat().st_size for file in files)
    if n_bytes > LARGEST_SHARE * available_bytes():
        return
    chunk = bytearray(CHUNK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(chunk):
                check()


def available_bytes() -> int:
    """Return the memory that new pages may take without swapping; 0 if the system does not say."""
    if not MEMORY.is_file():
        return 0
    for line in MEMORY.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
