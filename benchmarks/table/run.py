"""Run one table with compare_q, and make the jobs of vLLM alone for its rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import timings
from benchmarks.table.peaks import watched
from benchmarks.table.peers import Job

PROGRAM = Path(__file__).resolve().parents[2] / "eval" / "compare_q.py"
NOISE = "noise"


@dataclass(frozen=True)
class Row:
    """One row: a label, the folder of its model, and options added to the common ``engine``."""

    label: str
    model: str
    engine: dict[str, Any]


def table_rows(gpu: bool) -> list[Row]:
    """Return the table's five rows, and two more rows that are measured only if named."""
    # vLLM has no FP8 KV cache on a CPU.
    other: dict[str, Any] = {"max_num_seqs": 2}
    if gpu:
        other = {"kv_cache_dtype": "fp8"}
    return [
        Row("bf16", "bf16", {}),
        Row("FP8", "fp8", {}),
        Row("W4A16", "w4a16", {}),
        Row("noise", "bf16", {NOISE: "bf16"}),
        Row("W4A16 other", "w4a16", other),
        Row("NVFP4 W4A16", "nvfp4a16", {}),
        Row("compiled", "bf16", {"enforce_eager": False}),
    ]


def copies(model: str, engine: dict[str, Any], count: int) -> list[Row]:
    """Return rows of one model, with these engine options, that differ in their seed alone.

    A seed does not change scores, but compare_q scores each row as another model.
    """
    rows = []
    for number in range(count):
        rows.append(Row(f"row {number}", model, {**engine, "seed": number}))
    return rows


@dataclass(frozen=True)
class Plan:
    """A table: its rows, of models in a folder, over windows (count, length, stride).

    ``folder`` is scratch.  ``engine`` and ``spec`` are added to every row's; ``extra`` are words
    for compare_q.
    """

    folder: Path
    models: Path
    rows: list[Row]
    windows: tuple[int, int, int]
    engine: dict[str, Any]
    spec: dict[str, Any]
    program: Path
    extra: tuple[str, ...]

    def specs(self) -> list[dict[str, Any]]:
        """Return the model specs; the first row is the reference."""
        specs = []
        for row in self.rows:
            spec: dict[str, Any] = {
                "load_fn": "vllm_score",
                "label": row.label,
                "model_dir": str(self.models / row.model),
                "engine": {**self.engine, **row.engine},
            }
            if row is self.rows[0]:
                spec["reference"] = True
            if NOISE in row.engine:
                spec["noise_floor"] = True
            # The user's keys replace the others.
            specs.append(spec | self.spec)
        return specs


def write_text(plan: Plan) -> None:
    """Write random characters, one token each for the byte tokenizer of the shapes."""
    count, length, stride = plan.windows
    alphabet = list("abcdefghijklmnopqrstuvwxyz \n")
    letters = np.random.default_rng(0).choice(alphabet, count * stride + length)
    (plan.folder / "text.txt").write_text("".join(letters), encoding="utf-8")


def cut_windows(plan: Plan) -> Path:
    """Write the windows of compare_q's default method, int32 [N, L], cut here without its code."""
    from tokenizers import Tokenizer

    write_text(plan)
    tokenizer = Tokenizer.from_file(str(plan.models / plan.rows[0].model / "tokenizer.json"))
    count, length, stride = plan.windows
    text = (plan.folder / "text.txt").read_text(encoding="utf-8")
    tokens = np.array(tokenizer.encode(text).ids, dtype=np.int32)
    windows = []
    for start in range(0, count * stride, stride):
        windows.append(tokens[start : start + length])
    file = plan.folder / "windows.npy"
    np.save(file, np.stack(windows))
    return file


def drop_pages(folder: Path) -> None:
    """Drop the files below a folder from the page cache, so that a model is read from the disk."""
    # Pages that are not written yet cannot be dropped.
    os.sync()
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_table(plan: Plan) -> dict[str, Any]:
    """Run compare_q as a separate process with an empty cache.

    Returns wall time, peaks of memory, and its results.
    """
    out = plan.folder / "results.json"
    cache = plan.folder / "cache"
    write_inputs(plan)
    command = [sys.executable, plan.program, "-d", plan.folder / "data.json"]
    command += ["-m", plan.folder / "models.json", "--cache-dir", cache, "-o", out, *plan.extra]
    shutil.rmtree(cache, ignore_errors=True)
    out.unlink(missing_ok=True)
    began = time.time()
    start = time.perf_counter()
    with subprocess.Popen([str(word) for word in command], env=quiet_environment()) as process:
        with watched(process.pid) as peaks:
            status = process.wait()
        wall = time.perf_counter() - start
    # 10 GB of states for 586 windows of an 8B shape.
    shutil.rmtree(cache, ignore_errors=True)
    if not out.is_file():
        error = f"compare_q ended with exit status {status} and left no results"
        return {"error": error, "exit_status": status or 1, "wall_seconds": wall}
    models = timings.models_of(json.loads(out.read_text(encoding="utf-8")))
    times = [timings.timing_of(model) for model in models]
    return {
        "wall_seconds": wall,
        "exit_status": status,
        "rows": timings.rows_of(models),
        "gaps": timings.gaps(times),
        **timings.ends(times, began, began + wall),
        "peak_device_mib": peaks.device_mib,
        "peak_host_mib": peaks.host_mib,
    }


def write_inputs(plan: Plan) -> None:
    """Write the text and both spec files."""
    write_text(plan)
    count, length, stride = plan.windows
    data = {
        "tokenizer_dir": str(plan.models / plan.rows[0].model),
        "dataset": "text",
        "path": str(plan.folder / "text.txt"),
        "eval_len": length,
        "eval_stride": stride,
        "max_rows": count,
    }
    (plan.folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
    (plan.folder / "models.json").write_text(json.dumps(plan.specs()), encoding="utf-8")


def quiet_environment() -> dict[str, str]:
    """Return this environment, with Python's bytecode cache on and wide tables."""
    environment = dict(os.environ)
    # Without the bytecode cache, every start took 18 s instead of 9 s.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["COLUMNS"] = "160"
    return environment


def vllm_options(row: Row) -> dict[str, Any]:
    """Return the row's options that vLLM itself knows."""
    return {name: value for name, value in row.engine.items() if name != NOISE}


def prefill_key(row: Row) -> str:
    """Return a key that rows of the same model with the same engine arguments share."""
    options = vllm_options(row)
    if options:
        return f"{row.model} {json.dumps(options)}"
    return row.model


def prefill_jobs(plan: Plan, gpu: bool) -> dict[str, Job]:
    """Return key -> job of vLLM alone for each distinct model of the table."""
    windows = cut_windows(plan)
    common: dict[str, Any] = {
        # vLLM generates at least one token after the window.
        "max_model_len": plan.windows[1] + 1,
        "enforce_eager": True,
        **plan.engine,
    }
    if not gpu:
        # vLLM would claim 92 % of a CPU's memory.
        common["kv_cache_memory_bytes"] = 1 << 30
    jobs = {}
    for row in plan.rows:
        jobs[prefill_key(row)] = {
            "kind": "vllm",
            "model": str(plan.models / row.model),
            "windows": str(windows),
            "asked": {},
            "arguments": common | vllm_options(row),
        }
    return jobs


def add_prefill(table: dict[str, Any], prefill: dict[str, Any], plan: Plan) -> None:
    """Add each row's prefill time to its parts, and the ratio of their sum to the wall time.

    If a row failed, the ratio is None.
    """
    times = [prefill.get(prefill_key(row), {}).get("seconds") for row in plan.rows]
    # A table that ended without results has no rows.
    for row, seconds in zip(table.get("rows", []), times, strict=False):
        row["prefill_seconds"] = seconds
    table["prefill_over_wall"] = None
    if not table["exit_status"]:
        table["prefill_over_wall"] = timings.ratio(times, table["wall_seconds"])
