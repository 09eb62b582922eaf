"""The variants of a gate, and the shapes in which each is scored: model specs for an ordinary run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from compare_q import backends
from compare_q.backends.base import Capabilities
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.eval.results import ModelResult
from compare_q.eval.run.plan import DECODE_BATCH
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import ENGINE, ModelSpec

PREFILL, AGAIN, ALONE = "prefill", "prefill again", "prefill at batch 1"
SEPARATOR = " | "
"""Between a variant's label and the name of the shape, in the label of a row."""
COMMAND_LINE = Path("command line")


class Shape(NamedTuple):
    """A phase and a batch: kernels differ between them, and so do their faults."""

    name: str
    windows: int  # the first windows of the text, which are scored
    batch: int | None = None  # windows at a time in decode; None: prefill


@dataclass(frozen=True)
class Variant:
    """One way to run the model."""

    spec: ModelSpec
    run: str  # a name that no earlier gate had, so that every score is made anew
    must_change: bool = False  # an engine option that changes roundings is not the first variant's

    @property
    def capabilities(self) -> Capabilities:
        """The properties of its engine."""
        return backends.engine_class(backends.resolve(self.spec.load_fn, self.spec.fwd_fn)[0]).capabilities

    def shapes(self, windows: int, phases: Set[str]) -> Iterator[Shape]:
        """Yield the shapes in which it is scored, of ``windows`` windows; at batch 1, decode has one window."""
        if "prefill" in phases:
            yield from (Shape(PREFILL, windows), Shape(AGAIN, windows))
            if self.capabilities.one_at_a_time is not None:
                yield Shape(ALONE, windows)
        if "decode" in phases and self.capabilities.decodes:
            batch = min(windows, DECODE_BATCH, self.capabilities.decodes)
            yield from (Shape(f"decode at batch {size}", size, size) for size in sorted({batch, 1}, reverse=True))

    def in_shape(self, shape: Shape) -> ModelSpec:
        """Return the spec that scores it in a shape."""
        options = self.capabilities.one_at_a_time if shape.name == ALONE else None
        return self.copied(
            shape.name, options or {}, **({"phase": "decode", "batch": shape.batch} if shape.batch else {})
        )

    def noisy(self, number: int) -> ModelSpec:
        """Return the spec of a copy with other roundings; InputError if its engine cannot make them."""
        if (options := self.capabilities.noise) is None:
            why = f"{self.spec.load_fn!r} cannot add noise, so that the noise floor is unknown"
            raise InputError(f"{self.spec.name}: {why}; name a model in vLLM or Transformers first")
        noise = {"noise": "bf16", "noise_seed": number}
        return self.copied(f"roundings {number}", {**options, **noise}, noise_floor=True)

    def copied(self, name: str, options: Mapping[str, Any] = {}, **keys: Any) -> ModelSpec:
        """Return the spec with more options and keys, called ``LABEL | name``."""
        if isinstance(self.spec.model_dir, list) and isinstance(self.spec.model_dir[1], dict):
            keys["model_dir"] = self.spec.model_dir[0]
        label = f"{self.spec.name}{SEPARATOR}{name}"
        keys |= {"label": label, "repeat": f"{self.run} {label}"}
        return self.spec.model_copy(update={"engine": {**self.spec.options, **options}, **keys})


def shape_of(row: ModelResult) -> str:
    """Return the name of a row's shape."""
    return row.label.rpartition(SEPARATOR)[2]


def expanded(
    models: Sequence[ModelSpec], named: Sequence[str], sweeps: Sequence[str], run: str, first_run: str
) -> list[Variant]:
    """Return the variants: all models, times ``--variant`` (``named``), times the values of each ``--sweep``.

    ``first_run``: the run of the first one.  InputError for a word that cannot be read, or a key that cannot vary.
    """
    specs: list[ModelSpec] = []
    swept = {"sweep": dict(map(axis, sweeps))} if sweeps else {}
    for model in models:
        keys = model.model_dump(mode="json", exclude_unset=True) | {"reference": False, "out_logits": None}
        if set_here := sorted(keys.keys() & {"phase", "noise_floor", "repeat"}):
            raise InputError(model.blamed(f"{set_here[0]}: set by the gate; leave it out, and see --phase"))
        for label, changes in map(changes_of, named or [""]):
            name = f"{model.name} {label}" if label and len(models) > 1 else label or model.name
            engine = {**keys.get("engine", {}), **changes.pop("engine")}
            row = {**keys, "label": name, **changes, "engine": engine, **swept}
            specs += reading.specs_in(ModelSpec, row, model._folder / COMMAND_LINE)
    found, first = list[Variant](), specs[0].options
    for spec in reading.with_own_labels(specs, lambda _: None):
        variant = Variant(spec, run if found else first_run)
        changed = [name for name in variant.capabilities.arithmetic if first.get(name) != spec.options.get(name)]
        found.append(replace(variant, must_change=bool(changed)))
    return found


def axis(word: str) -> tuple[str, list[Any]]:
    """Return the key and values of ``--sweep KEY=VALUE,VALUE``; a list as JSON may stand for the values."""
    key, _, given = word.partition("=")
    if not (key and given):
        raise InputError(f"--sweep: {printable(word)!r}: expected KEY=VALUE,VALUE, as engine.enforce_eager=true,false")
    values = value(given)
    return key, values if isinstance(values, list) else list(map(value, given.split(",")))


def changes_of(word: str) -> tuple[str, dict[str, Any]]:
    """Return the label and the keys of ``--variant LABEL:KEY=VALUE,KEY=VALUE``; nothing changes without a word."""
    label, colon, given = word.partition(":")
    pairs = [each.partition("=") for each in re.split(r",(?=[\w.]+=)", given) if each]
    if word and not (colon and label.strip() and all(key and text for key, _, text in pairs)):
        raise InputError(f"--variant: {printable(word)!r}: expected LABEL:KEY=VALUE, as new:python=~/vllm-new")
    keys: dict[str, Any] = {"engine": {}}
    for key, _, text in pairs:
        (keys["engine"] if key.startswith(ENGINE) else keys)[key.removeprefix(ENGINE)] = value(text)
    return label, keys


def value(text: str) -> Any:
    """Return what JSON reads in a word, else the word."""
    with suppress(ValueError):
        return json.loads(text)
    return text
