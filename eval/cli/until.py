"""``--until``: as few windows as the answer needs, in at most three stages (Stein, Ann. Math. Statist. 16, 1945).

A pilot of spread windows tells how much scores vary, and so how many windows the answer needs.  What was scored stays
scored, since a longer run adds to the windows of a shorter one.  Every text has its own number of windows.

``kld:2%``: the KLD that all windows of the text would give is known to a standard error of 2 % in every row
(``eval.stats.uncertainty.sampling_error``).  ``ranked``: rows that are neighbours by KLD are told apart by their paired
differences, as everywhere, in texts like this one.  A row that is as near to the reference as roundings are would use
up any text: a KLD up to ``eval.results.sampled.least_kld`` counts as that one, two such rows have no order, and rows
that are not quantized are not asked for beside others that are (``eval.results.sampled.compared``).
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest
from compare_q.eval.results import sampled
from compare_q.eval.results.differences import Difference, difference_or_reason
from compare_q.eval.results.run_result import TextResult
from compare_q.eval.specs.types import DataSpec

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


DEFAULT = Target("kld", 0.02)
"""Of models and texts that are named without specs."""
ROWS = 64
"""Windows of such a run that has no reference."""


@dataclass(frozen=True)
class Known:
    """What a stage has shown of a text: how many windows were ``done`` of those ``available``, and how many the answer
    ``takes`` by what they say, infinitely many where no number would do.

    ``words``: how well it is known; ``rest``: what all windows would have cost beyond these.
    """

    done: int
    available: int
    takes: float
    words: str = ""
    rest: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether no further window is needed, or none is left."""
        return self.takes <= self.done or self.done >= self.available

    @property
    def next_count(self) -> int:
        """Windows of the next stage."""
        return math.ceil(min(self.takes * SPARE, self.available))


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
        near = nearest(given, {"ranked", re.sub(r"\D*([\d.]+).*", r"kld:\1%", given)} - {given})
        raise argparse.ArgumentTypeError(f"{given!r} is neither kld:PERCENT%, such as kld:2%, nor ranked{near}")
    return Target("kld", relative)


def settled(
    asked: Target | None, texts: Mapping[str, DataSpec], *, reference: bool
) -> tuple[Target | None, dict[str, DataSpec]]:
    """What must be known, and the texts by their names; those whose windows it decides have no ``max_rows``.

    Where nothing was ``asked``, the default, of spread windows without a ``max_rows``.  InputError for what cannot be
    answered: without a reference, or from windows that are no sample.
    """
    spread = {name for name, spec in texts.items() if spec.sample == "spread" and (asked or spec.max_rows is None)}
    if asked is None and not reference:
        return None, {name: sized_to(spec, ROWS) if name in spread else spec for name, spec in texts.items()}
    if not reference:
        raise InputError("--until: is about KL divergence from a reference, and there is none; give -r in its place")
    documents = {name for name, spec in texts.items() if spec.is_chat or spec.is_answers}
    if asked and (first := texts.keys() - spread - documents):
        raise InputError(
            f"--until: {', '.join(sorted(first))}: a run takes the first windows, which say little of the whole text; "
            'add "sample": "spread" to the data spec, or give -r in place of --until'
        )
    if asked and not spread:
        raise InputError("--until: is for texts that are cut into windows; of conversations and questions give -r")
    sized = {name: sized_to(spec, None) if name in spread else spec for name, spec in texts.items()}
    return (asked or DEFAULT) if spread else None, sized


def in_stages(texts: Sequence[str], score: Callable[[Mapping[str, int]], Mapping[str, Known]]) -> None:
    """Score more and more windows of each text until the answer is known of all, at most ``STAGES`` times.

    ``score``: scores so many windows of each text, and says what is known then; a text of which it says nothing is
    left as it is.
    """
    counts = dict.fromkeys(texts, PILOT)
    for _ in range(STAGES):
        more = {name: known.next_count for name, known in score(counts).items() if not known.is_enough}
        if not more:
            break
        counts |= more


def run(
    wanted: Target, texts: Mapping[str, DataSpec], score: Callable[..., Finished], say: Callable[[str], None]
) -> Finished:
    """The last of the runs that it takes until the answer is known; texts whose windows are not spread are scored as
    their specs say.

    ``score``: a run of these texts, ``again`` after an earlier one.
    """
    stages: list[Finished] = []

    def stage(counts: Mapping[str, int]) -> dict[str, Known]:
        sized = {name: sized_to(spec, counts[name]) if name in counts else spec for name, spec in texts.items()}
        stages.append(score(sized, again=bool(stages)))
        if stages[-1].signal:
            return {}
        known = what_is_known(wanted, stages[-1], counts)
        for name, each in known.items():
            say((f"{name}: " if len(texts) > 1 else "") + in_words(each, is_last=len(stages) == STAGES))
        return known

    in_stages([name for name, spec in texts.items() if spec.sample == "spread" and spec.max_rows is None], stage)
    return stages[-1]


def sized_to(spec: DataSpec, windows: int | None) -> DataSpec:
    """The spec with so many windows; None: with no number."""
    return spec.model_copy(update={"max_rows": windows})


def in_words(known: Known, *, is_last: bool) -> str:
    """What was found after a stage, and what comes next, in a line."""
    found = f"after {known.done:,} of the text's {known.available:,} windows {known.words}"
    if known.is_enough:
        return found + known.rest
    count = known.next_count
    return f"{found}; it takes about {count:,} (-r {count})" if is_last else f"{found}; {count:,} windows will do"


def what_is_known(wanted: Target, finished: Finished, names: Mapping[str, int]) -> dict[str, Known]:
    """What a run has shown of the texts of these names; nothing of a text that failed."""
    judge = klds if wanted.kind == "kld" else order
    known = {}
    for text, data in zip(finished.results.texts, finished.data, strict=True):
        if data is not None and text.name in names and not text.error:
            found = judge(wanted, text, len(data.windows), data.available)
            known[text.name] = replace(found, rest=sampled.rest_in_words(text))
    return known


def klds(wanted: Target, text: TextResult, done: int, available: int) -> Known:
    """How well the KLDs of the whole text are known."""
    worst = sampled.worst_kld(text)
    if worst is None or done == available:
        return Known(done, available, 0, "no row has a KLD" if worst is None else "the whole text was scored")
    takes = windows_for(worst.error, wanted.relative, done, available)
    words = (
        f"the whole text's KLD of every {sampled.kind_of_rows(text)} is known to {100 * worst.error:.2g} % or better"
    )
    if math.isinf(worst.error):
        words = f"{worst.label} has no error of its KLD"
    return Known(done, available, takes, words)


def windows_for(error: float, wanted: float, done: int, available: int) -> float:
    """How many of the ``available`` windows it takes for a standard error of ``wanted``, where ``done`` have ``error``.

    The square of the error of n windows of N goes as 1 / n - 1 / N.
    """
    if error <= wanted:
        return min(done, available)
    ratio = (wanted / error) ** 2
    return 1 / (ratio / done + (1 - ratio) / available)


def order(_: Target, text: TextResult, done: int, available: int) -> Known:
    """How well neighbours by KLD are told apart."""
    rows, least = sampled.compared(text), sampled.least_kld(text)
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if (b.mean_kld or 0.0) > least]
    found = {f"{a.label} and {b.label}": difference_or_reason(a, b, "kld") for a, b in pairs}
    times = {labels: times_as_many(each) for labels, each in found.items() if isinstance(each, Difference)}
    words = [f"{labels} cannot be compared ({each})" for labels, each in found.items() if isinstance(each, str)]
    words += [f"{labels} are not told apart by KLD" for labels, ratio in times.items() if ratio > 1]
    known = ", ".join(words) or f"every row is told apart from the next one by KLD (pairs: {len(pairs)})"
    return Known(done, available, done * max(times.values(), default=0.0), known)


def times_as_many(found: Difference) -> float:
    """How many times the windows so far it takes until 0 is outside the 95 % interval of a difference."""
    if found.limits is None or not found.value:
        return math.inf
    return ((found.limits[1] - found.limits[0]) / 2 / found.value) ** 2
