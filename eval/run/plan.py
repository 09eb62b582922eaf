"""Turn model specs into ``RunModel``s: all checks that need no engine, and the key of a model's
token scores.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
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
"""Share of a GPU's memory that weights may fill; the rest is for logits (1 GB for 2,048 tokens) and
the KV cache."""
HASHED_BYTES = 1 << 24
DECODE_BATCH = 32
"""Number of windows that are decoded together, if the spec has no ``batch`` and the engine supports
it."""
SCORES_VERSION = 9
"""Version of the scoring; raise it when numbers or the stored data change, so that stored scores
are not mixed."""


def plan_models(config: RunConfig, specs: Sequence[ModelSpec], max_tokens: int) -> list[RunModel]:
    """Check every model spec for windows of ``max_tokens``, before a text is tokenized.

    InputError with one line per problem.  A server that does not answer is not a problem yet: it is
    asked again when its model is scheduled.
    """
    check_unicode("--logits_file", config.logits_file)
    if config.clear:
        config.cache.check_writable()
    models, problems = [], []
    for spec in specs:
        try:
            models.append(checked(config, as_planned(config, spec, max_tokens)))
        except InputError as error:
            problems.append(spec.blamed(error))
    raise_all(problems)
    for model in models:
        if model.info.unreachable:
            config.progress.say(
                f"{model.label}: {model.info.unreachable}; it is asked again before it runs"
            )
    return models


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line per problem, if there are any."""
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))


def as_planned(config: RunConfig, spec: ModelSpec, max_tokens: int) -> RunModel:
    """Return the model that a spec describes, not checked yet."""
    engine, engine_class = backends.resolve(spec.load_fn, spec.fwd_fn)
    python = None
    if spec.python is not None:
        python = spec.locate(spec.python)
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
    python = config.workers.python(python, engine, spec.load_fn)
    model = RunModel(spec, planned, python, replicas=spec.replicas)
    check_unicode("model_dir", planned.model_dir, *planned.override_tensors)
    check_unicode("python", model.python)
    check_unicode("out_logits", model.out_logits)
    return model


def decode_of(spec: ModelSpec, capabilities: Capabilities) -> Decode | None:
    """Return the decode steps of a spec, None for prefill; InputError if its engine cannot take
    them.
    """
    if spec.phase == "prefill":
        return None
    if not capabilities.decodes:
        raise InputError(f"phase: {spec.load_fn!r} cannot be scored in decode steps; leave it out")
    if spec.batch is not None and spec.batch > capabilities.decodes:
        raise InputError(
            f"batch: {spec.load_fn!r} decodes {capabilities.decodes} windows at a time; choose a smaller batch"
        )
    return Decode(spec.step, spec.batch or min(DECODE_BATCH, capabilities.decodes))


def checked(config: RunConfig, model: RunModel) -> RunModel:
    """Return the model with its engine's versions in its Python, its hardware, GPUs and replicas.

    InputError if the engine is not installed, its options are wrong, or a local model's files do
    not fit.
    """
    spec = model.spec
    planned = model.planned
    name = planned.load_fn
    engine_class = backends.engine_class(model.engine)
    capabilities = engine_class.capabilities
    files = model.files
    backends.check_files(planned.model_dir, engine_class)
    info, hardware = config.workers.inspect(model)
    if info.installed is None:
        where = "" if model.python is None else f" in {model.python}"
        raise InputError(f"load_fn: {name!r} is not installed{where}: {capabilities.install}")
    if model.is_reference and not capabilities.reference:
        raise InputError(
            f"reference: {name!r} does not return logits to compare with; mark another model"
        )
    if model.is_reference and spec.noise_floor:
        raise InputError(
            "noise_floor: the reference cannot be its own noise floor; mark one of the two"
        )
    if planned.options.get("noise") is not None and not spec.noise_floor:
        raise InputError('engine.noise: only for a model that is marked with "noise_floor": true')
    if planned.revision is not None and not files.is_remote:
        raise InputError("revision: only for a model on the hub")
    if info.problem:
        raise InputError(info.problem)
    if spec.out_logits is not None and files.is_store:
        raise InputError("out_logits: a reference pack is a store already; leave it out")
    if planned.override_tensors and not capabilities.override_tensors:
        raise InputError(f"model_dir: {name!r} takes no override tensors; give the folder alone")
    for file in planned.override_tensors:
        if not file.is_file():
            raise InputError(f"model_dir: override tensors {file}: no such file")
    model = replace(model, info=info)
    context = None
    if not files.is_remote:
        context = model.facts.context
    if context is not None and planned.max_tokens > context:
        raise InputError(
            f"eval_len: windows of {planned.max_tokens} tokens "
            f"exceed the model's context of {context}"
        )
    if not config.workers.is_local:
        option = engine_class.spread_by(planned)
        if option:
            raise InputError(
                f"engine.{option}: the engine itself spreads this model over machines; "
                "run it without --ray"
            )
    n_gpus = gpus_of(model, hardware.gpus)
    most, asked = (
        1 if config.workers.in_process else hardware.most_replicas(n_gpus),
        spec.replicas,
    )
    found = hardware_of(model, hardware, n_gpus)
    cores = (
        {name: hardware.processor.get(name) for name in machine.threads()}
        if capabilities.here
        else {}
    )
    python = {} if model.python is None else {"python_path": model.python}
    phase = {} if planned.decode is None else {"phase": planned.decode.label}
    package = {"engine_version": " ".join(info.installed).strip()}
    known = {
        "engine": model.engine,
        **package,
        **phase,
        **info.versions,
        **python,
        **found,
        **cores,
    }
    replicas = asked if most is None else max(min(asked, most), 1)
    return replace(model, n_gpus=n_gpus, replicas=replicas, hardware=found, provenance=known)


def gpus_of(model: RunModel, gpus: Sequence[machine.Gpu]) -> int:
    """Return how many of a machine's ``gpus`` a replica of the model gets; InputError if there are
    too few.

    An engine that spreads a model over all visible GPUs gets as many as the weights fill up to
    ``WEIGHTS_SHARE``.
    """
    wanted = model.spec.gpus
    if wanted is None:
        wanted = backends.engine_class(model.engine).gpus(model.planned)
    if not gpus:
        return 0
    if wanted is None:
        files = model.files
        bits, room = (
            None if files.is_remote else files.storage().vram_bits,
            WEIGHTS_SHARE * gpus[0].mib * 1024**2,
        )
        wanted = 0 if bits is None or not room else min(math.ceil(bits / 8 / room), len(gpus))
    if wanted > len(gpus):
        raise InputError(f"gpus: the model needs {wanted} GPUs, the run has {len(gpus)}")
    return int(wanted or len(gpus))


def hardware_of(model: RunModel, hardware: Hardware, n_gpus: int) -> dict[str, Any]:
    """Return the part of the scores' key that names GPUs by their type, or the processor, and the
    settings.

    It is empty for a model on a server.  An engine that does not compute with torch may use GPUs
    and processor.
    """
    capabilities, gpus = model.capabilities, hardware.gpus[:n_gpus]
    if not capabilities.here:
        return {}
    only_gpus = capabilities.torch and "cpu" not in strings_in(model.planned.options)
    if not gpus or (only_gpus and model.info.cpu_only):
        return {**hardware.processor, **hardware.settings}
    names = {"gpus": [gpu.name for gpu in gpus], "driver": gpus[0].driver}
    return {**({} if only_gpus else hardware.processor), **names, **hardware.settings}


def fitted(
    config: RunConfig, specs: Sequence[ModelSpec], models: Sequence[RunModel], data: EvalData
) -> list[RunModel]:
    """Check the models of these specs again, now with the windows of the run; InputError with one
    line per problem.

    A chat prefix may have made the windows longer than the data specs say.
    """
    fitted_models = []
    problems = []
    lengths = [text.length for text in data.texts]
    for spec, model in zip(specs, models, strict=True):
        fits = model.with_planned(max_tokens=max(lengths))
        try:
            if max(lengths) > model.planned.max_tokens:
                fits = checked(config, fits)
        except InputError as error:
            problems.append(spec.blamed(error))
            continue
        fitted_models.append(fits)
        problems += vocabulary_problems(fits, data)
        edge = None if fits.files.is_remote else fits.facts.rope_changes_above
        if edge is not None and min(lengths) <= edge < max(lengths):
            problems.append(
                f"{model.label}: eval_len: the model has other rotary factors in contexts above {edge:,} tokens, and "
                "the longest text decides for all; score texts of longer windows in a separate run"
            )
    raise_all(problems)
    return fitted_models


def vocabulary_problems(model: RunModel, data: EvalData) -> list[str]:
    """Return a line if token ids of the run have no logit, or another meaning, in the model."""
    if model.files.is_remote:
        return []
    facts = model.facts
    where = f"{model.label}: tokenizer_dir:"
    if facts.vocab_size is not None and data.top_id >= facts.vocab_size:
        reaches = (
            f"its vocabulary reaches id {data.top_id}, the model has {facts.vocab_size} tokens"
        )
        return [f"{where} {reaches}; give the model's own tokenizer"]
    if facts.tokenizer is None:
        return []
    difference = vocabulary.disagreement(
        facts.tokenizer,
        data.tokenizer,
        trusted=bool(model.planned.options.get("trust_remote_code")),
        data_trusted=any(text.spec.trust_remote_code for text in data.texts),
        ids_in_chats=data.ids_in_chats,
    )
    return [f"{where} is not this model's tokenizer: {difference}"] if difference else []


def emulated_dtypes(config: RunConfig, models: Sequence[RunModel]) -> str | None:
    """Return a line on the models whose dtype this CPU emulates, and on the gain from another
    dtype.
    """
    if not (config.workers.is_local and machine.emulates_bf16()):
        return None
    labels = []
    for model in models:
        capabilities = model.capabilities
        on_cpu = (
            capabilities.here and capabilities.torch and (model.info.cpu_only or not model.n_gpus)
        )
        if on_cpu and not model.files.is_remote and model.facts.dtype in ("bfloat16", "float16"):
            labels.append(model.label)
    said = "16-bit products are emulated on this CPU, which has neither AVX-512 BF16 nor AMX: "
    remedy = (
        '"dtype": "float32" in "engine" takes about a quarter of the time, for a KLD of some 0.001'
    )
    return f"{', '.join(labels)}: {said}{remedy}" if labels else None


def is_known(model: RunModel) -> bool:
    """Return True if the model is known before it runs: no download, and no request to a server, is
    needed.
    """
    return model.capabilities.here and not model.files.is_remote


def fetched(config: RunConfig, model: RunModel) -> RunModel:
    """Return a model that is on this machine, with the fingerprint of its files; InputError if the
    files do not fit.

    Missing files are downloaded.  A server must now name its model; ModelError if it does not
    answer.
    """
    config.workers.check()
    files, known = model.files, is_known(model)
    if files.is_remote:
        with config.progress.phase(f"fetching {model.planned.model_dir}", unit="bytes") as phase:
            model = replace(model, planned=files.fetch(config.workers.stoppable(phase)))
    if not known:
        model = checked(config, model)
        if model.info.unreachable:
            raise ModelError(model.info.unreachable)
    model = model.with_planned(stamp=stamp_of(model))
    if config.gpus.gpus:  # its engine is imported while others have the GPUs
        config.workers.import_ahead(model, verbose=config.verbose)
    return model


def stamp_of(model: RunModel) -> str:
    """Return the fingerprint of a model that is on this machine, or the one that its server has
    sent.
    """
    if model.info.facts:
        return model.info.stamp
    return model.files.stamp()


def identity(config: RunConfig, model: RunModel) -> dict[str, Any]:
    """Return everything that a model's scores of a window depend on, but the window itself.

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
    if planned.decode is not None:  # omitted in prefill, so that existing cache keys stay valid
        facts["decode"] = asdict(planned.decode)
    edge = model.facts.rope_changes_above
    if edge is not None:  # the longest window of a run decides for all of them
        facts["long_rope"] = planned.max_tokens > edge
    if config.verify_weights:
        facts["weights"] = [digest_of(config, file) for file in model.files.weight_files()]
    return facts


def digest_of(config: RunConfig, file: Path) -> str:
    """Return SHA-256 of a whole file, which one run computes once; InputError if the file cannot be
    read.
    """
    try:
        stat = file.stat()
        key = (str(file), stat.st_size, stat.st_mtime_ns)
        if key not in config.digests:
            title = f"hashing {file.name}"
            with (
                config.progress.phase(title, unit="bytes", total=stat.st_size) as phase,
                file.open("rb") as stream,
            ):
                watch, digest = config.workers.stoppable(phase), hashlib.sha256()
                while content := stream.read(HASHED_BYTES):
                    digest.update(content)
                    watch.advance(len(content))
            config.digests[key] = digest.hexdigest()
    except OSError as error:
        raise InputError(f"model_dir: {file}: cannot be read: {error.strerror}") from None
    return config.digests[key]
