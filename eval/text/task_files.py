"""The files of lm-eval's tasks: which YAML a spec means, what it depends on, and whether it would run code.

A task is a YAML file, in lm-eval's own package or on this machine.  lm-eval runs the Python functions that a YAML names
by ``!function``.  Its own package was installed to be run; other files may have come from anywhere, so their functions
run only if the spec says ``trust_remote_code``.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from backends.common.errors import InputError
from backends.common.json_files import is_file, is_folder, read_bytes
from backends.common.messages import one_line, printable
from backends.common.packages import builds, installed_versions, package_folder
from eval.specs.types import DataSpec
from eval.text.corpus import digests, first_files
from eval.text.hub_datasets import names_in

INSTALL = "pip install lm_eval==0.4.13"
LEAST = (0, 4, 13)
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


def check_lm_eval() -> None:
    """InputError with what installs lm-eval if it is missing or too old."""
    version = installed_versions(("lm_eval",)).get("lm_eval")
    if version is None:
        raise InputError(f'dataset: "lm_eval" needs lm-eval, which is not installed: {INSTALL}')
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < LEAST:
        raise InputError(f'dataset: "lm_eval" needs lm-eval 0.4.13 or newer, and {version} is installed: {INSTALL}')


def identity(spec: DataSpec) -> dict[str, Any]:
    """What the questions depend on, as JSON types: the task's name and lm-eval's build, or the content of files.

    A data set of the hub counts by its name, and Python functions by all Python files below the folder of the YAML that
    names them.
    """
    check_lm_eval()
    found: dict[str, Any] = {**builds(("lm_eval",)), "num_fewshot": spec.num_fewshot}
    file = task_file(spec)
    if file is None:
        return {**found, "task": spec.task}
    return {**found, "version": FILES_VERSION, "task": file.name, "files": digests(paths_of(spec, file))}


def paths_of(spec: DataSpec, file: Path | None) -> list[Path]:
    """What a spec's task is made of, with its YAML: files, also those that may run, and folders of data."""
    if file is None:
        return []
    config, parts = merged(file, trusted=spec.trust_remote_code)
    has_code = next(codes_in(config), None) is not None
    folders = {part.parent for part in parts if not is_own(part)} if has_code else set()
    functions = {code for folder in folders for code in first_files(folder.rglob("*.py"), str(folder))}
    return [*parts, *sorted(functions), *data_folders(config), *data_files(config)]


def task_file(spec: DataSpec) -> Path | None:
    """The YAML that is the task; None for a task that lm-eval's own package has.  InputError if there is none."""
    name = spec.task or ""
    path = Path(spec.locate(name))
    is_path = "/" in name or path.suffix.lower() in SUFFIXES
    if is_path and path.is_dir() and spec.include_path is None:
        raise InputError(f"task: {printable(path)}: is a folder; name it in include_path, and its task here")
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
    files = first_files(folder.rglob("*.yaml"), str(folder))
    for file in sorted(files, key=lambda each: Path(each).as_posix()):
        if not IGNORED & set(Path(file).parts) and named(Path(file)) == name:
            return Path(file).resolve()
    return None


def named(file: Path) -> str | None:
    """The name of the task in a YAML; None if it cannot be read, as lm-eval leaves such a file out."""
    try:
        config, _ = merged(file, trusted=True)
    except InputError:
        return None
    return config.get("task") if isinstance(config.get("task"), str) else None


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
    found: dict[str, Any] = {}
    files: list[Path] = []
    for each in includes if isinstance(includes, list) else [includes]:
        keys, parts = merged(file.parent / str(each), trusted=trusted, inside=(*inside, file))
        found |= keys
        files += parts
    return {**found, **config}, [*files, file]


def check_harmless(config: dict[str, Any], name: str) -> None:
    """InputError if a YAML would run code: functions, metrics that are programs, pickles, foreign prompts."""
    code = [f"!function {each}" for each in codes_in(config)]
    code += [f"{key}: {config[key]}" for key in ("class", "use_prompt") if config.get(key) is not None]
    code += [f"dataset_path: {PICKLES}"] if config.get("dataset_path") == PICKLES else []
    metrics = config.get("metric_list")
    for each in metrics if isinstance(metrics, list) else []:
        metric = each.get("metric") if isinstance(each, dict) else each
        if metric not in METRICS or each.get("hf_evaluate"):
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
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from codes_in(each)


def is_own(file: Path) -> bool:
    """Whether a file belongs to lm-eval's package."""
    package = package_folder("lm_eval")
    return package is not None and file.is_relative_to(package.resolve())


def data_files(config: dict[str, Any]) -> list[Path]:
    """The local files of a task's data set; paths are relative to the working directory, as in lm-eval."""
    options = config.get("dataset_kwargs")
    options = options if isinstance(options, dict) else {}
    names = [str(name) for name in names_in(options.get("data_files")) if "://" not in str(name)]
    base = options.get("data_dir")
    places = [Path(str(base), name) if base else Path(name) for name in names]
    found = [Path(match) for place in places for match in first_files(glob.iglob(str(place), recursive=True), "")]
    for folder in data_folders(config):
        found += first_files(folder.rglob("*"), str(folder))
    return [file for file in found if is_file(file)]


def data_folders(config: dict[str, Any]) -> list[Path]:
    """The local folders that are a task's data set."""
    options = config.get("dataset_kwargs")
    folders = options.get("data_dir") if isinstance(options, dict) else None, config.get("dataset_path")
    return [Path(folder) for folder in folders if isinstance(folder, str) and is_folder(Path(folder))]


def is_here(spec: DataSpec) -> bool:
    """Whether nothing has to be downloaded for the task, as far as can be told: its data are local files."""
    file = task_file(spec)
    return file is not None and bool(data_files(merged(file, trusted=spec.trust_remote_code)[0]))
