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

PREFILL = "prefill"
PREFILL_AGAIN = "prefill again"
DECODE = "decode"
FULL = "full batch"
BATCH_OF_ONE = "batch 1"
"""The texts of a gate: several windows, which run together, and one shorter window, which runs
alone."""
SEPARATOR = " | "
"""Between a variant's label and the name of the pass, in the label of a row."""


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    ``run``: a name that no earlier gate had, so that no score is read from the cache.
    ``must_change``: it sets an option that changes roundings to a different value than the first
    variant does.
    """

    spec: ModelSpec
    run: str
    must_change: bool = False

    @property
    def engine(self) -> str:
        """The name of its engine in the registry."""
        return backends.resolve(self.spec.load_fn, self.spec.fwd_fn)[0]

    @property
    def capabilities(self) -> Capabilities:
        """The properties of its engine."""
        return backends.engine_class(self.engine).capabilities

    def copied(self, name: str, options: Mapping[str, Any] = {}, **keys: Any) -> ModelSpec:
        """Return the spec of a pass, ``LABEL | name``, with more options and keys."""
        if isinstance(self.spec.model_dir, list) and isinstance(self.spec.model_dir[1], dict):
            # Its options are those of ``spec.options``, which become ``engine``.
            keys["model_dir"] = self.spec.model_dir[0]
        label = f"{self.spec.name}{SEPARATOR}{name}"
        keys |= {"label": label, "repeat": f"{self.run} {label}"}
        if name == DECODE:
            keys["phase"] = "decode"
        # Compilation takes a minute per load, so it is off unless the variant enables it.
        engine = {**self.capabilities.eager, **self.spec.options, **options}
        return self.spec.model_copy(update={"engine": engine, **keys})

    def texts(self, pass_name: str) -> tuple[str, ...]:
        """Return the texts that a pass scores; none for decode if the engine cannot decode."""
        if pass_name == DECODE and not self.capabilities.decodes:
            return ()
        return (FULL, BATCH_OF_ONE)

    def copy_with_noise(self, number: int) -> ModelSpec:
        """Return the spec of a copy with other roundings.

        InputError if its engine cannot make them.
        """
        if not self.capabilities.noise:
            raise InputError(
                f"{self.spec.name}: {self.spec.load_fn!r} cannot add noise, so that the noise "
                "floor is unknown; name a model in vLLM or Transformers first"
            )
        options = {**self.capabilities.eager, "noise": "bf16", "noise_seed": number}
        return self.copied(f"roundings {number}", options, noise_floor=True)

    def option(self, name: str) -> Any:
        """Return the value of an option that decides roundings; None if the engine chooses."""
        spec_value = self.spec.options.get(name)
        if spec_value in (None, "auto"):
            return self.capabilities.arithmetic[name]
        return spec_value

    def must_differ_from(self, first: Variant) -> bool:
        """Return True if an option that changes roundings has another value than in ``first``."""
        shared = self.capabilities.arithmetic.keys() & first.capabilities.arithmetic.keys()
        for name in shared:
            first_value = first.option(name)
            value = self.option(name)
            # If the engine chooses a value, it may be the other variant's.
            if first_value is not None and value is not None and first_value != value:
                return True
        return False


def variants_of(
    models: Sequence[ModelSpec],
    changes: Sequence[str],
    sweeps: Sequence[str],
    run: str,
    first_run: str,
) -> list[Variant]:
    """Return the variants: all models, times the ``changes``, times the values of each sweep.

    ``changes``: words of ``--variant``; ``sweeps``: of ``--sweep``.  ``first_run``: the run of the
    first variant.  InputError for a word that cannot be read, or a key that cannot vary.
    """
    specs: list[ModelSpec] = []
    sweep_key: dict[str, Any] = {}
    if sweeps:
        sweep_key["sweep"] = dict(axis(word) for word in sweeps)
    for model in models:
        keys = model.model_dump(mode="json", exclude_unset=True)
        keys |= {"reference": False, "out_logits": None}
        set_by_gate = sorted(keys.keys() & {"phase", "noise_floor", "repeat"})
        if set_by_gate:
            raise InputError(
                model.blamed(f"{set_by_gate[0]}: set by the gate; leave it out, and see --phase")
            )
        for word in changes or [""]:
            change_label, changed_keys = changes_of(word)
            label = change_label or model.name
            if change_label and len(models) > 1:
                label = f"{model.name} {change_label}"
            engine = {**keys.get("engine", {}), **changed_keys.pop("engine")}
            row = {**keys, "label": label, **changed_keys, "engine": engine, **sweep_key}
            specs += spec_files.specs_in(ModelSpec, row, model._folder / spec_files.COMMAND_LINE)
    labelled = spec_files.with_own_labels(specs, lambda _: None)
    first = Variant(labelled[0], first_run)
    variants = [first]
    for spec in labelled[1:]:
        variant = Variant(spec, run)
        variants.append(replace(variant, must_change=variant.must_differ_from(first)))
    return variants


def axis(word: str) -> tuple[str, list[Any]]:
    """Return the key and values of ``--sweep KEY=VALUE,VALUE``; the values may be a JSON list."""
    key, _, values_text = word.partition("=")
    if not key or not values_text:
        raise InputError(
            f"--sweep: {printable(word)!r}: expected KEY=VALUE,VALUE, as "
            "engine.enforce_eager=true,false"
        )
    values = spec_files.json_or_word(values_text)
    if isinstance(values, list):
        return key, values
    return key, [spec_files.json_or_word(value) for value in values_text.split(",")]


def changes_of(word: str) -> tuple[str, dict[str, Any]]:
    """Return the label and the keys of ``--variant LABEL:KEY=VALUE,KEY=VALUE``.

    Without a word nothing changes.
    """
    label, colon, keys_text = word.partition(":")
    # A comma begins a key only if a name and "=" follow: values may contain commas.
    pairs = []
    for pair in re.split(r",(?=[\w.]+=)", keys_text):
        if pair:
            key, _, value = pair.partition("=")
            pairs.append((key, value))
    is_complete = all(key and value for key, value in pairs)
    if word and not (colon and label.strip() and is_complete):
        raise InputError(
            f"--variant: {printable(word)!r}: expected LABEL:KEY=VALUE, as new:python=~/vllm-new"
        )
    keys: dict[str, Any] = {"engine": {}}
    for key, value in pairs:
        if key.startswith(ENGINE):
            keys["engine"][key.removeprefix(ENGINE)] = spec_files.json_or_word(value)
        else:
            keys[key] = spec_files.json_or_word(value)
    return label, keys
