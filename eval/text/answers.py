"""Questions with several answers, of a task of lm-eval -> tokens -> windows, and what is said of them.

lm-eval itself reads the task, writes the prompts and splits each request into tokens of the context and tokens of the
answer (``loglikelihood`` of its TemplateLM); only ``tok_encode`` is ours, and follows that of lm-eval 0.4.13's HFLM.
A request is one answer to one question.  Few-shot examples are drawn with the seeds of lm-eval's ``simple_evaluate``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from backends.common.errors import InputError
from backends.common.messages import one_line, printable, shortened
from eval.common.progress import Progress
from eval.specs import reading
from eval.specs.types import DataSpec
from eval.text import corpus, cutting, task_files, tokens, vocabulary
from eval.text.tokens import Requests, Tokens

SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234
"""The defaults of ``simple_evaluate`` in lm-eval 0.4.13."""


@dataclass(frozen=True)
class Answers:
    """What is known of the windows of a run whose text is answers, an entry a window.

    ``question``: number of its question, from 0; ``right``: whether the answer is right; ``chars``: characters by which
    ``acc_norm`` divides; ``begins``: text index of the first token of its question.  ``found``: questions of the task;
    ``cut_off``: windows that lost the beginning of their context.
    """

    question: tuple[int, ...]
    right: tuple[bool, ...]
    chars: tuple[int, ...]
    begins: tuple[int, ...]
    task: str
    num_fewshot: int
    found: int
    cut_off: int

    @property
    def questions(self) -> int:
        """The questions that the windows are of."""
        return self.question[-1] + 1

    def subtitle(self, spec: DataSpec, n_windows: int) -> str:
        """The line below a title, e.g. ``arc_easy, 2,376 questions, 0-shot, 9,501 answers``."""
        return (
            f"{corpus.display_name(spec)}, {self.questions:,} questions, {self.num_fewshot}-shot, {n_windows:,} answers"
        )

    def in_words(self, n_windows: int, n_scored: int) -> str:
        """What ``--check`` says of them."""
        lost = f"; {self.cut_off:,} lost the beginning of their context" if self.cut_off else ""
        return (
            f"{self.questions:,} of {self.found:,} questions, {self.num_fewshot}-shot, {n_windows:,} answers, "
            f"{n_scored:,} scored tokens{lost}"
        )

    def as_json(self) -> dict[str, Any]:
        """What results.json says of them beside the spec's keys."""
        return {
            "task": self.task,
            "num_fewshot": self.num_fewshot,
            "questions": self.questions,
            "questions_of_the_task": self.found,
            "key_sha256": hashlib.sha256(json.dumps([self.question, self.right, self.chars]).encode()).hexdigest(),
            "longer_than_eval_len": self.cut_off,
        }


def cuts(
    text: Tokens, requests: Requests, spec: DataSpec, max_questions: int | None
) -> tuple[list[cutting.Cut], Answers]:
    """All windows of the requests, and what is known of those of the first ``max_questions`` (0 and None: all)."""
    if (longest := int(requests.scored.max())) > spec.eval_len:
        number = int(requests.question[requests.scored.argmax()]) + 1
        raise InputError(f"eval_len: an answer to question {number:,} has {longest:,} tokens; set eval_len above that")
    made = cutting.answers(text.ids, text.ends, requests.scored, spec.eval_len)
    question, lengths = requests.question, np.diff(text.ends, prepend=0)
    last = min(max_questions or int(question[-1]) + 1, int(question[-1]) + 1)
    taken = int(np.searchsorted(question, last))
    first = np.searchsorted(question, question[:taken])
    return made, Answers(
        tuple(question[:taken].tolist()), tuple(requests.right[:taken].tolist()),
        tuple(requests.chars[:taken].tolist()), tuple((text.ends - lengths)[first].tolist()), requests.task,
        requests.num_fewshot, int(question[-1]) + 1, int((lengths[:taken] > spec.eval_len + 1).sum()),
    )  # fmt: skip


def make(spec: Mapping[str, Any], tokenizer: str, file: str, progress: Progress) -> None:
    """Write the requests of the task of a packed ``spec`` as tokens into ``file``; InputError with the reason.

    ``tokenizer``: its folder.  Imports lm-eval and Transformers, and so is called apart.
    """
    found = reading.unpacked(spec)
    with progress.phase(f"tokenizing {corpus.display_name(found)}", unit="questions"):
        tokens.save(Path(file), read(found, Path(tokenizer)))


def read(spec: DataSpec, folder: Path) -> Tokens:
    """The requests of a task as tokens; InputError in one line if lm-eval, or compare_q, cannot score the task so."""
    file = task_files.task_file(spec)
    if file is not None:
        config, _ = task_files.merged(file, trusted=spec.trust_remote_code)  # before anything of it runs
        if "group" in config or not isinstance(config.get("task"), str):
            raise InputError(f"task: {printable(file)}: is a group, or has no task; name a file with one task")
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    trusted = file is None or task_files.is_own(file) or spec.trust_remote_code
    with said_in_one_line(spec), sandboxed(not trusted), read_anew(task_files.is_here(spec)):
        task = built_task(spec, file)
        check_task(task)
        task.build_all_requests()
        instances = task.instances
        pairs = encoded(instances, tokenizer)
        right, chars = graded(task, instances)
    for instance, (context, answer) in zip(instances, pairs, strict=True):
        if not context or not answer:
            what = "no tokens" if context else "no tokens before it"
            raise InputError(f"task: question {instance.doc_id + 1:,}, answer {instance.idx + 1}: has {what}")
    ids = np.concatenate([np.asarray(context + answer, np.int32) for context, answer in pairs])
    _, question = np.unique([instance.doc_id for instance in instances], return_inverse=True)
    return Tokens(
        ids, np.zeros(0, np.int32), max(vocabulary.plain_tokens(tokenizer)),
        vocabulary.digest(vocabulary.plain_tokens(tokenizer, ids.tolist())),
        ends=np.cumsum([len(context) + len(answer) for context, answer in pairs]),
        requests=Requests(
            question.astype(np.int32), np.asarray([len(answer) for _, answer in pairs], np.int32),
            np.asarray(right, np.bool_), np.asarray(chars, np.int32), str(task.config.task),
            int(task.config.num_fewshot or 0),
        ),
    )  # fmt: skip


@contextmanager
def said_in_one_line(spec: DataSpec) -> Iterator[None]:
    """InputError with lm-eval's reason in place of whatever it, ``datasets`` or a task's functions raise."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise InputError(f"task: {spec.task}: lm-eval cannot build it: {name}: {one_line(error)}") from None


@contextmanager
def sandboxed(wanted: bool) -> Iterator[None]:
    """If ``wanted``, lm-eval renders templates without access to Python's inner attributes, from which a template could
    run any code."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    usual = utils.env
    if wanted:
        utils.env = SandboxedEnvironment(
            loader=usual.loader, undefined=usual.undefined, keep_trailing_newline=usual.keep_trailing_newline
        )
        utils.env.filters = usual.filters
    try:
        yield
    finally:
        utils.env = usual


@contextmanager
def read_anew(wanted: bool) -> Iterator[None]:
    """If ``wanted``, ``datasets`` starts with an empty cache.

    It knows local files by their paths and times alone, and would serve the rows of others with the same.
    """
    if not wanted:
        yield
        return
    from datasets import config

    usual = config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory(prefix="compare_q.") as config.HF_DATASETS_CACHE:
        try:
            yield
        finally:
            config.HF_DATASETS_CACHE = usual


def built_task(spec: DataSpec, file: Path | None) -> Any:
    """lm-eval's task, set up as its ``simple_evaluate`` does; InputError for a name that is none, and for a group."""
    from lm_eval.tasks import TaskManager

    random.seed(SEED)
    np.random.seed(NUMPY_SEED)
    manager = TaskManager(include_defaults=file is None)
    if file is None:
        check_name(str(spec.task), manager)
    loaded = manager.load([str(spec.task if file is None else file)])
    if loaded.get("groups") or len(loaded["tasks"]) != 1:
        raise InputError(f"task: {spec.task}: is a group of tasks; name one of: {', '.join(loaded['tasks'])}")
    (task,) = loaded["tasks"].values()
    given = task.get_config("num_fewshot")
    if spec.num_fewshot is not None and given == 0 != spec.num_fewshot:
        raise InputError(f"num_fewshot: the task {spec.task} fixes it at 0, and lm-eval keeps that; leave it out")
    task.set_config("num_fewshot", (given or 0) if spec.num_fewshot is None else spec.num_fewshot)
    task.set_fewshot_seed(FEWSHOT_SEED)
    return task


def check_name(name: str, manager: Any) -> None:
    """InputError unless a name is one task of lm-eval's package."""
    if name in manager.all_subtasks:
        return
    if name in manager.all_groups or name in manager.all_tags:
        some = [each for each in manager.all_subtasks if each.startswith(name) or name in manager.task_index[each].tags]
        raise InputError(f"task: {name}: is a group of tasks; name one of them: {shortened(', '.join(some), 100)}")
    near = difflib.get_close_matches(name, manager.all_subtasks, 3)
    raise InputError(f"task: {name}: lm-eval has no such task{'; it has ' + ', '.join(near) if near else ''}")


def check_task(task: Any) -> None:
    """InputError unless the most probable of several answers is what decides in a task, by lm-eval's own rules."""
    from lm_eval.api.metrics import mean
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        kind = task.OUTPUT_TYPE if isinstance(task, ConfigurableTask) else "a Python class"
        raise InputError(f"task: is {kind}; only multiple_choice can be scored without generating")
    metrics = task.aggregation()
    if callable(task.config.process_results):
        raise InputError("task: has a rule of its own for its results (process_results), which is not accuracy")
    if not {"acc", "acc_norm"} & metrics.keys() or "acc_mutual_info" in metrics:
        raise InputError(f"task: measures {', '.join(metrics)}; only acc and acc_norm can be told here")
    if any(metrics[name] is not mean for name in ("acc", "acc_norm") if name in metrics):
        raise InputError("task: its accuracy is not the mean over its questions")
    if task.config.filter_list is not None or task.config.repeats != 1:
        raise InputError("task: has filter_list or repeats, which change the answers")


def encoded(instances: Sequence[Any], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(tokens of the context, tokens of the answer) of each request, as lm-eval splits them."""
    from lm_eval.api.model import TemplateLM

    class Recorder(TemplateLM):  # type: ignore[misc]
        """Only the tokens that lm-eval would score."""

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)

        @lru_cache(maxsize=64)  # noqa: B019 - the answers to a question have one context, and this object one use
        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None and string.startswith(tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False  # BOS would stand there twice
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(tokenizer.encode(string, **special))

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            return [(context, answer) for _, context, answer in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

    if any(len(instance.args) != 2 for instance in instances):
        raise InputError("task: has images or sound")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError("tokenizer_dir: has neither BOS nor EOS, one of which lm-eval puts before an empty context")
    found: list[tuple[list[int], list[int]]] = Recorder().loglikelihood(instances, disable_tqdm=True)
    return found


def graded(task: Any, instances: Sequence[Any]) -> tuple[list[bool], list[int]]:
    """(whether each request's answer is right, the characters of its choice).

    lm-eval says what is right: its ``process_results`` is told, of each answer in turn, that it is the most probable.
    """
    right: list[bool] = []
    chars: list[int] = []
    by_question: dict[int, list[Any]] = {}
    for instance in instances:
        by_question.setdefault(instance.doc_id, []).append(instance)
    for number, (doc_id, several) in enumerate(by_question.items()):
        document = several[0].doc
        choices = task.doc_to_choice(document)
        if len(choices) != len(several) or [each.idx for each in several] != list(range(len(choices))):
            raise InputError(f"task: question {doc_id + 1:,}: {len(several)} requests for {len(choices)} answers")
        if instances[len(right)].doc_id != doc_id:
            raise InputError(f"task: question {number + 1:,}: its requests do not follow one another")
        if not all(choices):
            raise InputError(f"task: question {doc_id + 1:,}, answer {choices.index('') + 1}: has no characters")
        for chosen in range(len(choices)):
            results = [(0.0 if each == chosen else -1.0, False) for each in range(len(choices))]
            found = task.process_results(document, results)
            right.append(found.get("acc", found.get("acc_norm")) == 1.0)
        chars += [len(choice) for choice in choices]
    return right, chars
