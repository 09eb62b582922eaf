"""``--until kld:2%``: score as many spread windows as the answer needs, in two stages (Stein 1945).

The first stage scores ``PILOT`` windows of each text.  The variance between these windows shows how many windows the
second stage must add.  The answer is known when the standard error of every row's KLD, as an estimate of the KLD of all
windows of the text, is within the given percentage (``eval.stats.uncertainty.sampling_error``).  Rows whose KLD is
only rounding would need more windows than a text has: ``ranking.worst_kld`` decides which rows count, and how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from compare_q.backends.common.errors import InputError
from compare_q.eval import ranking
from compare_q.eval.results import TextResult
from compare_q.eval.specs.types import DataSpec, ModelSpec

if TYPE_CHECKING:
    from compare_q.eval.run.config import RunConfig
    from compare_q.eval.run.runner import RunOutcome

PILOT = 16
"""Windows of the first stage."""
SPARE = 1.1
"""Factor on the pilot's number of windows, because its estimate of the variance is off by up to a third."""
DEFAULT = 0.02
"""Default relative standard error, for models and texts without spec files."""
ROWS = 64
"""Number of windows of such a run if it has no reference."""


def settled(
    asked: float | None, texts: Mapping[str, DataSpec], *, reference: bool
) -> tuple[float | None, dict[str, DataSpec]]:
    """Return (the relative error to reach, the texts by name); texts whose windows ``run`` chooses have no max_rows.

    If ``asked`` is None, the default applies to spread texts without a max_rows.  InputError if no model is the
    reference, or if a text's windows are not a sample of the text.
    """
    spread = {name for name, spec in texts.items() if spec.sample == "spread" and (asked or spec.max_rows is None)}
    rows = dict.fromkeys(spread, None if reference else ROWS)
    sized = sized_to(texts, rows)
    if asked is None:
        return DEFAULT if reference and spread else None, sized
    if not reference:
        raise InputError("--until: needs a reference for KL divergence; mark one, or give -r instead")
    first = [name for name, spec in texts.items() if name not in spread and not spec.is_chat]
    if first:
        raise InputError(f"--until: {', '.join(sorted(first))}: its first windows say little of the whole text; "
                         'add "sample": "spread" to the data spec, or give -r instead of --until')  # fmt: skip
    if not spread:
        raise InputError("--until: is for texts that are cut into windows; give -r for conversations")
    return asked, sized


def sized_to(texts: Mapping[str, DataSpec], rows: Mapping[str, int | None]) -> dict[str, DataSpec]:
    """Return the texts by name, each with its number of windows if ``rows`` has it."""
    changes = {name: {"max_rows": rows[name]} if name in rows else {} for name in texts}
    return {name: spec.model_copy(update=changes[name]) for name, spec in texts.items()}


def run(config: RunConfig, wanted: float, texts: Mapping[str, DataSpec], models: Sequence[ModelSpec]) -> RunOutcome:
    """Return the outcome of the last of at most two runs; print the precision of the KLDs after each.

    ``wanted``: the relative standard error.  Texts whose windows are not spread are scored as their specs say.
    """
    from compare_q.eval.run import runner

    counts = {name: PILOT for name, spec in texts.items() if spec.sample == "spread" and spec.max_rows is None}
    for is_last in (False, True):
        done = runner.run(replace(config, clear=config.clear and not is_last), sized_to(texts, counts), models)
        more = {}
        for text, data in zip(done.results.texts, done.data, strict=True):
            if data is None or text.error or text.name not in counts or done.signal:
                continue
            scored = len(data.windows)
            needed, words = windows_needed(text, wanted, scored, data.available)
            if needed > scored:
                more[text.name] = needed
                words += f"; it takes about {needed:,} (-r {needed})" if is_last else f"; {needed:,} windows will do"
            else:
                words += ranking.rest_in_words(text)
            title = f"{text.name}: " if len(texts) > 1 else ""
            config.progress.say(f"{title}after {scored:,} of the text's {data.available:,} windows {words}")
        if not more:
            break
        counts |= more
    return done


def windows_needed(text: TextResult, wanted: float, done: int, available: int) -> tuple[int, str]:
    """Return (the number of windows that the answer needs in all, the precision of the KLDs in words).

    The square of the error of n windows of N is proportional to 1 / n - 1 / N.
    """
    worst = ranking.worst_kld(text)
    if worst is None or done == available:
        return done, "no row has a KLD" if worst is None else "the whole text was scored"
    known = f"the whole text's KLD of every {worst.rows} is known to {100 * worst.error:.2g} % or better"
    if worst.error <= wanted:
        return done, known
    ratio = (wanted / worst.error) ** 2
    takes = 1 / (ratio / done + (1 - ratio) / available)
    needed = math.ceil(min(takes * SPARE, available))
    return needed, f"{worst.label} has no error of its KLD" if math.isinf(worst.error) else known
