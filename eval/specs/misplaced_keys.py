"""Find the level of specs where a misplaced key belongs.

There are three levels: data specs, model specs, and the ``engine`` object of a model spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import backends
from ...backends.common.errors import InputError
from .spec_types import ENGINE, DataSpec, ModelSpec, SweptSpec

MODEL_KEYS = SweptSpec.model_fields.keys()
DATA_KEYS = DataSpec.model_fields.keys()


def hint_at_level(key: str, kind: type[DataSpec] | type[ModelSpec], raw: Any) -> str:
    """Return where an unknown ``key`` of a spec belongs, as the end of a sentence.

    The text is empty if no level has the key.  ``raw``: the JSON of the spec.
    """
    if kind is DataSpec and key in MODEL_KEYS:
        return "; it is a key of model specs, which -m takes"
    if kind is not DataSpec and key in DATA_KEYS:
        return "; it is a key of data specs, which -d takes"
    load_fns = engines_with(key)
    if not load_fns:
        return ""
    is_option = f"; it is an option of {load_fns[0]}"
    if kind is DataSpec:
        return f'{is_option}, and belongs in "engine" of a model spec, which -m takes'
    load_fn = None
    if isinstance(raw, Mapping):
        load_fn = raw.get("load_fn")
    if load_fn in load_fns:
        return f'; it is an option of the engine, and belongs in "engine": {{"{key}": ...}}'
    if is_load_fn(load_fn):
        return f'{is_option}, in "engine", and {load_fn} does not have it'
    return f'{is_option}, and belongs in "engine"'


def hint_at_axis(axis: str) -> str:
    """Return how an option of an engine is written in a ``sweep``, as the end of a sentence.

    The text is empty if no engine has the option.
    """
    if not engines_with(axis):
        return ""
    return f'; an option of the engine is written "{ENGINE}{axis}"'


def engines_with(option: str) -> list[str]:
    """Return the load_fns whose engine has this option."""
    load_fns: list[str] = []
    for _, engine in backends.engines():
        option_names = engine.option_names()
        if option_names is not None and option in option_names:
            load_fns += engine.capabilities.load_fns
    return load_fns


def is_load_fn(name: Any) -> bool:
    """Return True for the ``load_fn`` of an engine; False for None and for an unknown one."""
    return any(name in engine.capabilities.load_fns for _, engine in backends.engines())


def check_options(spec: ModelSpec) -> None:
    """InputError for a key in ``engine`` that belongs into the model spec, or into a data spec."""
    misplaced = [key for key in spec.options if key in MODEL_KEYS or key in DATA_KEYS]
    # Most specs end here, before an engine looks up its options in its library.
    if not misplaced:
        return
    try:
        _, engine = backends.resolve(spec.load_fn, spec.fwd_fn)
        option_names = engine.option_names()
    except InputError:
        # The run reports an unknown load_fn.
        return
    if option_names is None:
        return
    for key in misplaced:
        if key in option_names:
            continue
        if key in MODEL_KEYS:
            raise InputError(f'engine.{key}: is a key of the model spec; write it next to "engine"')
        raise InputError(f"engine.{key}: is a key of data specs, which -d takes")
