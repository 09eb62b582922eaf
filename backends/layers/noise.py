"""The noise floor: the same weights, with bf16-rounding noise on every decoder layer's output.

Two engines with the same weights round differently; a lossless scheme would show that difference.
``"noise": "bf16"`` makes such a difference: every element of every layer's output is multiplied in
float32 by 1 + NOISE_SCALE * n, with n standard normal, and rounded to the dtype of the output.

The root mean square of a bf16 rounding is 0.85 * 2**-9 of the element (half a spacing over sqrt(3),
mantissas spread logarithmically), so that 2**-9 is about one more rounding per layer; exllamav3's
qbench uses the same scale.  The noise is normal because half a spacing of bf16 is 1 to 2 times
2**-9 of the element: rounding would remove uniform noise of +-2**-9 completely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ..common.engine_options import EngineOptions, parse_options
from ..common.errors import InputError, ModelError

if TYPE_CHECKING:
    import torch

NOISE_SCALE = 2.0**-9
NOISE_VERSION = 2
"""Version of the numbers that follow from a seed.

It is part of the key of a noise floor's token scores.
"""
TABLE = 1 << 22
"""How many random numbers are drawn from a seed; they are drawn on the CPU for every device.

The noise of a token in a layer is a consecutive part of these numbers.  Of the pairs of parts with
4,096 numbers, one in 512 overlaps; a number in the overlap is the noise of two different elements.
"""
TOKEN_HASHES: ContextVar[torch.Tensor] = ContextVar("TOKENS")
"""Hashes (``mixed``) of the tokens and positions of the current forward, int64 [n].

Each greenlet has its own.
"""


class NoiseOptions(EngineOptions):
    """The options of noise in an ``engine`` object."""

    noise: Literal["bf16"] | None = None
    noise_seed: int | None = Field(None, ge=0, lt=1 << 20, strict=True)


OPTIONS = frozenset(NoiseOptions.model_fields)


def seed_of(options: Mapping[str, Any]) -> int | None:
    """Return the seed, None if the options do not turn noise on; InputError for wrong options."""
    noise_values = {name: value for name, value in options.items() if name in OPTIONS}
    noise_options = parse_options(NoiseOptions, noise_values)
    if noise_options.noise is None:
        if noise_options.noise_seed is not None:
            raise InputError('engine.noise_seed: needs "noise": "bf16"')
        return None
    return noise_options.noise_seed or 0


def provenance_of(seed: int | None) -> dict[str, Any]:
    """Return the entries of a model's provenance about its noise; empty without noise."""
    if seed is None:
        return {}
    noise = {
        "kind": "bf16",
        "distribution": "normal, relative to each element",
        "scale": NOISE_SCALE,
        "seed": seed,
    }
    note = (
        "bf16-rounding noise added on every decoder layer's output "
        f"(normal, 2**-9 of each element, seed {seed})"
    )
    return {"noise": noise, "notes": [note]}


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
        self.layers_without_noise = set(layers)
        # On the CPU, so that every device gets the same numbers.
        generator = torch.Generator().manual_seed(seed)
        self.factors = torch.randn(TABLE, generator=generator).mul_(NOISE_SCALE).add_(1)
        self.handles = []
        for number, layer in layers.items():
            self.handles.append(layer.register_forward_hook(self.hook_of(number)))

    def hook_of(self, number: int) -> Callable[[Any, Any, Any], Any]:
        """Return the forward hook of layer ``number``."""

        def hook(_module: Any, _arguments: Any, output: Any) -> Any:
            return self.noisy(number, output)

        return hook

    def begin(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Set the tokens of the forward that begins in this thread (or greenlet).

        ``token_ids`` and ``positions`` are integers [n].
        """
        position_hashes = mixed(positions.long().to(token_ids.device))
        TOKEN_HASHES.set(mixed(token_ids.long() + position_hashes))

    def noisy(self, number: int, output: Any) -> Any:
        """Return a layer's output with noise; ModelError if it is not a decoder layer's output."""
        parts = output
        if not isinstance(output, tuple):
            parts = (output,)
        end = 1
        if self.pairs:
            end = len(parts)
        stream = [part for part in parts[:end] if part is not None]
        if not is_stream(stream):
            shapes = ", ".join(shape_text(part) for part in parts)
            raise ModelError(
                f"engine.noise: layer {number} returns {shapes}, not one tensor or two of a shape"
            )
        # vLLM's next layer adds the two tensors, or uses only the first (Cohere, EXAONE 4).  Both
        # tensors get the same factor, so the residual stream gets this factor in either case.
        factor = self.factor(number, stream[0])
        noisy_parts = []
        for part in parts[:end]:
            noisy_part = part
            if part is not None:
                noisy_part = (factor * part).to(part.dtype)
            noisy_parts.append(noisy_part)
        if isinstance(output, tuple):
            return (*noisy_parts, *parts[end:])
        return noisy_parts[0]

    def factor(self, number: int, state: torch.Tensor) -> torch.Tensor:
        """Return 1 + NOISE_SCALE * n for layer ``number``, float32 in the shape of ``state``.

        One dimension of ``state`` is the tokens; ModelError if none is.
        """
        tokens = TOKEN_HASHES.get(None)
        if tokens is None or len(tokens) not in state.shape:
            count = "unknown"
            if tokens is not None:
                count = str(len(tokens))
            raise ModelError(
                f"engine.noise: layer {number} returns {tuple(state.shape)}, "
                f"and its tokens are {count}"
            )
        self.layers_without_noise.discard(number)
        if self.factors.device != state.device:
            self.factors = self.factors.to(state.device)
        axis = state.shape.index(len(tokens))
        # vLLM's states are [tokens, hidden size], Transformers' [1, tokens, hidden size].
        other_sizes = (*state.shape[:axis], *state.shape[axis + 1 :])
        stretches = self.factors.unfold(0, math.prod(other_sizes), 1)
        places = mixed(tokens.to(state.device) + mixed(number + 1)) % len(stretches)
        return stretches[places].view(len(tokens), *other_sizes).movedim(0, axis)

    def missed(self) -> str:
        """Return an error if a layer has run without noise, otherwise "".

        Call this after all layers have run.
        """
        if not self.layers_without_noise:
            return ""
        return (
            f"engine.noise: layer {min(self.layers_without_noise)} has run without it; "
            "this model cannot be given noise"
        )

    def remove(self) -> str:
        """Stop the noise; return ``missed``."""
        for handle in self.handles:
            handle.remove()
        return self.missed()


def is_stream(parts: Sequence[Any]) -> bool:
    """True for one floating-point tensor, or two of the same shape: a layer's residual stream."""
    import torch

    for part in parts:
        if not isinstance(part, torch.Tensor) or not part.is_floating_point():
            return False
    if len(parts) == 1:
        return True
    return len(parts) == 2 and parts[0].shape == parts[1].shape


def shape_text(part: Any) -> str:
    """Return the shape of a tensor as text; the type's name in parentheses for other objects."""
    shape = getattr(part, "shape", [type(part).__name__])
    return str(tuple(shape))


def mixed(number: Any) -> Any:
    """Return a hash of the lowest 32 bits of an int, or of a tensor of int64.

    It scatters them over 32 bits without collisions.
    """
    number = number & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        number = (number ^ (number >> shift)) * factor & 0xFFFFFFFF
    return number ^ (number >> 15)


def layer_list(decoder: Any, count: int, owner: str) -> Sequence[Any]:
    """Return the first list of ``count`` modules in a decoder.

    ModelError that begins with ``owner`` if no list has this length.
    """
    import torch

    for module in decoder.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ModelError(f"{owner} has no list of {count} decoder layers")


def vllm_decoder_layers(model: Any, count: int) -> dict[int, Any]:
    """Return number -> decoder layer, for the layers that this pipeline rank holds of a vLLM model.

    ``count``: the model's number of layers, on all ranks.
    """
    decoder = model
    if hasattr(model, "get_language_model"):
        decoder = model.get_language_model()
    layers = layer_list(decoder, count, f"engine.noise: {type(model).__name__}")
    layers_of_rank = {}
    for number, layer in enumerate(layers):
        # vLLM has placeholders for the layers of other pipeline ranks.
        if type(layer).__name__ != "PPMissingLayer":
            layers_of_rank[number] = layer
    return layers_of_rank
