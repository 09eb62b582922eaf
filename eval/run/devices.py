"""The GPUs of a run, handed out to its workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from backends.common import machine
from backends.common.errors import InputError
from backends.common.machine import Gpu


class Devices:
    """GPUs of one kind.  Each is given to one worker at a time; a machine without GPUs works on one model at a time."""

    def __init__(self, gpus: Sequence[Gpu] = ()) -> None:
        self.gpus = tuple(gpus)
        self.free = list(range(max(len(gpus), 1)))
        self.waiting: list[object] = []
        self.changed = threading.Condition()

    @property
    def slots(self) -> int:
        """How many models can be in work at the same time."""
        return max(len(self.gpus), 1)

    def needed(self, wanted: int) -> int:
        """GPUs that a model gets which asks for ``wanted``, 0 for all; InputError if the run has fewer."""
        if self.gpus and wanted > len(self.gpus):
            raise InputError(f"gpus: the model needs {wanted} GPUs, the run has {len(self.gpus)}")
        return (wanted or len(self.gpus)) if self.gpus else 0

    def of(self, wanted: int) -> tuple[Gpu, ...]:
        """GPUs like those that a model gets: which of a kind it will be is not known before."""
        return self.gpus[: self.needed(wanted)]

    @contextmanager
    def taken(self, wanted: int) -> Iterator[tuple[str, ...] | None]:
        """Wait for that many GPUs and hold them: their names in CUDA_VISIBLE_DEVICES, None without GPUs.

        Who came first is served first, so that a model on many GPUs is not overtaken for ever.
        """
        count, ticket = max(wanted, 1), object()
        with self.changed:
            self.waiting.append(ticket)
            try:
                self.changed.wait_for(lambda: self.waiting[0] is ticket and len(self.free) >= count)
                held, self.free = self.free[:count], self.free[count:]
            finally:
                self.waiting.remove(ticket)
                self.changed.notify_all()
        try:
            yield tuple(self.gpus[index].device for index in held) if self.gpus else None
        finally:
            with self.changed:
                self.free = sorted(self.free + held)
                self.changed.notify_all()


@dataclass(frozen=True)
class Kind:
    """A kind of machine elsewhere, on which a model has the same scores wherever it runs.

    ``devices``: the GPUs of the largest such machine; ``cpu``, ``settings``, ``threads``: what ``machine`` says there;
    ``cpus``: processors that a model takes on a machine without GPUs; ``nodes``: the machines, by their ids.
    """

    devices: Devices
    cpu: str
    settings: Mapping[str, str]
    threads: Mapping[str, Any]
    cpus: float
    nodes: tuple[str, ...]

    @property
    def name(self) -> str:
        """GPU or processor."""
        return self.devices.gpus[0].name if self.devices.gpus else self.cpu

    @property
    def slots(self) -> int:
        """Models that its machines can run at the same time, each on one GPU."""
        return len(self.nodes) * self.devices.slots

    def hardware(self, gpus: Sequence[Gpu], *, torch: bool, cpu_only: bool) -> dict[str, Any]:
        """``machine.hardware`` and ``machine.settings`` of such a machine."""
        found = machine.hardware(gpus, torch=torch, cpu_only=cpu_only)
        return {**found, **({"cpu": self.cpu} if "cpu" in found else {}), **self.settings}


def chosen(found: Sequence[Gpu], wanted: Sequence[str] | None) -> tuple[tuple[Gpu, ...], str]:
    """(the GPUs of a run, what to tell the user): those named in ``--gpus``, and of several kinds only the first.

    Scores belong to a kind of GPU: a model must not land on one kind or on another by chance.  InputError for a name
    that is no GPU.
    """
    if wanted is not None:
        known = {gpu.device: gpu for gpu in found}
        for name in wanted:
            if name not in known:
                raise InputError(f"--gpus: there is no GPU {name}; there are: {', '.join(known) or 'none'}")
        found = [known[name] for name in dict.fromkeys(wanted)]
    same = tuple(gpu for gpu in found if gpu.name == found[0].name)
    left_out = [gpu.device for gpu in found if gpu.name != same[0].name]
    said = f"not used, since they are no {same[0].name}: GPUs {', '.join(left_out)}" if left_out else ""
    return same, said
