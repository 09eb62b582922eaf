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

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = "*.safetensors"
"""The pattern of weights in lists of patterns.  It is replaced by the files that ``weights_among``
returns."""
USUAL = "model*.safetensors"
COPIES = "consolidated*"
BELOW = "*/*.safetensors"


def matching(
    names: Collection[str], patterns: Iterable[str], index: Path | None
) -> dict[str, list[str]]:
    """Return the names that match each pattern; ``index``: the local copy of the repository's
    index, if there is one.

    ``*`` also matches "/", because tokenizers and code may be in folders.
    """
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    if WEIGHTS in found:
        found[WEIGHTS] = weights_among(names, index)
    return found


def weights_among(names: Collection[str], index: Path | None) -> list[str]:
    """Return the names of the files with the model's weights among all ``names`` of a repository.

    If the repository has an index without a local copy, these are all files that the index may
    name.
    """
    named = named_in(index)
    if named:
        return [name for name in names if name in named]
    files = [name for name in fnmatch.filter(names, WEIGHTS) if "/" not in name]
    if INDEX in names:
        return [name for name in files if not fnmatch.fnmatch(name, COPIES)] or files
    return fnmatch.filter(files, USUAL) or files


def named_in(index: Path | None) -> set[str]:
    """Return the files that an index names, and ``SINGLE``; empty if the index is missing or
    damaged.

    ``weight_files`` refuses ``SINGLE`` next to an index that does not name it.
    """
    if index is None or not index.is_file():
        return set()
    try:
        weight_map = read_object(index, strict=False).get("weight_map")
    except InputError:  # ``weight_files`` reports it
        return set()
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    named = {file for file in files if isinstance(file, str)}
    return named | {SINGLE} if named else set()


def expected(folder: Path) -> tuple[list[str], list[str]]:
    """Return patterns (allowed, ignored) of the weights that a folder of the hub's cache must have
    to be complete.
    """
    if named := named_in(folder / INDEX):
        return [glob.escape(name) for name in sorted(named)], []
    usual = any(folder.glob(USUAL))
    return [USUAL if usual else WEIGHTS], [BELOW]
