"""Time of the torch statistics on a CPU, by rows at a time: where ``CPU_ELEMENTS`` comes from.

    PYTHONPATH=. python benchmarks/cpu_statistics.py

Prints, for vocabularies of 49,152 and 128,256, the median time of scoring bf16 logits against a bf16 reference and
alone, as a ratio to the bf16 matrix product of the same rows with a head of hidden size 576; then both passes of
``--divergences`` as a ratio to the first, in processor time (OMP_NUM_THREADS=1, or waiting threads count too).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from compare_q.backends.scoring import divergences
from compare_q.backends.scoring.statistics import CPU_ELEMENTS, torch_partial, width

HIDDEN = 576
SIZES = (1, 2, 4, 8, 16, 32, 64, 256, None)  # None: as many as CPU_ELEMENTS gives


def medians(
    functions: list[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of each; the functions take turns, so that a busy moment of the machine hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, seen in zip(functions, times, strict=True):
            begin = clock()
            function()
            seen.append(clock() - begin)
    return [statistics.median(seen[1:]) for seen in times]


def table(vocabulary: int, rows: int, repeats: int) -> None:
    """Measure and print one vocabulary."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, HIDDEN).bfloat16()
    head = (torch.randn(vocabulary, HIDDEN) * 3 / HIDDEN**0.5).bfloat16()
    logits = hidden @ head.T
    reference = (logits.float() + 0.1 * torch.randn(rows, vocabulary)).bfloat16()
    targets = torch.randint(0, vocabulary, (rows,))

    def score(size: int | None, against: torch.Tensor | None) -> Callable[[], None]:
        out = torch.empty(rows, width(against is not None))
        return lambda: torch_partial(logits, targets, out, 0, against, size)

    cases = [score(size, against) for size in SIZES for against in (reference, None)]
    product, *seconds = medians([lambda: hidden @ head.T, *cases], repeats)
    print(f"V = {vocabulary:,}, {rows} rows, {torch.get_num_threads()} threads; head product {product * 1e3:.1f} ms")
    print("rows at a time  against a reference  alone")
    for size, pair, alone in zip(SIZES, seconds[::2], seconds[1::2], strict=True):
        rows_at_once = str(size or f"{max(CPU_ELEMENTS // vocabulary, 1)} (default)")
        print(f"{rows_at_once:>14}  {pair / product:19.2f}  {alone / product:5.2f}")
    out = torch.empty(rows, divergences.width(True, True))
    passes: list[Callable[[], object]] = [
        score(None, reference),
        lambda: divergences.both_passes(logits, targets, out, reference),
    ]
    first, both = medians(passes, repeats, time.process_time)
    print(f"both passes: {both / first:.2f} of the first against a reference, in processor time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    for vocabulary in (49152, 128256):
        table(vocabulary, options.rows, options.repeats)


if __name__ == "__main__":
    main()
