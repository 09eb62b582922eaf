"""The GPUs of a run: which models have them, and when each of them may compute.

A model has its GPUs alone.  Only on a machine with a single GPU, models whose memory is known may
be on it together, if it is large enough.  They load at the same time.  Then they score one after
the other, and no model loads before all of them have ended: each speed is measured on a GPU that
computes nothing else.  While a model scores, the processes of the one before it may still end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ...backends.common import machine
from ...backends.common.errors import InputError
from ...backends.common.machine import Gpu

STOP_POLL_S = 0.5
"""Seconds between two checks of whether the run was stopped."""
SHARE_OF_GPU = 0.8
"""Share of the GPU's memory that models on it together may need."""
MOST_TOGETHER = 8
"""Largest number of models on one GPU.  More would hardly load faster."""
CORES_OF_LOAD = 2
"""Processor cores for each model that loads at the same time."""
HOST_BYTES_OF_LOAD = 4 << 30
"""Memory of the machine for each model that loads at the same time."""
Check = Callable[[], None]
"""Raises StoppedError if the run was stopped; called every ``STOP_POLL_S`` seconds."""


class LoadGroup:
    """Models that have the same GPUs.

    Attributes:
        models: those that have not ended.
        to_score: those of them that have not scored, in their order.
        loading: those of them that have not asked for their turn.
        n_added: number of models, with those that have ended.
        n_bytes: memory that is enough for all of them.
        is_open: other models may join.
        users: the programs that used the GPU before the models; None: not known.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.models: set[object] = set()
        self.to_score: list[object] = []
        self.loading: set[object] = set()
        self.n_added = 0
        self.n_bytes = 0
        self.is_open = is_open
        self.users: str | None = None

    def add(self, model: object, n_bytes: int | None) -> None:
        """Add a model that will load."""
        self.models.add(model)
        self.to_score.append(model)
        self.loading.add(model)
        self.n_added += 1
        self.n_bytes += n_bytes or 0

    def remove(self, model: object) -> None:
        """Remove a model that has ended."""
        self.end_turn(model)
        self.models.remove(model)
        self.loading.discard(model)

    def end_turn(self, model: object) -> None:
        """Let the next model score."""
        if model in self.to_score:
            self.to_score.remove(model)


class Turn(NamedTuple):
    """A model's turn to score: how many models are on its GPUs."""

    # With this model, and those that wait for their turn.
    n_models: int
    # Models that have scored, and whose processes are ending.
    n_ending: int


class TakenGpus:
    """The GPUs of one model, from loading to closing.

    ``names``: in CUDA_VISIBLE_DEVICES; None on a machine without GPUs, and if Ray assigns them.
    """

    def __init__(
        self,
        group: LoadGroup,
        model: object,
        names: tuple[str, ...] | None,
        changed: threading.Condition,
    ) -> None:
        self.group = group
        self.model = model
        self.names = names
        self.changed = changed

    @property
    def users(self) -> str | None:
        """The programs that used the GPUs before; None: the worker must ask."""
        return self.group.users

    @property
    def was_shared(self) -> bool:
        """True if other models have been on these GPUs at the same time."""
        return self.group.n_added > 1

    def wait_for_turn(self, check: Check) -> Turn:
        """Wait until no other model computes on these GPUs.

        None will before ``end_turn``, or before this one ends.  Called when the model has loaded.
        """
        group = self.group
        with self.changed:
            group.loading.discard(self.model)
            self.changed.notify_all()
            while group.loading or group.to_score[0] is not self.model:
                check()
                self.changed.wait(STOP_POLL_S)
            group.is_open = False
            n_models = len(group.to_score)
            return Turn(n_models, len(group.models) - n_models)

    def end_turn(self) -> None:
        """Let the next model score; this one has scored, and ends now."""
        with self.changed:
            self.group.end_turn(self.model)
            self.changed.notify_all()


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
        # The models that share the only GPU; None if it is free, or if a model has it alone.
        self.group: LoadGroup | None = None
        self.changed = threading.Condition()
        # A model prepares.
        self.is_preparing = False
        self.most_together = 1
        if len(self.gpus) == 1:
            self.most_together = most_loads_at_once()

    @property
    def may_share(self) -> bool:
        """True if models whose memory is known may be on one GPU together."""
        return self.most_together > 1

    def n_threads(self, n_sharing: int) -> int:
        """Return how many models are worked on at the same time.

        Those that have GPUs, and at least one that prepares.  On a machine without GPUs, preparing
        would take processors from the model that runs.

        ``n_sharing``: number of models that may be on one GPU together.
        """
        if not self.gpus:
            return self.slots
        return self.slots + max(1, min(n_sharing, self.most_together))

    @contextmanager
    def take(
        self,
        count: int,
        check: Check,
        prepare: Callable[[], None] = lambda: None,
        n_bytes: int | None = None,
        queued: Callable[[], None] = lambda: None,
    ) -> Iterator[TakenGpus]:
        """Wait for ``count`` GPUs, at most all, and hold them.

        A model that needs fewer GPUs does not overtake a waiting one.

        Args:
            count: number of GPUs.
            check: called again and again while the model waits.
            prepare: called once if the model must wait for others to end; not if Ray assigns the
                GPUs, since the node is not known yet.  Only the next model prepares, unless it may
                be on a GPU together with those before it.
            n_bytes: memory of a GPU that is enough for the model; None: not known.
            queued: called when the model has its place among the waiting ones.
        """
        count = max(1, min(count, self.slots))
        model = object()
        with self.changed:
            self.queue.append(model)
        try:
            queued()
            # Ray chooses the node, and without GPUs there is nothing to prepare.
            is_prepared = not self.gpus
            while True:
                with self.changed:
                    indices = self.indices_for(model, count, n_bytes)
                    if indices is not None:
                        group = self.group_on(indices, model, n_bytes)
                        break
                    is_near = self.queue[0] is model or (self.may_share and n_bytes is not None)
                    must_wait = self.is_taken(count, n_bytes)
                    # One model after the other, since another one is scored.
                    prepares = is_near and must_wait and not (is_prepared or self.is_preparing)
                    if prepares:
                        self.is_preparing = True
                    else:
                        check()
                        self.changed.wait(STOP_POLL_S)
                if prepares:
                    is_prepared = True
                    # Without the condition, since it takes seconds.
                    self.prepare(prepare)
        finally:
            with self.changed:
                self.queue.remove(model)
                self.changed.notify_all()
        names = None
        if self.gpus:
            names = tuple(self.gpus[index].device for index in indices)
        try:
            self.find_users(group, names)
            yield TakenGpus(group, model, names, self.changed)
        finally:
            with self.changed:
                group.remove(model)
                if not group.models:
                    self.free.update(indices)
                    self.group = None
                self.changed.notify_all()

    def prepare(self, prepare: Callable[[], None]) -> None:
        """Let a model prepare; the next one may do so afterwards."""
        try:
            prepare()
        finally:
            with self.changed:
                self.is_preparing = False
                self.changed.notify_all()

    def indices_for(self, model: object, count: int, n_bytes: int | None) -> list[int] | None:
        """Return the GPUs that a model gets now, by their indices; None if it must wait."""
        if self.queue[0] is not model:
            return None
        if len(self.free) >= count:
            return sorted(self.free)[:count]
        group = self.group
        if group is not None and group.users == "" and self.has_room(group, n_bytes):
            return [0]
        return None

    def has_room(self, group: LoadGroup, n_bytes: int | None) -> bool:
        """Return True if one more model may join a group."""
        if n_bytes is None or not group.is_open or len(group.models) >= self.most_together:
            return False
        room = SHARE_OF_GPU * self.gpus[0].mib * 2**20
        return group.n_bytes + n_bytes <= room

    def is_taken(self, count: int, n_bytes: int | None) -> bool:
        """Return True if other models must end before a model gets its GPUs."""
        if len(self.free) >= count:
            return False
        return self.group is None or not self.has_room(self.group, n_bytes)

    def group_on(self, indices: Sequence[int], model: object, n_bytes: int | None) -> LoadGroup:
        """Add a model to the group on these GPUs; a new one if they are free."""
        if self.group is not None:
            group = self.group
        else:
            is_open = n_bytes is not None and self.may_share
            group = LoadGroup(is_open=is_open)
            self.free.difference_update(indices)
            if is_open:
                self.group = group
        group.add(model, n_bytes)
        return group

    def find_users(self, group: LoadGroup, names: Sequence[str] | None) -> None:
        """Find the programs that use the GPU of a new group; with any, no other model may join."""
        if names is None or not group.is_open or group.users is not None:
            return
        users = machine.gpu_users(names)
        with self.changed:
            group.users = users
            group.is_open = not users
            self.changed.notify_all()


def most_loads_at_once() -> int:
    """Return how many models this machine can load at the same time, at least 1."""
    by_cores = (machine.usable_cores() or 1) // CORES_OF_LOAD
    by_memory = machine.available_bytes() // HOST_BYTES_OF_LOAD
    return max(1, min(MOST_TOGETHER, by_cores, by_memory))


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
