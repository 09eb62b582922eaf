"""The results of a run, as results.json holds them: its windows, its reference and its rows.

Log-probabilities, losses and KLDs are in nats per token, shares from 0 to 1.  A row's numbers are
over all scored tokens; the estimates of a part of the tokens, such as one text, are in the row's
``slices``.  ``eval/spec/schema/results.schema.json`` is the schema of results.json.
"""

from ..stats.rollout_columns import WorstSequence
from .model_result import (
    MARK,
    NOT_FLAT,
    CachePart,
    Memory,
    ModelResult,
    Timing,
    WorstToken,
    noise_floor_of,
)
from .row_facts import deviations_of, option_texts, options_of
from .run_result import NO_RESULTS, RunResult, UsedText, json_schema, origin

__all__ = [
    "MARK",
    "NOT_FLAT",
    "NO_RESULTS",
    "CachePart",
    "Memory",
    "ModelResult",
    "RunResult",
    "Timing",
    "UsedText",
    "WorstSequence",
    "WorstToken",
    "deviations_of",
    "json_schema",
    "noise_floor_of",
    "option_texts",
    "options_of",
    "origin",
]
