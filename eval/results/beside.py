"""What ran beside a row while it was scored: a speed beside another model is not the speed of a model alone."""

from __future__ import annotations

from eval.results.run_result import ModelResult, RunResult, StoredRun
from eval.results.timing import shared_seconds

LEAST = 0.01
"""Share of a row's seconds from which something counts as beside it: less than a hundredth slows by less."""


def words_beside(model: ModelResult, run: RunResult) -> str:
    """The rows of the run that loaded, or were scored, on the model's machine while it was scored, each with the share
    of the model's seconds; empty if none did, or if it is not known when the rows ran.

    A row from the cache is compared with the others at the time at which it was scored.
    """
    if model.timing is None:
        return ""
    mine, seconds, found = model.timing.scored, model.timing.scoring_seconds, []
    for other in run.models:
        if other is model or other.timing is None:
            continue
        for what, span in (("scored", other.timing.scored), ("loading", other.timing.load)):
            share = shared_seconds(mine, span) / seconds
            if share >= LEAST and on_one_machine(model, other, run):
                found.append(f"{other.label} {what} {100 * share:.0f} %")
    return ", ".join(found)


def on_one_machine(one: ModelResult, other: ModelResult, run: RunResult) -> bool:
    """Whether two rows ran on one machine, by its name, and in one run where several were merged.

    llama.cpp names the CPU behind the GPUs, where other engines name GPUs alone.
    """
    parts = run.parts if isinstance(run, StoredRun) else ()
    apart = any((one.label in part.labels) != (other.label in part.labels) for part in parts)
    fewer, more = sorted((set(each.where.split(", ")) for each in (one, other)), key=len)
    return fewer <= more and not apart
