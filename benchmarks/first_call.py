"""How often the first window of a process gets other scores than the same window after it, on a CPU.

    python -m benchmarks.first_call OUT.json --seconds 60 --threads 16 --at-once 32

torch computes exp, cos and others of float32 by MKL.  On Intel's CPUs, MKL 2024.2 (torch 2.10 to 2.13) has a race in a
process's first such call if several threads share it: ``mkl_vml_serv_cpu_detect`` writes the kind of CPU as another
function of MKL numbers it (9: AVX-512) before it writes MKL's own number of it (5), and a thread that reads the 9 takes
the entry of its table of kernels that belongs to AVX2 at the lowest precision (pytorch/pytorch#188792).

Processes are forked from one that has called nothing of MKL, as an engine process forks workers.  Half of the time they
score at once ("open"), and the other half after ``machine.choose_mkl_kernels`` ("settled"), as workers do.  The windows
are those of ``benchmarks.kills``; the table of a rotary embedding of 8,192 positions is computed in other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare_q.backends.common import machine
from compare_q.backends.scoring import statistics

LENGTH, VOCABULARY, BOOST = 200, 300, 3.0
POSITIONS, HALF = 8192, 64


def window() -> torch.Tensor:
    """The log-probabilities [T] of one window of closed-form logits."""
    ids = np.random.default_rng(1).choice(np.frombuffer(b"abcdefgh \n", np.uint8), LENGTH).astype(np.int64)
    logits = torch.zeros(LENGTH - 1, VOCABULARY)
    logits[torch.arange(LENGTH - 1), torch.from_numpy(ids[1:])] = BOOST
    rows = statistics.of_rows(0, logits, ids[1:])
    return torch.from_numpy(statistics.scores(0, ids[1:], [rows]).logprob)


def rotary() -> torch.Tensor:
    """The cosines [positions, half a head] of a rotary embedding."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, HALF)
    return torch.outer(torch.arange(POSITIONS).float(), frequencies).cos()


def differences(compute: Callable[[], torch.Tensor], settled: bool, threads: int) -> tuple[int, float]:
    """(how many of the first call's numbers are not those of the second, the largest difference)."""
    torch.set_num_threads(threads)
    torch.zeros(1 << 20).add_(1)  # the threads are there
    if settled:
        machine.choose_mkl_kernels()
    first, second = compute(), compute()
    return int((first != second).sum()), float((first - second).abs().max())


def forked(compute: Callable[[], torch.Tensor], settled: bool, threads: int) -> int:
    """A process that computes; what it finds can be read from the pipe."""
    out, into = os.pipe()
    if os.fork() == 0:
        os.write(into, json.dumps(differences(compute, settled, threads)).encode())
        os._exit(0)
    os.close(into)
    return out


def storm(compute: Callable[[], torch.Tensor], settled: bool, args: argparse.Namespace) -> dict[str, Any]:
    """What processes have found that were forked, always so many at once, for a time."""
    found: list[tuple[int, float]] = []
    until, running = time.monotonic() + args.seconds / 4, list[int]()
    while running or time.monotonic() < until:
        while len(running) < args.at_once and time.monotonic() < until:
            running.append(forked(compute, settled, args.threads))
        pipe = running.pop(0)
        found.append(tuple(json.loads(os.read(pipe, 1000))))
        os.close(pipe)
        os.wait()
    wrong = [each for each in found if each[0]]
    return {"processes": len(found), "wrong": len(wrong), "wrong_numbers": sorted(count for count, _ in wrong)[-20:],
            "largest_difference": max((size for _, size in found), default=0.0)}  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("out", type=Path)
    p.add_argument("--seconds", type=float, default=60.0, help="in all")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each process")
    p.add_argument("--at-once", type=int, default=8, help="processes; the race needs more threads than cores")
    args = p.parse_args()
    results: dict[str, Any] = {"cpu": machine.cpu(), "torch": torch.__version__, "threads": args.threads}
    for compute in (window, rotary):
        for settled in (False, True):
            name = f"{compute.__name__}, {'settled' if settled else 'open'}"
            results[name] = storm(compute, settled, args)
            print(f"{name}: {results[name]}", flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
