"""Find the weights among the files of a model's repository on the hub.

Repositories may store the same weights several times: Mistral's also as
``consolidated*.safetensors``, others also in folders such as ``onnx/``.  Only the files that
``checkpoint.files.weight_files`` will read are fetched.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Collection, Iterable
from pathlib import Path

from .common.errors import InputError
from .common.json_files import read_object

SINGLE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS = "*.safetensors"
"""The pattern of weights in lists of patterns.

It is replaced by the files that ``weights_among`` returns.
"""
USUAL = "model*.safetensors"
CONSOLIDATED_FILES = "consolidated*"
BELOW = "*/*.safetensors"


def matching(
    names: Collection[str], patterns: Iterable[str], index: Path | None
) -> dict[str, list[str]]:
    """Return the names that match each pattern.

    ``*`` also matches "/", because tokenizers and code may be in folders.  ``index``: the local
    copy of the repository's index, if there is one.
    """
    matched = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    if WEIGHTS in matched:
        matched[WEIGHTS] = weights_among(names, index)
    return matched


def weights_among(names: Collection[str], index: Path | None) -> list[str]:
    """Return the names of the files with the model's weights among all ``names`` of a repository.

    If the repository has an index without a local copy, these are all files that the index may
    name.
    """
    named_files = files_of_index(index)
    if named_files:
        return [name for name in names if name in named_files]
    files = [name for name in fnmatch.filter(names, WEIGHTS) if "/" not in name]
    preferred = fnmatch.filter(files, USUAL)
    if WEIGHTS_INDEX in names:
        # The index may name any file; Mistral's repositories hold a second copy of the weights.
        preferred = [name for name in files if not fnmatch.fnmatch(name, CONSOLIDATED_FILES)]
    if preferred:
        return preferred
    return files


def files_of_index(index: Path | None) -> set[str]:
    """Return the files of weights of a repository with this index: those it names, and ``SINGLE``.

    Empty if the index is missing or damaged, or names no file.
    """
    if index is None or not index.is_file():
        return set()
    try:
        weight_map = read_object(index, strict=False).get("weight_map")
    except InputError:  # ``weight_files`` reports it
        return set()
    if not isinstance(weight_map, dict):
        return set()
    files = {file for file in weight_map.values() if isinstance(file, str)}
    if files:
        # ``weight_files`` refuses a folder that has this file and an index that does not name it.
        # The file counts here, so that a copy from the hub is refused like any other folder.
        files.add(SINGLE)
    return files


def expected(folder: Path) -> tuple[list[str], list[str]]:
    """Return patterns (allowed, ignored) of the weights that make a cached folder complete."""
    named_files = files_of_index(folder / WEIGHTS_INDEX)
    if named_files:
        return [glob.escape(name) for name in sorted(named_files)], []
    pattern = WEIGHTS
    if any(folder.glob(USUAL)):
        pattern = USUAL
    return [pattern], [BELOW]
