"""The probe: checks of a loaded model before its first window is scored.

It scores the first tokens of the longest windows in two ways, in the same steps of the engine: by
compare_q and by vLLM's own ``prompt_logprobs=0``.  A difference larger than the rounding of the
logits stops the model.  The probe also finds out whether each tensor-parallel rank can score its
own logits, and whether states are enough for a record.  Then it scores the same tokens without
``prompt_logprobs``, as in the scoring of all windows: vLLM may leave out states that no request
reads.  In decode it finally compares the scores with those of prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..base import ScoreRequest, Window
from ..common.errors import ModelError
from ..reference.head import Contents, head_mismatch
from .decode import PrefillCheck
from .driver import Floats, VllmDriver
from .scoring_plan import ScoringPlan
from .vllm_scores import (
    ScoresOfBoth,
    distance,
    largest_logit,
    score_with_vllm,
    token_scores,
    within,
)

PROBE_WINDOWS = 2


@dataclass(frozen=True)
class ProbeResult:
    """How a model's logits are scored and recorded; the fields are keys of results.json."""

    gathered: bool  # score logits that vLLM gathers from all ranks, not each rank's own logits
    states: bool  # logits can be recomputed from states and the head
    reason: str  # why not
    checked: int  # tokens that were compared with ``prompt_logprobs=0``
    largest: float  # largest difference from ``prompt_logprobs=0``, in nats
    mean: float  # average difference, in nats


class Probe:
    """The checks of one loaded model; see the module."""

    def __init__(self, driver: VllmDriver, *, tokens: int, decode: PrefillCheck | None) -> None:
        self.driver = driver
        self.tokens = tokens  # of each window
        self.decode = decode  # None in prefill, and if the caller compares decode with prefill

    def result(self, windows: Sequence[Window]) -> ProbeResult:
        """Return how the model is scored; ModelError if compare_q's scores are not vLLM's own."""
        beginnings = self.beginnings(windows)
        for gathered in (False, True):
            scores = score_with_vllm(self.driver, beginnings, gathered=gathered)
            # NaN and positive: a rank's own logits are not those that vLLM serves.
            if not scores.report["local_difference"] <= 0:
                continue
            check_own_scores(scores)
            logprobs = self.logprobs_without_request(beginnings, gathered=gathered)
            self.check_without_request(logprobs, scores, gathered=gathered)
            if self.decode is not None:
                self.decode.check(self.driver, beginnings, logprobs, gathered=gathered)
            return result_of(scores, gathered=gathered)
        raise ModelError(
            "vLLM's logits differ from call to call: compare_q cannot score this model"
        )

    def beginnings(self, windows: Sequence[Window]) -> list[Window]:
        """Return the first tokens of the longest windows; the first ones among equally long."""
        by_length = sorted(windows, key=lambda window: -len(window.token_ids))
        beginnings = []
        for window in by_length[:PROBE_WINDOWS]:
            beginnings.append(Window.scored_from(window.index, window.token_ids[: self.tokens]))
        return beginnings

    def logprobs_without_request(
        self, windows: Sequence[Window], *, gathered: bool
    ) -> dict[int, Floats]:
        """Return window -> log-probabilities [L - 1], scored as all windows are."""
        plan = ScoringPlan(gathered=gathered)
        logprobs = {}
        for scores in token_scores(self.driver, windows, plan):
            logprobs[scores.window] = scores.logprob
        return logprobs

    def check_without_request(
        self, logprobs: Mapping[int, Floats], scores: ScoresOfBoth, *, gathered: bool
    ) -> None:
        """Raise ModelError if windows score differently without ``prompt_logprobs``."""
        ours = [logprobs[window.index] for window in scores.windows]
        difference = distance(ours, scores.vllm)
        # Batches and rounding are the same, except in kernels whose order of additions varies.
        if within(difference, scores.limit):
            return
        # One more run measures how much the scores of such kernels vary.
        again = score_with_vllm(self.driver, scores.windows, gathered=gathered)
        variation = distance(again.vllm, scores.vllm)
        if not difference.mean() <= 4 * variation.mean() + scores.limit.mean() / 4:
            raise ModelError(
                "requests without prompt_logprobs score otherwise in vLLM, by "
                f"{difference.mean():.3g} nats on average (from run to run "
                f"{variation.mean():.3g}): vLLM does not compute all of their states, and "
                "compare_q cannot score this model"
            )


def check_own_scores(scores: ScoresOfBoth) -> None:
    """Raise ModelError if rounding does not explain how scores differ from vLLM's own."""
    difference = scores.difference
    if within(difference, scores.limit):
        return
    excess = np.nan_to_num(difference - scores.limit, nan=np.inf)
    worst = int(excess.argmax())
    raise ModelError(
        f"scores differ from vLLM's own prompt_logprobs by {difference[worst]:.3g} nats (rounding "
        f"explains {scores.limit[worst]:.3g}), {float(difference.mean()):.3g} on average: "
        "compare_q does not score this model right"
    )


def result_of(scores: ScoresOfBoth, *, gathered: bool) -> ProbeResult:
    """Return how the model is scored, from the scores that equal vLLM's."""
    report = scores.report
    # A reason why the head cannot be recomputed, or how far its product is from the logits.
    head_result = report["head_reason"] or report["head_difference"]
    most = max(float(largest_logit(shards).max()) for shards in scores.shards)
    reason = head_mismatch(head_result, most, report["logits_dtype"])
    return ProbeResult(
        gathered=gathered,
        states=not reason,
        reason=reason,
        checked=len(scores.difference),
        largest=float(scores.difference.max()),
        mean=float(scores.difference.mean()),
    )


def plan_of(request: ScoreRequest, route: ProbeResult, ranks: int) -> ScoringPlan:
    """Return the plan of a request; ``ranks``: tensor parallel size."""
    # A record of logits has all entries of a row; each rank's own logits are only a part of them.
    records_logits = request.record is not None and not route.states
    contents: Contents = "logits"
    if route.states:
        contents = "states"
    return ScoringPlan(
        gathered=route.gathered or (records_logits and ranks > 1),
        record_contents=contents,
        record_reason=route.reason,
        **request.model_dump(mode="json"),
    )
