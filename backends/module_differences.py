"""Where two runs of a window differ: what each module of two models takes and returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

Side = Literal["input", "output"]
MOST_POSITIONS = 128
"""Positions of a window that are compared; all of a shorter window.

The states of 128 positions of an 8B model take about 1.5 GB in a file.
"""


class ModulePlace(NamedTuple):
    """The input or the output of a module in a forward.

    Attributes:
        name: such as "layers.7.self_attn.o_proj"; decoder layers are called "layers.<number>" in
            every engine.
        side: "input": the first tensor that the module takes; "output": the first that it returns.
        call: number of the module's call in the forward, from 0.
        is_layer: True for the output of a whole decoder layer.
    """

    name: str
    side: Side
    call: int = 0
    is_layer: bool = False


class ModuleDifference(NamedTuple):
    """How far a module's input or output is from that of another run.

    ``difference``: the root mean square over the positions of norm(y - y0) / norm(y0), where y0 [n]
    is the other run's tensor at a position; infinity if y has values that are not finite where y0
    has not.
    """

    place: ModulePlace
    difference: float


def differences_to_json(differences: Iterable[ModuleDifference]) -> list[list[Any]]:
    """Return differences as JSON types, for ``differences_from_json``."""
    return [[list(place), difference] for place, difference in differences]


def differences_from_json(entries: Sequence[Sequence[Any]]) -> list[ModuleDifference]:
    """Return the differences that ``differences_to_json`` wrote."""
    return [ModuleDifference(ModulePlace(*place), difference) for place, difference in entries]
