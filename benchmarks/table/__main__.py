"""Measure the wall time of a table, by part, and divide it by the prefill times of its models.

    python -m benchmarks.table OUT.json --models DIR [--windows 586] [-- WORDS FOR COMPARE_Q...]

DIR has the models of ``python -m benchmarks.shapes``; without ``--models`` they are made first: the
8B shape on a machine with a GPU, or else a toy.  compare_q runs as a whole process with an empty
cache; afterwards vLLM alone runs the same windows in another process.  Each result is written to
OUT.json at once.  ``--only`` and ``--prefill-from`` run the two separately, for a machine that is
available for minutes only.  ``--compare-with OTHER/eval/compare_q.py`` runs the same table
with another version, too, and names each PPL, KLD and digest that differs.
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
TABLES = ("table", "other_table")
"""Keys of the results: the table of ``--program``, and of ``--compare-with``."""


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the flags; arguments after ``--`` are passed to compare_q."""
    gpu = bool(machine.gpus())
    count, length, stride = (32, 512, 256)
    shape = "toy"
    engine: dict[str, Any] = {"enforce_eager": True}
    if gpu:
        count, length, stride = (586, 2048, 512)
        shape = "llama-8b"
        engine["max_num_batched_tokens"] = 16384
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
    p.add_argument(
        "--copies",
        type=int,
        metavar="N",
        help="instead, N rows of the first row's model, which differ in their seed",
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
        choices=list(growth.SIZES_OF_SERIES),
        default=[],
        help="series of tables to measure",
    )
    p.add_argument("--small", action="store_true", help="series that two cores measure in minutes")
    p.add_argument(
        "--program", type=Path, default=run.PROGRAM, help="another checkout's eval/compare_q.py"
    )
    p.add_argument(
        "--compare-with",
        type=Path,
        metavar="PROGRAM",
        help="eval/compare_q.py of another version: it runs the same table afterwards, and its "
        "numbers must be equal",
    )
    shapes.add_shape(p, shape)
    flags = list(words)
    extra: list[str] = []
    if "--" in flags:
        end = flags.index("--")
        extra = flags[end + 1 :]
        flags = flags[:end]
    arguments = p.parse_args(flags)
    arguments.extra = tuple(extra)
    if arguments.engine is None:
        arguments.engine = engine
    return arguments


def plan_of_flags(arguments: argparse.Namespace, folder: Path, gpu: bool) -> run.Plan:
    """Return the plan that the flags select, after making the models."""
    rows = [row for row in run.table_rows(gpu) if row.label in arguments.rows]
    if arguments.copies:
        rows = run.copies(rows[0].model, rows[0].engine, arguments.copies)
    if arguments.models:
        models = arguments.models.resolve()
    else:
        models = folder / "models"
        formats = list(dict.fromkeys(row.model for row in rows))
        shapes.make_apart(models, shapes.shape_of(arguments), formats)
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
    """Measure prefill of every model of the table on ``count`` of its windows.

    The times are scaled to all windows.
    """
    n_windows, length, stride = plan.windows
    part = replace(plan, windows=(count, length, stride))
    results = jobs.measured(run.prefill_jobs(part, gpu), plan.folder)
    for result in results.values():
        if "seconds" in result:
            result["seconds"] *= n_windows / count
    return results


def measure_peers(plan: run.Plan, count: int, gpu: bool) -> Iterator[tuple[str, Any]]:
    """Yield each peer's name and its measurement, or why it cannot run.

    It runs ``count`` windows of the first row's model.
    """
    prefill_job = next(iter(run.prefill_jobs(plan, gpu).values()))
    for name, job in peers.jobs_of(prefill_job, count):
        if isinstance(job, str):
            yield name, job
        else:
            yield name, jobs.measured({name: job}, plan.folder)[name]


def measure_growth(
    arguments: argparse.Namespace, series: str, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield the tables of a series."""

    def plan_of(point: growth.Point, models: Path) -> run.Plan:
        rows = run.copies("bf16", {}, point.models)
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
    arguments: argparse.Namespace, results: dict[str, Any], folder: Path, save: Callable[[], None]
) -> None:
    """Run every measurement that the flags select, and put it into ``results``.

    ``save`` is called after each part.
    """
    gpu = bool(machine.gpus())
    if arguments.only or arguments.peers:
        plan = plan_of_flags(arguments, folder, gpu)
        results |= {"windows": plan.windows, "specs": plan.specs()}
        if arguments.cold:
            run.drop_pages(plan.models)
    if arguments.prefill_from:
        earlier = json.loads(arguments.prefill_from.read_text(encoding="utf-8"))
        results["prefill"] = earlier["prefill"]
    elif "prefill" in arguments.only:
        count = arguments.prefill_windows or plan.windows[0]
        results["prefill"] = measure_prefill(plan, count, gpu)
        save()
    if "table" in arguments.only:
        results["table"] = run.run_table(plan)
        save()
        if arguments.compare_with:
            results["other_table"] = run.run_table(replace(plan, program=arguments.compare_with))
            results["differences"] = timings.differences(results["table"], results["other_table"])
            save()
    for name in TABLES:
        if name in results:
            if "prefill" in results:
                run.add_prefill(results[name], results["prefill"], plan)
            print(f"{name}:\n{timings.text_of(results[name])}", flush=True)
    for difference in results.get("differences", []):
        print(f"differs: {difference}", flush=True)
    save()
    if arguments.peers:
        for name, peer in measure_peers(plan, arguments.peers, gpu):
            results.setdefault("peers", {})[name] = peer
            print(f"{name}: {peer}", flush=True)
            save()
    for series in arguments.growth:
        for point in measure_growth(arguments, series, folder):
            results.setdefault("growth", {}).setdefault(series, []).append(point)
            print(point, flush=True)
            save()


def main(words: Sequence[str]) -> int:
    """Measure, write each result to the output file at once, and return the exit status."""
    arguments = parsed(words)
    page_cache = "warm"
    if arguments.cold:
        page_cache = "cold"
    results: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "hardware": machine.hardware(machine.gpus()),
        "page_cache": page_cache,
        "engine": arguments.engine,
        "spec": arguments.spec,
        "extra": list(arguments.extra),
    }

    def save() -> None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    save()
    parent = None
    if arguments.models:
        parent = arguments.models.resolve().parent
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        measure(arguments, results, Path(folder), save)
    for name in TABLES:
        if results.get(name, {}).get("exit_status", 0) != 0:
            return 1
    return int(bool(results.get("differences")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
