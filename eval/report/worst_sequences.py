"""The texts of the sequences on which models and rollouts differ most, for the report."""

from __future__ import annotations

from rich.console import Console

from ...backends.common.errors import InputError
from ..common.terminal import say
from ..results import RunResult
from ..text.eval_data import EvalData
from .worst_tokens import context_of, decoded


def with_sequence_texts(results: RunResult, data: EvalData) -> RunResult:
    """Return the results with the text around the worst token of every worst sequence.

    If the tokens cannot be decoded, the rows stay unchanged, and the reason is printed on standard
    error.
    """
    contexts = []
    for model in results.models:
        contexts += [context_of(sequence, data) for sequence in model.worst_sequences]
    if not contexts:
        return results
    try:
        texts = iter(decoded(data, contexts))
    except InputError as error:
        say(f"no texts of worst sequences: {error}", console=Console(stderr=True))
        return results
    models = []
    for model in results.models:
        sequences = []
        for sequence in model.worst_sequences:
            sequences.append(sequence.updated(**next(texts)))
        models.append(model.updated(worst_sequences=tuple(sequences)))
    return results.updated(models=tuple(models))
