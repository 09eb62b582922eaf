"""The GPUs of a run.  Each model has its GPUs alone, from loading to closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...backends.common.errors import InputError
from ...backends.common.machine import Gpu

GPU_POLL_S = 0.5
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

    @property
    def n_threads(self) -> int:
        """Number of models at the same time: those that run, and one that prepares for its GPUs.

        On a machine without GPUs, preparing would take processors from the model that runs.
        """
        if self.gpus:
            return self.slots + 1
        return self.slots

    @contextmanager
    def take(
        self, count: int, check: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[str, ...] | None]:
        """Wait for ``count`` GPUs, at most all, and hold them.

        Yield their names in CUDA_VISIBLE_DEVICES; None on a machine without GPUs, and if Ray
        assigns them.  ``check`` is called every ``GPU_POLL_S`` seconds, and raises StoppedError if
        the run was stopped.  A model that needs fewer GPUs does not overtake a waiting one.
        ``prepare`` is called once if the model must wait although it is the next one; not if Ray
        assigns the GPUs, since the node is not known yet.
        """
        count = max(1, min(count, self.slots))
        ticket = object()
        with self.changed:
            self.queue.append(ticket)
        try:
            with self.changed:
                while self.queue[0] is not ticket:
                    check()
                    self.changed.wait(GPU_POLL_S)
                must_wait = len(self.free) < count and bool(self.gpus)
            # Without the lock, since it takes seconds.
            if must_wait:
                prepare()
            with self.changed:
                while len(self.free) < count:
                    check()
                    self.changed.wait(GPU_POLL_S)
                indices = sorted(self.free)[:count]
                self.free.difference_update(indices)
        finally:
            with self.changed:
                self.queue.remove(ticket)
                self.changed.notify_all()
        names = None
        if self.gpus:
            names = tuple(self.gpus[index].device for index in indices)
        try:
            yield names
        finally:
            with self.changed:
                self.free.update(indices)
                self.changed.notify_all()


def select_gpus(
    machine_gpus: Sequence[Gpu], names: Sequence[str] | None, say: Callable[[str], None]
) -> list[Gpu]:
    """Return the GPUs that a run uses: all of the first one's type, since scores depend on it.

    ``names``: those in ``--gpus``, or None for all ``machine_gpus``.  ``say`` prints the names of
    GPUs that are not used.  InputError if a name is not the name of a GPU.
    """
    selected_gpus = list(machine_gpus)
    if names is not None:
        selected_gpus = gpus_with_names(machine_gpus, names)
    same_type = []
    unused_names = []
    for gpu in selected_gpus:
        if gpu.name == selected_gpus[0].name:
            same_type.append(gpu)
        else:
            unused_names.append(gpu.device)
    if unused_names:
        unused = ", ".join(unused_names)
        say(f"not used, since they are no {same_type[0].name}: GPUs {unused}")
    return same_type


def gpus_with_names(machine_gpus: Sequence[Gpu], names: Sequence[str]) -> list[Gpu]:
    """Return the GPUs with these names, each once; InputError for a missing GPU."""
    gpu_of_name = {gpu.device: gpu for gpu in machine_gpus}
    for name in names:
        if name not in gpu_of_name:
            existing = ", ".join(gpu_of_name) or "none"
            raise InputError(f"--gpus: there is no GPU {name}; there are: {existing}")
    return [gpu_of_name[name] for name in dict.fromkeys(names)]
