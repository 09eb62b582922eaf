"""A closed-form engine whose KLD is a bound or an estimate, to test the driver without a server.

``load_fn: "partial"``, registered by ``monkeypatch.setitem(backends.ENGINES, "partial", LOCATION)``
and run by workers in threads.  Its logits are the fake engine's, and so is its exact KLD at every
token.  ``engine`` options, in addition to the fake engine's: ``kinds``, of the windows by turns;
``share`` of the exact KLD that a bound has; ``spread``: an estimate is this much above and below
the exact KLD by turns of the tokens, so that the mean over an even number of tokens is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from compare_q.backends.base import KldKind, ScoreRequest, TokenScores, Window
from tests.support.fake_engine import FakeEngine, FakeOptions

LOCATION = f"{__name__}:PartialEngine"


class PartialOptions(FakeOptions, strict=True):
    """The engine's ``engine`` object."""

    kinds: list[KldKind] = Field(default_factory=list)
    share: float = 0.5
    spread: float = 1.0


class PartialEngine(FakeEngine):
    """See the module's docstring."""

    capabilities = replace(FakeEngine.capabilities, load_fns=("partial",), fwd_fn="partial")
    options_type = PartialOptions

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        options = self.options
        for scores in super().score(windows, request):
            kind = options.kinds[scores.window % len(options.kinds)]
            yield of_kind(scores, kind, options.share, options.spread)


def of_kind(scores: TokenScores, kind: KldKind, share: float, spread: float) -> TokenScores:
    """Return scores with a KLD of another kind than the exact one that they have, if any."""
    kld = scores.kld
    if kld is None or kind == "exact":
        return scores
    if kind == "bound":
        kld = kld * np.float32(share)
    else:
        signs = np.resize(np.array([1, -1], np.float32), len(kld))
        kld = kld + np.float32(spread) * signs
    return replace(scores, kld=kld, kld_kind=kind)
