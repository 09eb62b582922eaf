"""One long window with KL divergence: what a GPU holds at its peak, beside windows of 8,192 tokens.

    python -m benchmarks.long_windows --output results/h100/long_windows.json
    python -m benchmarks.long_windows --engine transformers_auto_bf16 --output long_windows_hf.json

The shape is Llama 3.1 8B's with random weights, so that KL divergence is of the model against itself, and must be zero.
vLLM has dummy ones; Transformers reads them from files, 16 GB, which are written first.
Each line of ``--windows`` is loaded by a process of its own, records its states and is compared with them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.table.peaks import Peaks
from benchmarks.vllm_scoring import LLAMA_8B, VOCAB, seconds, windows_of
from compare_q.backends import resolve
from compare_q.backends.base import Engine, LoadRequest, Task
from compare_q.backends.common import machine
from compare_q.backends.reference import store as reference
from compare_q.backends.vllm.engine import VllmEngine
from compare_q.backends.window_scores import token_scores


def write_weights(folder: Path) -> None:
    """Random weights of the folder's config, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(
            folder
        )


def measured(load_fn: str, folder: Path, count: int, length: int) -> dict[str, Any]:
    """Seconds and bytes of one line, in this process."""
    import torch

    options = {"load_format": "dummy"} if load_fn == "vllm_score" else {}
    engine = resolve(load_fn, None)[1](
        LoadRequest("long", load_fn, str(folder), length, options, log_file=folder / "log")
    )
    engine.load()
    windows, store = windows_of(count, length), folder / "store"
    loaded = torch.cuda.memory_allocated()
    store.mkdir()
    recording = seconds(lambda: list(token_scores(engine, windows, Task(record=store))))
    reference.seal(store, {}, count)
    largest: list[float] = []
    task = Task(reference=store, vocab_size=VOCAB)

    def compare() -> None:
        largest.extend(float(each.kld.max()) for each in token_scores(engine, windows, task) if each.kld is not None)

    comparing = seconds(compare)
    return {
        "windows": count, "tokens_a_window": length, "recording_seconds": recording, "comparing_seconds": comparing,
        "tokens_a_second_with_kld": round(count * length / comparing), "largest_kld_against_itself": max(largest),
        "bytes_when_loaded": loaded, "most_bytes_allocated": torch.cuda.max_memory_allocated(), **of_vllm(engine),
    }  # fmt: skip


def of_vllm(engine: Engine) -> dict[str, Any]:
    """What only vLLM tells of its memory."""
    if not isinstance(engine, VllmEngine):
        return {}
    return {"kv_cache_bytes": engine.arguments["kv_cache_memory_bytes"], "scorer": engine.driver.pass_report}


def in_a_process(load_fn: str, count: int, length: int) -> dict[str, Any]:
    """What ``measured`` says in a process of its own, and the peaks of GPU and host as they are seen from outside."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama-8b"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": length}))
        if load_fn != "vllm_score":
            writing = [sys.executable, "-m", "benchmarks.long_windows", "--write", str(folder)]
            subprocess.run(writing, check=True)  # its memory is not the engine's
        words = [
            sys.executable,
            "-m",
            "benchmarks.long_windows",
            "--one",
            load_fn,
            str(folder),
            str(count),
            str(length),
        ]
        peaks, process = Peaks(), subprocess.Popen(words)
        watches = [
            threading.Thread(target=peaks.watch_devices),
            threading.Thread(target=peaks.watch_host, args=(process.pid,)),
        ]
        for watch in watches:
            watch.start()
        status = process.wait()
        peaks.ended.set()
        for watch in watches:
            watch.join()
        answer = folder / "answer.json"
        found = (
            json.loads(answer.read_text())
            if answer.exists()
            else {"failed": status, "windows": count, "tokens_a_window": length}
        )
        return {**found, "gpu_peak_mib": max(peaks.device_mib, default=0), "host_peak_mib": peaks.host_mib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--windows", nargs="+", default=["16x8192", "4x32768", "1x131072"], metavar="COUNTxTOKENS")
    parser.add_argument("--engine", default="vllm_score", help="load_fn of the engine")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_weights(args.write)
        return
    if args.one:
        folder = Path(args.one[1])
        (folder / "answer.json").write_text(json.dumps(measured(args.one[0], folder, *map(int, args.one[2:]))))
        return
    found: dict[str, Any] = {
        "commit": machine.commit(), "versions": machine.versions(), "hardware": machine.hardware(machine.gpus()),
        "engine": args.engine, "lines": [],
    }  # fmt: skip
    for each in args.windows:
        found["lines"].append(in_a_process(args.engine, *map(int, each.split("x"))))
        print(json.dumps(found["lines"][-1]), flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
