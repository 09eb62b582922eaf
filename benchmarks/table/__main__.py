"""The wall time of a table over the prefill times of its models, by part.

    python -m benchmarks.table OUT.json --models DIR [--windows 586] [-- WORDS FOR COMPARE_Q...]

DIR holds what ``python -m benchmarks.shapes`` makes; without ``--models`` it is made first: the 8B shape where there is
a GPU, else a toy.  compare_q runs as a whole process with an empty cache; afterwards vLLM alone runs the same windows
in another process.  What is finished is written to OUT.json at once; ``--only`` and ``--prefill-from`` take the two
apart, for a machine that is lent for minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends.common import machine
from benchmarks import shapes
from benchmarks.table import prefill, timings
from benchmarks.table.peaks import watched

ROOT = Path(__file__).resolve().parents[2]
NOISE = "noise"


@dataclass(frozen=True)
class Row:
    """One row: a label, the folder of its model, and what its spec adds to the common ``engine`` object."""

    label: str
    model: str
    engine: dict[str, Any]


def table_rows(gpu: bool) -> list[Row]:
    """The five rows; the first one is the reference.  vLLM has no FP8 KV cache on a CPU."""
    other = {"kv_cache_dtype": "fp8"} if gpu else {"max_num_seqs": 2}
    return [
        Row("bf16", "bf16", {}),
        Row("FP8", "fp8", {}),
        Row("W4A16", "w4a16", {}),
        Row("noise", "bf16", {NOISE: "bf16"}),
        Row("W4A16 other", "w4a16", other),
    ]


@dataclass(frozen=True)
class Plan:
    """What is measured, with which engine options, windows and words for compare_q; ``folder`` is scratch."""

    folder: Path
    models: Path
    rows: list[Row]
    engine: dict[str, Any]
    windows: int
    length: int
    stride: int
    program: Path
    spec: dict[str, Any]
    extra: tuple[str, ...]

    def specs(self) -> list[dict[str, Any]]:
        """The model specs."""
        return [
            {
                "load_fn": "vllm_score", "label": row.label, "model_dir": str(self.models / row.model),
                "engine": {**self.engine, **row.engine},
                **({"reference": True} if row is self.rows[0] else {}),
                **({"noise_floor": True} if NOISE in row.engine else {}),
                **self.spec,
            }
            for row in self.rows
        ]  # fmt: skip


def write_text(file: Path, tokens: int) -> None:
    """Random letters, one token each for the byte tokenizer of the shapes."""
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz \n"), tokens)
    file.write_text("".join(letters), encoding="utf-8")


def cut_windows(plan: Plan) -> Path:
    """The windows of compare_q's default method as int32 [N, L] in a file, cut here without its code."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(plan.models / plan.rows[0].model / "tokenizer.json"))
    tokens = np.array(tokenizer.encode((plan.folder / "text.txt").read_text(encoding="utf-8")).ids, dtype=np.int32)
    starts = range(0, plan.windows * plan.stride, plan.stride)
    np.save(plan.folder / "windows.npy", np.stack([tokens[at : at + plan.length] for at in starts]))
    return plan.folder / "windows.npy"


def run_table(plan: Plan) -> dict[str, Any]:
    """compare_q as a whole process with an empty cache: wall time, peaks of memory, and what its results say."""
    data = {"tokenizer_dir": str(plan.models / plan.rows[0].model), "dataset": "text",
            "path": str(plan.folder / "text.txt"), "eval_len": plan.length, "eval_stride": plan.stride,
            "max_rows": plan.windows}  # fmt: skip
    (plan.folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
    (plan.folder / "models.json").write_text(json.dumps(plan.specs()), encoding="utf-8")
    out, cache = plan.folder / "results.json", plan.folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, plan.program, "-d", plan.folder / "data.json", "-m", plan.folder / "models.json",
               "--cache-dir", cache, "-o", out, *plan.extra]  # fmt: skip
    out.unlink(missing_ok=True)
    log = plan.folder / "compare_q.log"
    began = time.perf_counter()
    with log.open("wb") as stream, subprocess.Popen(
        [str(word) for word in command], stdout=stream, stderr=subprocess.STDOUT, env=quiet_environment()
    ) as process, watched(process.pid) as peaks:  # fmt: skip
        status = process.wait()
    wall = time.perf_counter() - began
    print(log.read_text(encoding="utf-8", errors="replace"), flush=True)
    shutil.rmtree(cache, ignore_errors=True)  # 10 GB of states for 586 windows of an 8B shape
    if not out.is_file():
        return {"error": f"compare_q ended with exit status {status} and left no results", "wall_seconds": wall}
    rows = timings.rows_of(json.loads(out.read_text(encoding="utf-8")))
    read = [timings.timing_of(model) for model in json.loads(out.read_text(encoding="utf-8"))["models"]]
    return {
        "wall_seconds": wall, "exit_status": status, "gaps": timings.gaps(read), "rows": rows,
        "peak_device_mib": peaks.device_mib, "peak_host_mib": peaks.host_mib,
    }  # fmt: skip


def quiet_environment() -> dict[str, str]:
    """This environment, in which Python keeps what it has compiled: without, every start took 18 s in place of 9."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "COLUMNS": "160"}


def prefill_key(row: Row) -> str:
    """Rows with the same key are the same model with the same engine arguments."""
    return json.dumps([row.model, {name: value for name, value in row.engine.items() if name != NOISE}])


def prefill_jobs(plan: Plan, windows: Path, gpu: bool) -> dict[str, dict[str, Any]]:
    """Key -> job of ``benchmarks/table/prefill.py`` for each distinct model of the table."""
    common = {"max_model_len": plan.length + 1, "enforce_eager": True, **plan.engine}
    common |= {} if gpu else {"kv_cache_memory_bytes": 1 << 30}  # vLLM would claim 92 % of a CPU's memory
    return {
        prefill_key(row): {
            "model": str(plan.models / row.model), "windows": str(windows), "asked": {},
            "arguments": {**common, **{name: value for name, value in row.engine.items() if name != NOISE}},
        }
        for row in plan.rows
    }  # fmt: skip


def add_prefill(found: dict[str, Any], plan: Plan) -> None:
    """Put each row's prefill time beside its parts, and their sum over the wall time, where both were measured."""
    if "prefill" not in found or "rows" not in found.get("table", {}):
        return
    table = found["table"]
    each = [found["prefill"].get(prefill_key(row), {}).get("seconds") for row in plan.rows]
    for row, seconds in zip(table["rows"], each, strict=True):
        row["prefill_seconds"] = seconds
    table["prefill_over_wall"] = timings.ratio(each, table["wall_seconds"])


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The flags; what comes after ``--`` goes to compare_q."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.table", description="Measure the wall time of a table.")
    p.add_argument("out", type=Path, help="the results, JSON")
    p.add_argument("--models", type=Path, help="folder of benchmarks.shapes; default: made first, and removed")
    labels = [row.label for row in table_rows(bool(machine.gpus()))]
    p.add_argument("--rows", nargs="+", choices=labels, default=labels, help="only these; the first is the reference")
    p.add_argument("--windows", type=int, default=586)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--stride", type=int, default=512)
    p.add_argument("--engine", type=json.loads, help="engine options of every row, JSON")
    p.add_argument("--spec", type=json.loads, default={}, help="keys of every row's spec, JSON")
    p.add_argument("--only", choices=("table", "prefill"), help="only this half")
    p.add_argument("--prefill-from", type=Path, help="take prefill times from these results of the same machine")
    p.add_argument("--program", type=Path, default=ROOT / "eval" / "compare_q.py", help="another checkout's compare_q")
    shapes.add_shape(p, "llama-8b" if machine.gpus() else "toy")
    own = list(words)
    at = own.index("--") if "--" in own else len(own)
    arguments = p.parse_args(own[:at])
    arguments.extra = tuple(own[at + 1 :])
    return arguments


def made_plan(arguments: argparse.Namespace, folder: Path, gpu: bool) -> Plan:
    """What the flags ask for, with models and text in place."""
    models = arguments.models.resolve() if arguments.models else folder / "models"
    if not arguments.models:
        shapes.make(models, shapes.shape_of(arguments), ("bf16", "fp8", "w4a16"))
    engine = arguments.engine
    if engine is None:
        engine = {"enforce_eager": True, **({"max_num_batched_tokens": 16384} if gpu else {})}
    plan = Plan(
        folder, models, [row for row in table_rows(gpu) if row.label in arguments.rows], engine, arguments.windows,
        arguments.length, arguments.stride, arguments.program, arguments.spec, arguments.extra,
    )  # fmt: skip
    write_text(folder / "text.txt", plan.windows * plan.stride + plan.length)
    return plan


def main(words: Sequence[str]) -> int:
    """Make what is missing, run the table, then prefill; the exit status."""
    arguments, gpu = parsed(words), bool(machine.gpus())
    found: dict[str, Any] = {
        "commit": machine.commit(), "versions": machine.versions(), "hardware": machine.hardware(machine.gpus()),
        "windows": [arguments.windows, arguments.length, arguments.stride], "extra": list(arguments.extra),
    }  # fmt: skip

    def keep() -> None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    keep()
    beside = arguments.models.resolve().parent if arguments.models else None
    with tempfile.TemporaryDirectory(dir=beside) as scratch:
        plan = made_plan(arguments, Path(scratch), gpu)
        found |= {"engine": plan.engine, "specs": plan.specs()}
        if arguments.only != "prefill":
            found["table"] = run_table(plan)
            keep()
        if arguments.prefill_from:
            found["prefill"] = json.loads(arguments.prefill_from.read_text(encoding="utf-8"))["prefill"]
        elif arguments.only != "table":
            found["prefill"] = prefill.measured(prefill_jobs(plan, cut_windows(plan), gpu), plan.folder)
        add_prefill(found, plan)
        keep()
    if "table" not in found:
        print(json.dumps(found["prefill"], indent=1), flush=True)
        return 0
    print(timings.text_of(found["table"]) if "rows" in found["table"] else found["table"]["error"], flush=True)
    return 0 if "rows" in found["table"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
