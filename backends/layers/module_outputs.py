"""Forward hooks that write what modules take and return into a file, or compare it with the file.

One run of a window writes the file, and later runs of the same window compare, as each hook fires:
only one tensor is in memory.  The file is a .npz of float32 arrays [n, size] by the digests of
their contents, so that the output of a module and the equal input of the next one take room once,
and of an index.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..base import ModuleDifference, ModulePlace
from ..common.errors import ModelError
from ..common.message_text import with_class
from ..module_differences import MOST_POSITIONS, Side

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float32]
INDEX = "index"
"""Name of the index in the file."""
HEAD = ModulePlace("lm_head", "output")


class Visitor(Protocol):
    """Gets the positions of each forward, and then the tensors of its modules in their order."""

    def begin(self, positions: Sequence[int]) -> None:
        """Begin a forward; ``positions``: of the rows that are compared."""

    def visit(self, place: ModulePlace, rows: Floats) -> None:
        """Take what a module takes or returns, [n, size] at the n positions."""


class OutputWriter:
    """Writes a new file; ``close`` completes it."""

    def __init__(self, file: Path) -> None:
        self.archive = zipfile.ZipFile(file, "w", allowZip64=True)
        self.stored: set[str] = set()
        # Of each forward: its positions, and the digest of each place.
        self.forwards: list[tuple[list[int], list[tuple[ModulePlace, str]]]] = []

    def begin(self, positions: Sequence[int]) -> None:
        self.forwards.append((list(positions), []))

    def visit(self, place: ModulePlace, rows: Floats) -> None:
        digest = hashlib.sha256(f"{rows.shape}".encode() + rows.tobytes()).hexdigest()
        if digest not in self.stored:
            self.write(digest, rows)
            self.stored.add(digest)
        self.forwards[-1][1].append((place, digest))

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Write one array."""
        with self.archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
            np.save(stream, array, allow_pickle=False)

    def close(self) -> None:
        """Write the index, and close the file."""
        self.write(INDEX, np.asarray(json.dumps(self.forwards)))
        self.archive.close()


class OutputComparer:
    """Compares with the file of another run; ``differences`` returns the result."""

    def __init__(self, file: Path) -> None:
        self.arrays = np.load(file, allow_pickle=False)
        self.forwards: list[tuple[list[int], dict[ModulePlace, str]]] = []
        for positions, entries in json.loads(str(self.arrays[INDEX])):
            digests = {ModulePlace(*place): digest for place, digest in entries}
            self.forwards.append((positions, digests))
        self.n_forwards = 0
        # Sums of squared relative differences and numbers of rows, in the order of the first visit.
        self.squares: dict[ModulePlace, float] = {}
        self.n_rows: Counter[ModulePlace] = Counter()

    def begin(self, positions: Sequence[int]) -> None:
        number = self.n_forwards
        self.n_forwards += 1
        if number >= len(self.forwards) or self.forwards[number][0] != list(positions):
            raise ModelError("the two runs compute the window in different steps")

    def visit(self, place: ModulePlace, rows: Floats) -> None:
        digest = self.forwards[self.n_forwards - 1][1].get(place)
        # A module that only this model has.
        if digest is None:
            return
        other = self.arrays[digest]
        if other.shape != rows.shape:
            return
        differences = relative_differences(rows, other)
        squares = float(np.sum(differences**2))
        self.squares[place] = self.squares.get(place, 0.0) + squares
        self.n_rows[place] += len(differences)

    def differences(self) -> list[ModuleDifference]:
        """Return the difference at each place that both runs have, in the order of this run."""
        if self.n_forwards != len(self.forwards):
            raise ModelError("the two runs compute the window in different steps")
        differences = []
        for place, squares in self.squares.items():
            if self.n_rows[place]:
                difference = math.sqrt(squares / self.n_rows[place])
                differences.append(ModuleDifference(place, difference))
        return differences

    def close(self) -> None:
        """Close the file."""
        self.arrays.close()


def relative_differences(rows: Floats, other: Floats) -> NDArray[np.float64]:
    """Return norm(row - other) / norm(other) of each row whose ``other`` is not 0, in float64.

    Infinite if a value is not finite in only one of the two.
    """
    row_values = rows.astype(np.float64)
    other_values = other.astype(np.float64)
    is_finite = np.isfinite(other_values)
    # Equal infinities, and NaN in both, do not differ.
    is_same = (row_values == other_values) | (np.isnan(row_values) & np.isnan(other_values))
    with np.errstate(invalid="ignore"):
        change = np.where(is_same, 0.0, row_values - other_values)
    change = np.where(np.isnan(change), np.inf, change)
    norms = np.linalg.norm(np.where(is_finite, other_values, 0.0), axis=1)
    has_norm = norms > 0
    with np.errstate(over="ignore"):
        changes = np.linalg.norm(change[has_norm], axis=1)
    relative: NDArray[np.float64] = changes / norms[has_norm]
    return relative


def compared_positions(length: int) -> NDArray[np.int64]:
    """Return the positions of a window that are compared, in order: the same for every run.

    They are random, since a fault may repeat with a period.
    """
    count = min(length, MOST_POSITIONS)
    positions = np.random.default_rng(0).choice(length, count, replace=False)
    return np.sort(positions)


class ModuleHooks:
    """Hooks on the decoder of a model that pass tensors to a visitor, until ``remove``.

    Every module inside the decoder shows its output, and every module without submodules its input
    as well.  A module that is used at several places, such as vLLM's rotary embedding, is left out:
    its calls cannot be assigned to a layer.  ``begin`` sets the positions of a forward.  A tensor
    without a dimension of the forward's tokens is left out, such as those of single experts.

    ``pairs``: a decoder layer that returns two tensors of one shape returns (hidden states,
    residual), whose sum is its output, as vLLM's layers do.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[Any],
        visitor: Visitor,
        length: int,
        *,
        pairs: bool = False,
    ) -> None:
        self.visitor = visitor
        self.positions = compared_positions(length)
        self.pairs = pairs
        self.layers = set(layers)
        # An error in a hook would end vLLM's engine: it is kept for ``remove``.
        self.error = ""
        self.n_tokens = 0
        self.rows: list[int] = []
        self.calls: Counter[tuple[str, Side]] = Counter()
        self.handles = []
        for name, module in modules_by_name(model, layers).items():
            self.handles.append(module.register_forward_hook(self.output_hook(name)))
            if not any(True for _ in module.children()):
                hook = self.input_hook(name)
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self.handles.append(handle)

    def begin(self, _token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Begin a forward of tokens at ``positions``, integers [n]."""
        if self.error:
            return
        try:
            position_list = np.asarray(positions.cpu())
            rows = np.flatnonzero(np.isin(position_list, self.positions))
            self.rows = rows.tolist()
            self.n_tokens = len(position_list)
            self.calls.clear()
            self.visitor.begin(position_list[rows].tolist())
        except Exception as error:
            self.error = error_text(error)

    def output_hook(self, name: str) -> Any:
        """Return the forward hook of a module."""

        def hook(module: Any, _arguments: Any, output: Any) -> None:
            is_layer = module in self.layers
            if is_layer and self.pairs:
                output = state_of(output)
            self.show(name, "output", (output,), is_layer=is_layer)

        return hook

    def input_hook(self, name: str) -> Any:
        """Return the hook before the forward of a module."""

        def hook(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self.show(name, "input", (*arguments, *keywords.values()))

        return hook

    def show(self, name: str, side: Side, values: Sequence[Any], *, is_layer: bool = False) -> None:
        """Pass the first tensor of ``values`` to the visitor."""
        if self.error or not self.rows:
            return
        call = self.calls[name, side]
        self.calls[name, side] += 1
        try:
            rows = self.rows_of(first_tensor(values))
            if rows is not None:
                self.visitor.visit(ModulePlace(name, side, call, is_layer), rows)
        except Exception as error:
            self.error = error_text(error)

    def rows_of(self, tensor: torch.Tensor | None) -> Floats | None:
        """Return the rows of the compared positions [n, size]; None for another tensor."""
        if tensor is None or not tensor.is_floating_point() or tensor.element_size() == 1:
            return None
        if self.n_tokens not in tensor.shape:
            return None
        axis = tuple(tensor.shape).index(self.n_tokens)
        rows = tensor.detach().movedim(axis, 0)[self.rows]
        array: Floats = rows.reshape(len(self.rows), -1).float().cpu().numpy()
        return array

    def show_logits(self, pieces: Iterable[torch.Tensor], length: int) -> None:
        """Pass the logits of a window to the visitor, [n, V] of the next n positions each.

        They are left out if they are not those of ``length`` positions.
        """
        kept = []
        begin = 0
        for piece in pieces:
            end = begin + len(piece)
            is_inside = (self.positions >= begin) & (self.positions < end)
            rows = piece.detach()[self.positions[is_inside] - begin]
            kept.append(rows.float().cpu().numpy())
            begin = end
        # Several forwards have their own rows.
        if self.error or begin != length or len(self.rows) != len(self.positions):
            return
        self.visitor.visit(HEAD, np.concatenate(kept))

    def remove(self) -> None:
        """Remove the hooks; ModelError if one of them failed."""
        for handle in self.handles:
            handle.remove()
        if self.error:
            raise ModelError(self.error)


def error_text(error: Exception) -> str:
    """Return why a hook failed."""
    if isinstance(error, ModelError):
        return str(error)
    return with_class(error)


def modules_by_name(model: Any, layers: Sequence[Any]) -> dict[str, Any]:
    """Return name -> module of the part of a model that holds its decoder layers.

    ModelError if no list of modules holds them.  Lists, and modules with several names, are left
    out.
    """
    import torch

    for owner in model.modules():
        for list_name, child in owner.named_children():
            if isinstance(child, torch.nn.ModuleList) and list(child) == list(layers):
                return named_modules(owner, f"{list_name}.")
    raise ModelError(f"{type(model).__name__} has no list of its decoder layers")


def named_modules(owner: Any, list_prefix: str) -> dict[str, Any]:
    """Return name -> module inside ``owner``, as in ``ModulePlace``.

    ``list_prefix``: how the names of modules in decoder layers begin, such as "h.".
    """
    import torch

    all_names = list(owner.named_modules(remove_duplicate=False))
    n_names = Counter(module for _, module in all_names)
    modules = {}
    for name, module in all_names:
        is_list = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
        if module is owner or is_list or n_names[module] > 1:
            continue
        shown_name = name
        if name.startswith(list_prefix):
            shown_name = f"layers.{name.removeprefix(list_prefix)}"
        modules[shown_name] = module
    return modules


def first_tensor(values: Any) -> torch.Tensor | None:
    """Return the first tensor among values that may be in tuples; None without one."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, tuple | list):
            tensor = first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def state_of(output: Any) -> Any:
    """Return the sum of (hidden states, residual); another output as it is."""
    import torch

    if not isinstance(output, tuple) or len(output) != 2:
        return output
    hidden, residual = output
    if not isinstance(hidden, torch.Tensor) or not isinstance(residual, torch.Tensor):
        return output
    if hidden.shape != residual.shape:
        return output
    return hidden.float() + residual.float()
