"""The variants of a gate, as model specs for an ordinary run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import backends
from ...backends.base import Capabilities
from ...backends.common.errors import InputError
from ...backends.common.message_text import printable
from ..specs import spec_files
from ..specs.spec_types import ENGINE, ModelSpec

PREFILL, AGAIN, DECODE = "prefill", "prefill again", "decode"
FULL, ONE = "full batch", "batch 1"
"""The texts of a gate: several windows, which run together, and one shorter window, which runs
alone."""
SEPARATOR = " | "
"""Between a variant's label and the name of the pass, in the label of a row."""


@dataclass(frozen=True)
class Variant:
    """One way to run the model."""

    spec: ModelSpec
    run: str  # a name that no earlier gate had, so that no score is read from the cache
    # it sets an option that changes roundings to a different value than the first variant
    must_change: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """The properties of its engine."""
        return backends.engine_class(
            backends.resolve(self.spec.load_fn, self.spec.fwd_fn)[0]
        ).capabilities

    def copied(self, name: str, options: Mapping[str, Any] = {}, **keys: Any) -> ModelSpec:
        """Return the spec of a pass, ``LABEL | name``, with more options and keys.

        Compilation takes a minute per load, so it is off unless the variant enables it.
        """
        if isinstance(self.spec.model_dir, list) and isinstance(self.spec.model_dir[1], dict):
            keys["model_dir"] = self.spec.model_dir[0]
        label = f"{self.spec.name}{SEPARATOR}{name}"
        keys |= {"label": label, "repeat": f"{self.run} {label}"}
        if name == DECODE:
            keys["phase"] = "decode"
        engine = {**self.capabilities.eager, **self.spec.options, **options}
        return self.spec.model_copy(update={"engine": engine, **keys})

    def texts(self, of: str) -> tuple[str, ...]:
        """Return the texts that a pass scores; none for decode if the engine cannot decode."""
        return () if of == DECODE and not self.capabilities.decodes else (FULL, ONE)

    def noisy(self, number: int) -> ModelSpec:
        """Return the spec of a copy with other roundings; InputError if its engine cannot make
        them.
        """
        if not self.capabilities.noise:
            why = f"{self.spec.load_fn!r} cannot add noise, so that the noise floor is unknown"
            raise InputError(f"{self.spec.name}: {why}; name a model in vLLM or Transformers first")
        options = {**self.capabilities.eager, "noise": "bf16", "noise_seed": number}
        return self.copied(f"roundings {number}", options, noise_floor=True)

    def option(self, name: str) -> Any:
        """Return the value of an option that decides roundings; None if the engine chooses."""
        found = self.spec.options.get(name)
        return self.capabilities.arithmetic[name] if found in (None, "auto") else found


def expanded(
    models: Sequence[ModelSpec],
    named: Sequence[str],
    sweeps: Sequence[str],
    run: str,
    first_run: str,
) -> list[Variant]:
    """Return the variants: all models, times ``--variant`` (``named``), times the values of each
    ``--sweep``.

    ``first_run``: the run of the first one.  InputError for a word that cannot be read, or a key
    that cannot vary.
    """
    specs: list[ModelSpec] = []
    swept = {"sweep": dict(map(axis, sweeps))} if sweeps else {}
    for model in models:
        keys = model.model_dump(mode="json", exclude_unset=True) | {
            "reference": False,
            "out_logits": None,
        }
        if set_here := sorted(keys.keys() & {"phase", "noise_floor", "repeat"}):
            raise InputError(
                model.blamed(f"{set_here[0]}: set by the gate; leave it out, and see --phase")
            )
        for label, changes in map(changes_of, named or [""]):
            name = f"{model.name} {label}" if label and len(models) > 1 else label or model.name
            engine = {**keys.get("engine", {}), **changes.pop("engine")}
            row = {**keys, "label": name, **changes, "engine": engine, **swept}
            specs += spec_files.specs_in(ModelSpec, row, model._folder / spec_files.COMMAND_LINE)
    first, *others = (
        Variant(spec, run) for spec in spec_files.with_own_labels(specs, lambda _: None)
    )
    found = [replace(first, run=first_run)]
    for variant in others:
        shared = variant.capabilities.arithmetic.keys() & first.capabilities.arithmetic.keys()
        values = ((first.option(name), variant.option(name)) for name in shared)
        found.append(
            replace(
                variant, must_change=any(None not in pair and pair[0] != pair[1] for pair in values)
            )
        )
    return found


def axis(word: str) -> tuple[str, list[Any]]:
    """Return the key and values of ``--sweep KEY=VALUE,VALUE``; a list as JSON may stand for the
    values.
    """
    key, _, given = word.partition("=")
    if not (key and given):
        raise InputError(
            f"--sweep: {printable(word)!r}: expected KEY=VALUE,VALUE, as engine.enforce_eager=true,false"
        )
    values = spec_files.json_or_word(given)
    return key, values if isinstance(values, list) else list(
        map(spec_files.json_or_word, given.split(","))
    )


def changes_of(word: str) -> tuple[str, dict[str, Any]]:
    """Return the label and the keys of ``--variant LABEL:KEY=VALUE,KEY=VALUE``; nothing changes
    without a word.
    """
    label, colon, given = word.partition(":")
    pairs = [each.partition("=") for each in re.split(r",(?=[\w.]+=)", given) if each]
    if word and not (colon and label.strip() and all(key and text for key, _, text in pairs)):
        raise InputError(
            f"--variant: {printable(word)!r}: expected LABEL:KEY=VALUE, as new:python=~/vllm-new"
        )
    keys: dict[str, Any] = {"engine": {}}
    for key, _, text in pairs:
        (keys["engine"] if key.startswith(ENGINE) else keys)[key.removeprefix(ENGINE)] = (
            spec_files.json_or_word(text)
        )
    return label, keys
