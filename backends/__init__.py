"""The registry: the name in a spec -> the class that runs it.  No engine is imported here.

Looking up a name imports the file of the class.  The engine itself is imported when a model loads.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common.errors import InputError
from .common.json_files import expanded, is_folder
from .common.jsonl_kinds import kind_of
from .common.message_text import nearest, one_line

if TYPE_CHECKING:
    from .base import Engine, ModelFiles, PlannedModel
    from .checkpoint.checkpoint_config import CheckpointConfig

ENGINES = {
    "transformers": "compare_q.backends.hf.transformers_engine:TransformersEngine",
    "vllm_score": "compare_q.backends.vllm.vllm_engine:VllmEngine",
    "exllamav3": "compare_q.backends.exllama.exllama_engine:ExLlamaV3Engine",
    "llamacpp": "compare_q.backends.llamacpp:LlamacppEngine",
    "vllm_server": "compare_q.backends.vllm_server.server_engine:VllmServerEngine",
    "pack": "compare_q.backends.pack_engine:PackEngine",
    "scores_file": "compare_q.backends.scores_file.scores_file_engine:ScoresFileEngine",
    "rollouts": "compare_q.backends.scores_file.rollouts_engine:RolloutsEngine",
}
"""Engine -> its class."""
OUTSIDE = "COMPARE_Q_ENGINES"
"""Environment variable that adds engines: ``module:Class``, with commas between several."""
GENERAL = ("vllm_score", "transformers_auto")
"""load_fns for models that several engines run; the first one whose engine is installed is used."""
DEQUANTIZING = "transformers_auto_bf16"
"""load_fn for formats that the first installed engine of ``GENERAL`` has no kernel for."""
TOKENIZING = "transformers"
"""Engine that is imported for functions that read texts and tokenizers."""
LAYER_BY_LAYER = (
    '"engine": {"streaming": true} of "load_fn": "transformers_auto" loads it layer by layer'
)
"""Advice for a model that is larger than the memory."""
ENGINE_ALIASES = {
    "vllm": "vllm_score",
    "gguf": "llamacpp",
    "llama.cpp": "llamacpp",
    "llama_cpp": "llamacpp",
    "exl3": "exllamav3",
    "hf": "transformers",
}
"""Other names of engines -> load_fn."""
REMOVED = ("exllamav2", "exl2")
"""The engine ExLlamaV2 and its quantization method, which compare_q had until version 0.2."""


def engine_class(engine: str) -> type[Engine]:
    """Return an engine's class; InputError if ``$COMPARE_Q_ENGINES`` must have it, and is wrong."""
    if engine in ENGINES:
        return _imported(ENGINES[engine])
    return outside()[engine]


def files_of(model: PlannedModel) -> ModelFiles:
    """Return the files of a planned model."""
    return engine_class(model.engine).files_of(model)


def engines() -> Iterator[tuple[str, type[Engine]]]:
    """Return every (engine name, its class); InputError if ``$COMPARE_Q_ENGINES`` is wrong.

    The file of a built-in engine is imported when the iteration reaches the engine.
    """
    added = outside()
    built_in = ((engine, _imported(location)) for engine, location in ENGINES.items())
    return itertools.chain(built_in, added.items())


def outside() -> dict[str, type[Engine]]:
    """Return the engines that ``$COMPARE_Q_ENGINES`` adds, by their first load_fns.

    Raises InputError if the variable is wrong.
    """
    locations = outside_locations()
    if not locations:
        return {}
    taken = built_in_names()
    added: dict[str, type[Engine]] = {}
    for location in locations:
        engine = outside_engine(location)
        load_fns = engine.capabilities.load_fns
        conflicts = taken.intersection(load_fns)
        if conflicts:
            raise InputError(
                f"{OUTSIDE}: {location}: another engine has the load_fn {min(conflicts)!r}; "
                "choose another"
            )
        taken.update(load_fns)
        added[load_fns[0]] = engine
    return added


def outside_locations() -> list[str]:
    """Return the entries of ``$COMPARE_Q_ENGINES`` that are not empty."""
    entries = os.environ.get(OUTSIDE, "").split(",")
    return [entry.strip() for entry in entries if entry.strip()]


def built_in_names() -> set[str]:
    """Return the names of the built-in engines, and all their load_fns."""
    names = set(ENGINES)
    for location in ENGINES.values():
        names.update(_imported(location).capabilities.load_fns)
    return names


def outside_engine(location: str) -> type[Engine]:
    """Return the class at ``module:Class``; InputError if it is not an engine with load_fns."""
    from .base import Engine

    is_engine = False
    try:
        engine = _imported(location)
        if issubclass(engine, Engine):
            is_engine = bool(engine.capabilities.load_fns)
    except Exception as error:  # anything that the user's file does
        raise InputError(
            f"{OUTSIDE}: {location}: expected module:Class: {one_line(error)}"
        ) from None
    if not is_engine:
        raise InputError(
            f"{OUTSIDE}: {location}: expected a class derived from {Engine.__module__}.Engine"
        )
    return engine


def _imported(location: str) -> type[Engine]:
    """Return the class at ``module:Class``."""
    module, _, name = location.partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), name)
    return engine


def resolve(load_fn: str, fwd_fn: str | None) -> tuple[str, type[Engine]]:
    """Return (engine name, its class) for a spec's functions; InputError for unknown ones."""
    if load_fn in REMOVED:
        raise InputError(
            f"load_fn: {load_fn!r}: compare_q 0.3 does not measure EXL2; quantize to EXL3, "
            "or use compare_q 0.2"
        )
    load_fns: list[str] = []
    for name, engine in engines():
        expected = engine.capabilities.fwd_fn
        if load_fn in engine.capabilities.load_fns:
            if fwd_fn not in (None, expected):
                raise InputError(
                    f"fwd_fn: {fwd_fn!r} does not go with load_fn {load_fn!r}; use {expected!r}"
                )
            return name, engine
        load_fns += engine.capabilities.load_fns
    if load_fn in ENGINE_ALIASES:
        raise InputError(
            f"load_fn: unknown engine {load_fn!r}: it is {ENGINE_ALIASES[load_fn]!r} here"
        )
    suggestion = nearest(load_fn, [*load_fns, *ENGINE_ALIASES])
    raise InputError(
        f"load_fn: unknown engine {load_fn!r}{suggestion}; there are: {', '.join(load_fns)}"
    )


def reader_of(file: str) -> str | None:
    """Return the load_fn of the only engine for files with this suffix; None if there is none.

    For JSON Lines, the kind in the first line of an existing file decides.
    """
    kind = kind_of(expanded(file))
    for _, engine in engines():
        capabilities = engine.capabilities
        if file.lower().endswith(capabilities.suffixes) or kind in capabilities.kinds:
            return capabilities.load_fns[0]
    return None


def reads_if_named(file: str, engine: type[Engine]) -> bool:
    """Return True for a file of another engine that this engine reads if the user names it."""
    has_suffix = file.lower().endswith(engine.capabilities.reads_if_named)
    return has_suffix and not is_folder(expanded(file))


def names_in(model: str) -> list[str]:
    """Return a model's name and the names of the files in its folder.

    A folder with safetensors is one model: only its name is returned.
    """
    folder = Path(model).expanduser()
    if not is_folder(folder) or any(folder.glob("*.safetensors")):
        return [model]
    return [model, *sorted(file.name for file in folder.iterdir())]


def engine_for(model: str, config: CheckpointConfig | None, elsewhere: Set[str]) -> tuple[str, str]:
    """Return (load_fn, why) for a model whose user names no engine.

    ``model``: a server's address, a file, a folder or a hub id; ``config``: the folder's, None
    without a config; ``elsewhere``: engines and load_fns that have their own Python.
    """
    for name in names_in(model):
        load_fn = reader_of(name)
        if load_fn:
            return load_fn, f"a {Path(name).suffix} file"
    quant_method = ""
    quantization: Mapping[str, Any] = {}
    if config is not None:
        quant_method = config.quant_method
        quantization = config.quantization
    if quant_method in REMOVED:
        resolve(quant_method, None)  # raises the advice for removed engines
    only_engine = only_engine_for(model, quant_method)
    if only_engine is not None:
        return only_engine
    return general_engine_for(quant_method, quantization, elsewhere)


def only_engine_for(model: str, quant_method: str) -> tuple[str, str] | None:
    """Return (load_fn, why) if one engine alone runs such a model, or None."""
    for _, engine in engines():
        capabilities = engine.capabilities
        load_fn = capabilities.load_fns[0]
        if capabilities.schemes and model.startswith(capabilities.schemes):
            return load_fn, "an address"
        if capabilities.marker and (Path(model).expanduser() / capabilities.marker).is_file():
            return load_fn, f"a folder with {capabilities.marker}"
        if quant_method and quant_method == capabilities.quant_method:
            return load_fn, f"{quant_method.upper()} weights"
    return None


def general_engine_for(
    quant_method: str, quantization: Mapping[str, Any], elsewhere: Set[str]
) -> tuple[str, str]:
    """Return (load_fn, why) of the first installed engine of ``GENERAL``; if none is, of the last.

    ``elsewhere``: engines and load_fns that are installed in another Python.
    """
    weights = "no quantization"
    if quant_method:
        weights = f"{quant_method} weights"
    not_installed = ""
    for load_fn in GENERAL:
        name, engine = resolve(load_fn, None)
        has_own_python = bool(elsewhere & {name, load_fn})
        if not engine.capabilities.installed() and not has_own_python:
            not_installed = f"; {name} is not installed"
            continue
        kernel = engine.missing_kernel(quantization, {})
        if kernel:
            return DEQUANTIZING, f"{weights}; {name} has no kernel for {kernel}"
        return load_fn, weights + not_installed
    return GENERAL[-1], weights


def check_files(model_dir: str, engine: type[Engine]) -> None:
    """InputError for a file with another engine's suffix, or for a folder of such files."""
    if reads_if_named(model_dir, engine):
        return
    for name in names_in(model_dir):
        load_fn = reader_of(name)
        if load_fn and load_fn not in engine.capabilities.load_fns:
            raise InputError(
                f'model_dir: {model_dir}: {Path(name).suffix} files are for "load_fn": "{load_fn}"'
            )
