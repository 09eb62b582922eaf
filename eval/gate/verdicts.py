"""The verdict on a variant, from its rows in all passes and texts.

If several verdicts hold, the most important one counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..common.stored import Stored, Text
from ..ranking import kld_range
from ..results import ModelResult, WorstToken
from ..table.numbers import error_text, significant_text
from .floor import Floor, VariantTokens
from .variants import BATCH_OF_ONE, FULL, PREFILL, PREFILL_AGAIN

Outcome = Literal["as before", "differs", "not deterministic", "not applied", "failed"]
LARGEST_BATCH_CHANGE = 2.0
"""Log-probabilities of a full batch and of batch 1 may differ by this many times the floor's
``change_limit``."""
FAULT_RATIO = 3.0
FAULTLESS_RATIO = 1.5
"""A fault begins at a position if the KLD is at most FAULTLESS_RATIO times the copies' KLD at
earlier positions, and at least FAULT_RATIO times at this and later positions."""
LOWEST_RATIO = 0.1
"""Lower limit of the ratio of the KLD to the copies' KLD, because 0 does not have a logarithm."""
POSITIONS_FOR_A_PLACE = 4
"""Fewer positions have no four quarters."""
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
    where: Text = Field(
        default="",
        description="the module where a variant that differs begins to differ, in words, or why "
        "that is not known; empty without --where",
    )


class Row(NamedTuple):
    """A variant in one pass (``variants.PREFILL``, ...) over one text.

    ``tokens``: None if the variant failed, or its engine does not compute KLD.
    """

    pass_name: str
    text: str
    model: ModelResult
    tokens: VariantTokens | None

    @property
    def shape(self) -> str:
        """Pass and text, which distinguish the variant's rows.

        Kernels differ between phases and batches.
        """
        return f"{self.pass_name} at {self.text}"

    @property
    def kld(self) -> float:
        """Its KLD; 0 if that is not known."""
        return self.model.kld or 0.0


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
    first_models = {row.shape: row.model for row in first}
    is_equal = bool(first)
    for row in rows:
        first_model = first_models.get(row.shape)
        if first_model is None or not row.model.scores_equal(first_model):
            is_equal = False
    # Equal scores only count as "not applied" if the variant should have changed something: by an
    # option, or because its engine says that it deviates from its spec in another way.
    is_ignored = must_change
    if is_equal:
        for row in rows:
            if row.model.deviations != first_models[row.shape].deviations:
                is_ignored = True
    outcome, words = next(
        outcomes_that_hold(rows, floors, is_equal=is_equal, is_ignored=is_ignored)
    )
    published_rows = tuple(without_curves(row) for row in rows)
    return Verdict(label=label, outcome=outcome, words=words, rows=published_rows)


def first_verdict(label: str, rows: Sequence[Row], floors: Mapping[str, Floor]) -> Verdict | None:
    """Return the verdict of a first variant that cannot be compared with others.

    None if it can be compared.  ``rows``: the variant, its second run, and its copies with other
    roundings.  ``floors``: empty if not known yet.
    """
    published_rows = tuple(
        without_curves(row) for row in rows if row.pass_name in (PREFILL, PREFILL_AGAIN)
    )
    for row in rows:
        if not floors and (row.tokens is None or row.model.kld_non_finite):
            reason = row.model.error or "tokens without a finite KLD"
            words = f"failed in {row.shape}: {reason}"
            return Verdict(label=label, outcome="failed", words=words, rows=published_rows)
        if not floors and row.model.kld_kind != "exact":
            words = f"failed in {row.shape}: a noise floor needs exact KLDs"
            return Verdict(label=label, outcome="failed", words=words, rows=published_rows)
        if (
            floors
            and row.pass_name == PREFILL_AGAIN
            and floors[row.text].is_nondeterministic(row.kld)
        ):
            words = f"not deterministic: a second run has KLD {row.kld:.3g} from the first"
            return Verdict(
                label=label, outcome="not deterministic", words=words, rows=published_rows
            )
    return None


def without_curves(row: Row) -> ModelResult:
    """Return a row without the parts that a gate does not need."""
    return row.model.updated(
        label=f"{row.model.label} at {row.text}",
        blocks=None,
        curve=None,
        kld_percentiles={},
        delta_p_percentiles={},
        timing=None,
        seconds=None,
    )


def outcomes_that_hold(
    rows: Sequence[Row], floors: Mapping[str, Floor], *, is_equal: bool, is_ignored: bool
) -> Iterator[tuple[Outcome, str]]:
    """Yield every verdict that holds and its wording, the most important first."""
    for row in rows:
        if row.tokens is None:
            reason = row.model.error or "; ".join(row.model.notes)
            yield "failed", f"failed in {row.shape}: {reason}"
    tokens = {}
    for row in rows:
        if row.tokens is not None:
            tokens[row.pass_name, row.text] = row.tokens
    for text, floor in floors.items():
        change = logprob_change(tokens.get((PREFILL, text)), tokens.get((PREFILL_AGAIN, text)))
        times = times_the_limit(change, floor)
        if times > 1:
            yield (
                "not deterministic",
                f"not deterministic: two runs differ by {change:.3g} nats of log-probability per "
                f"token, {times:.1f} times the effect of roundings",
            )
    if is_equal and is_ignored:
        yield "not applied", "not applied: every score is the first variant's to the bit"
    differing = []
    undecided = []
    for row in rows:
        lowest, highest = kld_range(row.model)
        if row.model.kld_non_finite or lowest > floors[row.text].limit:
            differing.append(row)
        elif highest > floors[row.text].limit:
            undecided.append(row)
    if differing:
        parts = ", ".join(differences(rows, floors, differing))
        yield "differs", f"differs: {parts}"
    for row in undecided:
        kld = kld_with_error(row.model)
        yield (
            "failed",
            f"undecided in {row.shape}: KLD {kld}; whether it is above the floor, "
            f"{floors[row.text].limit:.4g}, is not known",
        )
    change = logprob_change(tokens.get((PREFILL, FULL)), tokens.get((PREFILL, BATCH_OF_ONE)))
    if times_the_limit(change, floors[BATCH_OF_ONE]) > LARGEST_BATCH_CHANGE:
        yield (
            "differs",
            f"differs: batch 1 and a full batch differ by {change:.3g} nats of log-probability per "
            "token",
        )
    if is_equal:
        yield "as before", "as before (equal to the bit)"
    else:
        yield "as before", "as before"


def kld_with_error(model: ModelResult) -> str:
    """Return a row's KLD and its error."""
    error = error_text(model.kld_stderr) or "n/a"
    return f"{significant_text(model.kld or 0.0, 4, model.kld_kind)} ± {error}"


def logprob_change(one: VariantTokens | None, other: VariantTokens | None) -> float:
    """Return the mean absolute difference of two rows' log-probabilities, nats.

    The shorter row must have the first tokens of the longer row.  0 if not, or if a row is missing.
    """
    if one is None or other is None:
        return 0.0
    count = min(len(one.logprob), len(other.logprob))
    if not np.array_equal(one.position[:count], other.position[:count]):
        return 0.0
    return float(np.mean(np.abs(one.logprob[:count] - other.logprob[:count])))


def times_the_limit(change: float, floor: Floor) -> float:
    """Return how many times the floor's ``change_limit`` a change of log-probabilities is."""
    if floor.change_limit:
        return change / floor.change_limit
    if change:
        return math.inf
    return 0.0


def differences(
    rows: Sequence[Row], floors: Mapping[str, Floor], differing: Sequence[Row]
) -> Iterator[str]:
    """Yield the size of a variant's difference, where it starts, and the shapes that have it."""
    worst = max(differing, key=lambda row: row.kld / (floors[row.text].limit or 1.0))
    floor = floors[worst.text]
    yield f"KLD {kld_with_error(worst.model)}"
    if floor.limit:
        at_least = ""
        if worst.model.has_bound:
            at_least = "at least "
        yield f"{at_least}{worst.kld / floor.limit:.1f} times the floor"
    else:
        yield "where the floor is 0"
    if worst.model.kld_non_finite:
        yield f"{worst.model.kld_non_finite:,} tokens without a finite KLD"
    elif worst.tokens is not None and worst.model.kld_kind == "exact":
        place = where(worst.tokens.by_position(), floor.curve)
        if place:
            yield place
    if len(differing) < len(rows):
        shapes = " and ".join(row.shape for row in differing)
        yield f"only in {shapes}"


def where(variant: NDArray[np.float64], copies: NDArray[np.float64]) -> str:
    """Return where in the windows a variant differs; empty if it differs equally everywhere.

    ``variant`` and ``copies``: mean KLD at each position.
    """
    positions = np.flatnonzero(copies[: len(variant)] > 0)
    if len(positions) < POSITIONS_FOR_A_PLACE:
        return ""
    variant = variant[positions]
    copies = copies[positions]
    cut = first_position(variant, copies)
    early = summed_ratio(variant[:cut], copies[:cut])
    late = summed_ratio(variant[cut:], copies[cut:])
    if early <= FAULTLESS_RATIO and late >= FAULT_RATIO:
        return f"from position {positions[cut]} on"
    quarter = max(len(positions) // 4, 1)
    first_ratio = summed_ratio(variant[:quarter], copies[:quarter])
    last_ratio = summed_ratio(variant[-quarter:], copies[-quarter:])
    if last_ratio >= GROWTH * first_ratio:
        return f"growing {last_ratio / first_ratio:.1f} times with position"
    return ""


def first_position(variant: NDArray[np.float64], copies: NDArray[np.float64]) -> int:
    """Return the index at which a fault would begin, from the mean KLDs at N positions.

    Two constants, one before the index and one from it on, fit the logarithm of the ratio best
    there.  A ratio below ``LOWEST_RATIO`` counts as this.
    """
    log_ratio = np.log(np.maximum(variant / copies, LOWEST_RATIO))
    total = log_ratio.sum()
    n_before = np.arange(1, len(log_ratio))
    n_after = n_before[::-1]
    sums_before = np.cumsum(log_ratio)[:-1]
    sums_after = total - sums_before
    # The squares that two means explain; the other squares do not depend on the index.
    explained = sums_before**2 / n_before + sums_after**2 / n_after
    return int(np.argmax(explained)) + 1


def summed_ratio(variant: NDArray[np.float64], copies: NDArray[np.float64]) -> float:
    """Return the ratio of the KLDs over some positions."""
    return float(variant.sum() / copies.sum())
