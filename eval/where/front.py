"""Restore the parts of a greedy order together: the KLD that is left with the first 1, 2, 3, ..."""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.base import Trial
from . import recipe, shares
from .recipe import FULL_BITS, KeptPart
from .results import FrontRow, Measured, Module, PartRow
from .search import WHOLE, Search, Sums


class Front:
    """The prefixes of the greedy order of a search, whose parts have been scored.

    ``modules``: all of the model; ``counts``: numbers of parts that were scored together.
    """

    def __init__(self, search: Search, rows: Sequence[PartRow], modules: Sequence[Module]) -> None:
        self.search = search
        self.part_rows = rows
        self.modules = modules
        self.order = recipe.greedy_order(rows, modules, FULL_BITS)
        self.counts: set[int] = set()

    def score_spread(self) -> None:
        """Score the prefixes that are spread over the front, all at once."""
        has_recipes = bool(self.search.question.targets)
        self.score(recipe.spread_counts(len(self.order), has_recipes=has_recipes))

    def score(self, counts: Sequence[int]) -> None:
        """Score the prefixes of these numbers of parts in all windows."""
        self.search.score_whole([self.trial_of(count) for count in counts])
        self.counts.update(counts)

    def trial_of(self, count: int) -> Trial:
        """Return the trial of the quantized model with the first parts restored."""
        names: list[str] = []
        for part in self.order[:count]:
            names += part.row.modules
        return Trial(tuple(names))

    def kld_of(self, count: int) -> float | None:
        """Return the KLD with the first parts restored, scored if it was not; None: not known."""
        if count not in self.counts:
            self.score([count])
        measured = self.measured(count)
        if measured is None:
            return None
        return measured.value

    def measured(self, count: int) -> Measured | None:
        """Return the KLD of a scored prefix; None if it is not known."""
        return self.search.measured(self.sums(count))

    def sums(self, count: int) -> Sums:
        """Return the sums of the KLD of a scored prefix in all windows."""
        return self.search.sums(self.trial_of(count), self.all_windows)

    @property
    def all_windows(self) -> range:
        """The numbers of all windows."""
        return range(len(self.search.windows))

    def rows(self) -> list[FrontRow]:
        """Return a row for each number of parts that was scored, the smallest first."""
        rows = []
        for count in sorted(self.counts - {0}):
            kept = self.order[:count]
            rows.append(
                FrontRow(
                    parts=tuple(part.row.name for part in kept),
                    kld=self.measured(count),
                    forecast=self.forecast(kept),
                    bits=self.bits(kept),
                    reason=self.sums(count).reason,
                )
            )
        return rows

    def bits(self, kept: Sequence[KeptPart]) -> float:
        """Return the stored bits of all modules if these parts are kept."""
        bits = sum(module.bits for module in self.modules)
        return float(bits + sum(part.bits for part in kept))

    def forecast(self, kept: Sequence[KeptPart]) -> Measured | None:
        """Return the whole KLD minus what vanishes of the shares; None if it is not known.

        It has no error if a part was not scored in all windows.
        """
        whole = self.search.sums(WHOLE, self.all_windows)
        if whole.klds is None:
            return None
        numbers_of = self.search.windows_of
        if any(len(numbers_of[part.row.name]) < len(self.all_windows) for part in kept):
            value = shares.estimate(whole.klds, whole.tokens, self.search.length).value
            return Measured(value=value - sum(part.gain for part in kept))
        by_name = {part.name: part for part in self.search.parts}
        left = whole.klds
        for part in kept:
            share = self.search.share_sums(by_name[part.row.name], self.all_windows)
            assert share.klds is not None
            left = left - part.fraction * share.klds
        return self.search.measured(Sums(whole.tokens, left))
