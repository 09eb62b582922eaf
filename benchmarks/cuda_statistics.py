"""The statistics kernel on a GPU: how much of the card's copy bandwidth it takes, and by its parameters.

    python -m benchmarks.cuda_statistics [--sweep]

Rows of bf16 logits over 128,256 tokens, against a reference and alone.  The bandwidth is the bytes of the logits over
the time, the card's own that of a copy of as many bytes, read and written, in the same process.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
import triton

from backends.common import machine
from backends.scoring import triton_kernel
from backends.scoring.statistics import torch_partial, width

VOCAB = 128_256


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of a call on the GPU, its caches emptied before each."""
    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy from the device's memory to itself."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def case(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, a reference's logits, targets)."""
    logits = (3 * torch.randn(rows, VOCAB, device="cuda")).bfloat16()
    reference = (logits.float() + 0.1 * torch.randn(rows, VOCAB, device="cuda")).bfloat16()
    return logits, reference, torch.randint(0, VOCAB, (rows,), device="cuda")


def measured(rows: int, compares: bool, peak: float) -> dict[str, Any]:
    """Time and bandwidth of one shape by the parameters that stand in the kernel's file, and whether it is right."""
    logits, reference, targets = case(rows)
    against = reference if compares else None
    out, gold = (torch.empty(rows, width(compares), device="cuda") for _ in range(2))
    taken = milliseconds(lambda: triton_kernel.partial(logits, targets, out, 0, against))
    torch_partial(logits, targets, gold, 0, against)
    bytes_read = rows * VOCAB * 2 * (1 + compares)
    return {
        "rows": rows, "against_a_reference": compares, "microseconds": round(taken * 1e3, 1),
        "terabytes_a_second": round(bytes_read / taken / 1e9, 3),
        "share_of_copy_bandwidth": round(bytes_read / taken * 1e3 / peak, 3),
        "largest_relative_difference_from_torch": float(((out - gold).abs() / gold.abs().clamp(min=1)).max()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other parameters of the kernel")
    options = parser.parse_args()
    torch.manual_seed(0)
    peak = copy_bandwidth()
    origin = {"versions": machine.versions(), "hardware": machine.hardware(machine.gpus())}
    print(json.dumps({"commit": machine.commit(), **origin, "copy_terabytes_a_second": peak / 1e12}))
    for rows, compares in itertools.product((512, 1024), (True, False)):
        print(json.dumps(measured(rows, compares, peak)), flush=True)
    if options.sweep:
        for lanes, group, warps in itertools.product((128, 256, 512, 1024), (8, 16), (2, 4, 8, 16)):
            if lanes >= 32 * warps:
                triton_kernel.LANES, triton_kernel.GROUP, triton_kernel.WARPS = lanes, group, warps
                found = [measured(rows, rows == 512, peak)["share_of_copy_bandwidth"] for rows in (512, 1024)]
                print(lanes, group, warps, "against a reference, alone:", *found, flush=True)


if __name__ == "__main__":
    main()
