"""KL divergence of the scores in a file from a reference store.

Its kind follows from what the file and the windows have (``scoring/partial_kld.py`` has the
formulas):

- exact: the log-probabilities of all tokens of the vocabulary;
- estimate: the log-probabilities of the requested ids, if some were drawn from the reference; or of
  the most probable tokens, in windows of sampled tokens;
- bound: the log-probabilities of any other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from ..reference.outside_tokens import outside_probability
from ..reference.partial_comparison import PartialComparison, scores_alone
from ..reference.store import Reader
from ..reference.stored_logprobs import StoredLogprobs
from ..scoring import partial_kld
from ..scoring.entries import NO_ID, Entries, Logprobs, most_probable
from ..window import KldKind, TokenScores, Window
from .format import LOGPROB_ERROR, WindowScores
from .known_entries import all_entries

KINDS: dict[str, KldKind] = {
    "all tokens": "exact",
    "drawn tokens": "estimate",
    "sampled text": "estimate",
    "bound": "bound",
}
"""Source of a KLD -> its kind."""


class Divergence(NamedTuple):
    """How the KLD of a window is computed.

    ``n_ranked``: on sampled text, the number of most probable tokens at each position.
    """

    source: Literal["all tokens", "drawn tokens", "sampled text", "bound"]
    n_ranked: int = 0

    @property
    def kind(self) -> KldKind:
        """The kind of the KLD."""
        return KINDS[self.source]


def divergence_of(window: Window, scores: WindowScores, store: Reader, n_ranked: int) -> Divergence:
    """Return how the KLD of a window is computed, which has entries.

    ``n_ranked``: of the file.  The other windows of a run do not matter: its scores may be of
    several runs.
    """
    if is_complete(window, scores, store.head.vocab_size):
        return Divergence("all tokens")
    # Ids that were drawn from another distribution would bias the estimate.
    if is_drawn_from(store, window, scores):
        return Divergence("drawn tokens")
    if n_ranked > 0 and window.sampler_logprobs is not None:
        return Divergence("sampled text", n_ranked)
    return Divergence("bound")


def has_entries(scores: WindowScores) -> bool:
    """Return True if a window has log-probabilities of other tokens, too."""
    return scores.top is not None or scores.asked is not None


def n_ranked_of(windows: Iterable[WindowScores]) -> int:
    """Return how many of the most probable tokens are known at every position of a file.

    Without the least probable entry, which may be there because it is the sampled token: the
    estimate needs entries that do not depend on it.
    """
    return min(n_entries(scores.top) for scores in windows) - 1


def is_drawn_from(store: Reader, window: Window, scores: WindowScores) -> bool:
    """Return True if a window has ids that were drawn from the numbers of this store."""
    return scores.asked is not None and scores.recording == store.recording(window.digest)


def n_entries(top: Entries | None) -> int:
    """Return the smallest number of entries at a position."""
    if top is None:
        return 0
    return int((top.ids != NO_ID).sum(axis=1).min())


def is_complete(window: Window, scores: WindowScores, vocab_size: int) -> bool:
    """Return True if the log-probabilities of all tokens are known, and their sums are 1.

    The sums are smaller if the model has more tokens than the reference, unless the file has these,
    too.
    """
    entries = all_entries(window, scores)
    is_shared = (entries.ids != NO_ID) & (entries.ids < vocab_size)
    n_known = is_shared.sum(axis=1)
    sums = np.exp(entries.logprobs).sum(axis=1)
    return bool((n_known == vocab_size).all() and (sums > 1.0 - LOGPROB_ERROR).all())


def compared(
    window: Window, scores: WindowScores, reference: StoredLogprobs, divergence: Divergence
) -> TokenScores:
    """Return the scores of a window with its KLD."""
    entries = entries_for(divergence, window, scores)
    comparison = PartialComparison.of(window, scores.logprob, entries, reference)
    if divergence.source == "all tokens":
        kld = partial_kld.terms(comparison.ref_logprobs, entries.logprobs).sum(axis=1)
    elif divergence.source == "drawn tokens":
        kld = by_draws(comparison.ref_logprobs, entries.logprobs, scores.drawn)
        # The asked ids are the reference's.  The other tokens of the model belong to S, too.
        if scores.top is not None:
            kld = kld + outside_probability(scores.top, reference.vocab_size)
    elif divergence.source == "sampled text":
        kld = comparison.on_samples()
    else:
        kld = comparison.bound(scores.rounding)
    return comparison.scores(scores.top, kld, divergence.kind)


def entries_for(divergence: Divergence, window: Window, scores: WindowScores) -> Entries:
    """Return the entries that a KLD is computed from."""
    if divergence.source == "drawn tokens" and scores.asked is not None:
        return scores.asked
    if divergence.source == "sampled text" and scores.top is not None:
        return most_probable(scores.top, divergence.n_ranked)
    return all_entries(window, scores)


def by_draws(ref_logprobs: Logprobs, logprobs: Logprobs, n_drawn: int) -> Logprobs:
    """Return the estimates [T] from asked ids [T, m]; the last ``n_drawn`` ones were drawn."""
    n_top = ref_logprobs.shape[1] - n_drawn
    return partial_kld.estimate_by_draws(
        ref_logprobs[:, :n_top], logprobs[:, :n_top], ref_logprobs[:, n_top:], logprobs[:, n_top:]
    )


def alone(window: Window, scores: WindowScores) -> TokenScores:
    """Return the scores of a window without a reference."""
    return scores_alone(window, scores.logprob, scores.top)
