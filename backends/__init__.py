"""The registry: the name in a spec -> the class that runs it.  No engine is imported here.

Looking up a name imports the file of the class.  The engine itself is imported when a model loads.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from .common.errors import InputError
from .common.json_files import is_folder
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
}
"""Engine -> its class."""
OUTSIDE = "COMPARE_Q_ENGINES"
"""Environment variable that adds engines: ``module:Class``, with commas between several."""
GENERAL = ("vllm_score", "transformers_auto")
"""load_fns for models that several engines run; the first one whose engine is installed is used."""
DEQUANTIZING = "transformers_auto_bf16"
"""load_fn for weight-only formats that the first installed engine of ``GENERAL`` has no kernel for.
"""
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
    """Return the class of an engine; InputError if it is not built in and ``$COMPARE_Q_ENGINES`` is
    wrong.
    """
    return _imported(ENGINES[engine]) if engine in ENGINES else outside()[engine]


def files_of(model: PlannedModel) -> ModelFiles:
    """Return the files of a planned model."""
    return engine_class(model.engine).files(model)


def engines() -> list[tuple[str, type[Engine]]]:
    """Return every (engine name, its class); InputError if ``$COMPARE_Q_ENGINES`` is wrong."""
    return [(engine, _imported(location)) for engine, location in ENGINES.items()] + list(
        outside().items()
    )


def outside() -> dict[str, type[Engine]]:
    """Return the engines that ``$COMPARE_Q_ENGINES`` adds, by their first load_fns; InputError if
    it is wrong.
    """
    locations = list(filter(None, map(str.strip, os.environ.get(OUTSIDE, "").split(","))))
    if not locations:
        return {}
    from .base import Engine

    found: dict[str, type[Engine]] = {}
    taken = {
        name
        for each, location in ENGINES.items()
        for name in (each, *_imported(location).capabilities.load_fns)
    }
    for location in locations:
        try:
            engine = _imported(location)
            names = engine.capabilities.load_fns if issubclass(engine, Engine) else ()
        except Exception as error:  # anything that the user's file does
            raise InputError(
                f"{OUTSIDE}: {location}: expected module:Class: {one_line(error)}"
            ) from None
        if not names:
            raise InputError(
                f"{OUTSIDE}: {location}: expected a class derived from {Engine.__module__}.Engine"
            )
        if known := taken.intersection(names):
            raise InputError(
                f"{OUTSIDE}: {location}: another engine has the load_fn {min(known)!r}; choose another"
            )
        taken.update(names)
        found[names[0]] = engine
    return found


def _imported(location: str) -> type[Engine]:
    """Return the class at ``module:Class``."""
    module, _, name = location.partition(":")
    found: type[Engine] = getattr(importlib.import_module(module), name)
    return found


def resolve(load_fn: str, fwd_fn: str | None) -> tuple[str, type[Engine]]:
    """Return (engine name, its class) for a spec's ``load_fn`` and ``fwd_fn``; InputError if
    unknown.
    """
    if load_fn in REMOVED:
        raise InputError(
            f"load_fn: {load_fn!r}: compare_q 0.3 does not measure EXL2; quantize to EXL3, or use compare_q 0.2"
        )
    known: list[str] = []
    for name, engine in engines():
        wanted = engine.capabilities.fwd_fn
        if load_fn in engine.capabilities.load_fns:
            if fwd_fn not in (None, wanted):
                raise InputError(
                    f"fwd_fn: {fwd_fn!r} does not go with load_fn {load_fn!r}; use {wanted!r}"
                )
            return name, engine
        known += engine.capabilities.load_fns
    if load_fn in ENGINE_ALIASES:
        raise InputError(
            f"load_fn: unknown engine {load_fn!r}: it is {ENGINE_ALIASES[load_fn]!r} here"
        )
    near = nearest(load_fn, [*known, *ENGINE_ALIASES])
    raise InputError(f"load_fn: unknown engine {load_fn!r}{near}; there are: {', '.join(known)}")


def reader_of(file: str) -> str | None:
    """Return the load_fn of the only engine that reads files with this suffix; None if there is
    none.
    """
    for _, engine in engines():
        if file.lower().endswith(engine.capabilities.suffixes):
            return engine.capabilities.load_fns[0]
    return None


def names_in(model: str) -> list[str]:
    """Return a model's name and the file names in its folder; only the name if the folder holds
    safetensors.
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
        if load_fn := reader_of(name):
            return load_fn, f"a {Path(name).suffix} file"
    quant_method = "" if config is None else config.quant_method
    if quant_method in REMOVED:
        resolve(quant_method, None)
    for _, engine in engines():
        capabilities = engine.capabilities
        if capabilities.schemes and model.startswith(capabilities.schemes):
            return capabilities.load_fns[0], "an address"
        if capabilities.marker and (Path(model).expanduser() / capabilities.marker).is_file():
            return capabilities.load_fns[0], f"a folder with {capabilities.marker}"
        if quant_method and quant_method == capabilities.quant_method:
            return capabilities.load_fns[0], f"{quant_method.upper()} weights"
    weights = f"{quant_method} weights" if quant_method else "no quantization"
    quantization = {} if config is None else config.quantization
    missing = ""
    for load_fn in GENERAL:
        name, engine = resolve(load_fn, None)
        if not engine.capabilities.installed() and not elsewhere & {name, load_fn}:
            missing = f"; {name} is not installed"
            continue
        if kernel := engine.missing_kernel(quantization, {}):
            return DEQUANTIZING, f"{weights}; {name} has no kernel for {kernel}"
        return load_fn, weights + missing
    return GENERAL[-1], weights


def check_files(model_dir: str, engine: type[Engine]) -> None:
    """InputError for a model that only another engine reads: a file with its suffix, or a folder of
    such files.
    """
    for name in names_in(model_dir):
        if (load_fn := reader_of(name)) and load_fn not in engine.capabilities.load_fns:
            raise InputError(
                f'model_dir: {model_dir}: {Path(name).suffix} files are for "load_fn": "{load_fn}"'
            )
