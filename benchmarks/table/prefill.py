"""vLLM alone, with nothing of compare_q: how long it takes over the same windows.

    python -m benchmarks.table.prefill JOBS.json OUT.jsonl

A job names a model, the arguments of ``LLM(...)``, the windows (int32 [N, L] in a .npy file) and what is asked of
every request: nothing for prefill alone.  Its line in OUT says the seconds from the first request queued to the last
finished, after a pass over a few windows that warms up; the engine core is in this process, as it is in compare_q's
workers.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.common.processes import command, environment

WARM_UP_TOKENS = 32_768
"""Tokens that are run before the clock starts: two full steps of 16,384."""


def run(engine: Any, windows: Any, asked: dict[str, Any]) -> float:
    """Seconds for all windows, int32 [N, L], each generating the one token that vLLM insists on."""
    from vllm import SamplingParams

    began = time.perf_counter()
    for number, window in enumerate(windows):
        params = SamplingParams(max_tokens=1, detokenize=False, skip_reading_prefix_cache=True, **asked)
        engine.add_request(str(number), {"prompt_token_ids": window.tolist()}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - began


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One job, in a vLLM of its own, which is closed again."""
    import torch
    from vllm import LLM

    windows = np.load(job["windows"])[: job.get("count")]
    began = time.perf_counter()
    llm = LLM(job["model"], skip_tokenizer_init=True, load_format="safetensors", **job["arguments"])
    loaded = time.perf_counter() - began
    engine = llm.llm_engine
    first = run(engine, windows[: max(1, WARM_UP_TOKENS // windows.shape[1])], job["asked"])
    seconds = run(engine, windows, job["asked"])
    engine.engine_core.shutdown()
    del llm, engine
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "windows": len(windows), "tokens": windows.size, "load_seconds": loaded, "warm_up_seconds": first,
        "seconds": seconds, "tokens_a_second": round(windows.size / seconds),
    }  # fmt: skip


def measured(jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> what its job measured, or {"error": ...}; in one process, and a new one after a job that it died of."""
    found: dict[str, dict[str, Any]] = {}
    out, todo = folder / "prefill.jsonl", folder / "prefill.json"
    out.touch()
    while waiting := {name: job for name, job in jobs.items() if name not in found}:
        todo.write_text(json.dumps(waiting), encoding="utf-8")
        with (folder / "prefill.log").open("ab") as log:
            subprocess.run(command("benchmarks.table.prefill", todo, out), stdout=log, stderr=log, env=environment())
        lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        found |= {line["name"]: line for line in lines}
        if set(waiting) == set(jobs) - set(found):
            last = (folder / "prefill.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            found[next(iter(waiting))] = {"error": "".join(last) or "the process died without a word"}
    return found


def main(words: Sequence[str]) -> int:
    """Do the jobs of a file in turn; an error ends the process, since a GPU may still hold the failed model."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    jobs, out = json.loads(Path(words[0]).read_text(encoding="utf-8")), Path(words[1])
    for name, job in jobs.items():
        found = measure(job)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
