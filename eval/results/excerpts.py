"""A report's excerpts of a text: passages with every model's scores, and each model's most damaged tokens."""

from __future__ import annotations

from dataclasses import dataclass

Numbers = tuple[float | None, ...]


@dataclass(frozen=True)
class Passage:
    """T tokens of window number ``window`` from ``position`` on; ``tokens``: the text of each.

    ``logprob`` and ``kld``: by model, in the order of the run, T numbers each (nats); None for a model without them.
    ``chosen``: why it is shown.  ``start``: the first token's index in the whole text; None in older reports.
    """

    window: int
    position: int
    tokens: tuple[str, ...]
    ref_logprob: Numbers | None
    logprob: tuple[Numbers | None, ...]
    kld: tuple[Numbers | None, ...]
    chosen: str = ""
    start: int | None = None


@dataclass(frozen=True)
class Damaged:
    """One token, its text between the texts ``before`` and ``after`` it, and its scores (nats)."""

    window: int
    position: int
    before: str
    token: str
    after: str
    ref_logprob: float | None
    logprob: float | None
    kld: float | None


@dataclass(frozen=True)
class Inspection:
    """``worst``: by model, in the order of the run, the largest first; None for a model without scores."""

    passages: tuple[Passage, ...]
    worst: tuple[tuple[Damaged, ...] | None, ...]
