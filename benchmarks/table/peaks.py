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
    """Peaks that threads measure.

    ``device_mib``: of each GPU as nvidia-smi lists them, all processes together; ``host_mib``: of a
    process and its descendants.

    Host memory is memory that the system cannot take back: private and shared pages, but not pages
    of files, which belong to the page cache.  Shared pages count in every process that has them.
    """

    def __init__(self) -> None:
        self.device_mib: list[int] = []
        self.host_mib = 0
        self.ended = threading.Event()

    def watch_host(self, pid: int) -> None:
        while not self.ended.wait(EVERY_S):
            used_kib = sum(resident_kib(process) for process in descendants(pid))
            self.host_mib = max(self.host_mib, used_kib // 1024)

    def watch_devices(self) -> None:
        while not self.ended.is_set():
            began = time.monotonic()
            fields = [row[0] for row in machine.nvidia_smi("--query-gpu=memory.used")]
            # nvidia-smi prints nothing without a GPU, and "[N/A]" for some GPUs.
            if not fields or not all(field.isdecimal() for field in fields):
                return
            used = [int(field) for field in fields]
            before = self.device_mib or used
            self.device_mib = [max(pair) for pair in zip(used, before, strict=False)]
            self.ended.wait(max(0.0, EVERY_S - (time.monotonic() - began)))


def descendants(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name before it is in parentheses, and may have spaces and parentheses.
            _, _, after_name = stat.read_text().rpartition(")")
            parent = int(after_name.split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    family = [pid]
    # The list grows while it is read: children, then their children.
    for member in family:
        family += children.get(member, [])
    return family


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process without the pages of files, KiB; 0 if it is gone."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1])
    return total


@contextmanager
def watched(pid: int) -> Iterator[Peaks]:
    """Measure the peaks of a process while the block runs."""
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
