"""The GPUs of a run.  Each model has its GPUs alone, from loading to closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...backends.common.errors import InputError
from ...backends.common.machine import Gpu

POLL_S = 0.5
"""Seconds between two checks of whether the run was stopped."""


class GpuPool:
    """GPUs of one type, assigned to waiting models in the order of their requests.

    ``slots``: number of models on one GPU each that can run at the same time.  A machine without
    GPUs has one slot.  A Ray cluster has one slot per GPU, and ``gpus`` is empty: its GPUs are only
    counted here.  ``names``: of all GPUs in CUDA_VISIBLE_DEVICES; None without any.
    """

    def __init__(self, gpus: Sequence[Gpu] = (), slots: int | None = None) -> None:
        self.gpus = tuple(gpus)
        self.names = tuple(gpu.device for gpu in gpus) or None
        self.slots = slots or max(len(self.gpus), 1)
        self.free = set(range(self.slots))
        self.queue: list[object] = []
        self.changed = threading.Condition()

    @contextmanager
    def take(self, count: int, check: Callable[[], None]) -> Iterator[tuple[str, ...] | None]:
        """Wait for ``count`` GPUs, at most all, and hold them; yield their names in
        CUDA_VISIBLE_DEVICES.

        None on a machine without GPUs, and if Ray assigns them.  ``check`` is called every
        ``POLL_S`` seconds, and raises StoppedError if the run was stopped.  A model that needs
        fewer GPUs does not overtake a waiting one.
        """
        count, ticket = max(1, min(count, self.slots)), object()
        with self.changed:
            self.queue.append(ticket)
            try:
                while self.queue[0] is not ticket or len(self.free) < count:
                    check()
                    self.changed.wait(POLL_S)
                taken = sorted(self.free)[:count]
                self.free.difference_update(taken)
            finally:
                self.queue.remove(ticket)
                self.changed.notify_all()
        try:
            yield tuple(self.gpus[index].device for index in taken) if self.gpus else None
        finally:
            with self.changed:
                self.free.update(taken)
                self.changed.notify_all()


def select_gpus(
    found: Sequence[Gpu], wanted: Sequence[str] | None, say: Callable[[str], None]
) -> list[Gpu]:
    """Return the GPUs that a run uses: all GPUs of the first one's type, since scores depend on the
    type.

    ``wanted``: the names in ``--gpus``, or None for all ``found`` GPUs.  ``say`` prints the names
    of GPUs that are not used.  InputError if a name is not the name of a GPU.
    """
    if wanted is not None:
        known = {gpu.device: gpu for gpu in found}
        for name in wanted:
            if name not in known:
                raise InputError(
                    f"--gpus: there is no GPU {name}; there are: {', '.join(known) or 'none'}"
                )
        found = [known[name] for name in dict.fromkeys(wanted)]
    same = [gpu for gpu in found if gpu.name == found[0].name]
    if others := ", ".join(gpu.device for gpu in found if gpu not in same):
        say(f"not used, since they are no {same[0].name}: GPUs {others}")
    return same
