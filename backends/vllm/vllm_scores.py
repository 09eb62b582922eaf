"""Scores of windows in vLLM: compare_q's, vLLM's own, and the difference that rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import TokenScores, Window
from ..common.errors import ModelError
from ..reference.head import spacing
from ..scoring import token_statistics
from ..scoring.token_statistics import Column
from .driver import Floats, VllmDriver
from .scoring_plan import ProbePlan, ScoringPlan

PROBE_BYTES = 256 << 20
"""Memory for vLLM's own log-probabilities, at 11 bytes per logit: the V1 runner holds all rows at
once."""
BYTES_A_LOGIT = 11
LEAST_TOKENS = 16
TOKENS_WHERE_SLOW = 64
"""Tokens of each window in decode and on a CPU; on a CPU, 2 x 546 tokens took 8 s of each load."""
STUCK = 8
"""A window is checked again if ``STUCK`` neighbouring positions have equal logits although their
tokens differ."""


class ScoresOfBoth(NamedTuple):
    """Statistics of some windows and vLLM's own scores, from the same steps."""

    windows: Sequence[Window]
    shards: list[list[Floats]]  # [L - 1, F] of each window and rank
    vllm: list[Floats]  # vLLM's log-probabilities [L - 1] of each window
    difference: NDArray[np.float64]  # |ours - vLLM's| at all positions, in nats
    limit: NDArray[np.float64]  # the largest difference that rounding explains
    report: dict[str, Any]  # of the ranks


def token_scores(
    driver: VllmDriver,
    windows: Sequence[Window],
    plan: ScoringPlan,
    noise_seed: int | None = None,
) -> Iterator[TokenScores]:
    """Yield the scores of each window when it finishes.

    ModelError if a position is missing, or if vLLM repeats logits.
    """
    suspects: list[tuple[Window, int, list[Floats]]] = []
    with closing(driver.run(windows, plan, noise_seed)) as results:
        for window, shards, _ in results:
            end = repetition(window, shards)
            if end > 0:
                suspects.append((window, end, shards))
            else:
                yield token_statistics.scores(window.index, window.targets, shards)
    report = driver.report
    for window, end, shards in suspects:
        check_repetition(driver, window, end, gathered=plan.gathered)
        yield token_statistics.scores(window.index, window.targets, shards)
    # The provenance is about the run of all windows, not about these checks.
    driver.report = report


def score_with_vllm(
    driver: VllmDriver, windows: Sequence[Window], *, gathered: bool
) -> ScoresOfBoth:
    """Score windows by compare_q and by vLLM's ``prompt_logprobs=0`` in the same steps."""
    shards_of: dict[int, list[Floats]] = {}
    vllm_of: dict[int, Floats] = {}
    plan = ProbePlan(gathered=gathered)
    with closing(driver.run(windows, plan, prompt_logprobs=0, flat_logprobs=True)) as results:
        for window, shards, output in results:
            shards_of[window.index] = shards
            vllm_of[window.index] = own_logprobs(window, output.prompt_logprobs)
    ours = []
    largest = []
    for window in windows:
        shards = shards_of[window.index]
        scores = token_statistics.scores(window.index, window.targets, shards)
        ours.append(scores.logprob)
        largest.append(largest_logit(shards))
    vllm = [vllm_of[window.index] for window in windows]
    # Either of two logits may be rounded by the spacing of its dtype; 1e-4 nats are for sums in
    # float32.
    limit = 2 * spacing(driver.report["logits_dtype"]) * np.concatenate(largest) + 1e-4
    return ScoresOfBoth(
        windows,
        [shards_of[window.index] for window in windows],
        vllm,
        distance(ours, vllm),
        limit,
        driver.report,
    )


def own_logprobs(window: Window, prompt_logprobs: Any) -> Floats:
    """Return vLLM's log-probabilities float32 [L - 1] of a window, from its flat container.

    It has L positions.  The first is empty, and the first entry of position i must be for the
    window's token i.
    """
    prefix = f"window {window.index}: vLLM"
    n_tokens = len(window.token_ids)
    if prompt_logprobs is None:
        raise ModelError(f"{prefix} returned log-probabilities for none of {n_tokens} positions")
    if len(prompt_logprobs) != n_tokens:
        raise ModelError(
            f"{prefix} returned log-probabilities for {len(prompt_logprobs)} of {n_tokens} "
            "positions"
        )
    starts = np.asarray(prompt_logprobs.start_indices[1:], dtype=np.int64)
    has_entry = np.asarray(prompt_logprobs.end_indices[1:], dtype=np.int64) > starts
    # Without an entry, the start may be after the end of the list.
    tokens = np.asarray(prompt_logprobs.token_ids, dtype=np.int64)[np.where(has_entry, starts, 0)]
    is_wrong = ~has_entry | (tokens != window.token_ids[1:])
    if is_wrong.any():
        position = int(is_wrong.argmax()) + 1
        raise ModelError(f"{prefix} scored another token, or none, at position {position}")
    logprobs: Floats = np.asarray(prompt_logprobs.logprobs, dtype=np.float32)[starts]
    return logprobs


def distance(ours: Sequence[Floats], vllm: Sequence[Floats]) -> NDArray[np.float64]:
    """Return |ours - vLLM's| of log-probabilities, in nats.

    It is 0 where both are NaN or the same infinity.
    """
    a = np.concatenate(ours).astype(np.float64)
    b = np.concatenate(vllm)
    with np.errstate(invalid="ignore"):
        is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.where(is_equal, 0.0, np.abs(a - b))


def within(difference: NDArray[np.float64], limit: NDArray[np.float64]) -> bool:
    """Return True if the rounding of logits explains the differences; False for NaN.

    No difference may exceed its limit, and their average may be a quarter of the limits' average.
    """
    return bool((difference <= limit).all() and difference.mean() <= limit.mean() / 4)


def largest_logit(shards: Sequence[Floats]) -> NDArray[np.float64]:
    """Return the larger size [T] of the top logit and the target's.

    0 where one is masked or NaN.
    """
    top = np.max([shard[:, Column.MAX] for shard in shards], axis=0)
    target = np.max([shard[:, Column.TARGET] for shard in shards], axis=0)
    larger: NDArray[np.float64] = np.maximum(np.abs(top), np.abs(target)).astype(np.float64)
    return np.where(np.isfinite(larger), larger, 0.0)


def repetition(window: Window, shards: Sequence[Floats]) -> int:
    """Return the number of tokens up to the end of the first ``STUCK`` positions with equal logits.

    0: no such positions.  Logits count as equal if three statistics of each shard are
    bit-identical.  Logits after equal tokens do not count: the keys and values of a repeated token
    are the same everywhere, except for the effect of the position.
    """
    tokens = window.token_ids[window.positions - 1]
    is_repeated = tokens[1:] != tokens[:-1]
    for shard in shards:
        statistics = shard[:, : Column.TARGET]
        is_repeated &= (statistics[1:] == statistics[:-1]).all(1)
    n_pairs = STUCK - 1
    if len(is_repeated) < n_pairs:
        return 0
    n_repeated = np.convolve(is_repeated, np.ones(n_pairs, np.int64), "valid")
    begins = np.flatnonzero(n_repeated == n_pairs)
    if len(begins) == 0:
        return 0
    return int(window.positions[begins[0] + n_pairs]) + 1


def check_repetition(driver: VllmDriver, window: Window, end: int, *, gathered: bool) -> None:
    """Raise ModelError if vLLM caused the equal logits at the tokens before ``end``.

    A model repeats logits itself, for example on repeated text, if a request of only these tokens,
    with ``prompt_logprobs=0``, also repeats them, and vLLM's scores equal compare_q's.
    """
    begin = max(end - n_checked_tokens(driver), 0)
    stretch = Window.scored_from(window.index, window.token_ids[begin:end])
    scores = score_with_vllm(driver, [stretch], gathered=gathered)
    repeats = repetition(stretch, scores.shards[0]) > 0
    if not repeats or not within(scores.difference, scores.limit):
        raise ModelError(
            f"window {window.index}: vLLM's logits are the same at {STUCK} different tokens in a "
            "row"
        )


def n_checked_tokens(driver: VllmDriver) -> int:
    """Return the number of tokens of a window that vLLM itself scores, for a comparison.

    Their log-probabilities take at most ``PROBE_BYTES``, unless ``LEAST_TOKENS`` take more.  In
    decode and on a CPU, vLLM is slow, and the number is at most ``TOKENS_WHERE_SLOW``.
    """
    vocab_size: int = driver.llm.llm_engine.vllm_config.model_config.get_vocab_size()
    tokens = max(PROBE_BYTES // (BYTES_A_LOGIT * vocab_size), LEAST_TOKENS)
    is_decode = driver.step is not None
    if driver.on_cpu or is_decode:
        return min(tokens, TOKENS_WHERE_SLOW)
    return tokens
