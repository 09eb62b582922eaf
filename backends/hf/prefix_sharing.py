"""Run a model whose first decoder layers return outputs that an earlier pass has recorded.

Trials (``backends/restoring.py``) of one window often differ only from some decoder layer on.  One
pass of the unchanged model records what its layers return.  A trial then replays the calls before
its first other layer, and computes the rest.  Everything else in the model's forward (masks, rotary
tables, embeddings) runs as always, so that the logits are equal bit for bit.

A layer's ``forward`` is replaced in the object's own dict, as accelerate does.  Hooks of the layer
run around it as before, and an own ``forward`` that the object had is put back afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..common.errors import ModelError

Forward = Callable[..., Any]
MISSING = object()


class Call(NamedTuple):
    """One call of a decoder layer: its number in the model, and what its ``forward`` returned."""

    layer: int
    output: Any


class Calls:
    """The calls of decoder layers in one pass over one window, in their order.

    A model may run one layer several times, or in another order than that of its list.
    """

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self.layers = layers
        self.calls: list[Call] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record every call of a decoder layer in this block."""

        def recording(number: int, forward: Forward) -> Forward:
            @functools.wraps(forward)
            def call(*arguments: Any, **keys: Any) -> Any:
                output = forward(*arguments, **keys)
                self.calls.append(Call(number, copied(output)))
                return output

            return call

        with replaced(self.layers, recording):
            yield

    @contextmanager
    def replayed(self, count: int) -> Iterator[None]:
        """Return recorded outputs from the first ``count`` calls of layers in this block.

        ModelError if the calls come in another order than they were recorded in.
        """
        n_calls = 0

        def replaying(number: int, forward: Forward) -> Forward:
            @functools.wraps(forward)
            def call(*arguments: Any, **keys: Any) -> Any:
                nonlocal n_calls
                index = n_calls
                n_calls += 1
                if index >= count:
                    return forward(*arguments, **keys)
                recorded = self.calls[index]
                if recorded.layer != number:
                    raise ModelError(
                        f"decoder layer {number} ran where layer {recorded.layer} ran in an "
                        "earlier pass over the same window"
                    )
                return copied(recorded.output)

            return call

        with replaced(self.layers, replaying):
            yield

    def before(self, layers: Collection[int]) -> int:
        """Return the number of calls before the first call of one of these layers."""
        for index, call in enumerate(self.calls):
            if call.layer in layers:
                return index
        return len(self.calls)


@contextmanager
def replaced(
    layers: Sequence[torch.nn.Module], replacement: Callable[[int, Forward], Forward]
) -> Iterator[None]:
    """Replace the ``forward`` of every layer object in this block.

    ``replacement`` is called with a layer's number and its ``forward``.
    """
    own_forwards = [vars(layer).get("forward", MISSING) for layer in layers]
    try:
        for number, layer in enumerate(layers):
            # Instead of an assignment: ``forward`` is a method of the class.
            vars(layer)["forward"] = replacement(number, layer.forward)
        yield
    finally:
        for layer, own_forward in zip(layers, own_forwards, strict=True):
            if own_forward is MISSING:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = own_forward


def copied(output: Any) -> Any:
    """Return a layer's output with copies of its tensors, which the next layer may change."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, tuple):
        return tuple(copied(part) for part in output)
    return output
