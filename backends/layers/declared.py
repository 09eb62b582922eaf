"""What a checkpoint asks of each of its layers: one scheme for all, others by name or by pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from backends.layers.fused import parts_of
from backends.layers.schemes import Scheme

OWNERS = re.compile(r"^(?:(?:model|language_model|backbone)\.)+")
"""What engines and checkpoints put before a language model's layers, each in its own order."""
BEFORE = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
EXPERT = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class Declared:
    """``exact``: name of a layer, as ``bare`` gives it -> scheme; ``patterns``: the first that matches a name's
    beginning counts; ``default``: every other quantized layer.  None: not known.
    """

    default: Scheme | None = None
    exact: Mapping[str, Scheme | None] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], Scheme | None], ...] = ()

    def of(self, layer: str) -> Scheme | None:
        """The scheme of one layer, by the name that a checkpoint or an engine has for it, fused or not."""
        paths = [layer] if bare(layer) in self.exact else parts_of(layer)
        found = {self._of_part(path) for path in paths}
        return found.pop() if len(found) == 1 else None

    def _of_part(self, path: str) -> Scheme | None:
        name = bare(path)
        for above in upwards(name):
            if above in self.exact:
                return self.exact[above]
        below = {scheme for key, scheme in self.exact.items() if key.startswith(f"{name}.")}
        if below:
            return below.pop() if len(below) == 1 else None
        inside = [f"{name}.0.{each}" for each in EXPERT] if name.endswith("experts") else []
        spelled = [before + each for each in (name, *inside) for before in BEFORE]
        for pattern, scheme in self.patterns:
            if pattern.match(path) or any(map(pattern.match, spelled)):
                return scheme
        return self.default


def upwards(name: str) -> Iterator[str]:
    """A layer's name, and those of the modules that hold it, which a config may name in its place."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def bare(layer: str) -> str:
    """A layer's name without what engines and checkpoints put before it, and without vLLM's inner module of experts."""
    return OWNERS.sub("", layer).removesuffix(".routed_experts")


def expression(found: str) -> re.Pattern[str] | None:
    """A regular expression that somebody wrote into a config; None if it is none."""
    try:
        return re.compile(found)
    except re.error:
        return None
