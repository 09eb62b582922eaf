"""Shared memory that an engine's processes leave behind if they are killed.

Python's shared memory (``psm_*``: vLLM's queues, 160 MiB each) and semaphores (``sem.*``), torch's
tensors (``torch_*``) and vLLM's ranks on CPUs (``vllm_dist_*``) are files in ``/dev/shm``, which
take memory until they are deleted.  vLLM 0.32 leaves the files of its ranks also when it ends in
order.  The names do not say whose they are, but the memory maps of a process show the files that it
uses.  Other files there, such as a model that somebody loads from ``/dev/shm``, are never deleted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FILE = re.compile(r"/dev/shm/(psm_|sem\.|torch_|vllm_dist_)[^/]*")
NOTE = "shared_memory.txt"
"""File in a worker's folder for temporary files, with the files that its processes have mapped."""
ATTEMPTS = 20
PAUSE_S = 0.05
"""Seconds between attempts: a process that was just killed still maps its files for a moment."""


def note(folder: str) -> None:
    """Write the files of this process group into the worker's folder; "" writes nothing.

    A worker does so after loading, because a process that is killed later no longer shows its maps.
    """
    if folder:
        files = sorted(files_of_group(os.getpgrp()))
        with suppress(OSError):  # a full disk: the files are still found while a process maps them
            Path(folder, NOTE).write_text("\n".join(files))


def files_of_worker(group: int, folder: str) -> set[str]:
    """Return the files that a worker's processes map now, and those that it has noted.

    Without the files that this process maps: the worker, its fork, maps them too.
    """
    files = files_of_group(group)
    with suppress(OSError):
        files.update(Path(folder, NOTE).read_text().splitlines())
    with suppress(OSError):
        files -= mapped_files(os.getpid())
    return files


def files_of_group(group: int) -> set[str]:
    """Return the files of shared memory that the processes of a group map."""
    files: set[str] = set()
    for process in processes():
        with suppress(OSError):
            if os.getpgid(process) == group:
                files |= mapped_files(process)
    return files


def remove(files: set[str]) -> None:
    """Delete files of processes that have been killed; a file that any process still maps stays."""
    for attempt in range(ATTEMPTS):
        mapped: set[str] = set()
        for process in processes():
            with suppress(OSError):
                mapped |= mapped_files(process)
        for file in files - mapped:
            with suppress(OSError):
                os.unlink(file)
        files = files & mapped
        if not files:
            return
        if attempt < ATTEMPTS - 1:
            time.sleep(PAUSE_S)


def processes() -> Iterator[int]:
    """Yield the ids of all processes; none on a system without ``/proc``."""
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)


def mapped_files(process: int) -> set[str]:
    """Return the files of shared memory that a process maps.

    OSError if the process has ended or is not the user's.
    """
    files = set()
    with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            # address, permissions, offset, device, inode, path
            fields = line.rstrip("\n").split(maxsplit=5)
            path = fields[-1]
            if FILE.fullmatch(path) and not path.endswith(" (deleted)"):
                files.add(path)
    return files
