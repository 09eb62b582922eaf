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


@dataclass(frozen=True)
class RunConfig:
    """Everything that stays the same over a run."""

    cache: Cache
    progress: Progress
    workers: Workers = field(default_factory=Workers)  # where models run
    gpus: GpuPool = field(default_factory=GpuPool)
    record_all: bool = False  # the reference's store must have all windows, as a pack needs them
    alone: frozenset[str] = (
        frozenset()
    )  # names of texts whose windows are each computed without any other
    logits_file: Path | None = (
        None  # path of the reference store that the user gave; it is read, or made there
    )
    clear: bool = (
        False  # first delete the texts' cached tokens, and the scores and states of their windows
    )
    verbose: bool = False  # engines print on the terminal
    verify_weights: bool = (
        False  # the scores' key holds the hash of every byte of the weight files, not of samples
    )
    # its further runs (``repeat``) are deleted at the end, or by another run after a kill
    is_temporary: bool = False
    # refuse a model whose decode differs from its prefill; False: the caller compares them
    check_decode: bool = True
    load_timeout_s: float = 3600.0  # maximum seconds of silence of a worker while it loads
    window_timeout_s: float = 1800.0  # maximum seconds of silence of a worker between two windows
    on_row: Callable[[ModelResult], None] = lambda _row: None  # gets each finished row
    # Gets the fingerprint of the reference's files and the windows before an engine loads; its
    # InputError ends the run.
    check_reference: Callable[[str | None, EvalData], None] = lambda _content, _data: None
    digests: dict[tuple[str, int, int], str] = field(
        default_factory=dict
    )  # of weight files, by path, size and time


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
    machine.code()  # hashed now: a worker must run the code that this process has imported
    progress = progress or Progress()
    pool = GpuPool(select_gpus(machine.gpus(), gpus, progress.say))
    all_pythons = {**spec_files.load_settings().python, **(pythons or {})}
    known = {
        name for key, engine in backends.engines() for name in (key, *engine.capabilities.load_fns)
    }
    if strange := sorted(all_pythons.keys() - known):
        there = ", ".join(sorted(known))
        raise InputError(
            f"python: {printable(strange[0])} is not an engine{nearest(strange[0], known)}; there are: {there}"
        )
    workers = Workers(all_pythons, pool, min(600.0, keys.get("load_timeout_s", 600.0)))
    return RunConfig(cache or Cache(default_root()), progress, workers, pool, **keys)
