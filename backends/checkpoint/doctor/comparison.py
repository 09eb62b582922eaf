"""How far every dequantized matrix is from the reference's: ||W_q - W|| / ||W|| in the Frobenius norm.

A band of each matrix is in memory at a time, ``BAND`` weights at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.checkpoint.doctor.finding import Finding, gathered
from backends.checkpoint.doctor.gguf_matrices import matrices_of
from backends.checkpoint.doctor.matrices import Matrix, matrix_of
from backends.checkpoint.doctor.numbers import Floats
from backends.checkpoint.doctor.subject import Checkpoint, Parts
from backends.checkpoint.gguf import GgufModel
from backends.common.errors import InputError
from backends.common.messages import one_line

BAND = 1 << 22
"""Weights of one band: 16 MiB of float32, of which four or five are alive at once."""
UNRELATED = 0.9
"""From this relative error on a matrix is not the reference's: a matrix of zeros has 1.  Round-to-nearest has 0.007 at
8 bits, 0.1 at 4 and 0.6 at 2."""


@dataclass(frozen=True)
class LayerError:
    """One matrix against the reference's, or ``note``: why it was not compared.

    ``error``: ||W_q - W|| / ||W||; ``scale``: <W_q, W> / <W, W>, 1 where the matrix did not shrink or grow as a whole;
    ``stored``: in words; ``weights``: their number.
    """

    name: str
    stored: str
    weights: int
    error: float | None = None
    scale: float | None = None
    note: str = ""


def layer_errors(
    model: Checkpoint | GgufModel, reference: Checkpoint, advance: Callable[[int], None] = lambda _: None
) -> Iterator[LayerError]:
    """Every matrix of the reference against the model's, in the reference's order.

    ``advance`` is told how many weights are done.  InputError where a file cannot be read.
    """
    theirs = dict(reference.matrices)
    for name, mine in mine_of(model, theirs):
        other = matrix_of(theirs[name], reference.quantization)
        size = 0 if isinstance(other, str) else math.prod(other.shape)
        yield one(name, mine, other, size)
        advance(size)


def weights_of(reference: Checkpoint) -> int:
    """How many weights the matrices of a reference have, by its headers."""
    found = (matrix_of(parts, reference.quantization) for _, parts in reference.matrices)
    return sum(math.prod(matrix.shape) for matrix in found if isinstance(matrix, Matrix))


def mine_of(model: Checkpoint | GgufModel, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Matrix | str]]:
    """(name of the reference's matrix, the model's matrix or why there is none)."""
    if isinstance(model, GgufModel):
        found: dict[str, Matrix | str] = dict(matrices_of(model, list(theirs)))
        yield from ((name, found.get(name, "the model has no such matrix")) for name in theirs)
        return
    own: dict[str, Parts] = dict(model.matrices)
    by_end = {end_of(name): name for name in own}
    for name in theirs:
        same = name if name in own else by_end.get(end_of(name))
        yield name, matrix_of(own[same], model.quantization) if same else "the model has no such matrix"


def end_of(name: str) -> str:
    """A module's name from ``layers.`` on: what stands before it differs between kinds of checkpoints."""
    return name[max(name.find("layers."), 0) :]


def one(name: str, mine: Matrix | str, reference: Matrix | str, size: int) -> LayerError:
    """One pair of matrices."""
    stored = mine.stored if isinstance(mine, Matrix) else ""
    for which, found in (("", mine), ("the reference's ", reference)):
        if isinstance(found, str):
            return LayerError(name, stored, size, note=f"not compared: {which}{found}")
    assert isinstance(mine, Matrix)
    assert isinstance(reference, Matrix)
    if mine.shape != reference.shape:
        sizes = " and ".join("x".join(map(str, found.shape)) for found in (mine, reference))
        return LayerError(name, stored, size, note=f"not compared: shapes {sizes}")
    orders = [mine.band] if mine.other is None else [mine.band, mine.other]
    try:
        error, scale = min(measured(mine, band, reference) for band in orders)
    except (IndexError, ValueError, ZeroDivisionError) as damage:  # parts that do not fit each other
        return LayerError(name, stored, size, note=f"not compared: its parts do not fit: {one_line(damage, 80)}")
    return LayerError(name, stored, size, error, scale)


def measured(mine: Matrix, band: Callable[[int, int], Floats], reference: Matrix) -> tuple[float, float]:
    """(relative error, scale) of two matrices of one shape, summed in float64; NaN where the weights are."""
    difference = both = norm = 0.0
    for begin, end in bands(mine):
        one, other = band(begin, end), same_band(reference, mine.axis, begin, end)
        apart = np.subtract(one, other).ravel()
        one, other = np.ascontiguousarray(one).ravel(), np.ascontiguousarray(other).ravel()
        difference += dot(apart, apart)
        both += dot(one, other)
        norm += dot(other, other)
    if not norm:
        return (0.0, 1.0) if not difference else (math.inf, math.inf)
    return math.sqrt(difference / norm) if difference >= 0 else math.nan, both / norm


def dot(one: Floats, other: Floats) -> float:
    """A product of vectors of float32, summed in float64 by pieces whose sums in float32 are exact to 1e-6."""
    return math.fsum(float(one[at : at + 4096] @ other[at : at + 4096]) for at in range(0, len(one), 4096))


def bands(matrix: Matrix) -> Iterator[tuple[int, int]]:
    """Where the bands of a matrix begin and end."""
    length, width = matrix.shape[matrix.axis], matrix.shape[1 - matrix.axis]
    step = max(BAND // max(width, 1) // matrix.step, 1) * matrix.step
    for begin in range(0, length, step):
        yield begin, min(begin + step, length)


def same_band(matrix: Matrix, axis: int, begin: int, end: int) -> Floats:
    """A band of a matrix along an axis that may not be its own, for which all of it is read."""
    if matrix.axis == axis:
        return (
            matrix.band(begin // matrix.step * matrix.step, end)[begin % matrix.step :]
            if axis == 0
            else matrix.band(begin, end)
        )
    whole = matrix.band(0, matrix.shape[matrix.axis])
    return whole[begin:end] if axis == 0 else whole[:, begin:end]


def findings(errors: Sequence[LayerError]) -> Iterator[Finding]:
    """What is wrong by the errors alone: matrices that are no numbers, or not the reference's."""
    compared = [each for each in errors if each.error is not None]
    broken = [each.name for each in compared if not math.isfinite(each.error or 0.0)]
    yield from gathered(
        "wrong", broken, "its dequantized weights are not all finite", "quantize the model again",
    )  # fmt: skip
    strange = [
        f"{each.name}: relative error {each.error:.3g}"
        for each in compared
        if each.error and UNRELATED < each.error < math.inf
    ]
    yield from gathered(
        "wrong", strange, "its weights are not the reference's", "give the reference that the model was made from",
    )  # fmt: skip
    if not compared:
        raise InputError("--against: no matrix of the model could be compared with the reference's")


def worst_first(errors: Sequence[LayerError]) -> list[LayerError]:
    """The compared matrices, the largest error first (NaN before all)."""
    compared = [each for each in errors if each.error is not None]
    return sorted(compared, key=lambda each: -math.inf if math.isnan(each.error or 0.0) else -(each.error or 0.0))
