"""KL divergence of a server from a reference store, by the server's most probable tokens.

It is an estimate in windows of sampled tokens, and a bound in all others
(``scoring/partial_kld.py``).  The kind depends on the window alone, so that kept scores do not
depend on the other windows of a run.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..reference.outside_tokens import OutsideTokens
from ..reference.partial_comparison import PartialComparison
from ..reference.store import open_reference
from ..reference.stored_logprobs import StoredLogprobs
from ..scoring.entries import Entries, with_targets
from ..scoring.rounding import rounding_of
from ..window import TokenScores, Window


class ServerKld:
    """Compares answers with a reference store, in one thread.

    Requests continue at the same time: their deadlines must not pass while this process computes.
    ImportError without torch.
    """

    def __init__(self, reference: Path) -> None:
        self.reference = StoredLogprobs(open_reference(reference))
        self.outside_tokens = OutsideTokens(self.reference.vocab_size)
        self.thread = ThreadPoolExecutor(max_workers=1)

    async def compared(
        self, window: Window, logprob: NDArray[np.float32], top: Entries
    ) -> TokenScores:
        """Return the scores of a window; ``logprob`` [T], ``top``: as in ``compared``."""
        self.outside_tokens.add(top)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.thread, compared, window, logprob, top, self.reference
        )

    def close(self) -> None:
        """Wait for the window that is being compared, and forget those that wait."""
        self.thread.shutdown(cancel_futures=True)


def compared(
    window: Window, logprob: NDArray[np.float32], top: Entries, reference: StoredLogprobs
) -> TokenScores:
    """Return the scores of a window with its KLD; ModelError if the store does not fit.

    ``logprob`` [T]: of the real tokens.  ``top``: the most probable tokens at each position.
    """
    of_targets = logprob.astype(np.float64)
    if window.sampler_logprobs is not None:
        comparison = PartialComparison.of(window, of_targets, top, reference)
        return comparison.scores(top, comparison.on_samples(), "estimate")
    # A bound may use everything that is known.
    known = with_targets(window.targets, of_targets, top)
    comparison = PartialComparison.of(window, of_targets, known, reference)
    rounding = rounding_of(known.logprobs.ravel())
    return comparison.scores(top, comparison.bound(rounding), "bound")
