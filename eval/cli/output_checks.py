"""Checks of a command's outputs before it starts: each can be written, and none is an input."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ...backends.common.engine_options import paths_in
from ...backends.common.errors import InputError
from ...backends.common.json_files import exists, is_file, is_folder
from ..common.output_files import file_names, is_writable
from ..plots import measures
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus
from .commands import Inputs, OutputFiles, PictureFlags

SPEC_FILES = ("data.json", "models.json")
"""The files that ``--save-specs`` writes: data specs and model specs.  No existing file is
replaced."""
NO_PART_OF_A_MODEL = (*measures.SUFFIXES, ".html", ".csv", ".md")
"""Suffixes of outputs that may be written into the folder of a model: engines do not read such
files, and the keys of cached scores do not depend on them."""

FlagPaths = list[tuple[str, Path]]
"""Flags with a path that each of them names."""


def check(
    files: OutputFiles,
    pictures: PictureFlags,
    input_paths: Iterable[str | Path],
    texts: Mapping[str, DataSpec] = {},
    models: Sequence[ModelSpec] = (),
) -> None:
    """InputError for an output that cannot be written, or is an input of this command.

    ``input_paths``: files and folders that the command reads, without those of texts and models.
    """
    written_files = files_of(files, pictures)
    folders = folders_of(files, pictures)
    # Files that exist in the folder are replaced; new files need a writable folder only.
    if files.tokens_out is not None:
        labels = [spec.name for spec in models]
        for file in token_files(files.tokens_out, labels).values():
            if os.path.lexists(file):
                written_files.append(("--tokens-out", file))
    real_inputs = set()
    for path in [*input_paths, *paths_of_models(models), *paths_of_texts(texts)]:
        if exists(path):
            real_inputs.add(os.path.realpath(path))
    check_files(written_files)
    folders_of_models = model_folders(texts, models) - folders_of_texts(texts)
    check_no_input([*folders, *written_files], real_inputs, folders_of_models)
    check_folders(folders)
    check_new_specs(files.save_specs)


def files_of(files: OutputFiles, pictures: PictureFlags) -> FlagPaths:
    """Return the flags and paths of files that a command writes."""
    return without_none(
        {
            "--output": files.output,
            "--csv": files.csv,
            "--markdown": files.markdown,
            "--model-card": files.model_card,
            "--junit": files.junit,
            "--html": files.html,
            "--plot_file": pictures.plot_file,
            "--card": pictures.card,
            "--recipe": pictures.front,
        }
    )


def folders_of(files: OutputFiles, pictures: PictureFlags) -> FlagPaths:
    """Return the flags and paths of folders that a command writes files into."""
    return without_none(
        {
            "--tokens-out": files.tokens_out,
            "--plots": pictures.plots,
            "--save-specs": files.save_specs,
        }
    )


def without_none(paths: Mapping[str, Path | None]) -> FlagPaths:
    """Return the flags with a path."""
    return [(flag, path) for flag, path in paths.items() if path is not None]


def check_files(files: FlagPaths) -> None:
    """InputError for a file that cannot be written, or that two flags name.

    Also for a picture in an unknown format.
    """
    flag_of_path: dict[str, str] = {}
    for flag, file in files:
        if not is_writable(file):
            reason = f"there is no folder {file.parent}"
            if is_folder(file.parent):
                reason = "is the folder yours, and the file?"
            raise InputError(f"{flag}: {file}: cannot be written; {reason}")
        other_flag = flag_of_path.setdefault(os.path.realpath(file), flag)
        if other_flag != flag:
            raise InputError(
                f"{flag}: {file}: is the file of {other_flag} as well; name another file"
            )
        is_picture = flag in ("--plot_file", "--card")
        if is_picture and file.suffix.lower() not in measures.SUFFIXES:
            raise InputError(f"{flag}: {file}: must end in {', '.join(measures.SUFFIXES)}")


def check_no_input(outputs: FlagPaths, real_inputs: set[str], folders_of_models: set[str]) -> None:
    """InputError for an output that is an input, or is in a folder that is one.

    ``real_inputs``, ``folders_of_models``: paths without links.
    """
    for flag, path in outputs:
        real_path = Path(os.path.realpath(path))
        inputs = set()
        for folder in (real_path, *real_path.parents):
            if str(folder) in real_inputs:
                inputs.add(str(folder))
        is_folder_flag = flag in ("--tokens-out", "--plots", "--save-specs")
        # No engine reads a picture, so that -p works in the folder of a model.
        if not is_folder_flag and path.suffix.lower() in NO_PART_OF_A_MODEL:
            inputs -= folders_of_models
        if inputs:
            raise InputError(
                f"{flag}: {path}: is read here, or lies in a folder that is; name another"
            )


def check_folders(folders: FlagPaths) -> None:
    """InputError for a folder that cannot be made, or that no file can be written into."""
    for flag, folder in folders:
        # The folder and its parents are made when something is written.
        existing_parent = folder
        while not os.path.lexists(existing_parent):
            existing_parent = existing_parent.absolute().parent
        can_write = os.access(existing_parent, os.W_OK | os.X_OK)
        if not is_folder(existing_parent) or not can_write:
            raise InputError(f"{flag}: {folder}: cannot be written; is the folder yours?")


def check_new_specs(folder: Path | None) -> None:
    """InputError if ``--save-specs`` would replace a file."""
    if folder is None:
        return
    for name in SPEC_FILES:
        if os.path.lexists(folder / name):
            raise InputError(f"--save-specs: {folder / name}: exists already; name another folder")


def token_files(folder: Path, labels: Sequence[str]) -> dict[str, Path]:
    """Return label -> the file that ``--tokens-out`` may write."""
    files = {}
    for label, name in zip(labels, file_names(labels), strict=True):
        files[label] = folder / f"{name}.parquet"
    return files


def spec_paths(inputs: Inputs) -> list[Path]:
    """Return the files of ``-d`` and ``-m``."""
    return spec_files.expand([*map(str, inputs.data), *inputs.specs])


def paths_of_models(models: Sequence[ModelSpec]) -> list[str | Path]:
    """Return the files and folders of models that a command reads."""
    paths: list[str | Path] = []
    for model in models:
        paths += [model.located, *model.override_tensors]
        for word in paths_in(model.options):
            if is_file(Path(word)):
                paths.append(Path(word))
        if model.python:
            paths.append(model.locate(model.python))
    return paths


def paths_of_texts(texts: Mapping[str, DataSpec]) -> list[str | Path]:
    """Return the files and folders of texts and their tokenizers."""
    paths: list[str | Path] = []
    for spec in texts.values():
        paths.append(spec.locate(spec.tokenizer_dir))
        # The run reports the error.
        with suppress(InputError):
            paths += corpus.paths_of(spec)
    return paths


def model_folders(texts: Mapping[str, DataSpec], models: Sequence[ModelSpec]) -> set[str]:
    """Return the paths of models and tokenizers, without links.

    Engines read only files that belong to a checkpoint there, so an output is refused in these
    folders only if it has the name of such a file.
    """
    folders = {os.path.realpath(model.located) for model in models}
    for spec in texts.values():
        folders.add(os.path.realpath(spec.locate(spec.tokenizer_dir)))
    return folders


def folders_of_texts(texts: Mapping[str, DataSpec]) -> set[str]:
    """Return the files and folders of texts, without links.

    A file that is added to such a folder may be read as a text.
    """
    folders: set[str] = set()
    for spec in texts.values():
        # The run reports the error.
        with suppress(InputError):
            for path in corpus.paths_of(spec):
                folders.add(os.path.realpath(path))
    return folders
