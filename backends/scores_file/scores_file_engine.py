"""A file of scores as a model: log-probabilities that another engine's script has written.

``format.py`` describes the file.  Nothing is computed again: the perplexity is that of the file,
and its KL divergence is exact, an estimate or a bound, by what the file has (``file_kld.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import (
    Capabilities,
    ModelFacts,
    ScoreRequest,
    TokenScores,
    Window,
)
from ..common.errors import ModelError
from ..common.message_text import amount
from ..reference.outside_tokens import OutsideTokens
from ..reference.store import open_reference
from ..reference.stored_logprobs import StoredLogprobs
from . import file_kld, format, known_entries
from .format import SCORES, ScoresHeader, WindowScores
from .kept_lines import lines_of
from .row_file import RowFile, RowFileEngine

KLD_VERSION = 2
"""Version of ``file_kld.py``; raise it when a KLD of the same file changes."""


class ScoresFiles(RowFile):
    """A file of scores before it is read as a whole."""

    def facts(self) -> ModelFacts:
        text = format.read_header(self.file).text
        if text is None:
            return ModelFacts()
        # One-line calls cut windows of this length.
        return ModelFacts(context=text.longest)

    def stamp(self) -> str:
        return f"{super().stamp()} {KLD_VERSION}"


class ScoresFileEngine(RowFileEngine):
    """One file of scores."""

    capabilities = Capabilities(
        load_fns=("scores_file",),
        fwd_fn="scores_file",
        packages=("torch",),
        install="pip install torch",
        summary="log-probabilities that a script of any other engine has written into a file",
        reference=False,
        kinds=(SCORES,),
    )
    files = ScoresFiles

    header: ScoresHeader
    outside_tokens: OutsideTokens | None = None  # of the run that scores now

    @classmethod
    def lines(cls, file: Path) -> Iterable[WindowScores]:
        return lines_of(format.read_scores, file)

    def load(self) -> None:
        self.header = format.read_header(self.file)
        self.windows: dict[str, WindowScores] = {}
        for scores in self.lines(self.file):
            self.windows[scores.window] = scores
        self.n_ranked = file_kld.n_ranked_of(self.windows.values())
        self.check_stamp()

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window; ModelError if the file lacks some."""
        pairs = self.pairs(windows)
        for window, scores in pairs:
            known_entries.check_targets(window, scores, str(self.file))
        reference = None
        self.outside_tokens = None
        has_entries = any(file_kld.has_entries(scores) for _, scores in pairs)
        if request.reference is not None and has_entries:
            reference = StoredLogprobs(open_reference(request.reference))
            self.outside_tokens = OutsideTokens(reference.vocab_size)
        for window, scores in pairs:
            yield self.scores_of(window, scores, reference)

    def scores_of(
        self, window: Window, scores: WindowScores, reference: StoredLogprobs | None
    ) -> TokenScores:
        """Return the scores of a window; without a KLD if ``reference`` is None."""
        if reference is None:
            return file_kld.alone(window, scores)
        if self.outside_tokens is not None:
            self.outside_tokens.add(scores.top)
        divergence = file_kld.divergence_of(window, scores, reference.store, self.n_ranked)
        return file_kld.compared(window, scores, reference, divergence)

    def provenance(self) -> dict[str, Any]:
        facts = super().provenance()
        if self.outside_tokens is not None:
            facts["notes"] = [*facts["notes"], *self.outside_tokens.notes()]
        return facts

    def pairs(self, windows: Sequence[Window]) -> list[tuple[Window, WindowScores]]:
        """Return each window with its scores; ModelError if the file lacks some."""
        pairs: list[tuple[Window, WindowScores]] = []
        missing: list[int] = []
        for window in windows:
            # An engine elsewhere does not know which windows must be computed alone.
            digest = replace(window, is_single=False).digest
            scores = self.windows.get(digest)
            if scores is None:
                missing.append(window.index)
            else:
                pairs.append((window, scores))
        if missing and not pairs:
            raise ModelError(f"{self.file}: has other windows than this run{self.text_in_words()}")
        if missing:
            raise self.lacks(missing, len(windows), "score all lines of the file of windows")
        return pairs

    def text_in_words(self) -> str:
        """Return which windows the file was made for, and what to do."""
        advice = "give text, tokenizer, --eval-len and -r the values that `compare-q windows` had"
        text = self.header.text
        if text is None:
            return f"; {advice}"
        windows = amount(text.windows, "window")
        names = ", ".join(text.names)
        return f": it was made for {windows} of up to {text.longest:,} tokens of {names}; {advice}"
