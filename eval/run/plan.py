"""Turn model specs into ``RunModel``s, and fetch the files of a model before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import backends
from ...backends.base import Capabilities, Decode, PlannedModel
from ...backends.common.errors import InputError, ModelError
from ...backends.common.json_files import check_unicode
from ...backends.common.packages import forget_versions
from ..specs.spec_types import ModelSpec
from .model_checks import check_model, raise_all
from .model_identity import stamp_of
from .run_config import RunConfig
from .run_model import RunModel

DECODE_BATCH = 32
"""Number of windows that are decoded together, if the engine supports as many.

The spec's ``batch`` replaces it.
"""


def plan_models(config: RunConfig, specs: Sequence[ModelSpec], max_tokens: int) -> list[RunModel]:
    """Check every model spec for windows of ``max_tokens``, before a text is tokenized.

    InputError with one line per problem.  A server that does not answer is not a problem yet: the
    request is repeated when its model is scheduled.
    """
    forget_versions()
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


def is_available(model: RunModel) -> bool:
    """Return True if the model needs no download and no request to a server."""
    return model.capabilities.here and not model.files.is_remote
