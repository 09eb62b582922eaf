"""The verdict on a variant, from its rows in all passes and texts; of several verdicts, the most
important counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..common.stored import Stored, Text
from ..results import ModelResult, WorstToken
from ..table.numbers import error_text
from .floor import Floor, Tokens
from .variants import AGAIN, FULL, ONE, PREFILL

Outcome = Literal["as before", "differs", "not deterministic", "not applied", "failed"]
BATCH = 2.0
"""Log-probabilities of a full batch and of batch 1 may differ by this many times the floor's
``change_limit``."""
STEP, STILL = 3.0, 1.5
"""A fault begins at a position if the KLD is at most STILL times the copies' KLD at earlier
positions, and at least STEP times at this and later positions."""
LEAST = 0.1
"""Lower limit of the ratio of the KLD to the copies' KLD, because 0 does not have a logarithm."""
GROWTH = 2.0
"""The KLD grows with position if its ratio to the copies' KLD is GROWTH times as high in the last
quarter of the positions as in the first."""


class Verdict(Stored):
    """A variant's verdict, and its rows, one per pass and text."""

    label: Text
    outcome: Outcome
    words: Text = Field(description="the verdict in one line")
    rows: tuple[ModelResult, ...] = Field(
        description="labelled LABEL | PASS at TEXT, without blocks and curves"
    )
    worst_tokens: tuple[WorstToken, ...] = Field(
        default=(), description="of a variant that differs"
    )


class Row(NamedTuple):
    """A variant in one pass over one text."""

    of: str  # the pass: ``variants.PREFILL``, ...
    text: str
    model: ModelResult
    tokens: Tokens | None  # None if the variant failed, or its engine does not compute KLD

    @property
    def shape(self) -> str:
        """Pass and text, which distinguish the variant's rows: kernels differ between phases and
        batches.
        """
        return f"{self.of} at {self.text}"


def verdict_of(
    label: str,
    rows: Sequence[Row],
    floors: Mapping[str, Floor],
    first: Sequence[Row],
    *,
    must_change: bool = False,
) -> Verdict:
    """Return the verdict of a variant from its rows and the floors of the texts.

    ``first``: the first variant's rows; empty if this is the first variant.  ``must_change``: True
    if the variant has an option that always changes roundings, if the engine applies it.
    """
    before = {row.shape: row.model for row in first}
    equal = bool(first) and all(
        row.shape in before and row.model.scores_equal(before[row.shape]) for row in rows
    )
    ignored = must_change or any(
        row.model.deviations != before[row.shape].deviations for row in rows if equal
    )
    outcome, words = next(judged(rows, floors, equal=equal, ignored=ignored))
    return Verdict(label=label, outcome=outcome, words=words, rows=tuple(map(slim, rows)))


def first_verdict(label: str, rows: Sequence[Row], floors: Mapping[str, Floor]) -> Verdict | None:
    """Return the verdict of a first variant that cannot be compared with others; None if it can be
    compared.

    ``rows``: the variant, its second run, and its copies with other roundings.  ``floors``: empty
    if not known yet.
    """
    kept = tuple(slim(row) for row in rows if row.of in (PREFILL, AGAIN))
    for row in rows:
        if not floors and (row.tokens is None or row.model.kld_non_finite):
            words = f"failed in {row.shape}: {row.model.error or 'tokens without a finite KLD'}"
            return Verdict(label=label, outcome="failed", words=words, rows=kept)
        if floors and row.of == AGAIN and floors[row.text].is_own(row.model.kld or 0.0):
            words = (
                f"not deterministic: a second run has KLD {row.model.kld or 0.0:.3g} from the first"
            )
            return Verdict(label=label, outcome="not deterministic", words=words, rows=kept)
    return None


def slim(row: Row) -> ModelResult:
    """Return a row without the parts that a gate does not need."""
    label = f"{row.model.label} at {row.text}"
    return row.model.updated(
        label=label,
        blocks=None,
        curve=None,
        kld_percentiles={},
        delta_p_percentiles={},
        timing=None,
        seconds=None,
    )


def judged(
    rows: Sequence[Row], floors: Mapping[str, Floor], *, equal: bool, ignored: bool
) -> Iterator[tuple[Outcome, str]]:
    """Yield every verdict that holds and its wording, the most important first."""
    for row in rows:
        if row.tokens is None:
            yield (
                "failed",
                f"failed in {row.shape}: {row.model.error or '; '.join(row.model.notes)}",
            )
    found = {(row.of, row.text): row.tokens for row in rows if row.tokens is not None}
    for text, floor in floors.items():
        change, times = apart(found.get((PREFILL, text)), found.get((AGAIN, text)), floor)
        if times > 1:
            words = f"two runs differ by {change:.3g} nats of log-probability per token"
            yield (
                "not deterministic",
                f"not deterministic: {words}, {times:.1f} times the effect of roundings",
            )
    if equal and ignored:
        yield "not applied", "not applied: every score is the first variant's to the bit"
    if differing := [
        m for m in rows if m.model.kld_non_finite or (m.model.kld or 0.0) > floors[m.text].limit
    ]:
        yield "differs", f"differs: {', '.join(differences(rows, floors, differing))}"
    change, times = apart(found.get((PREFILL, FULL)), found.get((PREFILL, ONE)), floors[ONE])
    if times > BATCH:
        yield (
            "differs",
            f"differs: batch 1 and a full batch differ by {change:.3g} nats of log-probability per token",
        )
    yield "as before", "as before (equal to the bit)" if equal else "as before"


def apart(one: Tokens | None, other: Tokens | None, floor: Floor) -> tuple[float, float]:
    """Return (mean |difference| of two rows' log-probabilities in nats, its ratio to the floor's
    limit).

    The shorter row must have the first tokens of the longer row.  Return zeros if not, or if a row
    is missing.
    """
    count = min(len(one.logprob), len(other.logprob)) if one and other else 0
    if not (one and other and np.array_equal(one.position[:count], other.position[:count])):
        return 0.0, 0.0
    change = float(np.mean(np.abs(one.logprob[:count] - other.logprob[:count])))
    return (
        change,
        change / floor.change_limit if floor.change_limit else math.inf if change else 0.0,
    )


def differences(
    rows: Sequence[Row], floors: Mapping[str, Floor], differing: Sequence[Row]
) -> Iterator[str]:
    """Yield the size of a variant's difference, the position where it starts, and the shapes that
    have it.
    """
    worst = max(differing, key=lambda row: (row.model.kld or 0.0) / (floors[row.text].limit or 1.0))
    kld, floor = worst.model.kld or 0.0, floors[worst.text]
    yield f"KLD {kld:.4g} ± {error_text(worst.model.kld_stderr) or 'n/a'}"
    yield f"{kld / floor.limit:.1f} times the floor" if floor.limit else "where the floor is 0"
    if worst.model.kld_non_finite:
        yield f"{worst.model.kld_non_finite:,} tokens without a finite KLD"
    elif worst.tokens is not None and (place := where(worst.tokens.by_position(), floor.curve)):
        yield place
    if len(differing) < len(rows):
        yield f"only in {' and '.join(row.shape for row in differing)}"


def where(own: NDArray[np.float64], floor: NDArray[np.float64]) -> str:
    """Return where in the windows a variant differs; empty if it differs equally everywhere.

    ``own`` and ``floor``: mean KLD at each position, of the variant and of the copies.  Their ratio
    counts as ``LEAST`` if it is lower.  A fault begins at the position where two constants, one
    before and one after it, best fit the logarithm of the ratio.
    """
    places = np.flatnonzero(floor[: len(own)] > 0)
    if len(places) < 4:
        return ""
    own, floor = own[places], floor[places]
    ratio, count = np.log(np.maximum(own / floor, LEAST)), np.arange(1, len(places))
    before, total = np.cumsum(ratio)[:-1], ratio.sum()
    cut = int(np.argmax(before**2 / count + (total - before) ** 2 / count[::-1])) + 1
    quarter = max(len(places) // 4, 1)
    parts = (slice(cut), slice(cut, None), slice(quarter), slice(-quarter, None))
    early, late, first, last = (float(own[part].sum() / floor[part].sum()) for part in parts)
    if early <= STILL and late >= STEP:
        return f"from position {places[cut]} on"
    return f"growing {last / first:.1f} times with position" if last >= GROWTH * first else ""
