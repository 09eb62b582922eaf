"""What kills at random moments cost: runs that are killed again and again until they are finished, and what is left.

    python -m benchmarks.kills OUT.json --kills 200

A table of two models on a toy Llama (a reference that leaves its store behind, and a model that is compared with it) is
measured once undisturbed, and then in new caches, where the driver, a worker, the process above it or vLLM's engine
core is killed at a random moment and the run is started again.  For Transformers the final results must be equal but
for times; for vLLM, whose batches differ then, the largest difference is reported.  After every kill no process may be
left, and at the end no file that an undisturbed run does not leave.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WINDOWS, LENGTH = 400, 200
PATIENCE_S = 5.0
"""Seconds after a kill in which every process must be gone."""
MODELS: dict[str, list[dict[str, Any]]] = {
    "Transformers": [
        {"load_fn": "transformers_auto_bf16", "label": "a", "reference": True},
        {"load_fn": "transformers", "label": "b"},
    ],
    "vLLM": [
        {"load_fn": "vllm_score", "label": "a", "reference": True, "engine": {"enforce_eager": True}},
        {"load_fn": "vllm_score", "label": "b", "engine": {"enforce_eager": True, "dtype": "float16"}},
    ],
}


@dataclass
class Seen:
    """What a campaign has seen."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    differing: int = 0
    largest: float = 0.0
    processes_left: int = 0
    files_left: list[str] = field(default_factory=list)


def make_model(folder: Path) -> None:
    """A two-layer Llama with random weights and a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.shapes import write_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, dtype="bfloat16",
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    write_tokenizer(folder)


def start(folder: Path, engine: str, cache: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a run; its results go beside the log."""
    models = [{**model, "model_dir": str(folder / "model")} for model in MODELS[engine]]
    (folder / f"{engine}.json").write_text(json.dumps(models), encoding="utf-8")
    words = ["-d", folder / "data.json", "-m", folder / f"{engine}.json", "--cache-dir", cache, "-o", results(log)]
    environment = {**os.environ, "COMPARE_Q_CACHE": str(cache), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "eval" / "compare_q.py"), *map(str, words)],
            stdout=output, stderr=output, env=environment, start_new_session=True,
        )  # fmt: skip


def results(log: Path) -> Path:
    """Where the results of a run go."""
    return log.with_suffix(".json")


def processes(cache: Path) -> dict[int, str]:
    """Process id -> what it is, of the runs that use a cache."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(cache).encode() not in (folder / "environ").read_bytes():
                continue
            name = (folder / "comm").read_text().strip()
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
            kind = "driver" if "compare_q.py" in words else "engine" if name.startswith("VLLM") else "other"
            if "backends.worker" in words:
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                mine = Path(f"/proc/{above}/cmdline").read_bytes().decode(errors="replace")
                kind = "worker" if "backends.worker" in mine else "supervisor"
            found[int(folder.name)] = kind
    return found


def kill_one(process: subprocess.Popen[bytes], cache: Path, seen: Seen, log: Path) -> None:
    """Kill a process of a random kind, or end the driver politely; wait for the run to end, and count what is left."""
    there = processes(cache)
    kinds = sorted(set(there.values()) - {"other"}) or ["driver"]
    kind = random.choice([*kinds, "driver, by SIGTERM"])
    number = signal.SIGTERM if kind.endswith("SIGTERM") else signal.SIGKILL
    target = process.pid if kind.startswith("driver") else random.choice([p for p, k in there.items() if k == kind])
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:] or ["starting"]
    seen.phases[" ".join(last[0].split()[:1])] += 1
    with suppress(ProcessLookupError):
        os.kill(target, number)
        seen.kills[kind] += 1
    process.wait()
    until = time.monotonic() + PATIENCE_S
    while (left := processes(cache)) and time.monotonic() < until:
        time.sleep(0.1)
    seen.processes_left += len(left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)


def comparable(file: Path) -> Any:
    """Results without times."""
    found = json.loads(file.read_text(encoding="utf-8"))
    for key in ("created", "command"):
        found.pop(key)
    for model in found["models"]:
        for key in ("load_seconds", "score_seconds", "tokens_per_second", "beside", "from_cache", "seconds", "timing"):
            model.pop(key, None)
    return found


def difference(a: Any, b: Any) -> float:
    """Largest relative difference of perplexity and divergence between two results."""
    largest = 0.0
    for mine, other in zip(a["models"], b["models"], strict=True):
        for name in ("ppl", "kld"):
            if mine[name] is not None:
                largest = max(largest, abs(mine[name] - other[name]) / max(abs(other[name]), 1e-12))
    return largest


def files_of(cache: Path) -> set[str]:
    """Files of a cache, with what is made of checksums and of sessions left out of their names."""
    names = set()
    for file in cache.rglob("*"):
        if file.is_file() and "logs" not in file.parts:
            parts = file.relative_to(cache).parts
            segment = parts[0] == "scores" and file.suffix in (".safetensors", ".json")
            names.add("/".join((*parts[:-1], f"*{file.suffix}")) if segment else "/".join(parts))
    return names


def campaign(folder: Path, engine: str, kills: int) -> dict[str, Any]:
    """Kill runs of one engine so many times."""
    seen = Seen()
    whole_cache, log = folder / f"{engine}-whole", folder / f"{engine}.whole.log"
    if start(folder, engine, whole_cache, log).wait():
        raise RuntimeError(log.read_text())
    whole, files, duration = comparable(results(log)), files_of(whole_cache), 0.0
    while seen.kills.total() < kills:
        seen.runs += 1
        cache, log = folder / f"{engine}-{seen.runs}", folder / f"{engine}.{seen.runs}.log"
        shutil.copytree(whole_cache / "tokens", cache / "tokens")  # what is killed is a model's run
        began = time.monotonic()
        while True:
            process = start(folder, engine, cache, log)
            try:
                status = process.wait(timeout=random.uniform(0.3, duration) if duration else None)
            except subprocess.TimeoutExpired:
                kill_one(process, cache, seen, log)
                continue
            if status == 0:
                break
        duration = duration or time.monotonic() - began  # of the first run, which nothing disturbs
        found = comparable(results(log))
        if engine == "Transformers" and found != whole:
            seen.differing += 1
        seen.largest = max(seen.largest, difference(found, whole))
        seen.files_left += sorted(files_of(cache) - files)
        left = f"{seen.processes_left} processes, {seen.files_left} files"
        differing = f"{seen.differing} differ, by at most {seen.largest:.2g}"
        print(f"{engine}: {seen.kills.total()} kills, {seen.runs} runs finished, {differing}, left: {left}", flush=True)
    return {
        "kills": dict(seen.kills), "phases": dict(seen.phases), "runs": seen.runs, "seconds_undisturbed": duration,
        "results_that_differ": seen.differing, "largest_relative_difference": seen.largest,
        "processes_left": seen.processes_left, "files_left": seen.files_left,
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("out", type=Path)
    p.add_argument("--kills", type=int, default=200, help="in all; a third of them in vLLM")
    p.add_argument("--engines", nargs="+", default=list(MODELS))
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    random.seed(args.seed)
    shares = {"Transformers": args.kills - args.kills // 3, "vLLM": args.kills // 3}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model")
        letters = np.random.default_rng(0).choice(list("abcdefgh \n"), WINDOWS * LENGTH)
        (folder / "text.txt").write_text("".join(letters), encoding="utf-8")
        data = {"tokenizer_dir": str(folder / "model"), "dataset": "text", "path": str(folder / "text.txt")}
        text = json.dumps({**data, "eval_len": LENGTH, "eval_stride": LENGTH})
        (folder / "data.json").write_text(text, encoding="utf-8")
        found = {engine: campaign(folder, engine, shares[engine]) for engine in args.engines}
    from backends.common import machine

    origin = {"commit": machine.commit(), "versions": machine.versions(), "cpu": machine.cpu()}
    args.out.write_text(json.dumps({**origin, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
