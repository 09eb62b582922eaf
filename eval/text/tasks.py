"""Turn a multiple-choice task of lm-eval into tokens; find the YAML file of a task.

lm-eval reads the task, writes the prompts and splits each request (one answer to one question) into tokens of the
context and of the answer.  Only ``tok_encode`` is our own; it does the same as lm-eval 0.4.13's HFLM.  A task can run
Python code.  Tasks of lm-eval's package may do so; tasks in a YAML file on this machine need ``trust_remote_code``.
"""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from packaging.version import Version

from compare_q.backends.checkpoint.tokenizers import follow_file
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import is_file, is_folder, read_bytes
from compare_q.backends.common.messages import nearest, one_line, printable
from compare_q.backends.common.packages import builds, installed_versions
from compare_q.eval.specs.types import DataSpec, texts_in
from compare_q.eval.text import vocabulary
from compare_q.eval.text.corpus import digests, files_in
from compare_q.eval.text.tokens import Requests, Tokens, prefix_token, tokens_of

SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234
"""The defaults of ``simple_evaluate`` in lm-eval 0.4.13."""
LEAST = "0.4.13"
FILES_VERSION = 2
"""Version of the questions of local files.  Raise it when they are read differently."""
IGNORED = {"__pycache__", ".ipynb_checkpoints"}
YAML = (".yaml", ".yml")


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """The YAML of a task, in which tags such as lm-eval's ``!function`` become None."""


Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def identity(spec: DataSpec) -> dict[str, Any]:
    """Return everything the questions depend on, as JSON types: lm-eval's build, and the task's name or digests.

    A data set of the hub is identified by its name.  Raises InputError with the install command if lm-eval is missing
    or too old.
    """
    version = installed_versions(("lm_eval",)).get("lm_eval")
    if version is None or Version(version) < Version(LEAST):
        given = f"{version} is installed" if version else "none is installed"
        install = f"pip install lm_eval=={LEAST}"
        raise InputError(f'dataset: "lm_eval" needs lm-eval {LEAST} or newer, and {given}: {install}')
    known: dict[str, Any] = {**builds(("lm_eval",)), "num_fewshot": spec.num_fewshot}
    file = task_file(spec)
    if file is None:
        return {**known, "task": spec.task}
    return {**known, "version": FILES_VERSION, "task": file.name, "files": digests(paths_of(spec))}


def paths_of(spec: DataSpec) -> list[Path]:
    """Return the files of a task: its YAML files, YAML and Python files next to them, data files, data folders."""
    file = task_file(spec)
    if file is None:
        return []
    config, parts = merged(file)
    beside = files_in((), sorted({str(part.parent) for part in parts}))
    names, folders = data_places(config)
    return [*parts, *(each for each in beside if each.suffix in (".py", *YAML)), *map(Path, folders),
            *files_in(names, folders)]  # fmt: skip


def is_here(spec: DataSpec) -> bool:
    """Return True if the task's data are local files, so that nothing is downloaded."""
    file = task_file(spec)
    return file is not None and bool(files_in(*data_places(merged(file)[0])))


def task_file(spec: DataSpec) -> Path | None:
    """Return the YAML file of the task, None for a task of lm-eval's package.

    InputError if the file does not exist, or the spec does not let it run code.
    """
    name = spec.task or ""
    path = Path(spec.locate(name))
    if "/" in name or path.suffix.lower() in YAML:
        if not is_file(path):
            raise InputError(f"task: {printable(path)}: no such file")
        file: Path | None = path
    else:
        file = file_in_folder(spec, name)
    if file is not None and not spec.trust_remote_code:
        raise InputError(
            f"task: {printable(file)}: such a file can run code; read it, then set "
            '"trust_remote_code": true in the data spec'
        )
    return file and file.resolve()


def file_in_folder(spec: DataSpec, name: str) -> Path | None:
    """Return the file of a task in ``include_path``; None if the folder does not have the task."""
    if spec.include_path is None:
        return None
    folder = Path(spec.locate(spec.include_path))
    if not folder.is_dir():
        raise InputError(f"include_path: {printable(folder)}: no such folder")
    # As in lm-eval: sorted by name, without its _IGNORE_DIRS and files that cannot be read; the first of a name counts.
    for file in sorted(folder.rglob("*.yaml"), key=Path.as_posix):
        with suppress(InputError):
            if not IGNORED & set(file.parts) and merged(file)[0].get("task") == name:
                return Path(file)
    return None


def merged(file: Path, inside: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """Return (a YAML file's keys, which replace keys of the files that it includes; all these files), as lm-eval does.

    InputError if a file is malformed or includes itself.
    """
    try:
        if file in inside:
            raise InputError("includes itself")
        config = yaml.load(read_bytes(file), Loader=Loader)
        if not isinstance(config, dict):
            raise InputError("a task is an object of keys and values")
    except InputError as error:
        raise InputError(f"task: {printable(file)}: {error}") from None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"task: {printable(file)}: cannot be read as a task: {one_line(error)}") from None
    keys, parts, names = dict[str, Any](), [file], config.pop("include", [])
    for name in names if isinstance(names, list) else [names]:
        included, others = merged((file.parent / str(name)).resolve(), (*inside, file))
        keys |= included
        parts += others
    return keys | config, parts


def data_places(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return (names of a task's data files, its data folders), relative to the working directory as in lm-eval."""
    options = config.get("dataset_kwargs")
    options = options if isinstance(options, dict) else {}
    names = [name for name in texts_in(options.get("data_files")) if "://" not in name]
    folders = options.get("data_dir"), config.get("dataset_path")
    return (
        [str(Path(str(options.get("data_dir") or ""), name)) for name in names],
        [folder for folder in folders if isinstance(folder, str) and is_folder(Path(folder))],
    )


def read(spec: DataSpec, folder: Path) -> Tokens:
    """Return the requests of a task as tokens; InputError if lm-eval or compare_q cannot score the task."""
    if (file := task_file(spec)) is not None:
        config, _ = merged(file)  # before any code of the task runs
        if "group" in config or not isinstance(config.get("task"), str):
            raise InputError(f"task: {printable(file)}: is a group, or has no task; name a file with one task")
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    with lm_eval_ready(spec, file):
        task = built_task(spec, file)
        check_task(task)
        task.build_all_requests()
        instances = task.instances
        notes = follow_file(tokenizer, folder, [text for each in instances for text in each.args])
        pairs = encoded(instances, tokenizer)
        right, chars = graded(task, instances)
    for instance, (context, answer) in zip(instances, pairs, strict=True):
        if not context or not answer:
            what = "no tokens" if context else "no tokens before it"
            raise InputError(f"task: question {instance.doc_id + 1:,}, answer {instance.idx + 1}: has {what}")
    _, question = np.unique([instance.doc_id for instance in instances], return_inverse=True)
    requests = Requests(
        question.astype(np.int32), np.asarray([len(answer) for _, answer in pairs], np.int32),
        np.asarray(right, np.bool_), np.asarray(chars, np.int32), str(task.config.task),
        int(task.config.num_fewshot or 0),
    )  # fmt: skip
    ids = [np.asarray(context + answer, np.int32) for context, answer in pairs]
    return tokens_of(tokenizer, ids, with_special=True, requests=requests, notes=notes)


@contextmanager
def lm_eval_ready(spec: DataSpec, file: Path | None) -> Iterator[None]:
    """Set up lm-eval for one task; errors of lm-eval and of a task's functions become an InputError with the reason.

    The data of a file are read with an empty cache of ``datasets``, which identifies files by path and time only.
    """
    from datasets import config

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own_cache = config.HF_DATASETS_CACHE
    try:
        with tempfile.TemporaryDirectory(prefix="compare_q.") as empty:
            if file is not None:
                config.HF_DATASETS_CACHE = empty
            yield
    except InputError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise InputError(f"task: {spec.task}: lm-eval cannot build it: {name}: {one_line(error)}") from None
    finally:
        config.HF_DATASETS_CACHE = own_cache


def built_task(spec: DataSpec, file: Path | None) -> Any:
    """Return lm-eval's task, set up as by ``simple_evaluate``; InputError for an unknown name or a group of tasks."""
    from lm_eval.tasks import TaskManager

    random.seed(SEED)
    np.random.seed(NUMPY_SEED)
    manager, name = TaskManager(include_defaults=file is None), str(spec.task)
    if file is None and name not in manager.all_subtasks:
        if name in manager.all_groups or name in manager.all_tags:
            raise InputError(f"task: {name}: is a group of tasks; name one of them")
        raise InputError(f"task: {name}: lm-eval has no such task{nearest(name, manager.all_subtasks)}")
    (task,) = manager.load([name if file is None else str(file)])["tasks"].values()
    given = task.get_config("num_fewshot")
    if spec.num_fewshot is not None and given == 0 != spec.num_fewshot:
        raise InputError(f"num_fewshot: the task {name} fixes it at 0, and lm-eval keeps that; leave it out")
    task.set_config("num_fewshot", (given or 0) if spec.num_fewshot is None else spec.num_fewshot)
    task.set_fewshot_seed(FEWSHOT_SEED)
    return task


def check_task(task: Any) -> None:
    """Raise InputError unless lm-eval grades the task by its most probable answer, as acc or acc_norm."""
    from lm_eval.api.metrics import mean
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        kind = task.OUTPUT_TYPE if isinstance(task, ConfigurableTask) else "a Python class"
        raise InputError(f"task: is {kind}; only multiple_choice can be scored without generating")
    metrics = task.aggregation()
    if callable(task.config.process_results):
        raise InputError("task: has its own process_results, which is not accuracy")
    told = {"acc", "acc_norm"} & metrics.keys()
    if not told or "acc_mutual_info" in metrics or any(metrics[name] is not mean for name in told):
        raise InputError(f"task: measures {', '.join(metrics)}; only the means of acc and acc_norm are supported")
    if task.config.filter_list is not None or task.config.repeats != 1:
        raise InputError("task: has filter_list or repeats, which change the answers")


def encoded(instances: Sequence[Any], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return (tokens of the context, tokens of the answer) of each request, as lm-eval splits them."""
    from lm_eval.api.model import TemplateLM

    prefix = prefix_token(tokenizer, "lm-eval needs one before an empty context")

    class Recorder(TemplateLM):  # type: ignore[misc]
        """A model for lm-eval that returns the tokens of a request instead of scores."""

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return prefix

        @lru_cache(maxsize=64)  # noqa: B019 - all answers to a question share one context; this object is used once
        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None and string.startswith(tokenizer.decode(prefix)):
                add_special_tokens = False  # otherwise BOS would be there twice
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
    return Recorder().loglikelihood(instances, disable_tqdm=True)  # type: ignore[no-any-return]


def graded(task: Any, instances: Sequence[Any]) -> tuple[list[bool], list[int]]:
    """Return (True for each request with the right answer, the number of characters of its choice).

    lm-eval decides which answer is right: ``process_results`` is called with each answer as the most probable.
    """
    right: list[bool] = []
    chars: list[int] = []
    for doc_id, requests in itertools.groupby(instances, lambda instance: instance.doc_id):
        document = next(requests).doc
        choices = task.doc_to_choice(document)
        if not all(choices):
            raise InputError(f"task: question {doc_id + 1:,}, answer {choices.index('') + 1}: has no characters")
        for chosen in range(len(choices)):
            results = [(0.0 if at == chosen else -1.0, False) for at in range(len(choices))]
            measured = task.process_results(document, results)
            right.append(measured.get("acc", measured.get("acc_norm")) == 1.0)
        chars += [len(choice) for choice in choices]
    return right, chars
