"""The noise floor: the same weights, with bf16-rounding noise on the residual stream after every
decoder layer.

Two engines with the same weights round differently; a lossless scheme would show that difference.
``"noise": "bf16"`` makes such a difference: every element of every layer's output is multiplied in
float32 by 1 + SCALE * n, with n standard normal, and rounded to the dtype of the output.

The root mean square of a bf16 rounding is 0.85 * 2**-9 of the element (half a spacing over sqrt(3),
mantissas spread logarithmically), so that 2**-9 is about one more rounding per layer; exllamav3's
qbench uses the same scale.  The noise is normal because half a spacing of bf16 is 1 to 2 times
2**-9 of the element: rounding would remove uniform noise of +-2**-9 completely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ..common.engine_options import EngineOptions, parse_options
from ..common.errors import InputError, ModelError

if TYPE_CHECKING:
    import torch

SCALE = 2.0**-9
VERSION = 2
"""Version of the numbers that follow from a seed; part of the key of a noise floor's token scores.
"""
TABLE = 1 << 22
"""How many random numbers are drawn from a seed; they are drawn on the CPU for every device.

The noise of a token in a layer is a consecutive part of these numbers.  Of the pairs of parts with
4,096 numbers, one in 512 overlaps; a number in the overlap is the noise of two different elements.
"""
TOKENS: ContextVar[torch.Tensor] = ContextVar("TOKENS")
"""Hashes (``mixed``) of the tokens and positions of the current forward, int64 [n]; one per
greenlet."""


class NoiseOptions(EngineOptions):
    """The options of noise in an ``engine`` object."""

    noise: Literal["bf16"] | None = None
    noise_seed: int | None = Field(None, ge=0, lt=1 << 20, strict=True)


OPTIONS = frozenset(NoiseOptions.model_fields)


def seed_of(options: Mapping[str, Any]) -> int | None:
    """The seed, or None if the options do not turn noise on; InputError for wrong options."""
    found = parse_options(
        NoiseOptions, {name: value for name, value in options.items() if name in OPTIONS}
    )
    if found.noise is None and found.noise_seed is not None:
        raise InputError('engine.noise_seed: needs "noise": "bf16"')
    return None if found.noise is None else found.noise_seed or 0


def provenance_of(seed: int | None) -> dict[str, Any]:
    """The entries of a model's provenance about its noise; empty without noise."""
    noise = {
        "kind": "bf16",
        "distribution": "normal, relative to each element",
        "scale": SCALE,
        "seed": seed,
    }
    note = f"bf16-rounding noise added on every decoder layer's output (normal, 2**-9 of each element, seed {seed})"
    return {} if seed is None else {"noise": noise, "notes": [note]}


class Noise:
    """Noise on the outputs of ``layers`` (number -> module) from now until ``remove``.

    The noise of an element depends only on the seed, its layer, its token, the token's position in
    its window and its place in the state.  It does not depend on earlier windows, other windows of
    a batch, or the rank.  ``begin`` sets the tokens of a forward.  ``pairs``: a layer may return
    (hidden states, residual), as vLLM's layers do.  Without ``pairs``, only the first of several
    tensors gets noise.
    """

    def __init__(self, layers: Mapping[int, Any], seed: int, *, pairs: bool = False) -> None:
        import torch

        self.pairs = pairs
        self.silent = set(layers)
        self.factors = (
            torch.randn(TABLE, generator=torch.Generator().manual_seed(seed)).mul_(SCALE).add_(1)
        )
        self.handles = [
            layer.register_forward_hook(
                lambda _, __, output, number=number: self.noisy(number, output)
            )
            for number, layer in layers.items()
        ]

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Set the tokens of the forward that begins in this thread (or greenlet), and their
        positions: integers [n].
        """
        TOKENS.set(mixed(token_ids.long() + mixed(positions.long().to(token_ids.device))))

    def noisy(self, number: int, output: Any) -> Any:
        """A layer's output with noise; ModelError if it is not what a decoder layer returns."""
        import torch

        parts = output if isinstance(output, tuple) else (output,)
        end = len(parts) if self.pairs else 1
        stream = [part for part in parts[:end] if part is not None]
        known = all(isinstance(part, torch.Tensor) and part.is_floating_point() for part in stream)
        if (
            not known
            or not 1 <= len(stream) <= 2
            or any(part.shape != stream[0].shape for part in stream)
        ):
            found = ", ".join(
                str(tuple(getattr(part, "shape", [type(part).__name__]))) for part in parts
            )
            raise ModelError(
                f"engine.noise: layer {number} returns {found}, not one tensor or two of a shape"
            )
        # vLLM's next layer adds the two tensors, or uses only the first (Cohere, EXAONE 4).  Both
        # tensors get the same
        # factor, so the residual stream gets this factor in either case.
        factor = self.factor(number, stream[0])
        noisy = tuple(
            None if part is None else (factor * part).to(part.dtype) for part in parts[:end]
        )
        return (*noisy, *parts[end:]) if isinstance(output, tuple) else noisy[0]

    def factor(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """1 + SCALE * n, float32, in the shape of ``like``; one of its dimensions is the tokens."""
        tokens = TOKENS.get(None)
        if tokens is None or len(tokens) not in like.shape:
            count = "unknown" if tokens is None else len(tokens)
            raise ModelError(
                f"engine.noise: layer {number} returns {tuple(like.shape)}, and its tokens are {count}"
            )
        self.silent.discard(number)
        if self.factors.device != like.device:
            self.factors = self.factors.to(like.device)
        axis = like.shape.index(len(tokens))
        rest = (*like.shape[:axis], *like.shape[axis + 1 :])
        stretches = self.factors.unfold(0, math.prod(rest), 1)
        places = mixed(tokens.to(like.device) + mixed(number + 1)) % len(stretches)
        return stretches[places].view(len(tokens), *rest).movedim(0, axis)

    def missed(self) -> str:
        """Return an error if a layer has run without noise, otherwise ""; call this after all
        layers have run.
        """
        missed = f"layer {min(self.silent, default=0)} has run without it; this model cannot be given noise"
        return f"engine.noise: {missed}" if self.silent else ""

    def remove(self) -> str:
        """Stop the noise; return ``missed``."""
        for handle in self.handles:
            handle.remove()
        return self.missed()


def mixed(number: Any) -> Any:
    """The lowest 32 bits of an int, or of a tensor of int64, scattered over 32 bits: a hash without
    collisions.
    """
    number = number & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        number = (number ^ (number >> shift)) * factor & 0xFFFFFFFF
    return number ^ (number >> 15)


def layer_list(decoder: Any, count: int, owner: str) -> Sequence[Any]:
    """The first list of ``count`` modules in a decoder; ModelError that begins with ``owner`` if
    there is none.
    """
    import torch

    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ModelError(f"{owner} has no list of {count} decoder layers")


def vllm_decoder_layers(model: Any, count: int) -> dict[int, Any]:
    """Number -> decoder layer, for the layers that this pipeline rank holds of a vLLM model with
    ``count`` layers.
    """
    decoder = model.get_language_model() if hasattr(model, "get_language_model") else model
    layers = layer_list(decoder, count, f"engine.noise: {type(model).__name__}")
    return {
        number: layer
        for number, layer in enumerate(layers)
        if type(layer).__name__ != "PPMissingLayer"
    }
