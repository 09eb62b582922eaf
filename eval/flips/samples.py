"""Read a file of samples that lm-eval 0.4 wrote, and check that it is whole.

A line is an object with the answer to one document, filtered in one way:

- ``doc_id``, ``filter``: which document and filter;
- ``doc_hash``, ``prompt_hash``, ``target_hash``: SHA-256 of the document, of the prompt with its
  chat template and examples, and of the right answer;
- ``arguments``: the request to the model, with possible answers or options of generation;
- ``filtered_resps``: [log-probability, is greedy] of each possible answer, or the texts that were
  generated;
- ``metrics``: names of the metrics; each is a further key with its value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backends.common.errors import InputError
from ...backends.common.json_files import open_regular, parsed_line
from ...backends.common.message_text import CONTROL, amount, printable, shortened

UNCONDITIONAL = "acc_mutual_info"
"""The metric whose answers lm-eval also scores without their contexts."""
HASHES = ("doc_hash", "prompt_hash", "target_hash")
KEYS = ("doc_id", *HASHES, "filter", "metrics", "filtered_resps")
"""Keys of every sample."""
SOURCE = "expected the samples of lm_eval --log_samples"
"""The end of a message on a line that is not a sample."""


def n_bytes(answer: str) -> int:
    """Return the length of an answer in bytes of UTF-8."""
    return len(answer.encode())


LENGTHS: dict[str, Callable[[str], int]] = {"acc_norm": len, "acc_bytes": n_bytes}
"""Metric -> the length of an answer that its log-probability is divided by; the largest quotient is
chosen."""


@dataclass(frozen=True)
class Sample:
    """The answer to one document.

    Attributes:
        hashes: as in ``HASHES``.
        requests: SHA-256 of the requests to the model.
        values: metric -> value.
        text: the generated texts as JSON; None for a choice among answers.
        choices: metric -> number of the chosen answer, of ``acc`` and the metrics of ``LENGTHS``.
        target: number of the right answer; None if it is not known.
    """

    hashes: tuple[str, str, str]
    requests: str
    values: Mapping[str, Any]
    text: str | None
    choices: Mapping[str, int]
    target: int | None


@dataclass(frozen=True)
class TaskSamples:
    """The samples of one task: filter -> document -> sample.

    ``is_sampled``: answers were drawn at random.
    """

    task: str
    file: Path
    filters: Mapping[str, Mapping[int, Sample]]
    is_sampled: bool

    @property
    def name(self) -> str:
        """The file's name for messages."""
        return printable(self.file)


def read_samples(task: str, file: Path) -> TaskSamples:
    """Return the samples in a file; InputError, with the line, if lm-eval has not written it or it
    is damaged.
    """
    filters: dict[str, dict[int, Sample]] = {}
    is_sampled = False
    with open_regular(file) as stream:
        for number, line in enumerate(stream, 1):
            place = f"{printable(file)}: line {number:,}"
            if not line.strip():
                continue
            # lm-eval writes NaN, which check_keys refuses with the name of the metric.
            keys = parsed_line(line, place, strict=False)
            check_keys(keys, place)
            documents = filters.setdefault(keys["filter"], {})
            document = keys["doc_id"]
            if document in documents:
                fault = f"is there twice with filter {keys['filter']!r}"
                raise InputError(f"{place}: document {document:,} {fault}")
            documents[document] = sample_of(keys, place)
            if draws_at_random(keys.get("arguments")):
                is_sampled = True
    check_whole(filters, printable(file))
    return TaskSamples(task, file, filters, is_sampled)


def check_keys(keys: Any, place: str) -> None:
    """Raise InputError for a line that is not a sample of lm-eval."""
    if not isinstance(keys, dict):
        raise InputError(f"{place}: is no object; {SOURCE}")
    for key in KEYS:
        if key not in keys:
            raise InputError(f"{place}: has no {key!r}; {SOURCE}")
    doc_id = keys["doc_id"]
    # True and False are integers in Python.
    if not isinstance(doc_id, int) or isinstance(doc_id, bool) or doc_id < 0:
        raise InputError(f"{place}: doc_id: expected a whole number, not {as_text(doc_id)}")
    for key in (*HASHES, "filter"):
        if not isinstance(keys[key], str):
            raise InputError(f"{place}: {key}: expected a text, not {as_text(keys[key])}")
    if CONTROL.search(keys["filter"]):
        raise InputError(f"{place}: filter: must be one line of printable text")
    for key in ("metrics", "filtered_resps"):
        if not isinstance(keys[key], list):
            raise InputError(f"{place}: {key}: expected a list, not {as_text(keys[key])}")
    for name in keys["metrics"]:
        if not isinstance(name, str) or name not in keys or CONTROL.search(name):
            raise InputError(f"{place}: metrics: {as_text(name)} has no value")
        if isinstance(keys[name], float) and math.isnan(keys[name]):
            fault = f"{name} is NaN; the model gave no answer that can be counted"
            raise InputError(f"{place}: {fault}")


def check_whole(filters: Mapping[str, Mapping[int, Sample]], name: str) -> None:
    """Raise InputError if filters have different documents, or documents different metrics; also
    without samples.
    """
    if not filters:
        raise InputError(f"{name}: is empty; lm_eval has logged no samples")
    first, *others = filters
    for other in others:
        lacking = filters[first].keys() ^ filters[other].keys()
        if lacking:
            count = f"{amount(len(lacking), 'document')}, such as {min(lacking):,}"
            fault = f"have only one of filters {first} and {other}"
            raise InputError(f"{name}: {count}, {fault}; was the file cut off?")
    for documents in filters.values():
        check_metrics(documents, name)


def check_metrics(documents: Mapping[int, Sample], name: str) -> None:
    """Raise InputError if documents of one filter have different metrics."""
    first = next(iter(documents.values()))
    metrics = first.values.keys()
    different = []
    for document, sample in documents.items():
        if sample.values.keys() != metrics:
            different.append(document)
    if different:
        count = f"{amount(len(different), 'document')}, such as {min(different):,}"
        raise InputError(f"{name}: {count}, have other metrics than {', '.join(metrics)}")


def sample_of(keys: Mapping[str, Any], place: str) -> Sample:
    """Return the sample of a line; InputError if an answer's log-probability is not a number."""
    requests = json.dumps(keys.get("arguments"), sort_keys=True)
    sums = log_probabilities(keys["filtered_resps"])
    answers = answer_texts(keys.get("arguments"))
    text: str | None = None
    choices: dict[str, int] = {}
    target: int | None = None
    if sums is None:
        # A document may have several texts.
        text = json.dumps(keys["filtered_resps"])
    elif any(math.isnan(logprob) for logprob in sums):
        fault = "the log-probability of an answer is NaN; the model cannot be compared"
        raise InputError(f"{place}: {fault}")
    # One log-probability is of a text, as in perplexity tasks: there is nothing to choose from.
    elif len(sums) > 1:
        if UNCONDITIONAL in keys["metrics"]:
            # The second half of the requests has no context.
            sums = sums[: len(sums) // 2]
            answers = answers[: len(sums)]
        choices = choices_of(sums, answers, keys["metrics"])
        target = target_of(str(keys.get("target", "")), answers)
    return Sample(
        hashes=(keys["doc_hash"], keys["prompt_hash"], keys["target_hash"]),
        requests=hashlib.sha256(requests.encode()).hexdigest(),
        values={name: keys[name] for name in keys["metrics"]},
        text=text,
        choices=choices,
        target=target,
    )


def log_probabilities(answers: Sequence[Any]) -> list[float] | None:
    """Return the log-probability of each possible answer; None if these are generated texts."""
    sums = []
    for answer in answers:
        if not isinstance(answer, list) or len(answer) != 2:
            return None
        logprob, is_greedy = answer
        # lm-eval writes numbers and truth values as texts.
        if str(is_greedy) not in ("True", "False"):
            return None
        try:
            sums.append(float(logprob))
        except (TypeError, ValueError):
            return None
    if not sums:
        return None
    return sums


def second_arguments(arguments: Any) -> Iterator[Any]:
    """Yield the second argument of each request: a possible answer, or options of generation."""
    if not isinstance(arguments, dict):
        return
    for request in arguments.values():
        if isinstance(request, dict):
            yield request.get("arg_1")


def answer_texts(arguments: Any) -> list[str]:
    """Return the possible answers that were scored, without the space that lm-eval puts before
    them.
    """
    texts = []
    for text in second_arguments(arguments):
        if isinstance(text, str):
            texts.append(text.removeprefix(" "))
    return texts


def draws_at_random(arguments: Any) -> bool:
    """Return True if the options of a request draw the answer at random."""
    for options in second_arguments(arguments):
        if isinstance(options, dict) and (options.get("do_sample") or options.get("temperature")):
            return True
    return False


def choices_of(
    sums: Sequence[float], answers: Sequence[str], metrics: Collection[str]
) -> dict[str, int]:
    """Return metric -> number of the answer that it chooses; without metrics that choose in a way
    not known here.
    """
    choices = {}
    if "acc" in metrics:
        choices["acc"] = sums.index(max(sums))
    for metric, length_of in LENGTHS.items():
        lengths = [length_of(answer) for answer in answers]
        # An empty answer cannot be divided by its length.
        if metric in metrics and len(lengths) == len(sums) and 0 not in lengths:
            scores = []
            for logprob, length in zip(sums, lengths, strict=True):
                scores.append(logprob / length)
            choices[metric] = scores.index(max(scores))
    return choices


def target_of(target: str, answers: Sequence[str]) -> int | None:
    """Return the number of the right answer, from its number or its text; None if it is not
    known.
    """
    numbers = [str(number) for number in range(len(answers))]
    if target in numbers:
        return int(target)
    text = target.strip()
    if answers.count(text) == 1:
        return answers.index(text)
    return None


def as_text(value: Any) -> str:
    """Return a value as JSON for a message."""
    return shortened(printable(json.dumps(value)), 40)
