"""What a gate says of a variant: the first verdict that holds, from its rows in all shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compare_q.eval.gate.floor import Floor, Tokens
from compare_q.eval.gate.variants import AGAIN, PREFILL, shape_of
from compare_q.eval.results import ModelResult, Stored, Text
from compare_q.eval.table.numbers import error_text

Outcome = Literal["as before", "differs", "not deterministic", "not applied", "failed"]
STEP, STILL = 3.0, 1.5
"""A fault begins at a position if the KLD after it is STEP times the copies' or more, and before it at most STILL."""
LEAST = 0.1
GROWTH = 2.0
"""The KLD grows with position if, in the last quarter, it is so many times the copies' as in the first, or more."""


class Verdict(Stored):
    """A variant's verdict, and its rows, one per shape."""

    label: Text
    outcome: Outcome
    words: Text = Field(description="the verdict in one line")
    rows: tuple[ModelResult, ...] = Field(description="labelled LABEL | SHAPE, without estimates")


def verdict_of(
    label: str, rows: Sequence[ModelResult], tokens: Mapping[str, Tokens], floor: Floor, first: Sequence[ModelResult],
    *, must_change: bool = False,
) -> Verdict:  # fmt: skip
    """Return the verdict of a variant from its rows and their tokens (by the rows' labels).

    ``first``: the first variant's rows; empty if this is the first one.  ``must_change``: it has an option that changes
    roundings unless it is ignored.
    """
    digests = {shape_of(row): row.scores_digest for row in first}
    equal = bool(first) and all(row.scores_digest == digests.get(shape_of(row)) != "" for row in rows)
    outcome, words = next(judged(rows, tokens, floor, equal=equal, must_change=must_change))
    return Verdict(label=label, outcome=outcome, words=words, rows=tuple(map(slim, rows)))


def first_verdict(label: str, rows: Sequence[ModelResult], floor: Floor | None) -> Verdict | None:
    """Return the verdict of a first variant with which nothing can be compared; None if that can be done.

    ``rows``: it, it again, and its copies with other roundings; ``floor``: None if one of them has not all KLDs.
    """
    found: Iterator[tuple[Outcome, str]] = (("failed", f"failed in {shape_of(m)}: {m.error}") for m in rows if m.error)
    outcome, words = next(found, ("failed", "failed: some tokens have no finite KLD"))
    if floor is not None:
        if not floor.is_own(again := rows[1].kld or 0.0):
            return None
        outcome, words = "not deterministic", f"not deterministic: a second run has KLD {again:.3g} from the first"
    return Verdict(label=label, outcome=outcome, words=words, rows=tuple(map(slim, rows[:2])))


def slim(row: ModelResult) -> ModelResult:
    """Return a row without what a gate does not need of it."""
    return row.updated(estimates=None, timing=None, seconds=None, worst_tokens=row.worst_tokens[:3])


def judged(
    rows: Sequence[ModelResult], tokens: Mapping[str, Tokens], floor: Floor, *, equal: bool, must_change: bool
) -> Iterator[tuple[Outcome, str]]:
    """Yield every verdict that holds, in words, the one that counts first."""
    for row in rows:
        if row.error or row.kld is None:
            yield "failed", f"failed in {shape_of(row)}: {row.error or '; '.join(row.notes)}"
    runs = [tokens[row.label].logprob for row in rows if shape_of(row) in (PREFILL, AGAIN) and row.label in tokens]
    if len(runs) == 2 and (change := float(np.mean(np.abs(runs[0] - runs[1])))) > floor.change_limit():
        words = f"two runs differ by {change:.3g} nats of log-probability per token"
        yield "not deterministic", f"not deterministic: {words}, {times(change, floor.change_limit())}"
    if equal and must_change:
        yield "not applied", "not applied: every score is the first variant's to the bit"
    if differing := [row for row in rows if row.kld_non_finite or (row.kld or 0.0) > floor.limit(row.windows)]:
        yield "differs", f"differs: {', '.join(differences(rows, tokens, floor, differing))}"
    yield "as before", "as before (equal to the bit)" if equal else "as before"


def differences(
    rows: Sequence[ModelResult], tokens: Mapping[str, Tokens], floor: Floor, differing: Sequence[ModelResult]
) -> Iterator[str]:
    """Yield by how much a variant differs, from which position on, and in which shapes."""
    worst = max(differing, key=lambda row: row.kld or 0.0)
    yield f"KLD {worst.kld or 0.0:.4g} ± {error_text(worst.kld_stderr) or 'n/a'}"
    yield times(worst.kld or 0.0, floor.limit(worst.windows))
    if worst.kld_non_finite:
        yield f"{worst.kld_non_finite:,} tokens without a finite KLD"
    elif place := where(tokens[worst.label].by_position(), floor.curve):
        yield place
    if len(differing) < len(rows):
        yield f"only in {' and '.join(map(shape_of, differing))}"


def where(own: NDArray[np.float64], floor: NDArray[np.float64]) -> str:
    """Return where in the windows a variant differs; empty if it does so everywhere alike.

    ``own`` and ``floor``: mean KLD at each position, of the variant and of the copies.  A fault begins where the
    logarithm of their ratio, which counts as ``LEAST`` where it is less, is best described by two constants.
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


def times(value: float, limit: float) -> str:
    """Return ``2.4 times the floor``, for a number above the floor's limit."""
    return f"{value / limit:.1f} times the floor" if limit > 0 else "where the floor is 0"
