"""The statistics kernel on a GPU: how much of the card's copy bandwidth it takes, and by its parameters.

    python -m benchmarks.cuda_statistics [--output statistics.json] [--sweep]

Rows of bf16 logits over 128,256 tokens: 384 against a reference, as vLLM's scorer gives them to the kernel at a time,
768 alone, and others; against a reference also with the second pass of ``--divergences``, which reads the logits once
more.  The bandwidth is the bytes of the logits over the time; the card's own is that of copies of as many bytes, read
and written together, in the same process.  Both are timed in CUDA graphs over four sets of data one after the other, so
that neither the time of a launch nor what a cache still holds is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from compare_q.backends.common import machine
from compare_q.backends.scoring import divergences, triton_kernels
from compare_q.backends.scoring.statistics import torch_partial

VOCAB = 128_256
SETS = 4


def milliseconds(works: Sequence[Callable[[], object]]) -> float:
    """Median time of one of several calls that a CUDA graph holds."""

    def all_of_them() -> None:
        for work in works:
            work()

    all_of_them()  # compiled before it is captured
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        taken = triton.testing.do_bench_cudagraph(all_of_them, rep=100, return_mode="median")
    return float(taken) / len(works)


def copy_bandwidth(n_bytes: int) -> float:
    """Bytes a second of copies within the device's memory, so many of them read and written together."""
    halves = [torch.empty(2, n_bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(SETS)]
    return n_bytes / milliseconds([partial(half[1].copy_, half[0]) for half in halves]) * 1e3


def case(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, a reference's logits, targets)."""
    logits = (3 * torch.randn(rows, VOCAB, device="cuda")).bfloat16()
    reference = (logits.float() + 0.1 * torch.randn(rows, VOCAB, device="cuda")).bfloat16()
    return logits, reference, torch.randint(0, VOCAB, (rows,), device="cuda")


def measured(rows: int, compares: bool, more: bool = False) -> dict[str, Any]:
    """Time and bandwidth of one shape by the parameters that stand in the kernel's file, and whether it is right."""
    cases = [case(rows) for _ in range(SETS)]
    out, gold = (torch.empty(rows, divergences.width(compares, more), device="cuda") for _ in range(2))
    if more:
        calls = [partial(divergences.both_passes, z, t, out, r) for z, r, t in cases]
    else:
        calls = [partial(triton_kernels.partial_statistics, z, t, out, 0, r if compares else None) for z, r, t in cases]
    taken = milliseconds(calls)
    logits, reference, targets = cases[-1]
    first = gold[:, : divergences.FIRST]
    torch_partial(logits, targets, first, 0, reference if compares else None)
    if more:
        whole = divergences.normalizers(first[None])
        divergences.torch_partial(logits, reference, whole, gold[:, divergences.FIRST :], 0)
    bytes_read = rows * VOCAB * 2 * (1 + compares) * (1 + more)
    copied = copy_bandwidth(bytes_read)
    return {
        "rows": rows, "against_a_reference": compares, "divergences": more, "microseconds": round(taken * 1e3, 1),
        "terabytes_a_second": round(bytes_read / taken / 1e9, 3),
        "share_of_copy_bandwidth": round(bytes_read / taken * 1e3 / copied, 3),
        "largest_relative_difference_from_torch": float(((out - gold).abs() / gold.abs().clamp(min=1)).max()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the results go, JSON")
    parser.add_argument("--sweep", action="store_true", help="try other parameters of the kernel")
    options = parser.parse_args()
    torch.manual_seed(0)
    shapes: list[dict[str, Any]] = []
    alone, pair, both = (False, False), (True, False), (True, True)
    for rows, kinds in ((384, (pair, both)), (768, (alone,)), (512, (pair, both, alone)), (1024, (pair, both, alone))):
        shapes += [measured(rows, *kind) for kind in kinds]
    for shape in shapes:
        print(json.dumps(shape))
    if options.output:
        origin = {"versions": machine.versions(), "hardware": machine.hardware(machine.gpus())}
        text = json.dumps({"commit": machine.commit(), **origin, "shapes": shapes}, indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.sweep:
        for lanes, group, warps in itertools.product((128, 256, 512, 1024), (16,), (4, 8, 16)):
            if lanes >= 32 * warps:
                triton_kernels.LANES, triton_kernels.GROUP, triton_kernels.WARPS = lanes, group, warps
                found = [measured(rows, rows == 384)["share_of_copy_bandwidth"] for rows in (384, 768)]
                print(lanes, group, warps, "against a reference, alone:", *found, flush=True)


if __name__ == "__main__":
    main()
