"""One long window with KL divergence: what a GPU holds at its peak, beside windows of 8,192 tokens.

    python -m benchmarks.long_windows --output results/h100/long_windows.json

The shape is Llama 3.1 8B's with dummy weights, so that KL divergence is of the model against itself, and must be zero.
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
from compare_q.backends.base import LoadRequest, Task
from compare_q.backends.common import machine
from compare_q.backends.reference import store as reference
from compare_q.backends.vllm.engine import VllmEngine


def measured(folder: Path, count: int, length: int) -> dict[str, Any]:
    """Seconds and bytes of one line, in this process."""
    import torch

    engine = VllmEngine(
        LoadRequest("long", "vllm_score", str(folder), length, {"load_format": "dummy"}, log_file=folder / "log")
    )
    engine.load()
    windows, store = windows_of(count, length), folder / "store"
    engine.get_ready(windows)
    loaded = torch.cuda.memory_allocated()
    store.mkdir()
    recording = seconds(lambda: list(engine.score(windows, Task(record=store))))
    reference.seal(store, {}, count)
    largest: list[float] = []
    task = Task(reference=store, vocab_size=VOCAB)

    def compare() -> None:
        largest.extend(float(each.kld.max()) for each in engine.score(windows, task) if each.kld is not None)

    comparing = seconds(compare)
    return {
        "windows": count, "tokens_a_window": length, "recording_seconds": recording, "comparing_seconds": comparing,
        "tokens_a_second_with_kld": round(count * length / comparing), "largest_kld_against_itself": max(largest),
        "kv_cache_bytes": engine.arguments["kv_cache_memory_bytes"], "bytes_when_loaded": loaded,
        "scorer": engine.driver.pass_report,
    }  # fmt: skip


def in_a_process(count: int, length: int) -> dict[str, Any]:
    """What ``measured`` says in a process of its own, and the peaks of GPU and host as they are seen from outside."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama-8b"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": length}))
        words = [sys.executable, "-m", "benchmarks.long_windows", "--one", str(folder), str(count), str(length)]
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
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        folder = Path(args.one[0])
        (folder / "answer.json").write_text(json.dumps(measured(folder, *map(int, args.one[1:]))))
        return
    found: dict[str, Any] = {
        "commit": machine.commit(), "versions": machine.versions(), "hardware": machine.hardware(machine.gpus()),
        "lines": [],
    }  # fmt: skip
    for each in args.windows:
        found["lines"].append(in_a_process(*map(int, each.split("x"))))
        print(json.dumps(found["lines"][-1]), flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
