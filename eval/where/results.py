"""The outcome of ``compare-q where``, and the only writer and reader of its JSON file.

KLDs and shares are in nats per scored token, bits are stored bits of weights with their scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ...backends.base import QuantizedModule
from ...backends.common import json_files
from ...backends.common.engine_options import describe
from ...backends.common.errors import InputError
from ...backends.common.message_text import printable, shortened
from ..common.output_files import write_text
from ..common.stored import JsonObject, Number, Stored, Text
from ..results import origin
from ..stats.uncertainty import Count, Error
from .shares import Estimate

FORMAT = 1
"""Version of the layout of the JSON file."""
NO_RESULT = "not a file that compare-q where -o wrote"


class Module(Stored):
    """A module of the quantized model that can be exchanged (``backends/restoring.py``)."""

    name: Text = Field(min_length=1)
    layer: Count | None = None
    n_weights: Count
    weights: Text = ""
    bits: float = Field(ge=0)
    reference_bits: float = Field(ge=0)

    @classmethod
    def of(cls, module: QuantizedModule) -> Module:
        """Return the facts about a module."""
        return cls(
            name=module.name,
            layer=module.layer,
            n_weights=module.n_weights,
            weights=module.weights,
            bits=float(module.bits),
            reference_bits=float(module.reference_bits),
        )


class Model(Stored):
    """One of the two models: what it is, and which engine computed it."""

    label: Text
    model: Text
    load_fn: Text
    options: JsonObject = Field(default={})
    engine_version: Text = ""
    versions: JsonObject = Field(default={})
    hardware: JsonObject = Field(default={})


class Measured(Stored):
    """A mean with one standard error and the ends of a 95 % interval; None with one window."""

    value: float
    stderr: Error | None = None
    low: Number = None
    high: Number = None

    @classmethod
    def of(cls, estimate: Estimate) -> Measured:
        """Return the fields of an estimate."""
        return cls(
            value=estimate.value, stderr=estimate.stderr, low=estimate.low, high=estimate.high
        )


class PartRow(Stored):
    """A part and its share.

    Attributes:
        kind: of all its modules; "" for modules of several kinds.
        layer: of all its modules; None for modules of several layers, or of none.
        modules: names in ``WhereResult.modules``.
        share: KLD that vanishes if the part is restored; with ``only``, KLD that appears if only
            this part is quantized.  None: not known.
        percent: the share in percent of the whole KLD of the same windows.
        kld: the KLD that is left if the part is restored, without an error if the part stopped;
            with ``only``, the share.
        windows: number of windows in which it was scored.
        stopped: it was scored in fewer windows than others, because its share is small.
        reason: why the share is not known; "" if it is.
    """

    name: Text
    kind: Text = ""
    layer: Count | None = None
    modules: tuple[Text, ...] = Field(min_length=1)
    n_weights: Count
    bits: float
    reference_bits: float
    share: Measured | None = None
    percent: Measured | None = None
    kld: Measured | None = None
    windows: Count = 0
    stopped: bool = False
    reason: Text = ""

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits per weight in the quantized model; None without weights."""
        if not self.n_weights:
            return None
        return self.bits / self.n_weights

    @property
    def is_told_from_zero(self) -> bool | None:
        """True if 0 is outside the share's interval; None without an interval."""
        if self.share is None or self.share.low is None or self.share.high is None:
            return None
        return not self.share.low <= 0 <= self.share.high


class FrontRow(Stored):
    """The quantized model with several parts restored together.

    Attributes:
        parts: their names, the one with the largest share per added bit first.
        kld: the KLD that is left; None: not known.
        forecast: the whole KLD minus the shares of the parts, without an error if one has stopped.
        bits: stored bits of all exchangeable weights then.
        reason: why the KLD is not known; "" if it is.
    """

    parts: tuple[Text, ...] = Field(min_length=1)
    kld: Measured | None = None
    forecast: Measured | None = None
    bits: float
    reason: Text = ""


class PasteList(Stored):
    """The modules of a recipe as another program takes them; ``tool``: its name and setting."""

    tool: Text
    text: Text


class Recipe(Stored):
    """Which parts to keep in more bits for a target.

    Attributes:
        target: a value of ``--recipe``.
        keep_bits: 16: the parts are as in the reference; 8: they have 8 bits per weight.
        is_reached: False: no prefix of the order reaches the target, and ``parts`` are those with
            the smallest KLD.
        parts: names, in the order in which they are kept; empty if none needs to be kept.
        modules: names of all modules of these parts.
        bits: stored bits of all exchangeable weights then.
        kld: the KLD with the parts restored together; None with 8 bits, or if it is not known.
        forecast: the whole KLD minus what vanishes of the shares; None if it is not known.
        lists: empty without parts, or if the target is not reached.
    """

    target: Text
    keep_bits: Literal[8, 16]
    is_reached: bool
    parts: tuple[Text, ...] = ()
    modules: tuple[Text, ...] = ()
    bits: float
    kld: Measured | None = None
    forecast: Measured | None = None
    lists: tuple[PasteList, ...] = ()
    notes: tuple[Text, ...] = ()


class WhereResult(Stored):
    """The shares of all parts of a quantized model.

    Attributes:
        by: the value of ``--by``.
        only: False: each part was restored in the quantized model; True: each part alone was
            quantized in the reference.
        whole: the KLD of the quantized model; None: not known (``whole_reason``).
        rows: in the order of the model.
        front: the parts with the largest shares per added bit, restored together, more in each
            row.
        recipes: one for each ``--recipe``.
        unmatched_weights: weights of modules that no part has.
        activations: how the layers of the quantized model ran.
    """

    where: Literal[1] = 1
    created: str = ""
    command: tuple[Text, ...] = ()
    commit: str | None = None
    versions: dict[str, str] = Field(default={})
    hardware: JsonObject = Field(default={})
    title: Text | None = None
    subtitle: Text = ""
    reference: Model
    quantized: Model
    data: JsonObject
    windows: Count
    by: Text
    only: bool = False
    modules: tuple[Module, ...]
    whole: Measured | None = None
    whole_reason: Text = ""
    rows: tuple[PartRow, ...]
    front: tuple[FrontRow, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    unmatched_weights: Count = 0
    activations: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()

    @property
    def n_weights(self) -> int:
        """Number of weights of all exchangeable modules."""
        return sum(module.n_weights for module in self.modules)

    @property
    def bits(self) -> float:
        """Stored bits of all exchangeable modules in the quantized model."""
        return sum(module.bits for module in self.modules)

    @property
    def sum_of_shares(self) -> float | None:
        """The sum of the shares of all parts; None if one is not known."""
        total = 0.0
        for row in self.rows:
            if row.share is None:
                return None
            total += row.share.value
        return total

    @property
    def ranked(self) -> tuple[PartRow, ...]:
        """The rows with the largest shares first, and those without a share last."""

        def rank(row: PartRow) -> tuple[bool, float]:
            if row.share is None:
                return True, 0.0
            return False, -row.share.value

        return tuple(sorted(self.rows, key=rank))

    def with_origin(self, command: Sequence[str]) -> WhereResult:
        """Return the result with the date, versions and hardware of now."""
        if self.created:
            return self
        return self.updated(**origin(command))

    def json_text(self) -> str:
        """Return the content of the JSON file."""
        return self.model_dump_json(indent=2) + "\n"

    def write(self, file: Path) -> None:
        """Write the JSON file atomically."""
        write_text(file, self.json_text())

    @classmethod
    def read(cls, file: Path) -> WhereResult:
        """Return the result in a JSON file; InputError in one line for another file, or damage."""
        name = printable(file)
        content = json_files.read_bytes(file)
        raw: Any = json_files.parsed(content, name)
        if not isinstance(raw, dict) or "where" not in raw:
            raise InputError(f"{name}: {NO_RESULT}")
        if raw["where"] != FORMAT:
            number = shortened(repr(raw["where"]), 20)
            raise InputError(
                f"{name}: where: results of format {number}, but this compare_q reads format "
                f"{FORMAT}; run compare-q where again with -o (its scores are in the cache)"
            )
        try:
            result = cls.model_validate_json(content)
        except ValidationError as error:
            raise InputError(f"{name}: damaged results: {describe(error, ())}") from None
        check_names(result, name)
        return result


def check_names(result: WhereResult, name: str) -> None:
    """InputError for two parts with one name, or a part with a module that is not listed."""
    names = [row.name for row in result.rows]
    if len(set(names)) < len(names):
        raise InputError(f"{name}: damaged results: rows: two have one name")
    modules = {module.name for module in result.modules}
    for row in result.rows:
        unlisted = set(row.modules) - modules
        if unlisted:
            raise InputError(
                f"{name}: damaged results: rows: {printable(row.name)}: {printable(min(unlisted))} "
                "is not in modules"
            )
