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
from .samples import HASHES, Sample, TaskSamples, read_samples

PARTS = {"doc_hash": "documents", "prompt_hash": "prompts", "target_hash": "right answers"}
"""The objects that a hash identifies."""
REASONS = {
    "doc_hash": "the versions of the task or of its data differ",
    "prompt_hash": "the examples, the chat template or the system prompt differ",
    "target_hash": "the versions of the task differ",
}
"""Why these objects may differ."""
OUTCOMES = {"equivalent": "yes", "undecided": "not shown", "different": "no"}
"""The result of the test of equality within the margin, in words."""
RIGHT_OR_WRONG = (1, 0)
"""Values of a metric that counts right answers."""
FilterAndMetric = tuple[str, str]


@dataclass(frozen=True)
class Selection:
    """The parts to compare; everything if empty.

    ``margin``: of equivalence, a share; None without one.
    """

    tasks: Collection[str] = ()
    metrics: Collection[str] = ()
    margin: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A new model's answers to one task, by one filter and metric, compared with the reference's.

    ``equivalence`` is None without a margin.
    """

    task: str
    filter: str
    metric: str
    label: str
    reference_accuracy: Accuracy
    accuracy: Accuracy
    flips: Flips
    lost_documents: tuple[int, ...]
    gained_documents: tuple[int, ...]
    equivalence: Equivalence | None = None

    @property
    def metric_and_filter(self) -> str:
        """The metric, with its filter if that is not lm-eval's default."""
        if self.filter == "none":
            return self.metric
        return f"{self.metric}, {self.filter}"


@dataclass(frozen=True)
class FlipReport:
    """All comparisons of a call.

    ``reference``: its label; ``absent``: (label, task) of a new model that has no samples of the
    task.
    """

    reference: str
    comparisons: tuple[Comparison, ...]
    absent: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def compare(reference: RunFiles, others: Sequence[RunFiles], selection: Selection) -> FlipReport:
    """Return all comparisons; InputError for samples that cannot be compared."""
    tasks = tasks_of(reference, others, selection.tasks)
    comparisons: list[Comparison] = []
    absent = []
    notes = list(reference.notes)
    for other in others:
        notes += other.notes
    for task in tasks:
        reference_samples = read_samples(task, reference.tasks[task])
        if reference_samples.is_sampled:
            notes.append(
                f"{task}: answers were drawn at random (do_sample or temperature), so that flips "
                "are also chance"
            )
        for other in others:
            if task not in other.tasks:
                absent.append((other.label, task))
                continue
            samples = read_samples(task, other.tasks[task])
            check_same(reference_samples, samples)
            metrics, notes_on_metrics = metrics_of(reference_samples, samples, selection.metrics)
            # Each new model has the same note.
            notes += [note for note in notes_on_metrics if note not in notes]
            comparisons += comparisons_of(
                reference_samples, samples, metrics, other.label, selection.margin
            )
    if not selection.tasks:
        notes += notes_on_unread_tasks(reference, others)
    return FlipReport(reference.label, tuple(comparisons), tuple(absent), tuple(notes))


def tasks_of(
    reference: RunFiles, others: Sequence[RunFiles], requested: Collection[str]
) -> list[str]:
    """Return the reference's tasks that are requested, or all.

    InputError if the reference lacks a requested task, or if another model lacks all tasks.
    """
    for task in requested:
        if task not in reference.tasks:
            hint = nearest(task, reference.tasks)
            choices = ", ".join(reference.tasks)
            fault = f"{reference.label} has no samples of {task}{hint}; it has {choices}"
            raise InputError(printable(f"--tasks: {fault}"))
    tasks = [task for task in reference.tasks if not requested or task in requested]
    for other in others:
        if not set(tasks) & other.tasks.keys():
            names = f"{', '.join(other.tasks)}, not {', '.join(tasks)}"
            raise InputError(printable(f"{other.label}: has no task of {reference.label}: {names}"))
    return tasks


def notes_on_unread_tasks(reference: RunFiles, others: Sequence[RunFiles]) -> list[str]:
    """Return a note on tasks of new models that the reference does not have."""
    unread: set[str] = set()
    for other in others:
        unread |= other.tasks.keys() - reference.tasks.keys()
    if not unread:
        return []
    tasks = ", ".join(sorted(unread))
    return [f"not compared, since {reference.label} has no samples of them: {tasks}"]


def check_same(reference: TaskSamples, new: TaskSamples) -> None:
    """Raise InputError unless both have the same filters, metrics, documents and requests."""
    place = f"{new.name}: differs from {reference.name}"
    if reference.filters.keys() != new.filters.keys():
        filters = f"{', '.join(new.filters)}, not {', '.join(reference.filters)}"
        raise InputError(f"{place}: its filters are {filters}")
    for name, documents in reference.filters.items():
        new_documents = new.filters[name]
        # First: the later checks look up every document in both.
        check_all_present(documents, new_documents, new.name)
        check_all_present(new_documents, documents, reference.name)
        check_same_metrics(documents, new_documents, place)
        check_same_questions(documents, new_documents, place)


def check_all_present(
    expected: Collection[int], documents: Mapping[int, Sample], name: str
) -> None:
    """Raise InputError if the samples called ``name`` lack a document that others have."""
    lacking = set(expected) - documents.keys()
    if lacking:
        count = f"{len(lacking):,} of {amount(len(expected), 'document')}"
        example = f"such as {min(lacking):,}"
        raise InputError(f"{name}: lacks {count}, {example}; was it run with --limit?")


def check_same_metrics(
    reference: Mapping[int, Sample], new: Mapping[int, Sample], place: str
) -> None:
    """Raise InputError unless both have the same metrics in each document."""
    for document, sample in reference.items():
        if new[document].values.keys() != sample.values.keys():
            metrics = f"{', '.join(new[document].values)}, not {', '.join(sample.values)}"
            raise InputError(f"{place}: its metrics are {metrics}")


def check_same_questions(
    reference: Mapping[int, Sample], new: Mapping[int, Sample], place: str
) -> None:
    """Raise InputError unless both models were asked the same."""
    for index, key in enumerate(HASHES):
        changed = []
        for document, sample in reference.items():
            if sample.hashes[index] != new[document].hashes[index]:
                changed.append(document)
        check_equal_parts(changed, len(reference), PARTS[key], place, REASONS[key])
    changed = []
    for document, sample in reference.items():
        if sample.requests != new[document].requests:
            changed.append(document)
    reason = "the possible answers or the options of generation differ"
    check_equal_parts(changed, len(reference), "requests", place, reason)


def check_equal_parts(
    changed: Sequence[int], count: int, parts: str, place: str, reason: str
) -> None:
    """Raise InputError if ``parts`` of some documents have changed.

    ``changed``: these documents; ``count``: the number of all documents.  ``place``: begins the
    message, such as "NEW FILE: differs from REFERENCE FILE"; ``reason``: ends it.
    """
    if changed:
        share = f"{len(changed):,} of {count:,} {parts}"
        example = f"such as that of document {min(changed):,}"
        raise InputError(f"{place} in {share}, {example}: {reason}")


def metrics_of(
    reference: TaskSamples, new: TaskSamples, requested: Collection[str]
) -> tuple[list[FilterAndMetric], list[str]]:
    """Return ((filter, metric) of each metric that is 0 or 1 for every document, notes on the
    others).

    InputError if a requested metric is not, or if there is none.
    """
    usable = []
    notes = []
    faults = []
    for name, documents in reference.filters.items():
        for metric in metrics_of_documents(documents):
            fault = fault_of(metric, documents, reference.name)
            if not fault:
                fault = fault_of(metric, new.filters[name], new.name)
            if fault and metric in requested:
                raise InputError(f"{fault}; accuracy needs a metric that is 0 or 1")
            if fault:
                faults.append(fault)
                reason = "it does not count right answers"
                notes.append(f"{reference.task}: {metric} is left out: {reason}")
            elif not requested or metric in requested:
                usable.append((name, metric))
    if usable:
        return usable, notes
    if faults and not requested:
        hint = "(--tasks chooses other tasks)"
        raise InputError(f"{faults[0]}; accuracy needs a metric that is 0 or 1 {hint}")
    missing = f"{reference.name}: has no metric of {', '.join(requested)}"
    raise InputError(f"--metrics: {missing}; it has {', '.join(all_metrics(reference))}")


def metrics_of_documents(documents: Mapping[int, Sample]) -> Collection[str]:
    """Return the names of the metrics, which are the same in all documents of a filter."""
    first = next(iter(documents.values()))
    return first.values.keys()


def all_metrics(samples: TaskSamples) -> list[str]:
    """Return the names of the metrics of all filters, each once."""
    names: dict[str, None] = {}
    for documents in samples.filters.values():
        names |= dict.fromkeys(metrics_of_documents(documents))
    return list(names)


def fault_of(metric: str, documents: Mapping[int, Sample], name: str) -> str:
    """Return where a metric has another value than 0 or 1; empty if no document has one."""
    for document, sample in documents.items():
        value = sample.values[metric]
        if not isinstance(value, int | float) or value not in RIGHT_OR_WRONG:
            return f"{name}: {metric} of document {document:,} is {printable(repr(value))}"
    return ""


def comparisons_of(
    reference: TaskSamples,
    new: TaskSamples,
    metrics: Sequence[FilterAndMetric],
    label: str,
    margin: float | None,
) -> Iterator[Comparison]:
    """Yield the comparison by each filter and metric."""
    for name, metric in metrics:
        pairs = []
        reference_right = []
        new_right = []
        lost = []
        gained = []
        # With several GPUs lm-eval writes documents in another order.
        for document in sorted(reference.filters[name]):
            sample = reference.filters[name][document]
            new_sample = new.filters[name][document]
            was_right = sample.values[metric] == 1
            is_right = new_sample.values[metric] == 1
            pairs.append((sample, new_sample))
            reference_right.append(was_right)
            new_right.append(is_right)
            if was_right and not is_right:
                lost.append(document)
            if is_right and not was_right:
                gained.append(document)
        counts = flip_statistics.flips(reference_right, new_right, other_wrong(pairs, metric))
        equivalence = None
        if margin is not None:
            equivalence = flip_statistics.equivalence(counts, margin)
        yield Comparison(
            task=reference.task,
            filter=name,
            metric=metric,
            label=label,
            reference_accuracy=flip_statistics.accuracy(reference_right),
            accuracy=flip_statistics.accuracy(new_right),
            flips=counts,
            lost_documents=tuple(lost),
            gained_documents=tuple(gained),
            equivalence=equivalence,
        )


def other_wrong(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> int | None:
    """Return how many wrong answers became other wrong answers; None if the chosen answers are not
    known.
    """
    count = 0
    for reference, new in pairs:
        reference_answer = answer_of(reference, metric)
        new_answer = answer_of(new, metric)
        if reference_answer is None or new_answer is None:
            return None
        both_wrong = reference.values[metric] == 0 and new.values[metric] == 0
        if both_wrong and reference_answer != new_answer:
            count += 1
    return count


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
        # Without the right answer, the choice cannot be checked.  Only that of ``acc``, the answer
        # with the largest log-probability, is returned unchecked: the other metrics divide by a
        # length of the answer.
        if metric == "acc":
            return choice
        return None
    is_right = sample.values[metric] == 1
    if (choice == sample.target) == is_right:
        return choice
    return None


def values_of(comparison: Comparison) -> dict[str, Any]:
    """Return the numbers of a comparison with a name for each, as in CSV and JSON; shares from 0 to
    1.
    """
    counts = comparison.flips
    margin = None
    equivalence_p = None
    outcome = None
    if comparison.equivalence is not None:
        margin = comparison.equivalence.margin
        equivalence_p = comparison.equivalence.p
        outcome = comparison.equivalence.outcome
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
        "margin": margin,
        "equivalence_p": equivalence_p,
        "outcome": outcome,
    }
