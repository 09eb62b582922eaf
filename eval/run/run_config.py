"""Settings and services that stay the same over a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import backends
from ...backends.common import machine
from ...backends.common.errors import InputError
from ...backends.common.message_text import nearest, printable
from ..common.cache import Cache, default_root
from ..common.progress import Progress
from ..results import ModelResult
from ..specs import spec_files
from ..text.eval_data import EvalData
from .gpu_pool import GpuPool, select_gpus
from .workers import Workers

INSPECT_S = 600.0
"""Maximum seconds in which a Python must report its engine's versions, and a server its model."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that stays the same over a run."""

    cache: Cache
    progress: Progress
    # Where models run.
    workers: Workers = field(default_factory=Workers)
    gpus: GpuPool = field(default_factory=GpuPool)
    # The reference's store must have all windows, as a pack needs them.
    record_all: bool = False
    # Names of texts whose windows are each computed without any other.
    alone: frozenset[str] = frozenset()
    # Path of the reference store that the user gave; it is read, or made there.
    logits_file: Path | None = None
    # First delete the texts' cached tokens, and the scores and states of their windows.
    clear: bool = False
    # Engines print on the terminal.
    verbose: bool = False
    # The scores' key has the hash of every byte of the weight files, not of samples.
    verify_weights: bool = False
    # Its further runs (``repeat``) are deleted at the end, or by another run after a kill.
    is_temporary: bool = False
    # Refuse a model whose decode differs from its prefill; False: the caller compares them.
    check_decode: bool = True
    # Maximum seconds of silence of a worker while it loads.
    load_timeout_s: float = 3600.0
    # Maximum seconds of silence of a worker between two windows.
    window_timeout_s: float = 1800.0
    # Gets each finished row.
    on_row: Callable[[ModelResult], None] = lambda _row: None
    # Gets the fingerprint of the reference's files and the windows before an engine loads; its
    # InputError ends the run.
    check_reference: Callable[[str | None, EvalData], None] = lambda _content, _data: None
    # Digests of weight files, by path, size and time: a run hashes each file once.
    digests: dict[tuple[str, int, int], str] = field(default_factory=dict)


def local_config(
    cache: Cache | None = None,
    progress: Progress | None = None,
    *,
    gpus: Sequence[str] | None = None,
    pythons: Mapping[str, str] | None = None,
    **keys: Any,
) -> RunConfig:
    """Return the configuration of a run on this machine.

    ``gpus``: names in CUDA_VISIBLE_DEVICES; None: all of the first GPU's type.  ``pythons``: engine
    or load_fn -> Python, in addition to the settings file.  ``keys``: other attributes of
    ``RunConfig``.  InputError for a wrong GPU.
    """
    # Hashed now: a worker must run the code that this process has imported.
    machine.code()
    if progress is None:
        progress = Progress()
    pool = GpuPool(select_gpus(machine.gpus(), gpus, progress.say))
    all_pythons = dict(spec_files.load_settings().python)
    if pythons is not None:
        all_pythons.update(pythons)
    check_engine_names(all_pythons)
    inspect_s = min(INSPECT_S, keys.get("load_timeout_s", INSPECT_S))
    workers = Workers(all_pythons, pool, inspect_s)
    if cache is None:
        cache = Cache(default_root())
    return RunConfig(cache, progress, workers, pool, **keys)


def check_engine_names(pythons: Mapping[str, str]) -> None:
    """InputError for a key that is not an engine or a load function, or for a wrong engine."""
    # InputError for a wrong variable with engines, once for the run.
    backends.outside()
    # Listing the engines imports all their files.
    if not pythons:
        return
    names: set[str] = set()
    for key, engine in backends.engines():
        names.add(key)
        names.update(engine.capabilities.load_fns)
    strange_names = sorted(pythons.keys() - names)
    if strange_names:
        name = strange_names[0]
        all_names = ", ".join(sorted(names))
        hint = nearest(name, names)
        raise InputError(
            f"python: {printable(name)} is not an engine{hint}; there are: {all_names}"
        )
