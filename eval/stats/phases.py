"""What decode changes of one model: KL(prefill || decode), beside what added rounding noise changes of the prefill.

Where in the window a change begins: a bug of decode may show from the second token on, or only behind the tokens that
one block of a kernel holds.  Positions are taken in ``position_bins``; the first bin counts whose mean exceeds
``times`` the noise's by what a one-sided t-test over windows allows (5 % for all bins together, Bonferroni: of 64
windows and 32 bins a mean 3.1 standard errors above).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.eval.stats.distributions import position_bins, sums_by_bin
from compare_q.eval.stats.uncertainty import Mean, student_t

LEVEL = 0.05
"""How often a decode that is no worse than the noise is said to begin to differ somewhere."""


@dataclass(frozen=True)
class OwnPrefill:
    """A model in decode beside the same model in prefill.

    ``kld``: mean KL(prefill || decode), nats; ``same_top``: share of positions with the same most probable token.
    ``noise``: the same of the prefill with rounding noise, None if ``no_noise`` says why there is none.
    ``is_above``: whether ``kld`` is above the limit up to which rows are nearly lossless beside such noise.
    ``begins``: position in the window from which decode differs by more than noise; None if nowhere, or not known.
    """

    kld: Mean
    same_top: Mean
    noise: Mean | None = None
    no_noise: str = ""
    is_above: bool = False
    begins: int | None = None

    @property
    def differs(self) -> bool:
        """Whether decode differs from prefill by more than noise does, over all, at some tokens or from some position
        on."""
        return self.is_above or self.not_finite > 0 or self.begins is not None

    @property
    def not_finite(self) -> int:
        """How many more tokens have no finite KLD, which means leave out, in decode than with noise."""
        return 0 if self.noise is None else max(self.kld.non_finite - self.noise.non_finite, 0)


def begins_at(
    kld: NDArray[Any], noise: NDArray[Any], window: NDArray[Any], position: NDArray[Any], times: float
) -> int | None:
    """The first position [N] in a ``window`` [N] whose bin has a mean KLD [N] above ``times`` the mean of the ``noise``
    [N] there; None if no bin has, or with fewer than two windows.
    """
    above = kld.astype(np.float64) - times * noise.astype(np.float64)
    edges, place = position_bins(position)
    bins = len(edges) - 1
    for each, (tokens, sums) in enumerate(zip(*sums_by_bin(place, window, above, bins), strict=True)):
        means = sums[tokens > 0] / tokens[tokens > 0]
        if len(means) < 2:
            continue
        error = means.std(ddof=1) / np.sqrt(len(means))
        if means.mean() > student_t(len(means) - 1, LEVEL / bins) * error:
            return int(position[place == each].min())  # a window may be scored in some stretches alone
    return None
