"""A Ray cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

SMALL_NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Yield a cluster with a head node that runs no model; its nodes end afterwards."""
    from ray.cluster_utils import Cluster

    # Ray's workers have a niceness of 15 otherwise, and would wait for the other tests.
    with patch.dict(os.environ, {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL_NODE})
        try:
            yield cluster
        finally:
            cluster.shutdown()
