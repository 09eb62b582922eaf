"""Compare a model with the log-probabilities that were recorded while tokens were sampled.

d = ln p_model - ln p_rollout of each sampled token, nats.

- k3, the mean of exp(d) - d - 1, estimates KL(rollout || model) if the tokens were drawn from
  p_rollout over all tokens: E[exp(d)] = 1, and E[-d] is the divergence.  No token has a negative
  value (J. Schulman, "Approximating KL Divergence", 2020).
- The ratio of a sequence is exp(sum of its d), the weight that importance sampling gives it.

Tokens without a finite d, and sequences that have one, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..common.stored import Number, Stored, Text
from .row_statistics import Percentiles, percentiles_of
from .uncertainty import (
    LARGEST_EXPONENT,
    Array,
    BlockAssignment,
    Count,
    Error,
    mean_with_errors,
)

LARGE = 1.0
"""|d| above which a token counts in ``d_large``, nats."""
MOST_SEQUENCES = 10
"""Worst sequences of each row."""
RATIO_PERCENTS = {"seq_ratio_p5": "5", "seq_ratio_median": "50", "seq_ratio_p95": "95"}
"""Field -> percent of the sequences that have a smaller ratio."""
SHIFT_TOKENS = 8
"""Tokens of the shortest sequence that is compared with shifted log-probabilities."""
SHIFT_EXPLAINS = 0.25
"""A shift is reported if it reduces the mean |d| of a sequence to this share or less."""
SHIFT_LEAST = 0.1
"""Smallest mean |d| of a sequence that is compared with shifted log-probabilities, nats."""
Size = Annotated[float, Field(ge=0)]


class WorstSequence(Stored):
    """A sequence on which a model and its rollout differ, and its token with the largest |d|."""

    window: Count
    tokens: Count = Field(description="sampled tokens with a finite log-probability")
    k3: Number = Field(default=None, description="nats per token; None if it is too large")
    d_mean: Size = Field(description="mean of |d|, nats")
    d_max: Size = Field(description="largest |d|, nats")
    ln_ratio: float = Field(description="sum of d, nats")
    position: Count = Field(description="place of the token in its window")
    logprob: float = Field(description="the model's log-probability of the token, nats")
    rollout_logprob: float = Field(description="the recorded one, nats")
    before: Text = ""
    token: Text = ""
    after: Text = ""


class RolloutStatistics(Stored):
    """The fields of a row about recorded log-probabilities; None on texts without them."""

    k3: Number = Field(
        default=None,
        description="mean of exp(d) - d - 1, nats; d = ln p_model - ln p_rollout of sampled tokens",
    )
    k3_stderr: Error | None = Field(default=None, description="its error")
    d_mean: Size | None = Field(default=None, description="mean of |d|, nats")
    d_mean_stderr: Error | None = Field(default=None, description="its error")
    d_max: Size | None = Field(default=None, description="largest |d|, nats")
    d_large: Count | None = Field(default=None, description="tokens with |d| above 1 nat")
    seq_ratio_p5: Size | None = Field(
        default=None, description="exp(sum of d) of a sequence: 5 % have a smaller one"
    )
    seq_ratio_median: Size | None = Field(default=None, description="its median")
    seq_ratio_p95: Size | None = Field(default=None, description="95 % have a smaller one")
    ln_seq_ratio_percentiles: Percentiles = Field(
        default={}, description="percentiles of the sums of d of the sequences, nats"
    )
    worst_sequences: tuple[WorstSequence, ...] = Field(
        default=(), description="sequences with the largest mean of |d|"
    )


class Tokens(NamedTuple):
    """The sampled tokens with a finite d [M]: d, and what locates them."""

    d: NDArray[np.float64]
    logprob: NDArray[np.float64]
    recorded: NDArray[np.float64]
    window: Array
    position: Array


class Sampled(NamedTuple):
    """A model's scores of all N tokens, and what was recorded.

    Attributes:
        logprob: of the model [N], nats.
        recorded: [N], nats; NaN for tokens that were not sampled.
        window, position: of the tokens [N].
    """

    logprob: Array
    recorded: Array
    window: Array
    position: Array

    @property
    def differences(self) -> NDArray[np.float64]:
        """d [N], nats; NaN for tokens that were not sampled."""
        return np.asarray(self.logprob.astype(np.float64) - self.recorded, np.float64)

    @property
    def finite(self) -> Tokens:
        """The tokens with a finite d."""
        d = self.differences
        used = np.isfinite(d)
        return Tokens(
            d[used],
            self.logprob[used].astype(np.float64),
            self.recorded[used].astype(np.float64),
            self.window[used],
            self.position[used],
        )


def k3_of(d: Array) -> NDArray[np.float64]:
    """Return exp(d) - d - 1 of each d [N]; infinite if it is too large for a number."""
    with np.errstate(over="ignore"):
        return np.asarray(np.expm1(d) - d, np.float64)


def rollout_statistics(sampled: Sampled, assignment: BlockAssignment) -> dict[str, Any]:
    """Return the fields of ``RolloutStatistics``; none if no token has a finite d.

    ``assignment``: the blocks of the tokens.
    """
    tokens = sampled.finite
    if not len(tokens.d):
        return {}
    d = sampled.differences
    mean_of_sizes = mean_with_errors(np.abs(d), None, assignment)
    fields: dict[str, Any] = {
        "d_mean": mean_of_sizes.value,
        "d_mean_stderr": mean_of_sizes.stderr,
        "d_max": float(np.abs(tokens.d).max()),
        "d_large": int((np.abs(tokens.d) > LARGE).sum()),
        "worst_sequences": worst_sequences(tokens),
    }
    # Not the mean of the finite values: it would leave out the worst tokens.
    if np.isfinite(k3_of(tokens.d)).all():
        mean = mean_with_errors(k3_of(d), None, assignment)
        if math.isfinite(mean.total):
            fields["k3"] = mean.value
            fields["k3_stderr"] = mean.stderr
    return fields | ratio_fields(sampled)


def ratio_fields(sampled: Sampled) -> dict[str, Any]:
    """Return the percentiles of the sequences' ratios; none without a finite ratio.

    They are interpolated between logarithms.  A ratio that is too large for a number is None.
    """
    d = sampled.differences
    is_sampled = ~np.isnan(sampled.recorded)
    # A sum with a d that is not finite is not finite.
    windows, place = np.unique(sampled.window[is_sampled], return_inverse=True)
    sums = np.bincount(place, d[is_sampled], len(windows))
    sums = sums[np.isfinite(sums)]
    logarithms = percentiles_of(sums)
    fields: dict[str, Any] = {"ln_seq_ratio_percentiles": logarithms}
    for name, percent in RATIO_PERCENTS.items():
        logarithm = logarithms.get(percent)
        if logarithm is not None and logarithm < LARGEST_EXPONENT:
            fields[name] = math.exp(logarithm)
    return fields


def worst_sequences(tokens: Tokens) -> tuple[WorstSequence, ...]:
    """Return the sequences with the largest mean |d|, the largest first, without texts."""
    windows, place = np.unique(tokens.window, return_inverse=True)
    sizes = np.abs(tokens.d)
    means = np.bincount(place, sizes) / np.bincount(place)
    worst = []
    for number in np.argsort(-means, kind="stable")[:MOST_SEQUENCES]:
        if means[number] > 0:
            worst.append(described(tokens, int(windows[number])))
    return tuple(worst)


def described(tokens: Tokens, window: int) -> WorstSequence:
    """Return the facts about one sequence."""
    entries = np.flatnonzero(tokens.window == window)
    d = tokens.d[entries]
    largest = entries[np.argmax(np.abs(d))]
    k3: float | None = float(k3_of(d).mean())
    if not math.isfinite(k3 or 0.0):
        k3 = None
    return WorstSequence(
        window=window,
        tokens=len(entries),
        k3=k3,
        d_mean=float(np.abs(d).mean()),
        d_max=float(np.abs(d).max()),
        ln_ratio=float(d.sum()),
        position=int(tokens.position[largest]),
        logprob=float(tokens.logprob[largest]),
        rollout_logprob=float(tokens.recorded[largest]),
    )


def rollout_notes(sampled: Sampled) -> Iterator[str]:
    """Yield footnotes on sequences that look shifted, and on a k3 that is not known."""
    tokens = sampled.finite
    if not len(tokens.d):
        yield "k3, |d| and ratios n/a: no sampled token has a finite log-probability"
        return
    if not np.isfinite(k3_of(tokens.d)).all():
        yield (
            f"k3 n/a: it is too large for a number, because d is up to {tokens.d.max():,.0f}; is a "
            "recorded log-probability no more than a placeholder?"
        )
    shifted = shifted_sequences(tokens)
    if shifted:
        n_sequences = len(np.unique(tokens.window))
        yield (
            f"{len(shifted):,} of {n_sequences:,} sequences fit if the recorded log-probabilities "
            f"are shifted by one token (window {shifted[0]} is the first): is the rollout engine "
            "or its script off by one?"
        )


def shifted_sequences(tokens: Tokens) -> list[int]:
    """Return the windows whose d nearly vanish if one side is shifted by one token."""
    shifted = []
    starts = np.flatnonzero(np.diff(tokens.window, prepend=-1))
    for logprob, recorded, window in zip(
        np.split(tokens.logprob, starts[1:]),
        np.split(tokens.recorded, starts[1:]),
        tokens.window[starts].tolist(),
        strict=True,
    ):
        if len(logprob) < SHIFT_TOKENS:
            continue
        d_mean = np.abs(logprob - recorded).mean()
        earlier = np.abs(logprob[1:] - recorded[:-1]).mean()
        later = np.abs(logprob[:-1] - recorded[1:]).mean()
        if d_mean > SHIFT_LEAST and min(earlier, later) <= SHIFT_EXPLAINS * d_mean:
            shifted.append(int(window))
    return shifted
