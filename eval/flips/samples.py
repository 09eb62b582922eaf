"""Read a file of samples that lm-eval 0.4 wrote, and check that it is whole.

A line is an object with the answer to one document, filtered in one way:

- ``doc_id``, ``filter``: which document and filter;
- ``doc_hash``, ``prompt_hash``, ``target_hash``: SHA-256 of the document, of the prompt with its
  chat template and examples, and of the right answer;
- ``arguments``: what the model was asked, with possible answers or options of generation;
- ``filtered_resps``: [log-probability, is greedy] of each possible answer, or the texts that were
  generated;
- ``metrics``: names of the metrics; each is a further key with its value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backends.common.errors import InputError
from ...backends.common.json_files import open_regular, parsed
from ...backends.common.message_text import CONTROL, amount, printable, shortened

UNCONDITIONAL = "acc_mutual_info"
"""The metric whose answers lm-eval also scores without their contexts."""
HASHES = ("doc_hash", "prompt_hash", "target_hash")
KEYS = ("doc_id", *HASHES, "filter", "metrics", "filtered_resps")
"""Keys of every sample."""
LENGTHS: dict[str, Callable[[str], int]] = {
    "acc_norm": len,
    "acc_bytes": lambda answer: len(answer.encode()),
}
"""Metric -> the length of an answer that its log-probability is divided by; the largest quotient is
chosen."""


@dataclass(frozen=True)
class Sample:
    """The answer to one document."""

    hashes: tuple[str, str, str]  # as in ``HASHES``
    requests: str  # SHA-256 of what the model was asked
    values: Mapping[str, Any]  # metric -> value
    text: str | None  # the generated texts as JSON; None for a choice among answers
    choices: Mapping[
        str, int
    ]  # metric -> number of the chosen answer, of ``acc`` and the metrics of ``LENGTHS``
    target: int | None  # number of the right answer; None if it is not known


@dataclass(frozen=True)
class TaskSamples:
    """The samples of one task: filter -> document -> sample."""

    task: str
    file: Path
    filters: Mapping[str, Mapping[int, Sample]]
    is_sampled: bool  # answers were drawn at random

    @property
    def name(self) -> str:
        """The file's name for messages."""
        return printable(self.file)


def read(task: str, file: Path) -> TaskSamples:
    """Return the samples in a file; InputError, with the line, if lm-eval has not written it or it
    is damaged.
    """
    filters: dict[str, dict[int, Sample]] = {}
    is_sampled = False
    with open_regular(file) as stream:
        for number, line in enumerate(stream, 1):
            where = f"{printable(file)}: line {number:,}"
            if not line.strip():
                continue
            keys = parsed(line, where, strict=False)
            check_keys(keys, where)
            documents = filters.setdefault(keys["filter"], {})
            if keys["doc_id"] in documents:
                raise InputError(
                    f"{where}: document {keys['doc_id']:,} is there twice with filter {keys['filter']!r}"
                )
            documents[keys["doc_id"]] = sample_of(keys, where)
            is_sampled = is_sampled or draws(keys.get("arguments"))
    check_whole(filters, printable(file))
    return TaskSamples(task, file, filters, is_sampled)


def check_keys(keys: Any, where: str) -> None:
    """Raise InputError for a line that is not a sample of lm-eval."""
    if not isinstance(keys, dict):
        raise InputError(f"{where}: is no object; expected the samples of lm_eval --log_samples")
    if missing := [key for key in KEYS if key not in keys]:
        raise InputError(
            f"{where}: has no {missing[0]!r}; expected the samples of lm_eval --log_samples"
        )
    doc_id = keys["doc_id"]
    if not isinstance(doc_id, int) or isinstance(doc_id, bool) or doc_id < 0:
        raise InputError(f"{where}: doc_id: expected a whole number, not {as_text(doc_id)}")
    for key in (*HASHES, "filter"):
        if not isinstance(keys[key], str):
            raise InputError(f"{where}: {key}: expected a text, not {as_text(keys[key])}")
    if CONTROL.search(keys["filter"]):
        raise InputError(f"{where}: filter: must be one line of printable text")
    for key in ("metrics", "filtered_resps"):
        if not isinstance(keys[key], list):
            raise InputError(f"{where}: {key}: expected a list, not {as_text(keys[key])}")
    for name in keys["metrics"]:
        if not isinstance(name, str) or name not in keys or CONTROL.search(name):
            raise InputError(f"{where}: metrics: {as_text(name)} has no value")
        if isinstance(keys[name], float) and math.isnan(keys[name]):
            raise InputError(
                f"{where}: {name} is NaN; the model gave no answer that can be counted"
            )


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
            raise InputError(
                f"{name}: {count}, have only one of filters {first} and {other}; was the file cut off?"
            )
    for documents in filters.values():
        metrics = next(iter(documents.values())).values.keys()
        different = [at for at, each in documents.items() if each.values.keys() != metrics]
        if different:
            count = amount(len(different), "document")
            usual = ", ".join(metrics)
            raise InputError(
                f"{name}: {count}, such as {min(different):,}, have other metrics than {usual}"
            )


def sample_of(keys: Mapping[str, Any], where: str) -> Sample:
    """Return the sample of a line; InputError if an answer's log-probability is not a number."""
    asked = json.dumps(keys.get("arguments"), sort_keys=True)
    sums = log_probabilities(keys["filtered_resps"])
    texts = answer_texts(keys.get("arguments"))
    text: str | None = None
    choices: dict[str, int] = {}
    target: int | None = None
    if sums is None:
        text = json.dumps(keys["filtered_resps"])
    elif any(math.isnan(each) for each in sums):
        raise InputError(
            f"{where}: the log-probability of an answer is NaN; the model cannot be compared"
        )
    elif len(sums) > 1:
        if UNCONDITIONAL in keys["metrics"]:  # a second half of the requests has no context
            sums = sums[: len(sums) // 2]
            texts = texts[: len(sums)]
        choices = choices_of(sums, texts, keys["metrics"])
        target = target_of(str(keys.get("target", "")), texts)
    hashes = (keys["doc_hash"], keys["prompt_hash"], keys["target_hash"])
    values = {name: keys[name] for name in keys["metrics"]}
    return Sample(hashes, hashlib.sha256(asked.encode()).hexdigest(), values, text, choices, target)


def log_probabilities(answers: Sequence[Any]) -> list[float] | None:
    """Return the log-probability of each possible answer; None if these are generated texts.
    lm-eval writes texts.
    """
    sums = []
    for each in answers:
        if not isinstance(each, list) or len(each) != 2 or str(each[1]) not in ("True", "False"):
            return None
        try:
            sums.append(float(each[0]))
        except (TypeError, ValueError):
            return None
    return sums or None


def answer_texts(arguments: Any) -> list[str]:
    """Return the possible answers that were scored, without the space that lm-eval puts before
    them.
    """
    texts = []
    for each in arguments.values() if isinstance(arguments, dict) else ():
        text = each.get("arg_1") if isinstance(each, dict) else None
        if isinstance(text, str):
            texts.append(text.removeprefix(" "))
    return texts


def choices_of(
    sums: Sequence[float], texts: Sequence[str], metrics: Collection[str]
) -> dict[str, int]:
    """Return metric -> number of the answer that it chooses; without metrics that choose in a way
    not known here.
    """
    choices = {}
    if "acc" in metrics:
        choices["acc"] = sums.index(max(sums))
    for metric, length_of in LENGTHS.items():
        lengths = [length_of(text) for text in texts]
        if metric in metrics and len(lengths) == len(sums) and 0 not in lengths:
            scores = [each / length for each, length in zip(sums, lengths, strict=True)]
            choices[metric] = scores.index(max(scores))
    return choices


def target_of(target: str, texts: Sequence[str]) -> int | None:
    """Return the number of the right answer, from its number or its text; None if it is not known."""
    numbers = [str(number) for number in range(len(texts))]
    if target in numbers:
        return int(target)
    if texts.count(target.strip()) == 1:
        return texts.index(target.strip())
    return None


def draws(arguments: Any) -> bool:
    """Return True if the options of a request draw the answer at random."""
    for each in arguments.values() if isinstance(arguments, dict) else ():
        options = each.get("arg_1") if isinstance(each, dict) else None
        if isinstance(options, dict) and (options.get("do_sample") or options.get("temperature")):
            return True
    return False


def as_text(value: Any) -> str:
    """Return a value as JSON for a message."""
    return shortened(printable(json.dumps(value)), 40)
