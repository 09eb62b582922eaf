"""Measure the gain of a second GPU: for one model on replicas, and for a table of four models.

    python -m benchmarks.two_gpus OUT.json [--models DIR] [--windows 720] [--only NAME ...]

The 8B shape of ``benchmarks/shapes.py`` in bf16, perplexity over windows of 2,048 tokens.  The four
rows are one checkpoint with four seeds; the seed changes no score, but makes each row a separate
model.  Every table is a whole process with an empty cache; each result is written at once.  The
replicas' gain is measured from the first window to the last; the table's gain is measured in wall
time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.table import run
from compare_q.backends.common import machine

ENGINE = {"enforce_eager": True, "max_num_batched_tokens": 16384}
TABLES: dict[str, tuple[int, dict[str, Any], str]] = {
    "one model, two replicas": (1, {"replicas": 2}, "0,1"),
    "four models, two GPUs": (4, {}, "0,1"),
    "four models, one GPU": (4, {}, "0"),
}
"""Name -> models, keys of their specs, GPUs.  The first table includes a cold start of vLLM, so its
wall time is not compared with the others."""


def scoring_seconds(table: dict[str, Any]) -> float:
    """Return the seconds of a table's first row, from its first window to its last."""
    begin, end = table["rows"][0]["windows_at"]
    return float(end - begin)


def gains(tables: dict[str, Any]) -> dict[str, float]:
    """Return the speed of two GPUs relative to one."""
    # In the order of TABLES.
    replicas, two, one = [tables[name] for name in TABLES]
    ppl = one["rows"][0]["ppl"]
    differences = []
    for table in (replicas, two):
        for row in table["rows"]:
            differences.append(abs(row["ppl"] / ppl - 1))
    return {
        "replicas": scoring_seconds(one) / scoring_seconds(replicas),
        "table": one["wall_seconds"] / two["wall_seconds"],
        "largest_relative_difference_of_ppl": max(differences),
    }


def main() -> int:
    """Run the tables; write each result to the output file at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--models", type=Path, help="folder of benchmarks.shapes (default: made first, and removed)"
    )
    parser.add_argument("--windows", type=int, default=720)
    parser.add_argument(
        "--only", nargs="+", choices=list(TABLES), default=list(TABLES), help="tables to measure"
    )
    options = parser.parse_args()
    tables: dict[str, Any] = {}
    results: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "hardware": machine.hardware(machine.gpus()),
        "windows": options.windows,
        "tables": tables,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = options.models or folder / "models"
        if not options.models:
            shapes.make_apart(models, shapes.SHAPES["llama-8b"], ["bf16"])
        for name in options.only:
            count, keys, gpus = TABLES[name]
            rows = [run.Row(f"model {i}", "bf16", {"seed": i}) for i in range(count)]
            # run.Plan makes the first row the reference; only perplexity is measured here.
            spec = {"reference": False, **keys}
            words = ("--gpus", gpus)
            sizes = (options.windows, 2048, 512)
            plan = run.Plan(folder, models.resolve(), rows, sizes, ENGINE, spec, run.PROGRAM, words)
            tables[name] = run.run_table(plan)
            if set(tables) == set(TABLES):
                results["gains"] = gains(tables)
                print(json.dumps(results["gains"]))
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
