"""``--ray``: where models run when they run on a cluster."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from backends.common import storage
from eval.cluster import ray_cluster
from eval.cluster.ray_workers import RayWorker
from eval.common.cache import Cache
from eval.run.devices import Devices, Hold
from eval.run.hosts import Hosts


class ClusterDevices(Devices):
    """The GPUs of a cluster, counted: Ray says which of them a model gets, and where."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.n_slots = slots

    @property
    def slots(self) -> int:
        return self.n_slots

    def _in_its_way(self, hold: Hold) -> list[Hold]:
        """Ray itself lets the others wait, whatever they hold here."""
        return [*self.waiting, *(other for other in self.holds if other is not hold)]


def on_cluster(here: Hosts, address: str, cache: Cache, say: Callable[[str], None]) -> Hosts:
    """Hosts whose workers run on the cluster at an address; InputError if there is none.

    No model takes a place before the reference is there, or keeps one while it waits for the reference on another text:
    a reference whose node was lost needs one of them.
    """
    cache.check_writable()
    token = cache.root / "runs" / storage.temporary_name()
    token.write_text(token.name, encoding="utf-8")
    atexit.register(partial(token.unlink, missing_ok=True))
    cluster = ray_cluster.connect(address, (token, token.name), say)
    return replace(
        here, devices=ClusterDevices(cluster.slots), make_worker=partial(RayWorker, cluster), nodes=cluster,
        in_process=False,
    )  # fmt: skip
