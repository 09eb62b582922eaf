"""Compare samples of new models with the reference's, by task, filter and metric; refuse what
cannot be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...backends.common.errors import InputError
from ...backends.common.message_text import amount, nearest, printable
from ..stats import flip_statistics
from ..stats.flip_statistics import Accuracy, Equivalence, Flips
from .sample_files import RunFiles
from .samples import HASHES, Sample, TaskSamples, read

PARTS = {"doc_hash": "documents", "prompt_hash": "prompts", "target_hash": "right answers"}
"""The object that a hash identifies."""
WHY = {
    "doc_hash": "the versions of the task or of its data differ",
    "prompt_hash": "the examples, the chat template or the system prompt differ",
    "target_hash": "the versions of the task differ",
}
OUTCOMES = {"equivalent": "yes", "undecided": "not shown", "different": "no"}
"""The result of the test of equality within the margin, in words."""
RIGHT = (0, 1)
"""Values of a metric that counts right answers."""


@dataclass(frozen=True)
class Selection:
    """The parts to compare; everything if empty.  ``margin``: of equivalence, a share; None without
    one.
    """

    tasks: Collection[str] = ()
    metrics: Collection[str] = ()
    margin: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A new model's answers to one task, by one filter and metric, compared with the reference's."""

    task: str
    filter: str
    metric: str
    label: str
    reference_accuracy: Accuracy
    accuracy: Accuracy
    flips: Flips
    lost_documents: tuple[int, ...]
    gained_documents: tuple[int, ...]
    equivalence: Equivalence | None = None  # None without a margin

    @property
    def metric_and_filter(self) -> str:
        """The metric, with its filter if that is not lm-eval's default."""
        return self.metric if self.filter == "none" else f"{self.metric}, {self.filter}"


@dataclass(frozen=True)
class FlipReport:
    """All comparisons of a call."""

    reference: str  # its label
    comparisons: tuple[Comparison, ...]
    absent: tuple[
        tuple[str, str], ...
    ] = ()  # (label, task) of a new model that has no samples of the task
    notes: tuple[str, ...] = ()


def compare(reference: RunFiles, others: Sequence[RunFiles], selection: Selection) -> FlipReport:
    """Return all comparisons; InputError for samples that cannot be compared."""
    tasks = tasks_of(reference, others, selection.tasks)
    comparisons: list[Comparison] = []
    absent = []
    notes = [*reference.notes, *(note for other in others for note in other.notes)]
    for task in tasks:
        asked = read(task, reference.tasks[task])
        if asked.is_sampled:
            notes.append(
                f"{task}: answers were drawn at random (do_sample or temperature), so that flips are also chance"
            )
        for other in others:
            if task not in other.tasks:
                absent.append((other.label, task))
                continue
            new = read(task, other.tasks[task])
            check_same(asked, new)
            metrics, left_out = metrics_of(asked, new, selection.metrics)
            notes += [note for note in left_out if note not in notes]
            comparisons += comparisons_of(asked, new, metrics, other.label, selection.margin)
    unread = {task for other in others for task in other.tasks} - set(reference.tasks)
    if unread and not selection.tasks:
        notes.append(
            f"not compared, since {reference.label} has no samples of them: {', '.join(sorted(unread))}"
        )
    return FlipReport(reference.label, tuple(comparisons), tuple(absent), tuple(notes))


def tasks_of(reference: RunFiles, others: Sequence[RunFiles], wanted: Collection[str]) -> list[str]:
    """Return the reference's tasks that are wanted; InputError if it lacks one, or another model
    all.
    """
    known = ", ".join(reference.tasks)
    for task in wanted:
        if task not in reference.tasks:
            near = nearest(task, reference.tasks)
            line = f"--tasks: {reference.label} has no samples of {task}{near}; it has {known}"
            raise InputError(printable(line))
    tasks = [task for task in reference.tasks if not wanted or task in wanted]
    for other in others:
        if not set(tasks) & other.tasks.keys():
            names = f"{', '.join(other.tasks)}, not {', '.join(tasks)}"
            raise InputError(printable(f"{other.label}: has no task of {reference.label}: {names}"))
    return tasks


def check_same(reference: TaskSamples, new: TaskSamples) -> None:
    """Raise InputError unless both have the same filters and metrics, and were asked the same."""
    where = f"{new.name}: differs from {reference.name}"
    if reference.filters.keys() != new.filters.keys():
        filters = f"{', '.join(new.filters)}, not {', '.join(reference.filters)}"
        raise InputError(f"{where}: its filters are {filters}")
    for name, documents in reference.filters.items():
        others = new.filters[name]
        check_documents(documents, others, reference.name, new.name)
        for at, sample in documents.items():
            if others[at].values.keys() != sample.values.keys():
                metrics = f"{', '.join(others[at].values)}, not {', '.join(sample.values)}"
                raise InputError(f"{where}: its metrics are {metrics}")
        for place, key in enumerate(HASHES):
            changed = [
                at
                for at, sample in documents.items()
                if sample.hashes[place] != others[at].hashes[place]
            ]
            check_none(changed, len(documents), where, PARTS[key], WHY[key])
        changed = [at for at, sample in documents.items() if sample.requests != others[at].requests]
        check_none(
            changed,
            len(documents),
            where,
            "requests",
            "the possible answers or the options of generation differ",
        )


def check_documents(
    reference: Mapping[int, Sample], new: Mapping[int, Sample], reference_name: str, new_name: str
) -> None:
    """Raise InputError unless both have the same documents."""
    for documents, others, name in ((reference, new, new_name), (new, reference, reference_name)):
        lacking = documents.keys() - others.keys()
        if lacking:
            count = f"{len(lacking):,} of {amount(len(documents), 'document')}"
            raise InputError(
                f"{name}: lacks {count}, such as {min(lacking):,}; was it run with --limit?"
            )


def check_none(changed: Sequence[int], count: int, where: str, parts: str, why: str) -> None:
    """Raise InputError if the parts of some documents differ."""
    if changed:
        example = f"such as that of document {min(changed):,}"
        raise InputError(f"{where} in {len(changed):,} of {count:,} {parts}, {example}: {why}")


def metrics_of(
    reference: TaskSamples, new: TaskSamples, wanted: Collection[str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return ((filter, metric) of each metric that is 0 or 1 for every document, notes on the
    others).

    InputError if a wanted metric is not, or if there is none.
    """
    usable = []
    notes = []
    faults = []
    for name, documents in reference.filters.items():
        for metric in next(iter(documents.values())).values:
            fault = fault_of(metric, documents, reference.name) or fault_of(
                metric, new.filters[name], new.name
            )
            if fault and metric in wanted:
                raise InputError(f"{fault}; accuracy needs a metric that is 0 or 1")
            if fault:
                faults.append(fault)
                notes.append(
                    f"{reference.task}: {metric} is left out: it does not count right answers"
                )
            elif not wanted or metric in wanted:
                usable.append((name, metric))
    if not usable and faults and not wanted:
        raise InputError(
            f"{faults[0]}; accuracy needs a metric that is 0 or 1 (--tasks chooses other tasks)"
        )
    if not usable:
        known = dict.fromkeys(
            metric
            for documents in reference.filters.values()
            for each in documents.values()
            for metric in each.values
        )
        raise InputError(
            f"--metrics: {reference.name}: has no metric of {', '.join(wanted)}; it has {', '.join(known)}"
        )
    return usable, notes


def fault_of(metric: str, documents: Mapping[int, Sample], name: str) -> str:
    """Return where a metric has another value than 0 or 1; empty if no document has one."""
    for at, sample in documents.items():
        value = sample.values[metric]
        if not isinstance(value, int | float) or value not in RIGHT:
            return f"{name}: {metric} of document {at:,} is {printable(repr(value))}"
    return ""


def comparisons_of(
    reference: TaskSamples,
    new: TaskSamples,
    metrics: Sequence[tuple[str, str]],
    label: str,
    margin: float | None,
) -> Iterator[Comparison]:
    """Yield the comparison by each filter and metric."""
    for name, metric in metrics:
        documents = sorted(reference.filters[name])
        pairs = [(reference.filters[name][at], new.filters[name][at]) for at in documents]
        before = [one.values[metric] == 1 for one, _ in pairs]
        after = [other.values[metric] == 1 for _, other in pairs]
        counts = flip_statistics.flips(before, after, other_wrong(pairs, metric))
        yield Comparison(
            task=reference.task,
            filter=name,
            metric=metric,
            label=label,
            reference_accuracy=flip_statistics.accuracy(before),
            accuracy=flip_statistics.accuracy(after),
            flips=counts,
            lost_documents=tuple(
                at for at, one, other in zip(documents, before, after, strict=True) if one > other
            ),
            gained_documents=tuple(
                at for at, one, other in zip(documents, before, after, strict=True) if one < other
            ),
            equivalence=None if margin is None else flip_statistics.equivalence(counts, margin),
        )


def other_wrong(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> int | None:
    """Return how many wrong answers became other wrong answers; None if the chosen answers are not
    known.
    """
    changed = 0
    for one, other in pairs:
        before = answer_of(one, metric)
        after = answer_of(other, metric)
        if before is None or after is None:
            return None
        if one.values[metric] == other.values[metric] == 0 and before != after:
            changed += 1
    return changed


def answer_of(sample: Sample, metric: str) -> str | int | None:
    """Return the generated text, or the number of the answer that a metric chooses; None if it is
    not known.

    The choice among possible answers is computed here as lm-eval 0.4.13 does.  If it contradicts
    the metric's value, the task chooses differently, and the answer is not known.
    """
    if sample.text is not None:
        return sample.text
    choice = sample.choices.get(metric)
    if choice is None:
        return None
    if sample.target is None:
        return choice if metric == "acc" else None
    is_right = sample.values[metric] == 1
    return choice if (choice == sample.target) == is_right else None


def values_of(comparison: Comparison) -> dict[str, Any]:
    """Return the numbers of a comparison with a name for each, as in CSV and JSON; shares from 0 to
    1.
    """
    counts = comparison.flips
    equal = comparison.equivalence
    return {
        "task": comparison.task,
        "filter": comparison.filter,
        "metric": comparison.metric,
        "label": comparison.label,
        "questions": counts.questions,
        "reference_accuracy": comparison.reference_accuracy.value,
        "reference_accuracy_stderr": comparison.reference_accuracy.stderr,
        "accuracy": comparison.accuracy.value,
        "accuracy_stderr": comparison.accuracy.stderr,
        "difference": counts.difference,
        "difference_low": counts.interval[0],
        "difference_high": counts.interval[1],
        "lost": counts.lost,
        "gained": counts.gained,
        "other_wrong": counts.other_wrong,
        "mcnemar_p": counts.mcnemar_p,
        "margin": equal and equal.margin,
        "equivalence_p": equal and equal.p,
        "outcome": equal and equal.outcome,
    }
