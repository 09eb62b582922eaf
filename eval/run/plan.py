"""Turn model specs into ``RunModel``s: all checks that need no engine, and the keys of scores."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ... import backends
from ...backends.base import Capabilities, Decode, PlannedModel
from ...backends.common import machine
from ...backends.common.engine_options import strings_in
from ...backends.common.errors import InputError, ModelError
from ...backends.common.json_files import check_unicode
from ...backends.layers import noise
from ..specs.spec_types import ModelSpec
from ..text import vocabulary
from ..text.eval_data import EvalData
from .run_config import RunConfig
from .run_model import RunModel
from .workers import Hardware

WEIGHTS_SHARE = 0.7
"""Share of a GPU's memory that weights may fill.

The rest is for logits (1 GB for 2,048 tokens) and the KV cache.
"""
HASHED_BYTES = 1 << 24
DECODE_BATCH = 32
"""Number of windows that are decoded together, if the engine supports as many.

The spec's ``batch`` replaces it.
"""
SCORES_VERSION = 9
"""Version of the scoring.

Raise it when numbers or the stored data change, so that stored scores are not mixed.
"""


def plan_models(config: RunConfig, specs: Sequence[ModelSpec], max_tokens: int) -> list[RunModel]:
    """Check every model spec for windows of ``max_tokens``, before a text is tokenized.

    InputError with one line per problem.  A server that does not answer is not a problem yet: the
    request is repeated when its model is scheduled.
    """
    check_unicode("--logits_file", config.logits_file)
    if config.clear:
        config.cache.check_writable()
    models = []
    problems = []
    for spec in specs:
        try:
            model = as_planned(config, spec, max_tokens)
            models.append(check_model(config, model))
        except InputError as error:
            problems.append(spec.blamed(error))
    raise_all(problems)
    for model in models:
        reason = model.info.unreachable
        if reason:
            config.progress.say(f"{model.label}: {reason}; it is asked again before it runs")
    return models


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line per problem, if there are any."""
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))


def as_planned(config: RunConfig, spec: ModelSpec, max_tokens: int) -> RunModel:
    """Return the model that a spec describes, not checked yet."""
    engine, engine_class = backends.resolve(spec.load_fn, spec.fwd_fn)
    planned = PlannedModel(
        label=spec.name,
        engine=engine,
        load_fn=spec.load_fn,
        model_dir=spec.located,
        max_tokens=max_tokens,
        options=spec.options,
        override_tensors=spec.override_tensors,
        revision=spec.revision,
        decode=decode_of(spec, engine_class.capabilities),
        check_decode=config.check_decode,
    )
    python_of_spec = None
    if spec.python is not None:
        python_of_spec = spec.locate(spec.python)
    python = config.workers.python(python_of_spec, engine, spec.load_fn)
    model = RunModel(spec, planned, python, replicas=spec.replicas)
    check_unicode("model_dir", planned.model_dir, *planned.override_tensors)
    check_unicode("python", model.python)
    check_unicode("out_logits", model.out_logits)
    return model


def decode_of(spec: ModelSpec, capabilities: Capabilities) -> Decode | None:
    """Return the decode steps of a spec, None for prefill.

    InputError if its engine does not support them.
    """
    if spec.phase == "prefill":
        return None
    most_windows = capabilities.decodes
    if not most_windows:
        raise InputError(f"phase: {spec.load_fn!r} cannot be scored in decode steps; leave it out")
    batch = spec.batch
    if batch is None:
        batch = min(DECODE_BATCH, most_windows)
    elif batch > most_windows:
        raise InputError(
            f"batch: {spec.load_fn!r} decodes {most_windows} windows at a time; "
            "choose a smaller batch"
        )
    return Decode(spec.step, batch)


def check_model(config: RunConfig, model: RunModel) -> RunModel:
    """Return the model with its engine's versions in its Python, its hardware, GPUs and replicas.

    InputError if the engine is not installed, its options are wrong, or a local model's files do
    not fit.
    """
    backends.check_files(model.planned.model_dir, backends.engine_class(model.engine))
    info, hardware = config.workers.inspect(model)
    model = replace(model, info=info)
    check_installed(model)
    check_spec(model)
    check_override_tensors(model)
    check_context(model)
    if not config.workers.is_local:
        check_is_on_one_machine(model)
    n_gpus = gpus_of(model, hardware.gpus)
    hardware_key = hardware_of(model, hardware, n_gpus)
    return replace(
        model,
        n_gpus=n_gpus,
        replicas=replicas_of(config, model, hardware, n_gpus),
        hardware=hardware_key,
        provenance=early_provenance(model, hardware, hardware_key),
    )


def check_installed(model: RunModel) -> None:
    """InputError if the model's engine is not installed in its Python."""
    if model.info.installed is not None:
        return
    place = ""
    if model.python is not None:
        place = f" in {model.python}"
    install = model.capabilities.install
    raise InputError(f"load_fn: {model.planned.load_fn!r} is not installed{place}: {install}")


def check_spec(model: RunModel) -> None:
    """InputError for keys of the spec that the engine or the kind of model does not have.

    The engine's own checks of the options have filled ``info.problem``.
    """
    spec = model.spec
    planned = model.planned
    files = model.files
    if model.is_reference and not model.capabilities.reference:
        raise InputError(
            f"reference: {planned.load_fn!r} does not return logits to compare with; "
            "mark another model"
        )
    if model.is_reference and spec.noise_floor:
        raise InputError(
            "noise_floor: the reference cannot be its own noise floor; mark one of the two"
        )
    if planned.options.get("noise") is not None and not spec.noise_floor:
        raise InputError('engine.noise: only for a model that is marked with "noise_floor": true')
    # Not the spec's revision: a download replaces hub id and revision by a path.
    if planned.revision is not None and not files.is_remote:
        raise InputError("revision: only for a model on the hub")
    if model.info.problem:
        raise InputError(model.info.problem)
    if spec.out_logits is not None and files.is_store:
        raise InputError("out_logits: a reference pack is a store already; leave it out")


def check_override_tensors(model: RunModel) -> None:
    """InputError for override tensors that the engine does not take, or that do not exist."""
    planned = model.planned
    if planned.override_tensors and not model.capabilities.override_tensors:
        raise InputError(
            f"model_dir: {planned.load_fn!r} takes no override tensors; give the folder alone"
        )
    for file in planned.override_tensors:
        if not file.is_file():
            raise InputError(f"model_dir: override tensors {file}: no such file")


def check_context(model: RunModel) -> None:
    """InputError if the windows are longer than the context of a model on this machine."""
    if model.files.is_remote:
        return
    context = model.facts.context
    max_tokens = model.planned.max_tokens
    if context is not None and max_tokens > context:
        raise InputError(
            f"eval_len: windows of {max_tokens} tokens exceed the model's context of {context}"
        )


def check_is_on_one_machine(model: RunModel) -> None:
    """InputError if an option makes the engine spread the model over machines.

    With ``--ray`` it would wait for GPUs that the run has already reserved for it.
    """
    option = backends.engine_class(model.engine).spread_by(model.planned)
    if option:
        raise InputError(
            f"engine.{option}: the engine itself spreads this model over machines; "
            "run it without --ray"
        )


def replicas_of(config: RunConfig, model: RunModel, hardware: Hardware, n_gpus: int) -> int:
    """Return how many workers share the windows of a model: the spec's number, or what fits."""
    replicas = model.spec.replicas
    most_replicas = hardware.most_replicas(n_gpus)
    if config.workers.in_process:
        most_replicas = 1
    if most_replicas is None:
        return replicas
    return max(min(replicas, most_replicas), 1)


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


def fitted(
    config: RunConfig, specs: Sequence[ModelSpec], models: Sequence[RunModel], data: EvalData
) -> list[RunModel]:
    """Check the models of these specs again, now with the windows of the run.

    A chat prefix may have made the windows longer than the data specs say.  InputError with one
    line per problem.
    """
    fitted_models = []
    problems = []
    lengths = [text.length for text in data.texts]
    for spec, model in zip(specs, models, strict=True):
        fitted_model = model.with_planned(max_tokens=max(lengths))
        try:
            if max(lengths) > model.planned.max_tokens:
                fitted_model = check_model(config, fitted_model)
        except InputError as error:
            problems.append(spec.blamed(error))
            continue
        fitted_models.append(fitted_model)
        problems += vocabulary_problems(fitted_model, data)
        problems += rotary_problems(fitted_model, lengths)
    raise_all(problems)
    return fitted_models


def vocabulary_problems(model: RunModel, data: EvalData) -> list[str]:
    """Return a line if token ids of the run have no logit, or another meaning, in the model."""
    if model.files.is_remote:
        return []
    facts = model.facts
    place = f"{model.label}: tokenizer_dir:"
    if facts.vocab_size is not None and data.top_id >= facts.vocab_size:
        return [
            f"{place} its vocabulary reaches id {data.top_id}, "
            f"the model has {facts.vocab_size} tokens; give the model's own tokenizer"
        ]
    if facts.tokenizer is None:
        return []
    difference = vocabulary.disagreement(
        facts.tokenizer,
        data.tokenizer,
        trusted=bool(model.planned.options.get("trust_remote_code")),
        data_trusted=any(text.spec.trust_remote_code for text in data.texts),
        ids_in_chats=data.ids_in_chats,
    )
    if not difference:
        return []
    return [f"{place} is not this model's tokenizer: {difference}"]


def rotary_problems(model: RunModel, lengths: Sequence[int]) -> list[str]:
    """Return a line if texts are on both sides of a model's change of rotary factors.

    llama.cpp chooses the factors by its context, which is the longest window of the run.  Without
    the longest text, the others would have different scores under the same key.
    """
    if model.files.is_remote:
        return []
    edge = model.facts.rope_changes_above
    if edge is None or not min(lengths) <= edge < max(lengths):
        return []
    return [
        f"{model.label}: eval_len: the model has other rotary factors in contexts above "
        f"{edge:,} tokens, and the longest text decides for all; "
        "score texts of longer windows in a separate run"
    ]


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


def is_available(model: RunModel) -> bool:
    """Return True if the model needs neither a download nor a request to a server."""
    return model.capabilities.here and not model.files.is_remote


def fetched(config: RunConfig, model: RunModel) -> RunModel:
    """Return a model that is on this machine, with the fingerprint of its files.

    Missing files are downloaded.  InputError if the files do not fit.  A server must now name its
    model; ModelError if it does not answer.
    """
    config.workers.check()
    was_available = is_available(model)
    files = model.files
    if files.is_remote:
        title = f"fetching {model.planned.model_dir}"
        with config.progress.phase(title, unit="bytes") as phase:
            planned = files.fetch(config.workers.stoppable(phase))
        model = replace(model, planned=planned)
    if not was_available:
        model = check_model(config, model)
        if model.info.unreachable:
            raise ModelError(model.info.unreachable)
    model = model.with_planned(stamp=stamp_of(model))
    # The engine is imported while others have the GPUs.
    if config.gpus.gpus:
        config.workers.import_ahead(model, verbose=config.verbose)
    return model


def stamp_of(model: RunModel) -> str:
    """Return the fingerprint of a model that is on this machine.

    For a model on a server, the one that the server has sent.
    """
    if model.info.facts:
        return model.info.stamp
    return model.files.stamp()


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
        facts["noise"] = noise.VERSION
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
