"""Measure the wall time of a table, by part, and divide it by the prefill times of its models.

    python -m benchmarks.table OUT.json --models DIR [--windows 586] [-- WORDS FOR COMPARE_Q...]

DIR has the models of ``python -m benchmarks.shapes``; without ``--models`` they are made first: the
8B shape on a machine with a GPU, or else a toy.  compare_q runs as a whole process with an empty
cache; afterwards vLLM alone runs the same windows in another process.  Each result is written to
OUT.json at once.  ``--only`` and ``--prefill-from`` run the two separately, for a machine that is
available for minutes only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.table import growth, jobs, peers, run, timings
from compare_q.backends.common import machine

PARTS = ("table", "prefill")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the flags; arguments after ``--`` are passed to compare_q."""
    gpu = bool(machine.gpus())
    count, length, stride = (586, 2048, 512) if gpu else (32, 512, 256)
    labels = [row.label for row in run.table_rows(gpu)]
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description="Measure the wall time of a table."
    )
    p.add_argument("out", type=Path, help="the results, JSON")
    p.add_argument(
        "--models", type=Path, help="folder of benchmarks.shapes; default: made first, and removed"
    )
    p.add_argument(
        "--rows",
        nargs="+",
        choices=labels,
        default=labels[:5],
        help="the first is the reference (default: %(default)s)",
    )
    for name, default in (("windows", count), ("length", length), ("stride", stride)):
        p.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    p.add_argument("--engine", type=json.loads, help="engine options of every row, JSON")
    p.add_argument("--spec", type=json.loads, default={}, help="keys of every row's spec, JSON")
    p.add_argument(
        "--only",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        help="what is measured (default: %(default)s)",
    )
    p.add_argument(
        "--prefill-windows",
        type=int,
        metavar="N",
        help="measure prefill on N windows, and scale it up",
    )
    p.add_argument(
        "--cold", action="store_true", help="read the models from the disk, not from the page cache"
    )
    p.add_argument(
        "--prefill-from",
        type=Path,
        help="take prefill times from these results of the same machine",
    )
    p.add_argument(
        "--peers", type=int, metavar="WINDOWS", help="measure what a user would take instead, too"
    )
    p.add_argument(
        "--growth",
        nargs="+",
        choices=list(growth.SIZES),
        default=[],
        help="series of tables to measure",
    )
    p.add_argument("--small", action="store_true", help="series that two cores measure in minutes")
    p.add_argument(
        "--program", type=Path, default=run.PROGRAM, help="another checkout's eval/compare_q.py"
    )
    shapes.add_shape(p, "llama-8b" if gpu else "toy")
    own = list(words)
    at = own.index("--") if "--" in own else len(own)
    arguments = p.parse_args(own[:at])
    arguments.extra = tuple(own[at + 1 :])
    if arguments.engine is None:
        arguments.engine = {
            "enforce_eager": True,
            **({"max_num_batched_tokens": 16384} if gpu else {}),
        }
    return arguments


def made_plan(arguments: argparse.Namespace, folder: Path, gpu: bool) -> run.Plan:
    """Return the plan that the flags select, after making the models and the text."""
    models = arguments.models.resolve() if arguments.models else folder / "models"
    rows = [row for row in run.table_rows(gpu) if row.label in arguments.rows]
    if not arguments.models:
        shapes.make_apart(
            models, shapes.shape_of(arguments), list(dict.fromkeys(row.model for row in rows))
        )
    sizes = (arguments.windows, arguments.length, arguments.stride)
    return run.Plan(
        folder,
        models,
        rows,
        sizes,
        arguments.engine,
        arguments.spec,
        arguments.program,
        arguments.extra,
    )


def measure_prefill(plan: run.Plan, count: int, gpu: bool) -> dict[str, Any]:
    """Measure prefill of every model of the table on ``count`` of its windows, and scale the times
    to all windows.
    """
    part = replace(plan, windows=(count, *plan.windows[1:]))
    found = jobs.measured(run.prefill_jobs(part, gpu), plan.folder)
    for each in found.values():
        if "seconds" in each:
            each["seconds"] *= plan.windows[0] / count
    return found


def measure_peers(plan: run.Plan, count: int, gpu: bool) -> Iterator[tuple[str, Any]]:
    """Yield each peer's name and measurement on ``count`` windows of the first row's model, or why
    it cannot run.
    """
    job = next(iter(run.prefill_jobs(plan, gpu).values()))
    for name, peer in peers.jobs_of(job, count):
        yield (
            name,
            peer if isinstance(peer, str) else jobs.measured({name: peer}, plan.folder)[name],
        )


def measure_growth(
    arguments: argparse.Namespace, series: str, folder: Path
) -> Iterator[dict[str, Any]]:
    """The tables of a series."""

    def plan_of(point: growth.Point, models: Path) -> run.Plan:
        rows = [
            run.Row(f"row {i}", "bf16", {"seed": i}) for i in range(point.models)
        ]  # a seed changes no score
        return run.Plan(
            folder,
            models,
            rows,
            point.windows,
            arguments.engine,
            arguments.spec,
            arguments.program,
            arguments.extra,
        )

    return growth.measured(series, arguments.small, folder, plan_of)


def measure(
    arguments: argparse.Namespace, found: dict[str, Any], folder: Path, keep: Callable[[], None]
) -> None:
    """Run every measurement that the flags select and put it into ``found``; call ``keep`` after
    each part.
    """
    gpu = bool(machine.gpus())
    if arguments.only or arguments.peers:
        plan = made_plan(arguments, folder, gpu)
        found |= {"windows": plan.windows, "specs": plan.specs()}
        if arguments.cold:
            run.drop_pages(plan.models)
    if arguments.prefill_from:
        found["prefill"] = json.loads(arguments.prefill_from.read_text(encoding="utf-8"))["prefill"]
    elif "prefill" in arguments.only:
        found["prefill"] = measure_prefill(plan, arguments.prefill_windows or plan.windows[0], gpu)
        keep()
    if "table" in arguments.only:
        found["table"] = run.run_table(plan)
        keep()
    if "table" in found and "prefill" in found:
        run.add_prefill(found, plan)
        print(timings.text_of(found["table"]), flush=True)
    keep()
    for name, peer in measure_peers(plan, arguments.peers, gpu) if arguments.peers else ():
        found.setdefault("peers", {})[name] = peer
        print(f"{name}: {peer}", flush=True)
        keep()
    for series in arguments.growth:
        for point in measure_growth(arguments, series, folder):
            found.setdefault("growth", {}).setdefault(series, []).append(point)
            print(point, flush=True)
            keep()


def main(words: Sequence[str]) -> int:
    """Measure, write each result to the output file at once, and return the exit status."""
    arguments = parsed(words)
    found: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "hardware": machine.hardware(machine.gpus()),
        "page_cache": "cold" if arguments.cold else "warm",
        "engine": arguments.engine,
        "spec": arguments.spec,
        "extra": list(arguments.extra),
    }

    def keep() -> None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    keep()
    beside = arguments.models.resolve().parent if arguments.models else None
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        measure(arguments, found, Path(folder), keep)
    return 0 if found.get("table", {}).get("exit_status", 0) == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
