"""A file of rollouts as a model: its row has the log-probabilities that were recorded.

``rollouts.py`` describes the file, which is a text, too (``eval/text/rollouts.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base import (
    Capabilities,
    ModelFacts,
    ScoreRequest,
    TokenScores,
    Window,
)
from ..common.jsonl_kinds import ROLLOUTS
from . import rollouts
from .kept_lines import lines_of
from .rollouts import Rollout, RolloutsHeader
from .row_file import RowFile, RowFileEngine


class RolloutsFiles(RowFile):
    """A file of rollouts before it is read as a whole."""

    def facts(self) -> ModelFacts:
        rollouts.read_header(self.file)
        return ModelFacts()


class RolloutsEngine(RowFileEngine):
    """One file of rollouts."""

    capabilities = Capabilities(
        load_fns=("rollouts",),
        fwd_fn="rollouts",
        packages=(),
        install="built in",
        summary="log-probabilities that were recorded while a model sampled: perplexity only",
        reference=False,
        compares=False,
        torch=False,
        kinds=(ROLLOUTS,),
    )
    files = RolloutsFiles

    header: RolloutsHeader

    @classmethod
    def lines(cls, file: Path) -> Iterable[Rollout]:
        return lines_of(rollouts.read_rollouts, file)

    def load(self) -> None:
        self.header = rollouts.read_header(self.file)
        self.rollouts = list(self.lines(self.file))
        self.check_stamp()

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the recorded log-probabilities; ModelError if the file lacks some."""
        rollout_of = self.by_tokens(max(len(window.token_ids) for window in windows))
        scores: list[TokenScores] = []
        missing: list[int] = []
        for window in windows:
            rollout = rollout_of.get(window.token_ids.tobytes())
            if rollout is None or np.isnan(rollout.logprobs[window.positions]).any():
                missing.append(window.index)
                continue
            logprob = rollout.logprobs[window.positions].astype(np.float32)
            scores.append(TokenScores(window.index, logprob))
        if missing:
            raise self.lacks(missing, len(windows), "give this file as the text, too")
        yield from scores

    def by_tokens(self, longest: int) -> dict[bytes, Rollout]:
        """Return each sequence by the bytes of its tokens, and by those of its first ``longest``.

        The first one of equal sequences; a whole sequence before the beginning of another one.
        """
        by_tokens: dict[bytes, Rollout] = {}
        for rollout in self.rollouts:
            by_tokens.setdefault(rollout.token_ids.tobytes(), rollout)
        for rollout in self.rollouts:
            by_tokens.setdefault(rollout.token_ids[:longest].tobytes(), rollout)
        return by_tokens

    def provenance(self) -> dict[str, Any]:
        facts = super().provenance()
        facts["notes"] = [*facts["notes"], *self.notes_on_repeats()]
        return facts

    def notes_on_repeats(self) -> list[str]:
        """Return a note on equal sequences with other log-probabilities."""
        first: dict[bytes, Rollout] = {}
        n_different = 0
        for rollout in self.rollouts:
            other = first.setdefault(rollout.token_ids.tobytes(), rollout)
            if not np.array_equal(other.logprobs, rollout.logprobs, equal_nan=True):
                n_different += 1
        if not n_different:
            return []
        return [
            f"{n_different:,} of {len(self.rollouts):,} sequences repeat the tokens of an earlier "
            "one with other log-probabilities; this row has those of the first"
        ]
