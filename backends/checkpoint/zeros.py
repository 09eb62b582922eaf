"""Find weights that are zeros, left by holes in a file or by failed quantization.

Whole tensors count, and runs of rows.  A row of a matrix that repeats one number counts as well:
4-bit formats may store 8 for zero.

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

from ..base import TensorBytes
from ..hub import SILENT, Watch
from ..layers.module_names import kind_of

MOST_SAMPLES = 17
"""Largest number of samples per tensor.  If one repeats a number, all rows of the tensor are read.
"""
FEWEST_SAMPLES = 3
SAMPLE_BYTES = 512
"""Bytes of a sample."""
READS = 1 << 14
"""Approximate number of samples in total.

For models with many tensors, such as mixtures of experts, fewer samples per tensor are read.
"""
FIRST_BYTES = 32
"""Bytes of each row that are read first."""
READ_BYTES = 1 << 24
"""Bytes per read of rows that begin with zeros."""
NUMBER_BYTES = 4
"""Bytes whose repetition shows one number, of 4, 8, 16 or 32 bits."""
SHORTEST = 4
"""Smallest number of rows in a run that counts: two or three dead rows may be neighbours."""
PADDING_SHARE = 0.05
"""Largest share of zero rows that counts as padding, in a matrix that is the only one of its kind.

The embedding is such a matrix.
"""
LEFT_OUT = re.compile(
    r"bias|zero|_?idx|perm|lora|shape|mask|(^|\.)[kvq]_scale|input_(global_)?scale"
)
"""Pattern in the names of tensors that may be all zeros, or that the doctor checks elsewhere."""
SCALE_NAME = re.compile(r"scale|absmax|\.SCB$")


class Run(NamedTuple):
    """The longest run of rows that repeat one number; ``length`` 0 if there is none."""

    first: int
    length: int
    repeats: bool  # the number is not zero


NO_RUN = Run(0, 0, repeats=False)


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
        what = "one repeated number" if self.repeats else "zeros"
        if self.length == self.rows:
            return f"all {what}"
        last = self.first + self.length - 1
        return f"rows {self.first:,} to {last:,} of {self.rows:,} are {what}"


def find(
    tensors: Sequence[TensorBytes], *, whole: bool = False, watch: Watch = SILENT
) -> list[Zeros]:
    """Find matrices and scales with zeros, from samples or (``whole``) all rows.

    ``watch`` gets numbers of bytes.
    """
    kinds: dict[str, list[tuple[TensorBytes, Run]]] = {}
    watch.expect(sum(tensor.nbytes for tensor in tensors))
    n_samples = READS // max(len(tensors), 1)
    n_samples = min(max(n_samples, FEWEST_SAMPLES), MOST_SAMPLES)
    with ExitStack() as stack:
        # Memory maps would read ahead around each sample.
        descriptors: dict[Path, int] = {}
        for file in {tensor.file for tensor in tensors}:
            descriptors[file] = stack.enter_context(file.open("rb", buffering=0)).fileno()
        for tensor in tensors:
            watch.advance(tensor.nbytes)
            is_scale = SCALE_NAME.search(tensor.name) is not None
            if not tensor.nbytes or LEFT_OUT.search(tensor.name):
                continue
            if len(tensor.shape) < 2 and not is_scale:
                continue
            run = NO_RUN
            reads_all = whole or tensor.nbytes < MOST_SAMPLES * SAMPLE_BYTES
            if reads_all or has_repeating_sample(descriptors[tensor.file], tensor, n_samples):
                run = longest_run(matrix_of(tensor), zeros_only=is_scale)
            kinds.setdefault(kind_of(tensor.name), []).append((tensor, run))
    zeros = []
    for members in kinds.values():
        zeros += zeros_of_kind(members)
    return zeros


def has_repeating_sample(descriptor: int, tensor: TensorBytes, n_samples: int) -> bool:
    """Return True if one of some samples of a tensor repeats one number."""
    last = tensor.start + max(tensor.nbytes - SAMPLE_BYTES, 0)
    for start in np.linspace(tensor.start, last, n_samples, dtype=int):
        sample = os.pread(descriptor, SAMPLE_BYTES, start)
        if sample[NUMBER_BYTES:] == sample[:-NUMBER_BYTES]:
            return True
    return False


def matrix_of(tensor: TensorBytes) -> NDArray[np.uint8]:
    """Return a tensor as bytes [rows, bytes of a row], mapped into memory."""
    n_rows = math.prod(tensor.shape[:-1])
    shape = (1, tensor.nbytes)
    if tensor.nbytes % n_rows == 0:
        shape = (n_rows, tensor.nbytes // n_rows)
    return np.memmap(tensor.file, np.uint8, "r", tensor.start, shape)


def zeros_of_kind(members: Sequence[tuple[TensorBytes, Run]]) -> list[Zeros]:
    """Return the zeros in tensors whose names differ only in numbers."""
    n_with_zeros = sum(run.length > 0 for _, run in members)
    zeros = []
    for tensor, run in members:
        if not run.length:
            continue
        n_rows = math.prod(tensor.shape[:-1])
        if len(members) > 1:
            may_be_intended = 2 * n_with_zeros > len(members)
        else:
            may_be_intended = run.length <= PADDING_SHARE * n_rows
        is_scale_of_zeros = run.length == n_rows and SCALE_NAME.search(tensor.name) is not None
        wrong = not may_be_intended or is_scale_of_zeros
        zeros.append(
            Zeros(tensor.name, tensor.file, run.first, run.length, n_rows, wrong, run.repeats)
        )
    return zeros


def longest_run(matrix: NDArray[np.uint8], *, zeros_only: bool) -> Run:
    """Return the longest run of rows that repeat a number of ``NUMBER_BYTES`` bytes.

    ``NO_RUN`` if it is short, or most such rows are outside it.  ``matrix``: bytes [rows, bytes of
    a row].  ``zeros_only``: the number must be zero.  It also must be in very short rows, which may
    repeat another number by chance.
    """
    if matrix.shape[1] < FIRST_BYTES:
        zeros_only = True
    # The first bytes of most rows do not repeat a number: the rest of these rows is not read.
    candidates = np.flatnonzero(repeat_one_number(matrix[:, :FIRST_BYTES], zeros_only=zeros_only))
    step = max(READ_BYTES // matrix.shape[1], 1)
    repeating = [candidates[:0]]
    for start in range(0, len(candidates), step):
        some = candidates[start : start + step]
        repeating.append(some[repeat_one_number(matrix[some], zeros_only=zeros_only)])
    rows = np.concatenate(repeating)
    if not len(rows):
        return NO_RUN
    # Places in ``rows`` where runs begin, and the end: -2 and len(matrix) + 1 are next to no row.
    edges = np.flatnonzero(np.diff(rows, prepend=-2, append=len(matrix) + 1) > 1)
    lengths = np.diff(edges)
    longest = max(lengths)
    if longest < min(SHORTEST, len(matrix)) or 2 * longest < len(rows):
        return NO_RUN
    first = int(rows[edges[lengths.argmax()]])
    return Run(first, int(longest), repeats=bool(matrix[first].any()))


def repeat_one_number(rows: NDArray[np.uint8], *, zeros_only: bool) -> NDArray[np.bool_]:
    """Return for each row whether it repeats one number of ``NUMBER_BYTES`` bytes."""
    if zeros_only:
        return np.asarray(~rows.any(1))
    return np.asarray((rows[:, NUMBER_BYTES:] == rows[:, :-NUMBER_BYTES]).all(1))
