"""KL divergence of the scores in a file from a reference store.

Its kind follows from what the file has (``scoring/partial_kld.py`` has the formulas):

- exact: the log-probabilities of all tokens of the vocabulary;
- estimate: those of the ids that were asked for, some of which were drawn from the reference;
- bound: those of any other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..reference.store import Reader
from ..reference.stored_logprobs import Gathered, StoredLogprobs
from ..scoring import partial_kld
from ..window import KldKind, TokenScores, Window
from .format import LOGPROB_ERROR, NO_ID, Entries, Logprobs, WindowScores
from .known_entries import all_entries, top_tokens

Pairs = Sequence[tuple[Window, WindowScores]]


def kind_of(pairs: Pairs, store: Reader) -> KldKind | None:
    """Return the kind of KLD that the scores of all windows can have; None if they have none."""
    if any(scores.top is None and scores.asked is None for _, scores in pairs):
        return None
    if all(is_complete(window, scores, store.head.vocab_size) for window, scores in pairs):
        return "exact"
    # Ids that were drawn from another distribution would bias the estimate.
    for window, scores in pairs:
        if scores.asked is None or scores.recording != store.recording(window.digest):
            return "bound"
    return "estimate"


def is_complete(window: Window, scores: WindowScores, vocab_size: int) -> bool:
    """Return True if the log-probabilities of all tokens are known, and their sums are 1.

    The sums are smaller if the model has more tokens than the reference.
    """
    entries = all_entries(window, scores)
    n_known = (entries.ids != NO_ID).sum(axis=1)
    sums = np.exp(entries.logprobs).sum(axis=1)
    return bool((n_known == vocab_size).all() and (sums > 1.0 - LOGPROB_ERROR).all())


def compared(
    window: Window, scores: WindowScores, reference: StoredLogprobs, kind: KldKind
) -> TokenScores:
    """Return the scores of a window with its KLD of this kind."""
    if kind == "estimate" and scores.asked is not None:
        entries = scores.asked
        gathered = reference.gathered(window, with_targets(window, entries))
        kld = estimate(gathered.logprobs[:, 1:], entries.logprobs, scores.drawn)
    else:
        entries = all_entries(window, scores)
        gathered = reference.gathered(window, with_targets(window, entries))
        kld = divergence(gathered.logprobs[:, 1:], entries.logprobs, scores, kind)
    return with_reference(alone(window, scores), scores, gathered, kld, kind)


def with_targets(window: Window, entries: Entries) -> np.ndarray:
    """Return ids [T, 1 + k]: the target, and the entries."""
    return np.concatenate([window.targets[:, None], entries.ids], axis=1)


def estimate(ref_logprobs: Logprobs, logprobs: Logprobs, n_drawn: int) -> Logprobs:
    """Return the estimates [T] from asked ids [T, m], the last ``n_drawn`` of which were drawn."""
    n_top = ref_logprobs.shape[1] - n_drawn
    return partial_kld.estimate_by_draws(
        ref_logprobs[:, :n_top], logprobs[:, :n_top], ref_logprobs[:, n_top:], logprobs[:, n_top:]
    )


def divergence(
    ref_logprobs: Logprobs, logprobs: Logprobs, scores: WindowScores, kind: KldKind
) -> Logprobs:
    """Return the bound [T] from entries [T, k], or the KLD if they are the whole vocabulary."""
    if kind == "exact":
        return np.asarray(partial_kld.terms(ref_logprobs, logprobs).sum(axis=1), np.float64)
    return partial_kld.bound(ref_logprobs, logprobs, scores.rounding.errors(logprobs))


def with_reference(
    own: TokenScores, scores: WindowScores, gathered: Gathered, kld: Logprobs, kind: KldKind
) -> TokenScores:
    """Return a model's own scores with those that compare it with the reference."""
    same_top = None
    if scores.top is not None:
        same_top = top_tokens(scores.top)[0] == gathered.top
    return TokenScores(
        own.window,
        logprob=own.logprob,
        top1_logprob=own.top1_logprob,
        top1=own.top1,
        ref_logprob=gathered.logprobs[:, 0].astype(np.float32),
        ref_top1_logprob=gathered.top_logprob.astype(np.float32),
        kld=kld.astype(np.float32),
        same_top=same_top,
        kld_kind=kind,
    )


def alone(window: Window, scores: WindowScores) -> TokenScores:
    """Return the scores of a window without a reference."""
    logprob = scores.logprob.astype(np.float32)
    if scores.top is None:
        return TokenScores(window.index, logprob)
    ids, highest = top_tokens(scores.top)
    return TokenScores(
        window.index,
        logprob,
        top1_logprob=highest.astype(np.float32),
        top1=ids == window.targets,
    )
