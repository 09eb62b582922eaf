"""Where a quantization loses: modules of a quantized model are exchanged for its reference's.

Two loaded models take part, a quantized one and its reference.  A trial computes one of them with
some modules of the other one.  The KL divergence from the reference that remains, or that appears,
shows what these modules cost.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Base = Literal["quantized", "reference"]


@dataclass(frozen=True)
class QuantizedModule:
    """A module of a quantized model that can be exchanged for the reference's.

    Attributes:
        name: from ``layers.`` on, such as "layers.7.mlp.down_proj", or without a decoder layer
            "lm_head"; "layers.7" is a whole decoder layer.
        layer: number of its decoder layer; None outside the layers.
        n_weights: number of its weights.
        weights: their format in the quantized checkpoint, such as "int4 g128"; "" if it has
            several, as a whole layer may have.
        bits: stored bits of all its weights in the quantized checkpoint, with their scales.
        reference_bits: the same in the reference.
    """

    name: str
    layer: int | None
    n_weights: int
    weights: str
    bits: float
    reference_bits: float


@dataclass(frozen=True)
class Trial:
    """A model with some modules of the other one.

    Attributes:
        modules: names of the exchanged modules (``QuantizedModule.name``).
        base: "quantized": the quantized model, whose ``modules`` are the reference's; "reference":
            the reference, whose ``modules`` are quantized.
    """

    modules: tuple[str, ...]
    base: Base = "quantized"

    @property
    def digest(self) -> str:
        """Return the name of the trial in files; the order of the modules does not matter."""
        content = json.dumps([self.base, sorted(self.modules)])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


class TrialScore(NamedTuple):
    """The score of one trial in one window.

    Attributes:
        trial: index of the trial in the list.
        window: ``Window.index``.
        kld: sum of KL(reference || trial) over the scored tokens whose KLD is finite, in nats.
        tokens: number of these tokens.
        non_finite: number of the other scored tokens.
    """

    trial: int
    window: int
    kld: float
    tokens: int
    non_finite: int = 0

    @property
    def is_known(self) -> bool:
        """Return True if every scored token has a finite KLD."""
        return self.non_finite == 0 and math.isfinite(self.kld)
