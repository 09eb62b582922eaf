"""Find weights that are zeros, left by holes in a file or by failed quantization: whole tensors and
runs of rows.

A row of a matrix that repeats one number counts as well: 4-bit formats may store 8 for zero.

Zeros can be intended: padding, pruned rows, tensors that begin training as zeros.  Intended zeros
are in every layer, and damage is in a few layers.  Zeros in a matrix therefore count as wrong if
most of the matrices whose names differ only in numbers have no zeros.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import Placed
from ..hub import SILENT, Watch
from ..layers.module_names import NUMBER

SAMPLES, SAMPLE, READS = 17, 512, 1 << 14
"""Largest number of samples per tensor, bytes per sample, and approximate number of samples in
total.

If a sample repeats a number, all rows of the tensor are read.  For models with many tensors, such
as mixtures of experts, fewer samples per tensor are read, but at least 3.
"""
FIRST_BYTES, STEP = 32, 1 << 24
"""Bytes of each row that are read first; bytes per read of rows that begin with zeros."""
WORD = 4
"""Bytes whose repetition shows one number, of 4, 8, 16 or 32 bits."""
SHORTEST = 4
"""Smallest number of rows in a run that counts: two or three dead rows may be next to each other.
"""
PADDING = 0.05
"""Largest share of zero rows that counts as padding, in a matrix that is the only one of its kind
(the embedding)."""
LEFT_OUT = re.compile(
    r"bias|zero|_?idx|perm|lora|shape|mask|(^|\.)[kvq]_scale|input_(global_)?scale"
)
"""Pattern in the names of tensors that may be all zeros, or that the doctor checks elsewhere."""
SCALE = re.compile(r"scale|absmax|\.SCB$")


class Zeros(NamedTuple):
    """The longest run of rows of zeros in a tensor.

    ``rows``: number of rows of the tensor; ``wrong``: the zeros cannot be intended; ``repeats``:
    the rows repeat a number that is not zero.
    """

    name: str
    file: Path
    first: int
    length: int
    rows: int
    wrong: bool
    repeats: bool

    def __str__(self) -> str:
        what, last = (
            "one repeated number" if self.repeats else "zeros",
            self.first + self.length - 1,
        )
        return (
            f"all {what}"
            if self.length == self.rows
            else f"rows {self.first:,} to {last:,} of {self.rows:,} are {what}"
        )


def find(tensors: Sequence[Placed], *, whole: bool = False, watch: Watch = SILENT) -> list[Zeros]:
    """Find matrices and scales with zeros, from samples or (``whole``) all rows; ``watch`` gets
    numbers of bytes.
    """
    kinds: dict[str, list[tuple[Placed, int, tuple[int, int, bool]]]] = {}
    watch.expect(sum(tensor.nbytes for tensor in tensors))
    n_samples = min(max(READS // max(len(tensors), 1), 3), SAMPLES)
    with ExitStack() as stack:  # memory maps would read ahead around each sample
        opened = {
            file: stack.enter_context(file.open("rb", buffering=0))
            for file in {each.file for each in tensors}
        }
        for tensor in tensors:
            watch.advance(tensor.nbytes)
            name, file, start, nbytes, shape = tensor
            if not nbytes or LEFT_OUT.search(name) or (len(shape) < 2 and not SCALE.search(name)):
                continue
            places = np.linspace(start, start + max(nbytes - SAMPLE, 0), n_samples, dtype=int)
            samples = (os.pread(opened[file].fileno(), SAMPLE, at) for at in places)
            rows, run = math.prod(shape[:-1]), (0, 0, False)
            if (
                whole
                or nbytes < SAMPLES * SAMPLE
                or any(each[WORD:] == each[:-WORD] for each in samples)
            ):
                shaped = (rows, nbytes // rows) if nbytes % rows == 0 else (1, nbytes)
                run = longest_run(
                    np.memmap(file, np.uint8, "r", start, shaped),
                    zeros_only=bool(SCALE.search(name)),
                )
            kinds.setdefault(NUMBER.sub("*", name), []).append((tensor, rows, run))
    found = []
    for members in kinds.values():
        with_zeros = sum(count > 0 for _, _, (_, count, _) in members)
        for tensor, rows, (first, count, repeats) in members:
            usual = 2 * with_zeros > len(members) if len(members) > 1 else count <= PADDING * rows
            wrong = not usual or (count == rows and bool(SCALE.search(tensor.name)))
            found += (
                [Zeros(tensor.name, tensor.file, first, count, rows, wrong, repeats)]
                if count
                else []
            )
    return found


def longest_run(matrix: NDArray[np.uint8], *, zeros_only: bool) -> tuple[int, int, bool]:
    """(first row, number of rows, True if not zeros) of the longest run of rows that repeat a
    number of ``WORD`` bytes.

    (0, 0, False) if it is short, or most such rows are outside it.  ``matrix``: bytes [rows, bytes
    of a row].  ``zeros_only``: the number is zero, as in rows that are too short to repeat one.
    """
    zeros_only |= matrix.shape[1] < FIRST_BYTES

    def repeating(part: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return np.asarray(
            ~part.any(1) if zeros_only else (part[:, WORD:] == part[:, :-WORD]).all(1)
        )

    rows, step = np.flatnonzero(repeating(matrix[:, :FIRST_BYTES])), max(STEP // matrix.shape[1], 1)
    parts = [rows[at : at + step] for at in range(0, len(rows), step)]
    zeros = np.concatenate([part[repeating(matrix[part])] for part in parts] or [rows])
    edges = np.flatnonzero(
        np.diff(zeros, prepend=-2, append=len(matrix) + 1) > 1
    )  # where runs begin, and the end
    lengths = np.diff(edges)
    if not len(zeros) or (
        max(lengths) < min(SHORTEST, len(matrix)) or 2 * max(lengths) < len(zeros)
    ):
        return 0, 0, False
    first = int(zeros[edges[lengths.argmax()]])
    return first, int(lengths.max()), bool(matrix[first].any())
