"""Measure the peak memory of a process and its descendants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compare_q.backends.common import machine

EVERY_S = 0.2


class Peaks:
    """Watches from a thread: ``device_mib`` of each GPU as nvidia-smi lists them, all processes
    together; ``host_mib`` of a process and its descendants.

    Host memory is memory that the system cannot take back: private and shared pages, but not pages
    of files, which belong to the page cache.  Shared pages count in every process that has them.
    """

    def __init__(self) -> None:
        self.device_mib: list[int] = []
        self.host_mib = 0
        self.ended = threading.Event()

    def watch_host(self, pid: int) -> None:
        while not self.ended.wait(EVERY_S):
            self.host_mib = max(self.host_mib, sum(map(own_kib, descendants(pid))) // 1024)

    def watch_devices(self) -> None:
        while not self.ended.is_set():
            began = time.monotonic()
            told = [row[0] for row in machine.nvidia_smi("--query-gpu=memory.used")]
            if not told or not all(map(str.isdecimal, told)):
                return
            used = list(map(int, told))
            self.device_mib = [*map(max, used, self.device_mib or used)]
            self.ended.wait(max(0.0, EVERY_S - (time.monotonic() - began)))


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def own_kib(pid: int) -> int:
    """Resident memory of a process without the pages of files, KiB; 0 if it is gone."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(
            int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
        )
    return 0


@contextmanager
def watched(pid: int) -> Iterator[Peaks]:
    """Peaks of a process while the block runs."""
    peaks = Peaks()
    threads = [
        threading.Thread(target=peaks.watch_host, args=(pid,)),
        threading.Thread(target=peaks.watch_devices),
    ]
    for thread in threads:
        thread.start()
    try:
        yield peaks
    finally:
        peaks.ended.set()
        for thread in threads:
            thread.join()
