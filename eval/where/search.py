"""Find the shares of the parts of a quantized model in stages.

In each stage, every part that has not stopped is scored in further windows.  A part stops when its
share is certainly small (``shares.small_parts``), or when its KLD is not finite in a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...backends.base import Trial, Window
from ...backends.common.message_text import amount
from . import parts, shares
from .parts import Part
from .recipe import FULL_BITS, Target
from .results import Measured, PartRow
from .shares import Array
from .trial_runner import TrialRunner

WHOLE = Trial(())
"""The quantized model itself."""


@dataclass(frozen=True)
class Question:
    """The values of ``--by``, ``--only``, ``--recipe`` and ``--keep-bits``."""

    by: str = parts.LAYER
    only: bool = False
    targets: tuple[Target, ...] = ()
    keep_bits: int = FULL_BITS

    def trial_of(self, part: Part) -> Trial:
        """Return the trial that shows the share of a part."""
        if self.only:
            return Trial(part.module_names, "reference")
        return Trial(part.module_names)


@dataclass(frozen=True)
class Sums:
    """Sums over the scored tokens of each window [n].

    ``klds``: nats; None if one is not known, for this ``reason``.
    """

    tokens: Array
    klds: Array | None
    reason: str = ""


@dataclass
class Search:
    """A search.

    ``windows``: in the order of the text; ``length``: tokens of the text, for errors;
    ``windows_of``: name of a part -> numbers of the windows in which it was scored.
    """

    runner: TrialRunner
    windows: Sequence[Window]
    length: int
    parts: Sequence[Part]
    question: Question
    windows_of: dict[str, list[int]] = field(default_factory=dict)

    def score_parts(self) -> None:
        """Score all parts in stages, until all have stopped or all windows are used."""
        running = list(self.parts)
        numbers: list[int] = []
        waiting = shares.stages(len(self.windows))
        while waiting and running:
            trials = [WHOLE, *(self.question.trial_of(part) for part in running)]
            remaining = [number for stage in waiting for number in stage]
            self.runner.expect(self.runner.n_missing(trials, self.selected(remaining)))
            stage = waiting.pop(0)
            self.runner.score(trials, self.selected(stage))
            numbers = sorted([*numbers, *stage])
            for part in running:
                self.windows_of[part.name] = numbers
            running = self.still_running(running, numbers)
        # Parts may stop before the last stage; the whole KLD is of all windows.
        self.score_whole([WHOLE])

    def score_whole(self, trials: Sequence[Trial]) -> None:
        """Score trials in all windows."""
        self.runner.expect(self.runner.n_missing(trials, self.windows))
        self.runner.score(trials, self.windows)

    def selected(self, numbers: Sequence[int]) -> list[Window]:
        """Return the windows of these numbers."""
        return [self.windows[number] for number in numbers]

    def still_running(self, running: Sequence[Part], numbers: Sequence[int]) -> list[Part]:
        """Return the parts that need more windows than these."""
        whole = self.sums(WHOLE, numbers)
        sums = {}
        for part in running:
            share = self.share_sums(part, numbers)
            if share.klds is not None:
                sums[part.name] = share.klds
        small: set[str] = set()
        # With ``only``, shares are known without the whole KLD.
        if whole.klds is not None:
            small = shares.small_parts(sums, whole.klds)
        return [part for part in running if part.name in sums and part.name not in small]

    def sums(self, trial: Trial, numbers: Sequence[int]) -> Sums:
        """Return the sums of the KLD of a trial in windows, which must be scored."""
        klds = []
        tokens = []
        n_unknown = 0
        for window in self.selected(numbers):
            score = self.runner.score_of(trial, window)
            klds.append(score.kld)
            tokens.append(float(score.tokens))
            if not score.is_known:
                n_unknown += 1
        if n_unknown:
            windows = f"{n_unknown:,} of {amount(len(klds), 'window')}"
            return Sums(np.array(tokens), None, f"the KLD of tokens in {windows} is not finite")
        return Sums(np.array(tokens), np.array(klds))

    def share_sums(self, part: Part, numbers: Sequence[int]) -> Sums:
        """Return the sums of the share of a part in windows."""
        of_trial = self.sums(self.question.trial_of(part), numbers)
        if self.question.only or of_trial.klds is None:
            return of_trial
        whole = self.sums(WHOLE, numbers)
        if whole.klds is None:
            return Sums(whole.tokens, None, f"in the quantized model, {whole.reason}")
        return Sums(whole.tokens, whole.klds - of_trial.klds)

    def measured(self, sums: Sums) -> Measured | None:
        """Return the mean over scored tokens; None if it is not known."""
        if sums.klds is None:
            return None
        return Measured.of(shares.estimate(sums.klds, sums.tokens, self.length))

    def row_of(self, part: Part) -> PartRow:
        """Return the row of a part."""
        numbers = self.windows_of[part.name]
        share = self.share_sums(part, numbers)
        whole = self.sums(WHOLE, numbers)
        percent = None
        if share.klds is not None and whole.klds is not None and whole.klds.sum() > 0:
            ratio = shares.estimate(100 * share.klds, whole.klds, self.length)
            percent = Measured.of(ratio)
        return PartRow(
            name=part.name,
            kind=part.kind,
            layer=part.layer,
            modules=part.module_names,
            n_weights=part.n_weights,
            bits=float(part.bits),
            reference_bits=float(part.reference_bits),
            share=self.measured(share),
            percent=percent,
            kld=self.kld_of(part, share),
            windows=len(numbers),
            stopped=share.klds is not None and len(numbers) < len(self.windows),
            reason=share.reason,
        )

    def kld_of(self, part: Part, share: Sums) -> Measured | None:
        """Return the KLD of a part's trial in all windows; ``share``: the sums of its share.

        If the part stopped, it is the whole KLD minus the share, without an error.
        """
        if share.klds is None:
            return None
        if self.question.only:
            return self.measured(share)
        numbers = self.windows_of[part.name]
        if len(numbers) == len(self.windows):
            return self.measured(self.sums(self.question.trial_of(part), numbers))
        whole = self.measured(self.sums(WHOLE, range(len(self.windows))))
        stopped = self.measured(share)
        if whole is None or stopped is None:
            return None
        return Measured(value=whole.value - stopped.value)
