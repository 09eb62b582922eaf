"""The GPUs of a run, handed out to its models: each model has its own alone, from loading to closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.machine import Gpu


@dataclass(eq=False)
class Hold:
    """What one model has of the GPUs: their ``names`` in CUDA_VISIBLE_DEVICES, None without GPUs.

    ``place``: who is lower is served first.
    """

    count: int
    place: int
    indices: tuple[int, ...] = ()
    names: tuple[str, ...] | None = None


class Devices:
    """GPUs of one kind.  Each is given to one worker at a time; a machine without GPUs works on one model at a time.

    ``slots``: how many models can be in work at the same time; given for a cluster, whose GPUs are counted here, and
    handed out by Ray.
    """

    def __init__(self, gpus: Sequence[Gpu] = (), slots: int | None = None) -> None:
        self.gpus = tuple(gpus)
        self.slots = slots or max(len(self.gpus), 1)
        self.holds: list[Hold] = []
        self.waiting: list[Hold] = []
        self.begun: set[int] = set()
        self.changed = threading.Condition()

    def planned(self, wanted: int) -> tuple[Gpu, ...]:
        """GPUs like those that a model gets which asks for ``wanted``, 0 for all; InputError if the run has fewer."""
        if self.gpus and wanted > len(self.gpus):
            raise InputError(f"gpus: the model needs {wanted} GPUs, the run has {len(self.gpus)}")
        return self.gpus[: wanted or len(self.gpus)]

    @contextmanager
    def taken(self, wanted: int, place: int = 0) -> Iterator[Hold]:
        """Wait for that many GPUs and hold them; who is first in the run is served first, and so never overtaken."""
        hold = Hold(max(wanted, 1), place)
        with self.changed:
            self.waiting.append(hold)
            try:
                while not (indices := self._offered(hold)):
                    self.changed.wait()
                hold.indices = indices
                hold.names = tuple(self.gpus[index].device for index in hold.indices) if self.gpus else None
                self.holds.append(hold)
                self.begun.add(place)
            finally:
                self.waiting.remove(hold)
                self.changed.notify_all()
        try:
            yield hold
        finally:
            with self.changed:
                self.holds.remove(hold)
                self.changed.notify_all()

    def pass_by(self, place: int, _: object = None) -> None:
        """The model of this place has begun, or never will: later ones need not wait for it."""
        with self.changed:
            self.begun.add(place)
            self.changed.notify_all()

    def _offered(self, hold: Hold) -> tuple[int, ...]:
        """The GPUs that a waiting model gets now, none if it has to wait.

        It waits for models before it that have not come yet, but where there are enough GPUs for these too.
        """
        n_before = sum(place not in self.begun for place in range(hold.place))
        if n_before >= self.slots or min(self.waiting, key=lambda other: other.place) is not hold:
            return ()
        held = {index for each in self.holds for index in each.indices}
        free = [index for index in range(self.slots) if index not in held]
        return tuple(free[: hold.count]) if len(free) >= hold.count else ()


@dataclass(frozen=True)
class Kind:
    """A kind of machine elsewhere, on which a model has the same scores wherever it runs.

    ``devices``: the GPUs of the largest such machine; ``processor``, ``settings``: what ``machine`` says there;
    ``cpus``: processors that a model takes on a machine without GPUs; ``nodes``: the machines, by their ids.
    """

    devices: Devices
    processor: dict[str, Any]
    settings: dict[str, str]
    cpus: float
    nodes: tuple[str, ...]

    @property
    def name(self) -> str:
        """GPU or processor."""
        return self.devices.gpus[0].name if self.devices.gpus else str(self.processor["cpu"])

    @property
    def slots(self) -> int:
        """Models that its machines can run at the same time, each on one GPU."""
        return len(self.nodes) * self.devices.slots


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
    left_out = ", ".join(gpu.device for gpu in found if gpu.name != same[0].name)
    return same, f"not used, since they are no {same[0].name}: GPUs {left_out}" if left_out else ""
