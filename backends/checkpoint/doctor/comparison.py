"""How far every dequantized matrix is from the reference's: ||W_q - W|| / ||W|| in the Frobenius norm.

A band of each matrix is in memory at a time, ``BAND`` weights at most.

Smoothing (AWQ, SmoothQuant) multiplies the columns of a matrix by factors and divides what stands before it by them,
which changes no answer and is no error.  Before q, k, v, gate and up a norm stands: the columns are multiplied by the
model's norm over the reference's.  Before o and down stand the rows of v and up, whose factors no small tensor holds:
they are fitted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backends.checkpoint.doctor.finding import Finding, gathered
from backends.checkpoint.doctor.gguf_matrices import matrices_of
from backends.checkpoint.doctor.matrices import Matrix, matrix_of, with_columns
from backends.checkpoint.doctor.numbers import Floats, values
from backends.checkpoint.doctor.subject import FLOATS, Checkpoint, Parts
from backends.checkpoint.gguf import GgufModel
from backends.checkpoint.stored_bits import OTHER_TOWERS
from backends.common.messages import one_line

BAND = 1 << 22
"""Weights of one band: 16 MiB of float32, of which four or five are alive at once."""
UNRELATED = 0.9
"""From this relative error on a matrix is not the reference's: a matrix of zeros has 1.  Round-to-nearest has 0.007 at
8 bits, 0.1 at 4 and 0.6 at 2."""
Vectors = dict[str, dict[str, Floats]]
"""Layer ("" outside of all) -> the rest of a module's name -> its weights."""
LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")
PROBE = 256
"""Rows (or columns) by which it is decided how a matrix was changed before it was quantized."""
SMOOTHED = {
    "o_proj": 1, "down_proj": 1, "w2": 1, "v_proj": 0, "up_proj": 0, "w3": 0, "qkv_proj": 0, "gate_up_proj": 0,
}  # fmt: skip
"""Last step of the names of matrices whose columns (1) or rows (0) smoothing scales without a norm beside them."""
BETTER = 0.9
"""A fit counts if it leaves less than this part of the error: of quantization alone it leaves 0.985 or more."""


@dataclass(frozen=True)
class LayerError:
    """One matrix against the reference's, or ``note``: why it was not compared.

    ``error``: ||W_q - W|| / ||W||; ``scale``: <W_q, W> / <W, W>, 1 where the matrix did not shrink or grow as a whole;
    ``stored``: in words, with what was undone: "int4 g128, norm folded", "int4 g128, columns scaled"; ``weights``:
    their number.
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
    ratios = Norms(model, reference)
    for name, same, mine in mine_of(model, theirs):
        other = matrix_of(theirs[name], reference.quantization)
        size = 0 if isinstance(other, str) else math.prod(other.shape)
        yield one(name, mine, other, size, ratios.of(same, name))
        advance(size)


def weights_of(reference: Checkpoint) -> int:
    """How many weights the matrices of a reference have, by its headers."""
    found = (matrix_of(parts, reference.quantization) for _, parts in reference.matrices)
    return sum(math.prod(matrix.shape) for matrix in found if isinstance(matrix, Matrix))


def mine_of(model: Checkpoint | GgufModel, theirs: Mapping[str, Any]) -> Iterator[tuple[str, str, Matrix | str]]:
    """(name of the reference's matrix, the model's name of it, the model's matrix or why there is none)."""
    if isinstance(model, GgufModel):
        found: dict[str, Matrix | str] = dict(matrices_of(model, list(theirs)))
        yield from ((name, name, found.get(name, "the model has no such matrix")) for name in theirs)
        return
    own: dict[str, Parts] = dict(model.matrices)
    ends, wanted = by_end(own), by_end(theirs)
    for name in theirs:
        same = name if name in own else ends.get(end_of(name)) if end_of(name) in wanted else None
        found_here = matrix_of(own[same], model.quantization) if same else "the model has no such matrix"
        yield name, same or name, found_here


def by_end(names: Iterable[str]) -> dict[str, str]:
    """End of a name -> the name, if it is the only one with that end."""
    names = list(names)
    counts = Counter(map(end_of, names))
    return {end_of(name): name for name in names if counts[end_of(name)] == 1}


def end_of(name: str) -> str:
    """A module's name from its tower, its MTP part, or ``layers.`` on: kinds of checkpoints differ before it."""
    steps = name.split(".")
    own = (at for at, step in enumerate(steps) if OTHER_TOWERS.fullmatch(step) or step.startswith("mtp"))
    first = next(own, steps.index("layers") if "layers" in steps else 0)
    return ".".join(steps[first:])


class Norms:
    """What the vectors of each layer of a model, its norms among them, are to the reference's."""

    def __init__(self, model: Checkpoint | GgufModel, reference: Checkpoint) -> None:
        self.theirs = vectors(reference)
        self.mine = vectors_of_gguf(model, self.theirs) if isinstance(model, GgufModel) else vectors(model)
        self.known: dict[tuple[str, str], list[Floats]] = {}

    def of(self, mine: str, theirs: str) -> list[Floats]:
        """The ratios in the layers of two matrices that differ from 1 by more than bfloat16's rounding."""
        layers = layer_of(mine), layer_of(theirs)
        if layers not in self.known:
            one, other = self.mine.get(layers[0], {}), self.theirs.get(layers[1], {})
            pairs = [(one[name], other[name]) for name in one if name in other]
            self.known[layers] = [ratio for pair in pairs if pair[0].shape == pair[1].shape for ratio in folded(*pair)]
        return self.known[layers]


def vectors(checkpoint: Checkpoint) -> Vectors:
    """The weights of the modules that are vectors of floats."""
    found: Vectors = {}
    for module, parts in checkpoint.modules.items():
        weight = parts.get("weight")
        if weight is not None and len(weight.shape) == 1 and weight.dtype in FLOATS:
            layer = layer_of(module)
            found.setdefault(layer, {})[module[len(layer) :] if layer else last_step(module)] = values(weight)
    return found


def vectors_of_gguf(model: GgufModel, wanted: Vectors) -> Vectors:
    """Those of a GGUF model under the reference's names."""
    names = {layer + rest: (layer, rest) for layer, found in wanted.items() for rest in found if layer}
    known: Vectors = {}
    for name, vector in matrices_of(model, list(names)):
        if isinstance(vector, Matrix) and vector.shape[0] == 1:
            layer, rest = names[name]
            known.setdefault(layer, {})[rest] = vector.band(0, 1)[0]
    return known


def last_step(name: str) -> str:
    """What stands after the last point of a name."""
    return name.rpartition(".")[2]


def layer_of(module: str) -> str:
    """ "model.layers.3" of a module in that layer; "" outside of all."""
    found = LAYER.match(module)
    return found[0] if found else ""


def folded(mine: Floats, theirs: Floats) -> Iterator[Floats]:
    """The ratios of two norms that may have been divided by factors; Gemma and Qwen3-Next store a norm less 1."""
    for more in (0, 1):
        one, other = mine + np.float32(more), theirs + np.float32(more)
        ratio = np.divide(one, other, out=np.ones_like(one), where=other != 0)
        if np.isfinite(ratio).all() and np.abs(ratio - 1).max(initial=0) > 2**-7:
            yield ratio


def one(name: str, mine: Matrix | str, reference: Matrix | str, size: int, ratios: Sequence[Floats] = ()) -> LayerError:
    """One pair of matrices; ``ratios``: of the norms that may stand before it."""
    stored = mine.stored if isinstance(mine, Matrix) else ""
    for which, found in (("", mine), ("the reference's ", reference)):
        if isinstance(found, str):
            return LayerError(name, stored, size, note=f"not compared: {which}{found}")
    assert isinstance(mine, Matrix)
    assert isinstance(reference, Matrix)
    if mine.shape != reference.shape:
        sizes = " and ".join("x".join(map(str, found.shape)) for found in (mine, reference))
        return LayerError(name, stored, size, note=f"not compared: shapes {sizes}")
    try:
        by = SMOOTHED.get(last_step(name))
        mine = likeliest(mine, reference, ratios, by)
        error, scale = measured(mine, reference, bands(mine))
        if by is not None and (fit := unscaled(mine, reference, by, error)) is not None:
            return LayerError(name, f"{mine.stored}, {('rows', 'columns')[by]} scaled", size, fit, 1.0)
    except (IndexError, ValueError, ZeroDivisionError) as damage:  # parts that do not fit each other
        return LayerError(name, stored, size, note=f"not compared: its parts do not fit: {one_line(damage, 80)}")
    return LayerError(name, mine.stored, size, error, scale)


def likeliest(mine: Matrix, reference: Matrix, ratios: Sequence[Floats], by: int | None) -> Matrix:
    """The matrix as it is, in its other order, or with a norm's ratio in its columns: what is nearest.

    ``by``: whose factors are fitted later; fitted columns (1) need no ratio.
    """
    ways = [mine] if mine.other is None else [mine, replace(mine, band=mine.other)]
    fitting = [ratio for ratio in ratios if len(ratio) == mine.shape[1] and by != 1]
    ways += [with_columns(way, ratio, f"{way.stored}, norm folded") for way in ways for ratio in fitting]
    if len(ways) == 1:
        return mine
    if by is None:
        return min(ways, key=lambda way: measured(way, reference, probe(way))[0])
    return min(ways, key=lambda way: fitted(way, reference, by, probe(way))[0])


def unscaled(mine: Matrix, reference: Matrix, by: int, error: float) -> float | None:
    """The error without factors of its columns or rows, if they explain a part of it; None if they do not."""
    if not 0.01 < error < math.inf:
        return None
    for pieces in (probe(mine), bands(mine)):
        found, without = fitted(mine, reference, by, pieces)
        if not found < BETTER * without:
            return None
    return found


def fitted(mine: Matrix, reference: Matrix, by: int, pieces: Iterator[tuple[int, int]]) -> tuple[float, float]:
    """The error with a fitted positive factor for each row (0) or column (1), and with one for all or none."""
    sums = np.zeros((3, mine.shape[by]))
    for begin, end in pieces:
        one, other = mine.band(begin, end), reference.cut(mine.axis, begin, end)
        where = slice(begin, end) if mine.axis == by else slice(None)
        for number, pair in enumerate(((one, one), (one, other), (other, other))):
            sums[number, where] += np.einsum(f"ij,ij->{'ij'[by]}", *pair, dtype=np.float64)
    norm = sums[2].sum()
    if not norm:
        return math.nan, math.nan

    def left(own: Any, both: Any, theirs: Any) -> float:
        factor = np.divide(both, theirs, out=np.ones_like(both), where=both > 0)
        return math.sqrt(max(float((own / factor**2 - 2 * both / factor + theirs).sum()), 0.0) / norm)

    plain = math.sqrt(max(sums[0].sum() - 2 * sums[1].sum() + norm, 0.0) / norm)
    return left(*sums), min(left(*sums.sum(1, keepdims=True)), plain)


def measured(mine: Matrix, reference: Matrix, pieces: Iterator[tuple[int, int]]) -> tuple[float, float]:
    """(relative error, scale) of two matrices of one shape, summed in float64; NaN where the weights are."""
    difference = both = norm = 0.0
    for begin, end in pieces:
        one, other = mine.band(begin, end), reference.cut(mine.axis, begin, end)
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


def probe(matrix: Matrix) -> Iterator[tuple[int, int]]:
    """The first band, of ``PROBE`` rows or columns."""
    yield 0, min(-(-PROBE // matrix.step) * matrix.step, matrix.shape[matrix.axis])


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


def worst_first(errors: Sequence[LayerError]) -> list[LayerError]:
    """The compared matrices, the largest error first (NaN before all)."""
    compared = [each for each in errors if each.error is not None]
    return sorted(compared, key=lambda each: -math.inf if math.isnan(each.error or 0.0) else -(each.error or 0.0))
