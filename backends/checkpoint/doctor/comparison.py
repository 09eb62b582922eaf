"""How far every dequantized matrix is from the reference's: ||W_q - W|| / ||W|| in the Frobenius norm.

One matrix and the reference's are in memory at a time, as float32.

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
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.doctor.checks import Finding, one_finding
from compare_q.backends.checkpoint.doctor.matrices import Matrix, gguf_matrices, matrix_of
from compare_q.backends.checkpoint.formats import FLOATS, Floats, layout_of, values
from compare_q.backends.checkpoint.gguf import GgufModel
from compare_q.backends.layers.names import from_layers_on

BAND = 1 << 22
"""Weights that are subtracted at once: 16 MiB of float32."""
UNRELATED = 0.9
"""From this relative error on a matrix is not the reference's: a matrix of zeros has 1.  Round-to-nearest has 0.007 at
8 bits, 0.1 at 4 and 0.6 at 2."""
Vectors = dict[tuple[str, str], Floats]
"""(Layer, "" outside of all; the rest of a module's name) -> its weights."""
LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")
PROBE = 256
"""Rows by which it is decided how a matrix was changed before it was quantized."""
SMOOTHED = {
    "o_proj": 1, "down_proj": 1, "w2": 1, "v_proj": 0, "up_proj": 0, "w3": 0, "qkv_proj": 0, "gate_up_proj": 0,
}  # fmt: skip
"""Last step of the names of matrices whose columns (1) or rows (0) smoothing scales without a norm beside them."""
BETTER = 0.9
"""A fit counts if it leaves less than this part of the error: of quantization alone it leaves 0.985 or more."""
ABSENT = "the model has no such matrix"


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

    ``advance`` is told how many weights are done.  InputError where a file cannot be read or a package is missing.
    """
    ratios = norm_ratios(model, reference)
    for name, own_name, mine in models_matrices(model, reference.matrices):
        theirs = matrix_of(reference.matrices[name], reference.config)
        size = 0 if isinstance(theirs, str) else theirs.numbers.size
        yield compared(name, mine, theirs, size, ratios(own_name, name))
        advance(size)


def weights_of(reference: Checkpoint) -> int:
    """How many weights the matrices of a reference have, by its headers."""
    counts = (layout_of(parts, reference.config).weights for parts in reference.matrices.values())
    return sum(count for count in counts if isinstance(count, int))


def models_matrices(
    model: Checkpoint | GgufModel, theirs: Mapping[str, Any]
) -> Iterator[tuple[str, str, Matrix | str]]:
    """(name of the reference's matrix, the model's name of it, the model's matrix or why there is none)."""
    if isinstance(model, GgufModel):
        read = gguf_matrices(model, list(theirs))
        yield from ((name, name, read[name]() if name in read else ABSENT) for name in theirs)
        return
    ends, wanted = by_end(model.matrices), by_end(theirs)
    for name in theirs:
        end = from_layers_on(name)
        own = name if name in model.matrices else ends.get(end) if end in wanted else None
        yield name, own or name, matrix_of(model.matrices[own], model.config) if own else ABSENT


def by_end(names: Iterable[str]) -> dict[str, str]:
    """A name from its layers on -> the name, if it is the only one that goes on like this."""
    names = list(names)
    counts = Counter(map(from_layers_on, names))
    return {from_layers_on(name): name for name in names if counts[from_layers_on(name)] == 1}


def norm_ratios(model: Checkpoint | GgufModel, reference: Checkpoint) -> Callable[[str, str], list[Floats]]:
    """A function of two matrices' names: what the norms in their layers are to each other.

    Of the vectors of both layers the ratios that differ from 1 by more than bfloat16's rounding.
    """
    theirs = vectors(reference)
    mine = gguf_vectors(model, theirs) if isinstance(model, GgufModel) else vectors(model)

    @cache
    def ratios(own_layer: str, layer: str) -> list[Floats]:
        pairs = [
            (mine[own_layer, rest], vector)
            for (its_layer, rest), vector in theirs.items() if its_layer == layer and (own_layer, rest) in mine
        ]  # fmt: skip
        return [ratio for pair in pairs if pair[0].shape == pair[1].shape for ratio in folded(*pair)]

    return lambda own_name, name: ratios(place_of(own_name)[0], place_of(name)[0])


def vectors(checkpoint: Checkpoint) -> Vectors:
    """The weights of the modules that are vectors of floats."""
    weights = {module: parts["weight"] for module, parts in checkpoint.modules.items() if "weight" in parts}
    return {
        place_of(module): values(weight)
        for module, weight in weights.items() if len(weight.shape) == 1 and weight.dtype in FLOATS
    }  # fmt: skip


def gguf_vectors(model: GgufModel, wanted: Vectors) -> Vectors:
    """Those of a GGUF model under the reference's names."""
    places = {layer + rest: (layer, rest) for layer, rest in wanted if layer}
    found = {name: read() for name, read in gguf_matrices(model, list(places)).items()}
    return {
        places[name]: vector.numbers[0]
        for name, vector in found.items() if isinstance(vector, Matrix) and len(vector.numbers) == 1
    }  # fmt: skip


def place_of(module: str) -> tuple[str, str]:
    """("model.layers.3", ".mlp.up_proj") of a module in a layer; outside of all "" and its last step."""
    match = LAYER.match(module)
    return (match[0], module[match.end() :]) if match else ("", module.rpartition(".")[2])


def folded(mine: Floats, theirs: Floats) -> Iterator[Floats]:
    """The ratios of two norms that may have been divided by factors; Gemma and Qwen3-Next store a norm less 1."""
    for more in (0, 1):
        one, other = mine + np.float32(more), theirs + np.float32(more)
        ratio = np.divide(one, other, out=np.ones_like(one), where=other != 0)
        if np.isfinite(ratio).all() and np.abs(ratio - 1).max(initial=0) > 2**-7:
            yield ratio


def compared(
    name: str, mine: Matrix | str, theirs: Matrix | str, size: int, ratios: Sequence[Floats] = ()
) -> LayerError:
    """One pair of matrices; ``ratios``: of the norms that may stand before it."""
    if isinstance(mine, str):
        return LayerError(name, "", size, note=f"not compared: {mine}")
    if isinstance(theirs, str):
        return LayerError(name, mine.stored, size, note=f"not compared: the reference's {theirs}")
    if mine.numbers.shape != theirs.numbers.shape:
        sizes = " and ".join("x".join(map(str, matrix.numbers.shape)) for matrix in (mine, theirs))
        return LayerError(name, mine.stored, size, note=f"not compared: shapes {sizes}")
    axis = SMOOTHED.get(name.rpartition(".")[2])
    mine = likeliest(mine, theirs.numbers, ratios, axis)
    error, scale = measured(mine.numbers, theirs.numbers)
    if axis is not None and (fit := unscaled(mine.numbers, theirs.numbers, axis, error)) is not None:
        return LayerError(name, f"{mine.stored}, {('rows', 'columns')[axis]} scaled", size, fit, 1.0)
    return LayerError(name, mine.stored, size, error, scale)


def likeliest(mine: Matrix, theirs: Floats, ratios: Sequence[Floats], axis: int | None) -> Matrix:
    """The matrix as it is, in its other order, or with a norm's ratio in its columns: what is nearest.

    ``axis``: whose factors are fitted later; fitted columns (1) need no ratio.
    """
    fitting = [ratio for ratio in ratios if len(ratio) == mine.numbers.shape[1] and axis != 1]
    orders = [np.arange(len(theirs)), *([] if mine.order is None else [mine.order])]
    ways = [(order, ratio) for ratio in (None, *fitting) for order in orders]
    if len(ways) == 1:
        return mine

    def rearranged(way: tuple[Any, Floats | None], rows: int | None = None) -> Floats:
        order, ratio = way
        some: Floats = mine.numbers[order[:rows]]
        return some if ratio is None else some * ratio

    def distance(way: tuple[Any, Floats | None]) -> float:
        some, others = rearranged(way, PROBE), theirs[:PROBE]
        return (measured(some, others) if axis is None else fitted(some, others, axis))[0]

    nearest = min(ways, key=distance)
    return Matrix(mine.stored + ("" if nearest[1] is None else ", norm folded"), rearranged(nearest))


def unscaled(mine: Floats, theirs: Floats, axis: int, error: float) -> float | None:
    """The error without factors of its columns or rows, if they explain a part of it; None if they do not."""
    if not 0.01 < error < math.inf:
        return None
    for rows in (PROBE, None):
        fit, without = fitted(mine[:rows], theirs[:rows], axis)
        if not fit < BETTER * without:
            return None
    return fit


def fitted(mine: Floats, theirs: Floats, axis: int) -> tuple[float, float]:
    """The error with a fitted positive factor for each row (0) or column (1), and with one for all or none."""
    pairs = ((mine, mine), (mine, theirs), (theirs, theirs))
    sums = np.stack([np.einsum(f"ij,ij->{'ij'[axis]}", *pair, dtype=np.float64) for pair in pairs])
    norm = sums[2].sum()
    if not norm:
        return math.nan, math.nan

    def left(own: Any, both: Any, others: Any) -> float:
        factor = np.divide(both, others, out=np.ones_like(both), where=both > 0)
        return math.sqrt(max(float((own / factor**2 - 2 * both / factor + others).sum()), 0.0) / norm)

    plain = math.sqrt(max(sums[0].sum() - 2 * sums[1].sum() + norm, 0.0) / norm)
    return left(*sums), min(left(*sums.sum(1, keepdims=True)), plain)


def measured(mine: Floats, theirs: Floats) -> tuple[float, float]:
    """(relative error, scale) of two matrices of one shape, summed in float64; NaN where the weights are."""
    difference = both = norm = 0.0
    rows = max(BAND // max(mine.shape[1], 1), 1)
    for begin in range(0, len(mine), rows):
        one, other = (np.ascontiguousarray(numbers[begin : begin + rows]).ravel() for numbers in (mine, theirs))
        apart = one - other
        difference += dot(apart, apart)
        both += dot(one, other)
        norm += dot(other, other)
    if not norm:
        return (0.0, 1.0) if not difference else (math.inf, math.inf)
    return math.sqrt(difference / norm) if difference >= 0 else math.nan, both / norm


def dot(one: Floats, other: Floats) -> float:
    """A product of vectors of float32, summed in float64 by pieces whose sums in float32 are exact to 1e-6."""
    return math.fsum(float(one[at : at + 4096] @ other[at : at + 4096]) for at in range(0, len(one), 4096))


def findings(errors: Sequence[LayerError]) -> Iterator[Finding]:
    """What is wrong by the errors alone: matrices that are no numbers, or not the reference's."""
    known = [(layer.name, layer.error) for layer in errors if layer.error is not None]
    broken = [name for name, error in known if not math.isfinite(error)]
    yield from one_finding(
        "wrong", broken, "its dequantized weights are not all finite", "quantize the model again",
    )  # fmt: skip
    strange = [f"{name}: relative error {error:.3g}" for name, error in known if UNRELATED < error < math.inf]
    yield from one_finding(
        "wrong", strange, "its weights are not the reference's", "give the reference that the model was made from",
    )  # fmt: skip


def worst_first(errors: Sequence[LayerError]) -> list[LayerError]:
    """The compared matrices, the largest error first (NaN before all)."""
    known = [(layer.error, layer) for layer in errors if layer.error is not None]
    return [layer for _, layer in sorted(known, key=lambda pair: (not math.isnan(pair[0]), -pair[0]))]
