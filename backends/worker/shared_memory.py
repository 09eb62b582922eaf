"""Shared memory that an engine's processes leave if they are killed.

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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY_FILE = re.compile(r"/dev/shm/(psm_|sem\.|torch_|vllm_dist_)[^/]*")
CREATED = re.compile(r"/dev/shm/sem\.\w+-(\d+)-.*")
"""A semaphore with its creator's process id.

vLLM's EngineCore makes one that its worker process maps only seconds later.
"""
NOTE = "shared_memory.txt"
"""File in a worker's folder for temporary files, with the files that its processes have mapped."""
WATCH_S = 0.2
"""Seconds between looks for new files, while workers run."""
ATTEMPTS = 20
PAUSE_S = 0.05
"""Seconds between attempts: a process that was just killed still maps its files for a moment."""


class Notes:
    """Notes of the files that each worker's processes map, written by their engine process.

    A process that has been killed no longer shows its maps, and an engine process may be killed
    with its workers.
    """

    def __init__(self) -> None:
        self.files: frozenset[str] = frozenset()
        self.is_again = False

    def update(self, workers: Mapping[int, str]) -> None:
        """Write the notes of workers (process group -> folder) if a file has appeared."""
        files = frozenset(files_in_memory())
        is_new = not files <= self.files
        # Once more the next time: a new file may not have been mapped yet.
        if is_new or self.is_again:
            for group, folder in workers.items():
                note(group, folder)
        self.files = files
        self.is_again = is_new


def note(group: int, folder: str) -> None:
    """Add the files that a process group maps now to the note in the worker's folder.

    "" writes nothing.
    """
    write_note(folder, noted_files(folder) | files_of_group(group))


def write_note(folder: str, files: set[str]) -> None:
    """Write the note of a worker's folder; "" writes nothing."""
    if not folder:
        return
    file = Path(folder, NOTE)
    begun = file.with_suffix(".new")
    with suppress(OSError):  # a full disk: the files are still found while a process maps them
        begun.write_text("\n".join(sorted(files)))
        os.replace(begun, file)


def noted_files(folder: str) -> set[str]:
    """Return the files in the note of a worker's folder; none without a note, and none for ""."""
    files: set[str] = set()
    if not folder:
        return files
    with suppress(OSError):
        for file in Path(folder, NOTE).read_text().splitlines():
            if SHARED_MEMORY_FILE.fullmatch(file):
                files.add(file)
    return files


def files_in_memory() -> Iterator[str]:
    """Yield the files of ``/dev/shm`` that may be an engine's."""
    with suppress(OSError):
        for name in os.listdir("/dev/shm"):
            if SHARED_MEMORY_FILE.fullmatch(f"/dev/shm/{name}"):
                yield f"/dev/shm/{name}"


def files_of_worker(group: int, folder: str) -> set[str]:
    """Return the files that a worker's processes map now, and the files in the note in its folder.

    Files that this process maps do not count: a worker is a fork of it, and inherits its maps.
    """
    files = files_of_group(group) | noted_files(folder)
    with suppress(OSError):
        files -= mapped_files(os.getpid())
    return files


def files_of_group(group: int) -> set[str]:
    """Return the files of shared memory that the processes of a group map.

    And the semaphores that they have created, even if no process maps them yet.
    """
    files: set[str] = set()
    members = set()
    for process in processes():
        with suppress(OSError):
            if os.getpgid(process) == group:
                members.add(process)
                files |= mapped_files(process)
    for file in files_in_memory():
        created = CREATED.fullmatch(file)
        if created and int(created[1]) in members:
            files.add(file)
    return files


def remove(files: set[str]) -> set[str]:
    """Delete files of processes that have been killed.

    Return those that stay, because a process still maps them.
    """
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
            break
        if attempt < ATTEMPTS - 1:
            time.sleep(PAUSE_S)
    return files


def processes() -> Iterator[int]:
    """Yield the ids of all processes; none on a system without ``/proc``."""
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)


def mapped_files(process: int) -> set[str]:
    """Return the files of shared memory that a process maps.

    OSError if the process has ended or is another user's.
    """
    files = set()
    with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            # address, permissions, offset, device, inode, path
            fields = line.rstrip("\n").split(maxsplit=5)
            path = fields[-1]
            if SHARED_MEMORY_FILE.fullmatch(path) and not path.endswith(" (deleted)"):
                files.add(path)
    return files
