"""The parts of a quantized model, named sets of its modules: by layer, kind, or a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...backends.base import QuantizedModule
from ...backends.common.errors import InputError
from ...backends.common.message_text import amount

LAYER = "layer"
KIND = "kind"
MATRIX = "matrix"
WORDS = (LAYER, KIND, MATRIX)
"""The words of ``--by``; any other value is a regular expression."""
OTHER_WORDS = {"layers": LAYER, "kinds": KIND, "matrices": MATRIX, "module": MATRIX}
"""Words that users write for those of ``WORDS``."""
PROJECTION = "_proj"
"""The end of a module's last name that a kind leaves out."""
EXPERTS = "experts"
SHARED_EXPERTS = "shared_expert"
"""The beginning of the name of a module that holds experts for all tokens."""
ROUTERS = {"gate": "router"}
"""Last name of a module -> its kind, where that is not its name: ``gate`` chooses experts, and
``gate_proj`` is a matrix of an MLP."""
WHOLE_LAYER = re.compile(r"layers\.\d+")
"""The name of a whole decoder layer (``backends/restoring.py``)."""
WHOLE_LAYERS_ONLY = (
    "only whole layers of these two models can be exchanged: their norms differ, or scales are "
    "folded into neighbouring weights, as AWQ and SmoothQuant do; use --by layer"
)


@dataclass(frozen=True)
class Part:
    """A named set of modules; ``modules``: at least one, in the order of the model."""

    name: str
    modules: tuple[QuantizedModule, ...]

    @property
    def module_names(self) -> tuple[str, ...]:
        """The names of its modules."""
        return tuple(module.name for module in self.modules)

    @property
    def n_weights(self) -> int:
        """Number of weights of all its modules."""
        return sum(module.n_weights for module in self.modules)

    @property
    def bits(self) -> float:
        """Stored bits of all its weights in the quantized model."""
        return sum(module.bits for module in self.modules)

    @property
    def reference_bits(self) -> float:
        """Stored bits of all its weights in the reference."""
        return sum(module.reference_bits for module in self.modules)

    @property
    def layer(self) -> int | None:
        """The decoder layer of all its modules; None if they are of several layers, or of none."""
        layers = {module.layer for module in self.modules}
        if len(layers) > 1:
            return None
        return layers.pop()

    @property
    def kind(self) -> str:
        """The kind of all its modules; "" if they are of several kinds."""
        kinds = {kind_of(module) for module in self.modules}
        if len(kinds) > 1:
            return ""
        return kinds.pop()


def check_pattern(by: str) -> None:
    """InputError if a value of ``--by`` is not a word of ``WORDS`` or a regular expression."""
    if by in OTHER_WORDS:
        raise InputError(f"{by!r}: did you mean {OTHER_WORDS[by]!r}?")
    try:
        re.compile(by)
    except re.error as error:
        raise InputError(
            f"{by!r}: expected {', '.join(WORDS)}, or a regular expression for the names "
            f"of modules; as one it is wrong: {error}"
        ) from None


def parts_of(modules: Sequence[QuantizedModule], by: str) -> list[Part]:
    """Return the parts of a model, in the order of their first modules.

    ``by``: a value of ``--by``.  A module that a regular expression does not match is in no part.
    InputError if the expression matches no module, or if modules of whole layers are to be divided.
    """
    if by != LAYER and has_whole_layers(modules):
        raise InputError(f"--by: {by}: {WHOLE_LAYERS_ONLY}")
    modules_by_name: dict[str, list[QuantizedModule]] = {}
    for module in modules:
        name = part_name(module, by)
        if name is not None:
            modules_by_name.setdefault(name, []).append(module)
    if not modules_by_name:
        raise InputError(
            f"--by: {by!r}: matches none of {amount(len(modules), 'module')}; they have names "
            f"such as {modules[0].name}"
        )
    return [Part(name, tuple(members)) for name, members in modules_by_name.items()]


def has_whole_layers(modules: Sequence[QuantizedModule]) -> bool:
    """Return True if whole decoder layers are exchanged instead of their modules."""
    return any(WHOLE_LAYER.fullmatch(module.name) for module in modules)


def part_name(module: QuantizedModule, by: str) -> str | None:
    """Return the name of the part that has a module; None if it is in no part."""
    if by == LAYER:
        if module.layer is None:
            return module.name
        return f"layer {module.layer}"
    if by == KIND:
        return kind_of(module)
    if by == MATRIX:
        return module.name
    match = re.search(by, module.name)
    if match is None:
        return None
    # A group that did not take part in the match is None.
    groups = [group for group in match.groups() if group]
    # A pattern that matches an empty text, such as "x*", names no part.
    return " ".join(groups) or match[0] or None


def kind_of(module: QuantizedModule) -> str:
    """Return the kind of a module: q, down, experts, shared_experts.down, qkv, lm_head.

    It is the last name of the module without ``_proj``.  All routed experts of all layers are one
    kind; experts for all tokens have other kinds.
    """
    if WHOLE_LAYER.fullmatch(module.name):
        return LAYER
    names = module.name.split(".")
    last_name = names[-1].removesuffix(PROJECTION)
    if EXPERTS in names[:-1] or names[-1] == EXPERTS:
        return EXPERTS
    for name in names[:-1]:
        if name.startswith(SHARED_EXPERTS):
            return f"{name}.{last_name}"
    return ROUTERS.get(names[-1], last_name)


def unmatched(modules: Sequence[QuantizedModule], parts: Sequence[Part]) -> int:
    """Return the number of weights of the modules that are in no part."""
    n_weights = sum(module.n_weights for module in modules)
    return n_weights - sum(part.n_weights for part in parts)
