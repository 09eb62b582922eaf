"""Plans of scoring runs: the driver sends them to vLLM's ranks, as JSON.

Both sides import this module, so that the ranks need nothing of the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..reference.head import Contents

EXTRA_ARGS_KEY = "compare_q"
"""Key in a request's ``SamplingParams.extra_args``: (window, spans) of compare_q's requests."""


@dataclass(frozen=True)
class ScoringPlan:
    """Options of a run that scores, compares and records windows."""

    gathered: bool = False  # use the logits that vLLM gathers
    vocab_size: int | None = None  # cut logits to this many entries; None: the model's own number
    reference: str | None = None  # folder of the store to compare with
    record: str | None = None  # folder for this model's states or logits
    record_key: str = ""  # key of the reference that is recorded
    record_contents: Contents = "states"
    record_reason: str = ""  # why logits
    may_halve_chunks: bool = True  # if memory is too small (``ScoreRequest``)
    step: int | None = None  # tokens of a window in each decode step; None in prefill
    # (index, digest) of the windows, in the order of scoring
    windows: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class ProbePlan:
    """Options of a run of the probe: the windows get no noise, and nothing is recorded."""

    gathered: bool = False  # use the logits that vLLM gathers; otherwise compare both, and the head
    step: int | None = None  # tokens of a window in each decode step; None in prefill
