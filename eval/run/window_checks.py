"""Check models with the windows of a run: their lengths, vocabulary and rotary factors."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.common.errors import InputError
from ..specs.spec_types import ModelSpec
from ..text import vocabulary
from ..text.eval_data import EvalData
from .model_checks import check_model, raise_all
from .run_config import RunConfig
from .run_model import RunModel


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
