"""Compare tables without Ray and on two Ray nodes of one GPU each.

    python -m benchmarks.ray_nodes OUT.json [--models DIR] [--layers 8] [--windows 64]

Both nodes run on this machine, each with one of its two GPUs and its own cache.  The benchmark
compares every row's perplexity and KL divergence, and the seconds that each row takes to load.  It
also runs one model that spans both nodes.
Each result is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.table import run
from compare_q.backends.common import machine

ENGINE = {"enforce_eager": True}
VALUES = ("ppl", "kld")
ONE = [run.Row("bf16", "bf16", {})]
SEVERAL = [
    *ONE,
    run.Row("fp8 0", "fp8", {"seed": 0}),
    run.Row("w4a16 0", "w4a16", {"seed": 0}),
    run.Row("nvfp4a16 0", "nvfp4a16", {"seed": 0}),
    run.Row("fp8 1", "fp8", {"seed": 1}),
    run.Row("w4a16 1", "w4a16", {"seed": 1}),
    run.Row("nvfp4a16 1", "nvfp4a16", {"seed": 1}),
]
"""The same checkpoint with another seed counts as another model, and loads again."""
TWO_RANKS = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
"""vLLM turns its own all-reduce off between machines, but treats two nodes on one machine as one
machine."""
BY_RAY = {"distributed_executor_backend": "ray"}
COMPARED = (("rows", "rows over Ray"), ("two ranks", "two ranks over Ray nodes"))
"""Pairs of tables of the same rows."""


@contextmanager
def nodes(folder: Path) -> Iterator[str]:
    """Start two nodes of one GPU each and yield the cluster's address."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    try:
        for gpu in (0, 1):
            variables = {
                "CUDA_VISIBLE_DEVICES": str(gpu),
                "COMPARE_Q_CACHE": str(folder / f"node{gpu}"),
                # vLLM requires that each node has its own address.
                "VLLM_HOST_IP": f"127.0.0.{gpu + 1}",
            }
            cluster.add_node(
                num_cpus=4,
                num_gpus=1,
                env_vars=variables,
                include_dashboard=False,
                object_store_memory=1 << 30,
            )
        yield cluster.address
    finally:
        cluster.shutdown()


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of each value between two tables of the same rows."""
    largest = {}
    for name in VALUES:
        gaps = []
        for row, other_row in zip(one["rows"], other["rows"], strict=True):
            gaps.append(abs((row[name] or 0.0) - (other_row[name] or 0.0)))
        largest[name] = max(gaps)
    return largest


def parsed() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--models", type=Path, help="folder of benchmarks.shapes (default: made first, and removed)"
    )
    shapes.add_shape(parser, "llama-8b")
    parser.add_argument("--windows", type=int, default=64)
    return parser.parse_args()


def main() -> int:
    """Run the tables; write each result to the output file at once."""
    options = parsed()
    shape = shapes.shape_of(options)
    tables: dict[str, Any] = {}
    results: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "hardware": machine.hardware(machine.gpus()),
        "shape": asdict(shape),
        "windows": options.windows,
        "tables": tables,
    }

    def table(name: str, rows: list[run.Row], engine: dict[str, Any], *words: str) -> None:
        sizes = (options.windows, 2048, 512)
        plan = run.Plan(
            folder, models.resolve(), rows, sizes, ENGINE | engine, {}, run.PROGRAM, words
        )
        tables[name] = run.run_table(plan)
        for first, second in COMPARED:
            # A table that ended without results has no rows.
            if "rows" in tables.get(first, {}) and "rows" in tables.get(second, {}):
                largest = differences(tables[first], tables[second])
                results[f"largest differences: {first} and {second}"] = largest
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = options.models or folder / "models"
        if not options.models:
            shapes.make_apart(models, shape, ["bf16", "fp8", "w4a16", "nvfp4a16"])
        table("rows", SEVERAL, {}, "--gpus", "0")
        with nodes(folder) as address:
            table("rows over Ray", SEVERAL, {}, "--ray", address)
        table("two ranks", ONE, TWO_RANKS, "--gpus", "0,1")
        with nodes(folder) as address:
            # compare_q runs without --ray here; vLLM's executor finds the cluster by this address.
            os.environ |= {"RAY_ADDRESS": address, "VLLM_HOST_IP": "127.0.0.1"}
            table("two ranks over Ray nodes", ONE, TWO_RANKS | BY_RAY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
