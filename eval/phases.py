"""``--phases``: each model in prefill and in decode, and its decode beside its own prefill.

The table has a row for each phase, against the one reference.  Then each model runs once more with its own prefill as
the reference: its decode, and the prefill with rounding noise where the engine can add it, which is what the difference
is measured by.  A quantized model may make more of a rounding than the unquantized one, so every model has a noise
floor of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from compare_q import backends
from compare_q.backends.base import Window
from compare_q.backends.common.errors import CompareQError, InputError
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference import store as reference_store
from compare_q.eval.results.differences import TIMES_FLOOR, near_lossless
from compare_q.eval.results.run_result import ModelResult, TextResult, is_decode, model_keys
from compare_q.eval.run import jobs, runner, token_scores
from compare_q.eval.run.hosts import Session
from compare_q.eval.run.runner import Finished
from compare_q.eval.run.token_scores import StoredScores
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import DataSpec, ModelSpec
from compare_q.eval.stats.phases import OwnPrefill, begins_at

NO_MODEL = "--phases: no model here can be scored in both phases"
NO_NOISE = "the engine cannot add noise of roundings"


def with_decode(specs: Sequence[ModelSpec]) -> tuple[list[ModelSpec], list[str]]:
    """(the specs, each in prefill followed by the same model in decode, unless that is among them; lines to be said).

    InputError if no model can be scored in both phases.
    """
    doubled, said = list[ModelSpec](), list[str]()
    for spec in specs:
        doubled.append(spec)
        if is_decode(keys_of(spec)) or spec.noise_floor or decodes_of(spec, specs):
            continue
        if backends.resolve(spec.load_fn, spec.fwd_fn)[1].capabilities.decodes:
            doubled.append(changed(spec, label=f"{spec.name} decode", phase="decode"))
        else:
            said.append(f"{spec.name}: {spec.load_fn!r} cannot be scored in decode steps; it stays in prefill")
    doubled = reading.with_own_labels(doubled, said.append)
    if not any(decodes_of(spec, doubled) for spec in doubled):
        raise InputError(NO_MODEL)
    return doubled, said


def keys_of(spec: ModelSpec) -> dict[str, object]:
    """The keys that a spec sets, as JSON types, as its row has them."""
    return spec.model_dump(mode="json", exclude_unset=True)


def changed(spec: ModelSpec, **keys: object) -> ModelSpec:
    """The same model in another row, which is no reference."""
    kept = {key: value for key, value in keys_of(spec).items() if key not in ("reference", "out_logits")}
    found = reading.parse_model_spec({**kept, **keys}, spec._folder / "model spec")
    found._places = spec._places
    return found


def decodes_of(spec: ModelSpec, specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    """The specs of the same model in decode; none for a spec in decode."""
    keys = keys_of(spec)
    if is_decode(keys):
        return []
    others = [(other, keys_of(other)) for other in specs]
    return [other for other, own in others if is_decode(own) and model_keys(own) == model_keys(keys)]


def beside_own_prefill(
    session: Session, texts: Mapping[str, DataSpec], specs: Sequence[ModelSpec], finished: Finished
) -> Finished:
    """A run of these specs (``with_decode``) and texts, in whose rows of decode ``own_prefill`` is known.

    What could not be scored stays None, and is said.  An interrupt ends it early; no row is lost by either.
    """
    sized = {
        name: spec.model_copy(update={"max_rows": data.max_rows})
        for (name, spec), data in zip(texts.items(), finished.data, strict=True) if data is not None
    }  # fmt: skip
    for spec in specs:
        decodes = decodes_of(spec, specs)
        rows = [model for model in finished.results.of_label(spec.name) if model is not None and not model.error]
        if not decodes or not rows or finished.signal:
            continue
        session.progress.say(f"{spec.name}: decode beside its own prefill")
        try:
            ended, found = own_run(session, sized, spec, decodes)
        except CompareQError as error:
            session.progress.say(f"{spec.name}: its decode is not compared with its own prefill: {one_line(error)}")
            continue
        except KeyboardInterrupt as interrupt:
            return replace(finished, signal=getattr(interrupt, "signal", signal.SIGINT))
        compared = (with_own(text, found.get(text.name, {})) for text in finished.results.texts)
        finished = replace(finished, signal=ended, results=replace(finished.results, texts=tuple(compared)))
    return finished


def own_run(
    session: Session, texts: Mapping[str, DataSpec], spec: ModelSpec, decodes: Sequence[ModelSpec]
) -> tuple[int, dict[str, dict[str, OwnPrefill]]]:
    """(the signal that has ended one model's own run or 0, text -> label of a row in decode -> its comparison)."""
    # What this very run has made of the marked reference is not forgotten again.
    session = replace(session, logits_file=None, clear=session.clear and not spec.is_reference)
    own, no_noise = own_specs(session, spec, decodes, max(data.longest for data in texts.values()))
    before = {store.name for store in session.cache.path("references", "", "").glob("*")}
    ran = runner.run(session, texts, own)
    found = {
        text.name: of_text(session, text, data.windows, no_noise)
        for text, data in zip(ran.results.texts, ran.data, strict=True) if data is not None
    }  # fmt: skip
    if not spec.is_reference:
        forget_stores(session, ran, before)
    return ran.signal, found


def own_specs(
    session: Session, spec: ModelSpec, decodes: Sequence[ModelSpec], longest: int
) -> tuple[list[ModelSpec], str]:
    """(the model's prefill as the reference, its ``decodes``, and its prefill with noise; why there is no noise)."""
    noisy = changed(spec, label=f"{spec.name} with noise", noise_floor=True, engine={**spec.engine, "noise": "bf16"})
    problems = jobs.plan([noisy], longest, session.hosts)[1]
    own = [changed(spec, reference=True), *decodes, *([] if problems else [noisy])]
    reason = problems[0].removeprefix(f"{noisy.name}: ") if problems else ""
    return own, NO_NOISE if reason == "engine.noise: unknown key" else reason


def of_text(session: Session, text: TextResult, windows: Sequence[Window], no_noise: str) -> dict[str, OwnPrefill]:
    """Label of a row in decode -> its comparison with the reference, which is the same model's prefill."""
    floor = next((model for model in text.models if model.is_noise_floor), None)
    if floor is not None and (floor.error or floor.kld is None or floor.kld.value is None):
        no_noise, floor = floor.error or "it has no KLD", None
    near = near_lossless(text.models)
    noise = None if floor is None else token_scores.of_row(session.cache, floor.scores_key, windows)
    return {
        model.label: OwnPrefill(
            model.kld, model.same_top, None if floor is None else floor.kld, no_noise,
            is_above=floor is not None and model.label not in near,
            begins=None if noise is None else first_above(session, model, noise, windows),
        )
        for model in text.models if is_decode(model.spec) and model.kld is not None and model.same_top is not None
    }  # fmt: skip


def first_above(session: Session, model: ModelResult, noise: StoredScores, windows: Sequence[Window]) -> int | None:
    """Where in the window a row's KLD begins to be above the noise floor's."""
    scores = token_scores.of_row(session.cache, model.scores_key, windows)
    if scores is None:
        return None
    return begins_at(scores.columns["kld"], noise.columns["kld"], scores.window, scores.position, TIMES_FLOOR)


def with_own(text: TextResult, found: Mapping[str, OwnPrefill]) -> TextResult:
    """The text with what was found of the rows of these labels."""
    models = (replace(each, own_prefill=found.get(each.label, each.own_prefill)) for each in text.models)
    return replace(text, models=tuple(models))


def forget_stores(session: Session, found: Finished, before: Set[str]) -> None:
    """Delete the stores of a run's references: its scores are kept, and a store takes gigabytes for each model.

    Stores that were there ``before``, by their keys, stay, and so do those that another run uses now.
    """
    kept = before | session.cache.used_by_runs(others=True)
    for text in found.results.scored:
        if text.reference is not None and (key := text.reference["key"]) not in kept:
            with session.hosts.held(session.cache.lock("references", key)):
                reference_store.discard(session.cache.path("references", key, ""))
            session.progress.say(f"{text.reference['label']}: the store of its own prefill is deleted again")
