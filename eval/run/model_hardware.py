"""GPUs and processor of a model: how many it gets, and what of them its results name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ... import backends
from ...backends.common import machine
from ...backends.common.engine_options import strings_in
from ...backends.common.errors import InputError
from .run_config import RunConfig
from .run_model import RunModel
from .workers import Hardware

WEIGHTS_SHARE = 0.7
"""Share of a GPU's memory that weights may fill.

The rest is for logits (1 GB for 2,048 tokens) and the KV cache.
"""


def gpus_of(model: RunModel, gpus: Sequence[machine.Gpu]) -> int:
    """Return how many of a machine's ``gpus`` a replica of the model gets.

    An engine that spreads a model over all visible GPUs gets as many as the weights fill up to
    ``WEIGHTS_SHARE``.  InputError if there are too few.
    """
    n_gpus = model.spec.gpus
    if n_gpus is None:
        n_gpus = backends.engine_class(model.engine).gpus(model.planned)
    if not gpus:
        return 0
    if n_gpus is None:
        n_gpus = gpus_for_weights(model, gpus)
    if n_gpus > len(gpus):
        raise InputError(f"gpus: the model needs {n_gpus} GPUs, the run has {len(gpus)}")
    # In a spec and from an engine, 0 means all GPUs.
    if n_gpus == 0:
        return len(gpus)
    return int(n_gpus)


def gpus_for_weights(model: RunModel, gpus: Sequence[machine.Gpu]) -> int:
    """Return how many GPUs the weights fill up to ``WEIGHTS_SHARE``; 0 if a size is unknown."""
    if model.files.is_remote:
        return 0
    bits = model.files.storage().vram_bits
    room_of_gpu = WEIGHTS_SHARE * gpus[0].mib * 1024**2
    if bits is None or not room_of_gpu:
        return 0
    return min(math.ceil(bits / 8 / room_of_gpu), len(gpus))


def replicas_of(config: RunConfig, model: RunModel, hardware: Hardware, n_gpus: int) -> int:
    """Return how many workers share the windows of a model: the spec's number, or what fits."""
    replicas = model.spec.replicas
    most_replicas = hardware.most_replicas(n_gpus)
    if config.workers.in_process:
        most_replicas = 1
    if most_replicas is None:
        return replicas
    return max(min(replicas, most_replicas), 1)


def hardware_of(model: RunModel, hardware: Hardware, n_gpus: int) -> dict[str, Any]:
    """Return the part of the scores' key that names the hardware, and the machine's settings.

    GPUs by their type, or the processor.  An engine that does not compute with torch may use GPUs
    and processor.  Empty for a model on a server.
    """
    capabilities = model.capabilities
    gpus = hardware.gpus[:n_gpus]
    if not capabilities.here:
        return {}
    uses_only_gpus = capabilities.torch and "cpu" not in strings_in(model.planned.options)
    if not gpus or (uses_only_gpus and model.info.cpu_only):
        return {**hardware.processor, **hardware.settings}
    key: dict[str, Any] = {}
    if not uses_only_gpus:
        key |= hardware.processor
    key["gpus"] = [gpu.name for gpu in gpus]
    key["driver"] = gpus[0].driver
    return {**key, **hardware.settings}


def early_provenance(
    model: RunModel, hardware: Hardware, hardware_key: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of a model's provenance that is known before it loads."""
    installed = model.info.installed or ()
    provenance: dict[str, Any] = {
        "engine": model.engine,
        "engine_version": " ".join(installed).strip(),
    }
    if model.planned.decode is not None:
        provenance["phase"] = model.planned.decode.label
    provenance |= model.info.versions
    if model.python is not None:
        provenance["python_path"] = model.python
    provenance |= hardware_key
    if model.capabilities.here:
        for name in machine.threads():
            provenance[name] = hardware.processor.get(name)
    return provenance


def emulated_dtypes(config: RunConfig, models: Sequence[RunModel]) -> str | None:
    """Return a line on the models whose dtype this CPU emulates, and on the gain from another."""
    if not (config.workers.is_local and machine.emulates_bf16()):
        return None
    labels = []
    for model in models:
        if not runs_on_cpu(model) or model.files.is_remote:
            continue
        if model.facts.dtype in ("bfloat16", "float16"):
            labels.append(model.label)
    if not labels:
        return None
    names = ", ".join(labels)
    return (
        f"{names}: 16-bit products are emulated on this CPU, which has neither AVX-512 BF16 nor "
        'AMX: "dtype": "float32" in "engine" takes about a quarter of the time, for a KLD of '
        "some 0.001"
    )


def runs_on_cpu(model: RunModel) -> bool:
    """Return True if torch computes the model on the processor of this machine."""
    if not (model.capabilities.here and model.capabilities.torch):
        return False
    return model.info.cpu_only or not model.n_gpus
