"""Compare a model with a reference store if only some of its log-probabilities are known.

``scoring/partial_kld.py`` has the formulas of the KLD.  Only the tested side is incomplete: the
store has the reference's whole distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..common.errors import ModelError
from ..scoring import partial_kld
from ..scoring.entries import Entries, Ids, Logprobs, top_tokens
from ..scoring.rounding import Rounding
from ..window import KldKind, TokenScores, Window
from .stored_logprobs import Gathered, StoredLogprobs


@dataclass(frozen=True)
class PartialComparison:
    """The known log-probabilities of a window, and the reference's of the same tokens, in nats.

    Attributes:
        window: the window, with T scored positions.
        logprob: ln q of the targets [T].
        entries: ln q of the known tokens [T, k].
        gathered: ln p of the targets, and then of the known tokens [T, 1 + k].
    """

    window: Window
    logprob: Logprobs
    entries: Entries
    gathered: Gathered

    @classmethod
    def of(
        cls, window: Window, logprob: Logprobs, entries: Entries, reference: StoredLogprobs
    ) -> PartialComparison:
        """Compare with a store; ModelError if it does not fit the window.

        The reference has to have the targets.  It may lack entries, which it gives the probability
        0 (``outside_tokens.py``).
        """
        largest = int(window.targets.max(initial=0))
        if largest >= reference.vocab_size:
            raise ModelError(
                f"window {window.index}: token {largest} is outside the reference's "
                f"{reference.vocab_size} logits"
            )
        ids: Ids = np.concatenate([window.targets[:, None], entries.ids], axis=1)
        return cls(window, logprob, entries, reference.gathered(window, ids))

    @property
    def ref_target(self) -> Logprobs:
        """ln p of the targets [T]."""
        return self.gathered.logprobs[:, 0]

    @property
    def ref_logprobs(self) -> Logprobs:
        """ln p of the known tokens [T, k]."""
        return self.gathered.logprobs[:, 1:]

    def bound(self, rounding: Rounding) -> Logprobs:
        """Return the lower bounds [T] of the KLD; ``rounding``: of the known log-probabilities."""
        errors = rounding.errors(self.entries.logprobs)
        return partial_kld.bound(self.ref_logprobs, self.entries.logprobs, errors)

    def on_samples(self) -> Logprobs:
        """Return the estimates [T] of the KLD, for targets that a model has sampled.

        The known tokens must not depend on the targets.
        """
        # The store and the sampler differ by roundings.
        weights = np.exp(self.ref_target - np.asarray(self.window.sampler_logprobs, np.float64))
        return partial_kld.estimate_on_samples(
            self.ref_logprobs,
            self.entries.logprobs,
            self.ref_target,
            self.logprob,
            (self.entries.ids == self.window.targets[:, None]).any(axis=1),
            weights,
        )

    def scores(self, top: Entries | None, kld: Logprobs, kind: KldKind) -> TokenScores:
        """Return the scores with a KLD [T]; ``top``: as in ``scores_alone``."""
        own = scores_alone(self.window, self.logprob, top)
        same_top = None
        if top is not None:
            same_top = top_tokens(top)[0] == self.gathered.top
        return TokenScores(
            own.window,
            logprob=own.logprob,
            top1_logprob=own.top1_logprob,
            top1=own.top1,
            ref_logprob=self.ref_target.astype(np.float32),
            ref_top1_logprob=self.gathered.top_logprob.astype(np.float32),
            kld=kld.astype(np.float32),
            same_top=same_top,
            kld_kind=kind,
        )


def scores_alone(window: Window, logprob: Logprobs, top: Entries | None) -> TokenScores:
    """Return the scores of a window without a reference.

    ``logprob`` [T]: of the targets.  ``top``: the most probable tokens; None if they are unknown.
    """
    if top is None:
        return TokenScores(window.index, logprob.astype(np.float32))
    ids, highest = top_tokens(top)
    return TokenScores(
        window.index,
        logprob.astype(np.float32),
        top1_logprob=highest.astype(np.float32),
        top1=ids == window.targets,
    )
