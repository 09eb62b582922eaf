"""Safetensors files of a checkpoint: the files that engines load, headers, fingerprint.  No engine,
no torch.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from ..common import json_files
from ..common.errors import InputError
from ..common.json_files import LARGEST, exists, is_file, open_regular, parsed, read_object
from ..common.message_text import one_line, printable
from ..common.storage import times_of
from ..hub_files import INDEX, SINGLE

ADAPTER = "adapter_config.json"
STAMPED = (
    "*config.json",
    "*.index.json",
    "*quant*.json",
    "params.json",
    "*.py",
    "*/*.py",
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
)
"""Patterns of all files in a folder that an engine may open, except the tokenizer's."""


class Tensor(NamedTuple):
    """One entry of a safetensors header; ``start`` is the absolute offset of its bytes in ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: the files in the index, else the files of the Hugging
    Face format.

    InputError for a damaged index, for a missing file of the index, and for a folder with two sets
    of weights or with an adapter, which engines handle differently.
    """
    index, single = folder / INDEX, folder / SINGLE
    if exists(folder / ADAPTER):
        raise InputError(
            f"{printable(folder / ADAPTER)}: an adapter, which some engines add to the model and others ignore; merge "
            "it into the weights, or move it out of the folder"
        )
    if exists(index):
        weight_map = read_object(index, strict=False).get("weight_map")
        named = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not all(
            isinstance(name, str) and ".." not in Path(name).parts and name[:1] != "/"
            for name in named
        ):
            what = "weight_map must be an object of names of files in the folder"
            raise InputError(f"{printable(index)}: not a safetensors index: {what}")
        names = sorted(set(named))
        if exists(single) and SINGLE not in names:
            raise InputError(
                f"{printable(single)}: not one of the {len(names)} files that {INDEX} names: there are two sets of "
                "weights, and engines differ in which one they load; move one of them out of the folder"
            )
        for name in names:
            if not is_file(folder / name):
                raise InputError(
                    f"{folder / printable(name)}: named in {INDEX} but missing; download the model again"
                )
        return [folder / name for name in names]
    if is_file(single):
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    # Mistral's repositories have the same weights twice, as model*.safetensors and as
    # consolidated*.safetensors.
    return [file for file in files if file.name.startswith("model")] or files


def no_weights(folder: Path) -> str:
    """Why a folder without safetensors files has no weights that can be loaded, and what to do."""
    pickled = next(
        (
            file.name
            for suffix in (".bin", ".pt", ".pth")
            for file in sorted(folder.glob(f"*{suffix}"))
        ),
        "",
    )
    advice = (
        f"save the model with safetensors instead of {pickled}"
        if pickled
        else "are its weights downloaded?"
    )
    return f"{printable(folder)}: no .safetensors files; compare_q loads no pickled weights; {printable(advice)}"


def strays(folder: Path) -> list[Path]:
    """The other safetensors files of the folder; an engine that loads every file would load another
    model.
    """
    known = set(weight_files(folder))
    return [file for file in sorted(folder.glob("*.safetensors")) if file not in known]


def sampled(file: Path) -> bytes:
    """SHA-256 of 64 blocks of 4 KiB, spread over a file: replaced weights may have the same size
    and header.
    """
    size, block, digest = file.stat().st_size, 4096, hashlib.sha256()
    with file.open("rb") as stream:
        for part in range(64):
            stream.seek(max(size - block, 0) * part // 63)
            digest.update(stream.read(block))
    return digest.digest()


def header_bytes(file: Path) -> bytes:
    """The JSON header of a safetensors file, as stored."""
    try:
        with open_regular(file) as stream:
            start = stream.read(8)
            if start == b"version ":  # of the specification of Git LFS
                raise ValueError(
                    "it is a pointer of Git LFS; download the file itself, as with git lfs pull"
                )
            (length,) = struct.unpack("<Q", start)
            if length > min(os.fstat(stream.fileno()).st_size - 8, LARGEST):
                raise ValueError(
                    "its header is longer than the file, or than a header can be; download it again"
                )
            return stream.read(length)
    except (OSError, ValueError, struct.error) as error:
        why = (
            "it ends too early; download it again"
            if isinstance(error, struct.error)
            else json_files.reason(error)
        )
        raise InputError(f"{printable(file)}: not a readable safetensors file: {why}") from None


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensor name -> header entry of one safetensors file; reads only the header."""
    raw, where = header_bytes(file), f"{printable(file)}: not a readable safetensors file"
    try:
        with safe_open(file, "numpy"):  # safe_open checks names, dtypes, shapes and offsets
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"{where}: {one_line(error)}; download it again") from None
    found, data = {}, 8 + len(raw)
    for name, entry in parsed(raw, where).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = Tensor(
                file, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin
            )
    return found


def read_headers(files: Iterable[Path]) -> dict[str, Tensor]:
    """The headers of several files as one; InputError if two files have a tensor with the same
    name.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        own = read_header(file)
        if again := min(own.keys() & found.keys(), default=""):
            raise InputError(
                f"{printable(file)}: has the tensor {printable(again)}, as {printable(found[again].file.name)} has, "
                "and engines differ in which one they load; move one of the files out of the folder"
            )
        found |= own
    return found


def stamp(folder: Path, override_tensors: Sequence[Path] = (), *, times: bool = True) -> str:
    """Hex digest that changes when configs, code, or the headers, sizes, times or sampled weights
    of the files change.

    Other weights in the folder count, since engines differ in what they open.
    generation_config.json counts, since engines read more than sampling defaults from it (for
    example tokens that Gemma 4 must never score).  Tokenizer, README and other files do not count.
    Without ``times`` a copy on another machine has the same digest.
    """
    digest = hashlib.sha256()
    weights = weight_files(folder)
    found = {file for pattern in STAMPED for file in folder.glob(pattern) if not file.is_dir()} - {
        *weights
    }
    read = {
        file
        for file in found
        if file.suffix in (".json", ".py") and not file.name.startswith("tokenizer")
    }
    for file in sorted(read):
        digest.update(os.fsencode(file.relative_to(folder)) + b"\0" + json_files.read_bytes(file))
    others = sorted(file for file in found if file.suffix not in (".json", ".py"))
    for file in [*weights, *override_tensors, *others]:
        header, stat = b"" if file in others else header_bytes(file), file.stat()
        when = times_of(stat) if times else ""
        digest.update(
            b"\0" + os.fsencode(file.relative_to(folder) if file in weights else file.name)
        )
        digest.update(f"\0{stat.st_size}\0{when}\0".encode() + header + sampled(file))
    return digest.hexdigest()
