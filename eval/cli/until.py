"""``--until``: as few windows as the answer needs, in at most three stages (Stein, Ann. Math. Statist. 16, 1945).

A pilot of spread windows tells how much scores vary, and so how many windows the answer needs: an error falls as the
root of their number.  What was scored stays scored, since a longer run adds to the windows of a shorter one.

A row's KLD is wanted of the whole text, of which the windows are a sample: the standard error of n windows of N counts
times root(1 - n / N) (the finite population correction of Cochran, Sampling Techniques, 1977).  Rows are told apart by
their paired differences, as everywhere, in texts like this one.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compare_q.eval.results.differences import difference_or_reason, near_lossless
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.stats.estimates import n_blocks
from compare_q.eval.stats.uncertainty import n_waves, student_t

if TYPE_CHECKING:
    from compare_q.eval.run.runner import Finished

PILOT = 16
"""Windows of the first stage."""
STAGES = 3
SPARE = 1.1
"""So many times the windows that the pilot asks for: its variance is itself measured, to a third or so."""


@dataclass(frozen=True)
class Target:
    """What must be known: every row's KLD of the whole text to a ``relative`` standard error, or the order by KLD."""

    kind: Literal["kld", "ranked"]
    relative: float = 0.0

    @property
    def words(self) -> str:
        """What must be known, in words."""
        return "the order by KLD" if self.kind == "ranked" else f"the text's KLD to {100 * self.relative:.3g} %"


def target(given: str) -> Target:
    """``--until``: ``kld:2%`` or ``ranked``."""
    if given == "ranked":
        return Target("ranked")
    kind, colon, percent = given.partition(":")
    try:
        relative = float(percent.removesuffix("%")) / 100
    except ValueError:
        relative = 0.0
    if kind != "kld" or not colon or not percent.endswith("%") or not 0 < relative < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is neither kld:PERCENT%, such as kld:2%, nor ranked")
    return Target("kld", relative)


def run(wanted: Target, score: Callable[..., Finished], say: Callable[[str], None]) -> Finished:
    """Score stage after stage until the answer is known, or the text used up.

    ``score``: a run of so many windows, ``again`` after an earlier stage.
    """
    rows = PILOT
    for stage in range(1, STAGES + 1):
        finished = score(rows, again=stage > 1)
        done, available = sizes(finished)
        takes = max((needed(wanted, text, done, available) for text in finished.results.scored), default=0)
        if finished.signal or takes <= done or done == available or stage == STAGES:
            break
        rows = math.ceil(min(takes * SPARE, available))
        say(f"after {done:,} windows: {rows:,} of the text's {available:,} will do")
    say(
        f"{wanted.words} {'is' if takes <= done else 'is not'} known after {done:,} of the text's {available:,} windows"
    )
    return finished


def sizes(finished: Finished) -> tuple[int, int]:
    """(windows that were scored, windows of the text); of several texts, of the one that has the most."""
    data = [each for each in finished.data if each is not None]
    return max(len(each.windows) for each in data), max(each.available for each in data)


def needed(wanted: Target, text: TextResult, done: int, available: int) -> float:
    """How many windows the answer takes, by what ``done`` of the text's ``available`` ones have shown; infinite where
    no number of them would do."""
    rows = [model for model in text.models if model.kld and model.kld.value and not model.is_reference]
    if text.is_answers:
        return 0
    if wanted.kind == "kld":
        errors = [kld.stderr / kld.value for model in rows if (kld := model.kld) and kld.value and kld.stderr]
        alone = max((done * (error / wanted.relative) ** 2 for error in errors), default=0.0)
        return alone / (1 + alone / available)  # a sample of the text: what is left out falls to nothing at its end
    near = near_lossless(text.models)
    ranked = sorted(rows, key=lambda model: model.mean_kld or 0.0)
    pairs = [pair for pair in itertools.pairwise(ranked) if not {model.label for model in pair} <= near]
    return max((done * told_apart(*pair) for pair in pairs), default=0.0)


def told_apart(a: ModelResult, b: ModelResult) -> float:
    """How many times the windows so far it takes to tell two rows apart at 95 %; 0 if they cannot be compared."""
    found = difference_or_reason(a, b, "kld")
    if isinstance(found, str) or found.stderr is None or a.estimates is None:
        return 0.0
    reach = student_t(n_waves(n_blocks(a.estimates.blocks), a.estimates.blocks.length)) * found.stderr
    return (reach / found.value) ** 2 if found.value else math.inf
