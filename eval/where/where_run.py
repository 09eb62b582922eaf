"""``compare-q where`` from two model specs and texts to its result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from ...backends import engines, resolve
from ...backends.base import Window
from ...backends.common.errors import InputError
from ..run import checkpoint_notes, plan, runner
from ..run.claims import lock_file
from ..run.model_identity import identity
from ..run.run_config import RunConfig
from ..run.run_model import RunModel
from ..specs.spec_types import DataSpec, ModelSpec
from ..stats import uncertainty
from ..text.eval_data import EvalData
from . import parts, recipe, trial_file
from .front import Front
from .recipe_search import recipes_of
from .results import Model, WhereResult
from .search import WHOLE, Question, Search
from .trial_file import SECTION, SUFFIX
from .trial_runner import TrialRunner


def where(
    config: RunConfig,
    data_specs: Mapping[str, DataSpec],
    specs: Sequence[ModelSpec],
    n_windows: int | None,
    question: Question,
) -> WhereResult:
    """Return the shares of the parts of a quantized model.

    ``specs``: of the reference and the quantized model; ``data_specs``, ``n_windows``: as for
    ``runner.run``.  InputError with one line per problem, before anything loads; ModelError if a
    model fails, with its scores kept.
    """
    check_engines(specs)
    models, data = runner.prepare(config, data_specs, specs, n_windows)
    check_vocabularies(models)
    reference, quantized = [plan.fetched(config, model) for model in models]
    check_different(config, reference, quantized)
    key = trial_file.key_of(config, reference, quantized)
    file = config.cache.path(SECTION, key, SUFFIX)
    config.cache.use(SECTION, key)

    def waits() -> None:
        config.progress.say("waiting for another run that scores parts of these models")

    lock = lock_file(config.cache.path(SECTION, key, ""))
    # In this order: the worker and its progress end before the lock is released.
    with (
        config.cache.locked([lock], config.workers.check, waits),
        ExitStack() as resources,
    ):
        if config.clear:
            config.cache.clear(SECTION, key)
        trials = TrialRunner(config, reference, quantized, file, key, resources)
        return result_of(trials, data, question)


def check_engines(specs: Sequence[ModelSpec]) -> None:
    """InputError for models that cannot be loaded together and exchanged in parts."""
    names = set()
    for spec in specs:
        name, engine = resolve(spec.load_fn, None)
        if not engine.capabilities.restores:
            raise InputError(
                f"{spec.name}: where exchanges modules of two checkpoints in one engine, which "
                f"{spec.load_fn} cannot do; name folders, hub ids or .gguf files that "
                f"{restoring_load_fns()} loads"
            )
        names.add(name)
    if len(names) > 1:
        first, second = specs
        raise InputError(
            f"{second.name}: {second.load_fn} is not the engine of {first.name}, {first.load_fn}; "
            "where loads both models in one engine"
        )
    first, second = specs
    is_same_place = os.path.realpath(first.located) == os.path.realpath(second.located)
    if is_same_place and first.options == second.options:
        raise InputError(same_model(first.name, second.name))


def restoring_load_fns() -> str:
    """Return the load_fns of engines that exchange modules."""
    load_fns: list[str] = []
    for _, engine in engines():
        if engine.capabilities.restores:
            load_fns += engine.capabilities.load_fns
    return ", ".join(load_fns) or "no installed engine"


def same_model(first: str, second: str) -> str:
    """Return a line about two models that are the same."""
    return f"{second}: is the same model as {first}; name the reference, then the quantized model"


def check_vocabularies(models: Sequence[RunModel]) -> None:
    """InputError if the models have vocabularies of different sizes.

    Tokenizers were compared with the text's.  A model that is not downloaded yet is not checked:
    its logits are.
    """
    sizes = {}
    for model in models:
        if not model.files.is_remote and model.facts.vocab_size is not None:
            sizes[model.label] = model.facts.vocab_size
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{label} has {size:,}" for label, size in sizes.items())
        raise InputError(f"the models have different vocabularies: {words} tokens")


def check_different(config: RunConfig, reference: RunModel, quantized: RunModel) -> None:
    """InputError if both models have the same files and options."""
    if identity(config, reference) == identity(config, quantized):
        raise InputError(same_model(reference.label, quantized.label))


def result_of(trials: TrialRunner, data: EvalData, question: Question) -> WhereResult:
    """Score what is missing, and return the result."""
    facts = trials.facts()
    recipe.check_targets(question.targets, facts.modules)
    modules = trial_file.modules_of(facts)
    all_parts = parts.parts_of(modules, question.by)
    search = Search(trials, in_text_order(data), length_of(data), all_parts, question)
    search.score_parts()
    rows = [search.row_of(part) for part in all_parts]
    front = Front(search, rows, facts.modules)
    front.score_spread()
    recipes = recipes_of(front, question.targets, question.keep_bits)
    # Again: what ran is known now.
    facts = trials.facts()
    whole = search.sums(WHOLE, range(len(data.windows)))
    return WhereResult(
        subtitle=data.subtitle,
        reference=model_of(trials.reference),
        quantized=model_of(trials.quantized),
        data=data.as_json(),
        windows=len(data.windows),
        by=question.by,
        only=question.only,
        modules=facts.modules,
        whole=search.measured(whole),
        whole_reason=whole.reason,
        rows=tuple(rows),
        front=tuple(front.rows()),
        recipes=tuple(recipes),
        unmatched_weights=parts.unmatched(modules, all_parts),
        activations=facts.activations,
        notes=(*config_notes(trials.reference, trials.quantized), *facts.notes),
    )


def config_notes(reference: RunModel, quantized: RunModel) -> list[str]:
    """Return a note if the quantized model's config differs from the reference's.

    Modules are exchanged, and configs are not.
    """
    note = checkpoint_notes.config_note(quantized, reference)
    if not note:
        return []
    return [f"{quantized.label}: {note}; the KLD includes this difference, and no share does"]


def in_text_order(data: EvalData) -> list[Window]:
    """Return the windows in the order of their texts."""
    order = np.argsort(data.starts, kind="stable")
    return [data.windows[number] for number in order]


def length_of(data: EvalData) -> int:
    """Return the number of tokens from the first to the last scored one, added over all texts."""
    length = 0
    for number in range(len(data.texts)):
        indices = []
        for start, window, text in zip(data.starts, data.windows, data.text_of, strict=True):
            if text == number:
                indices += [start + window.positions[0], start + window.positions[-1]]
        length += uncertainty.length_of(np.array(indices))
    return length


def model_of(model: RunModel) -> Model:
    """Return the facts about a model for the result."""
    return Model(
        label=model.label,
        model=model.spec.located,
        load_fn=model.planned.load_fn,
        options=dict(model.planned.options),
        engine_version=" ".join(model.info.installed or ()),
        versions=dict(model.info.versions),
        hardware=dict(model.hardware),
    )
