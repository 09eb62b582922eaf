"""Questions with several answers, of a task of lm-eval -> tokens; which YAML a spec means, and whether it runs code.

lm-eval itself reads the task, writes the prompts and splits each request into tokens of the context and tokens of the
answer (``loglikelihood`` of its TemplateLM); only ``tok_encode`` is ours, and follows that of lm-eval 0.4.13's HFLM.
A request is one answer to one question.  Few-shot examples are drawn with the seeds of lm-eval's ``simple_evaluate``.

A task is a YAML file, in lm-eval's own package or on this machine.  lm-eval runs the Python functions that a YAML names
by ``!function``.  Its own package was installed to be run; other files may have come from anywhere, so their functions
run only if the spec says ``trust_remote_code``.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml
from packaging.version import Version

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import is_file, is_folder, read_bytes
from compare_q.backends.common.messages import nearest, one_line, printable
from compare_q.backends.common.packages import builds, installed_versions, package_folder
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import vocabulary
from compare_q.eval.text.corpus import digests, files_in
from compare_q.eval.text.hub_datasets import names_in
from compare_q.eval.text.tokens import Requests, Tokens, tokens_of

SEED, NUMPY_SEED, FEWSHOT_SEED = 0, 1234, 1234
"""The defaults of ``simple_evaluate`` in lm-eval 0.4.13."""
LEAST = "0.4.13"
INSTALL = f"pip install lm_eval=={LEAST}"
FILES_VERSION = 2
"""Version of the questions of local files; a change of how they are read raises it.

2: the data are read anew: ``datasets`` served the rows of other files with the same paths and times.
"""
SUFFIXES = (".yaml", ".yml")
METRICS = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "brier_score", "exact_match", "f1", "likelihood", "mcc")
"""lm-eval's own metrics of multiple choice; it takes any other name for a program of Hugging Face's ``evaluate``."""
IGNORED = {"__pycache__", ".ipynb_checkpoints"}
PICKLES = "pandas"
"""The format of ``datasets`` that loads pickles, which are code."""


class Code(str):
    """What a YAML names by ``!function``."""


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """lm-eval's YAML; any other tag is an error."""


Loader.add_constructor("!function", lambda loader, node: Code(loader.construct_scalar(node)))


# The files of a task.


def identity(spec: DataSpec) -> dict[str, Any]:
    """What the questions depend on, as JSON types: the task's name and lm-eval's build, or the content of files.

    A data set of the hub counts by its name, and Python functions by all Python files below the folder of the YAML that
    names them.  InputError with what installs lm-eval if it is missing or too old.
    """
    version = installed_versions(("lm_eval",)).get("lm_eval")
    if version is None or Version(version) < Version(LEAST):
        given = f"{version} is installed" if version else "none is installed"
        raise InputError(f'dataset: "lm_eval" needs lm-eval {LEAST} or newer, and {given}: {INSTALL}')
    known: dict[str, Any] = {**builds(("lm_eval",)), "num_fewshot": spec.num_fewshot}
    file = task_file(spec)
    if file is None:
        return {**known, "task": spec.task}
    return {**known, "version": FILES_VERSION, "task": file.name, "files": digests(paths_of(spec))}


def paths_of(spec: DataSpec) -> list[Path]:
    """What a spec's task is made of, with its YAML: files, also those that may run, and folders of data."""
    file = task_file(spec)
    if file is None:
        return []
    config, parts = merged(file, trusted=spec.trust_remote_code)
    has_code = next(codes_in(config), None) is not None
    beside = {str(part.parent) for part in parts if not is_own(part)} if has_code else set()
    functions = [code for code in files_in((), beside) if code.suffix == ".py"]
    names, folders = data_places(config)
    return [*parts, *functions, *map(Path, folders), *files_in(names, folders)]


def is_here(spec: DataSpec) -> bool:
    """Whether nothing has to be downloaded for the task, as far as can be told: its data are local files."""
    file = task_file(spec)
    return file is not None and bool(data_files(merged(file, trusted=spec.trust_remote_code)[0]))


def task_file(spec: DataSpec) -> Path | None:
    """The YAML that is the task; None for a task that lm-eval's own package has.  InputError if there is none."""
    name = spec.task or ""
    path = Path(spec.locate(name))
    is_path = "/" in name or path.suffix.lower() in SUFFIXES
    if is_path:
        if not is_file(path):
            raise InputError(f"task: {printable(path)}: no such file")
        return path.resolve()
    if spec.include_path is None:
        return None
    folder = Path(spec.locate(spec.include_path))
    if not folder.is_dir():
        raise InputError(f"include_path: {printable(folder)}: no such folder")
    # As in lm-eval: by their names as text, without its _IGNORE_DIRS, and the first of one name counts.
    for file in sorted(folder.rglob("*.yaml"), key=Path.as_posix):
        if not IGNORED & set(file.parts) and task_name(file) == name:
            return Path(file).resolve()
    return None


def task_name(file: Path) -> Any:
    """The name of the task in a YAML; None if it cannot be read, as lm-eval leaves such a file out."""
    try:
        return merged(file, trusted=True)[0].get("task")
    except InputError:
        return None


def merged(file: Path, *, trusted: bool, inside: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[Path]]:
    """(the keys of a YAML and of what it includes, its own last; all these files); InputError for what is malformed.

    ``trusted``: its functions may run; otherwise InputError if it names any, or a data set of pickles.
    """
    file = Path(os.path.realpath(file.expanduser()))
    name = f"task: {printable(file)}"
    if file in inside:
        raise InputError(f"{name}: includes itself")
    try:
        config = yaml.load(read_bytes(file), Loader=Loader)
    except (InputError, OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: cannot be read as a task: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise InputError(f"{name}: a task is an object of keys and values")
    if not trusted and not is_own(file):
        check_harmless(config, name)
    includes = config.pop("include", [])
    keys: dict[str, Any] = {}
    files: list[Path] = []
    for include in includes if isinstance(includes, list) else [includes]:
        included, parts = merged(file.parent / str(include), trusted=trusted, inside=(*inside, file))
        keys |= included
        files += parts
    return {**keys, **config}, [*files, file]


def check_harmless(config: dict[str, Any], name: str) -> None:
    """InputError if a YAML would run code: functions, metrics that are programs, pickles, foreign prompts."""
    code = [f"!function {function}" for function in codes_in(config)]
    code += [f"{key}: {config[key]}" for key in ("class", "use_prompt") if config.get(key) is not None]
    code += [f"dataset_path: {PICKLES}"] if config.get("dataset_path") == PICKLES else []
    metrics = config.get("metric_list")
    for entry in metrics if isinstance(metrics, list) else []:
        metric = entry.get("metric") if isinstance(entry, dict) else entry
        if metric not in METRICS or entry.get("hf_evaluate"):
            code.append(f"metric: {metric}")
    if code:
        raise InputError(
            f'{name}: would run code ({printable(code[0])}); read that, and let it with "trust_remote_code": true'
        )


def codes_in(value: Any) -> Iterator[Code]:
    """Everything that a YAML names by ``!function``."""
    if isinstance(value, Code):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from codes_in(item)


def is_own(file: Path) -> bool:
    """Whether a file belongs to lm-eval's package."""
    package = package_folder("lm_eval")
    return package is not None and file.is_relative_to(package.resolve())


def data_files(config: dict[str, Any]) -> list[Path]:
    """The local files of a task's data set."""
    return files_in(*data_places(config))


def data_places(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(names of a task's data files, folders of its data); relative to the working directory, as in lm-eval."""
    options = config.get("dataset_kwargs")
    options = options if isinstance(options, dict) else {}
    names = [name for name in names_in(options.get("data_files")) if "://" not in name]
    folders = options.get("data_dir"), config.get("dataset_path")
    return (
        [str(Path(str(options.get("data_dir") or ""), name)) for name in names],
        [folder for folder in folders if isinstance(folder, str) and is_folder(Path(folder))],
    )


# A task -> tokens.


def read(spec: DataSpec, folder: Path) -> Tokens:
    """The requests of a task as tokens; InputError in one line if lm-eval, or compare_q, cannot score the task so."""
    file = task_file(spec)
    if file is not None:
        config, _ = merged(file, trusted=spec.trust_remote_code)  # before anything of it runs
        if "group" in config or not isinstance(config.get("task"), str):
            raise InputError(f"task: {printable(file)}: is a group, or has no task; name a file with one task")
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    with lm_eval_ready(spec, file):
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
    _, question = np.unique([instance.doc_id for instance in instances], return_inverse=True)
    requests = Requests(
        question.astype(np.int32), np.asarray([len(answer) for _, answer in pairs], np.int32),
        np.asarray(right, np.bool_), np.asarray(chars, np.int32), str(task.config.task),
        int(task.config.num_fewshot or 0),
    )  # fmt: skip
    ids = [np.asarray(context + answer, np.int32) for context, answer in pairs]
    return tokens_of(tokenizer, ids, with_special=True, requests=requests)


@contextmanager
def lm_eval_ready(spec: DataSpec, file: Path | None) -> Iterator[None]:
    """lm-eval as it may run here; InputError with its reason in place of whatever it or a task's functions raise.

    Templates of files that are not trusted are rendered without access to Python's inner attributes, from which a
    template could run any code.  Local data are read with an empty cache of ``datasets``, which knows files by their
    paths and times alone, and would serve the rows of others with the same.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            if file is not None and not is_own(file) and not spec.trust_remote_code:
                stack.enter_context(sandboxed())
            if is_here(spec):
                from datasets import config

                cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="compare_q."))
                stack.enter_context(patch.object(config, "HF_DATASETS_CACHE", cache))
            yield
    except InputError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise InputError(f"task: {spec.task}: lm-eval cannot build it: {name}: {one_line(error)}") from None


def sandboxed() -> Any:
    """While it holds, lm-eval renders templates in Jinja's sandbox."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    sandbox = SandboxedEnvironment(loader=utils.env.loader, undefined=utils.env.undefined)
    sandbox.keep_trailing_newline, sandbox.filters = utils.env.keep_trailing_newline, utils.env.filters
    return patch.object(utils, "env", sandbox)


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
    if name in manager.all_groups or name in manager.all_tags:
        raise InputError(f"task: {name}: is a group of tasks; name one of them")
    if name not in manager.all_subtasks:
        raise InputError(f"task: {name}: lm-eval has no such task{nearest(name, manager.all_subtasks)}")


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
    told = {"acc", "acc_norm"} & metrics.keys()
    if not told or "acc_mutual_info" in metrics or any(metrics[name] is not mean for name in told):
        raise InputError(f"task: measures {', '.join(metrics)}; only means of acc and acc_norm can be told here")
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
    return Recorder().loglikelihood(instances, disable_tqdm=True)  # type: ignore[no-any-return]


def graded(task: Any, instances: Sequence[Any]) -> tuple[list[bool], list[int]]:
    """(whether each request's answer is right, the characters of its choice).

    lm-eval says what is right: its ``process_results`` is told, of each answer in turn, that it is the most probable.
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
