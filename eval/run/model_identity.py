"""The identity of a model's scores: all that they depend on; a hash of it is their key."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...backends.common.errors import InputError
from ...backends.layers import noise
from .run_config import RunConfig
from .run_model import RunModel

HASHED_BYTES = 1 << 24
SCORES_VERSION = 9
"""Version of the scoring.

Raise it when numbers or the stored data change, so that stored scores are not mixed.
"""


def identity(config: RunConfig, model: RunModel) -> dict[str, Any]:
    """Return everything that a model's scores of a window depend on, except the window itself.

    Reads the headers of its files; InputError if they are damaged.
    """
    planned = model.planned
    facts: dict[str, Any] = {
        "version": SCORES_VERSION,
        "model": planned.stamp or stamp_of(model),
        "engine": model.engine,
        "load_fn": planned.load_fn,
        "options": planned.options,
        "versions": model.info.versions,
        "hardware": model.hardware,
    }
    if planned.options.get("noise") is not None:
        facts["noise"] = noise.NOISE_VERSION
    if model.spec.repeat is not None:
        facts["repeat"] = model.spec.repeat
    # Omitted in prefill, so that existing cache keys stay valid.
    if planned.decode is not None:
        facts["decode"] = asdict(planned.decode)
    edge = model.facts.rope_changes_above
    # The longest window of a run decides for all of them.
    if edge is not None:
        facts["long_rope"] = planned.max_tokens > edge
    if config.verify_weights:
        facts["weights"] = [digest_of(config, file) for file in model.files.weight_files()]
    return facts


def stamp_of(model: RunModel) -> str:
    """Return the fingerprint of a model that is on this machine.

    For a model on a server, the one that the server has sent.
    """
    if model.info.facts:
        return model.info.stamp
    return model.files.stamp()


def digest_of(config: RunConfig, file: Path) -> str:
    """Return the SHA-256 of a complete file, which one run computes once.

    InputError if the file cannot be read.
    """
    try:
        status = file.stat()
        key = (str(file), status.st_size, status.st_mtime_ns)
        if key not in config.digests:
            config.digests[key] = hashed(config, file, status.st_size)
    except OSError as error:
        raise InputError(f"model_dir: {file}: cannot be read: {error.strerror}") from None
    return config.digests[key]


def hashed(config: RunConfig, file: Path, size: int) -> str:
    """Return the SHA-256 of a file of ``size`` bytes, and show the progress."""
    digest = hashlib.sha256()
    title = f"hashing {file.name}"
    with (
        config.progress.phase(title, unit="bytes", total=size) as phase,
        file.open("rb") as stream,
    ):
        watch = config.workers.stoppable(phase)
        while True:
            content = stream.read(HASHED_BYTES)
            if not content:
                return digest.hexdigest()
            digest.update(content)
            watch.advance(len(content))
