"""Check a model before it loads: its engine, its spec, its files and its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import backends
from ...backends.common.errors import InputError
from .model_hardware import early_provenance, gpus_of, hardware_of, replicas_of
from .run_config import RunConfig
from .run_model import RunModel


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


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line per problem, if there are any."""
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))
