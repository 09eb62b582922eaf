"""Safetensors files of a checkpoint: the files that engines load, headers, fingerprint.

No engine and no torch is imported.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..common import json_files
from ..common.errors import InputError
from ..common.json_files import (
    LARGEST_JSON_BYTES,
    exists,
    is_file,
    open_regular,
    parsed,
    read_object,
)
from ..common.message_text import one_line, printable
from ..common.storage import times_of
from ..hub_files import SINGLE, WEIGHTS_INDEX

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
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
SAMPLED_BLOCKS = 64
SAMPLED_BLOCK_BYTES = 4096
"""Number and bytes of the blocks of a file that its fingerprint reads."""


class Tensor(NamedTuple):
    """One entry of a safetensors header; ``start``: the offset of its bytes in ``file``."""

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
    """Return the model's safetensors files: by the index, or else in the Hugging Face format.

    InputError for a damaged index, for a missing file of the index, and for a folder with two sets
    of weights or with an adapter, which engines handle differently.
    """
    if exists(folder / ADAPTER):
        raise InputError(
            f"{printable(folder / ADAPTER)}: an adapter, which some engines add to the model and "
            "others ignore; merge it into the weights, or move it out of the folder"
        )
    if exists(folder / WEIGHTS_INDEX):
        return indexed_files(folder)
    single = folder / SINGLE
    if is_file(single):
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    # Mistral's repositories have the same weights twice, as model*.safetensors and as
    # consolidated*.safetensors.
    model_files = [file for file in files if file.name.startswith("model")]
    return model_files or files


def indexed_files(folder: Path) -> list[Path]:
    """Return the files that a folder's index names; InputError as for ``weight_files``."""
    index = folder / WEIGHTS_INDEX
    weight_map = read_object(index, strict=False).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(is_name_inside, weight_map.values())):
        raise InputError(
            f"{printable(index)}: not a safetensors index: "
            "weight_map must be an object of names of files in the folder"
        )
    names = sorted(set(weight_map.values()))
    single = folder / SINGLE
    if exists(single) and SINGLE not in names:
        raise InputError(
            f"{printable(single)}: not one of the {len(names)} files that {WEIGHTS_INDEX} names: "
            "there are two sets of weights, and engines differ in which one they load; move one of "
            "them out of the folder"
        )
    for name in names:
        if not is_file(folder / name):
            raise InputError(
                f"{folder / printable(name)}: named in {WEIGHTS_INDEX} but missing; "
                "download the model again"
            )
    return [folder / name for name in names]


def is_name_inside(name: Any) -> bool:
    """Return True for a path that stays in its folder."""
    return isinstance(name, str) and ".." not in Path(name).parts and name[:1] != "/"


def no_weights(folder: Path) -> str:
    """Return why a folder without safetensors files has no weights to load, and what to do."""
    pickled = []
    for suffix in PICKLED_SUFFIXES:
        pickled += sorted(folder.glob(f"*{suffix}"))
    advice = "are its weights downloaded?"
    if pickled:
        advice = f"save the model with safetensors instead of {pickled[0].name}"
    return (
        f"{printable(folder)}: no .safetensors files; compare_q loads no pickled weights; "
        f"{printable(advice)}"
    )


def strays(folder: Path) -> list[Path]:
    """Return the other safetensors files of a folder.

    An engine that loads every file would load another model.
    """
    loaded = set(weight_files(folder))
    return [file for file in sorted(folder.glob("*.safetensors")) if file not in loaded]


def sampled(file: Path) -> bytes:
    """Return the SHA-256 of blocks spread over a file.

    Replaced weights may have the same size and header.
    """
    last_start = max(file.stat().st_size - SAMPLED_BLOCK_BYTES, 0)
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in range(SAMPLED_BLOCKS):
            stream.seek(last_start * block // (SAMPLED_BLOCKS - 1))
            digest.update(stream.read(SAMPLED_BLOCK_BYTES))
    return digest.digest()


def header_bytes(file: Path) -> bytes:
    """Return the JSON header of a safetensors file, as stored; InputError."""
    try:
        with open_regular(file) as stream:
            start = stream.read(8)
            if start == b"version ":  # of the specification of Git LFS
                raise ValueError(
                    "it is a pointer of Git LFS; download the file itself, as with git lfs pull"
                )
            (length,) = struct.unpack("<Q", start)
            if length > min(os.fstat(stream.fileno()).st_size - 8, LARGEST_JSON_BYTES):
                raise ValueError(
                    "its header is longer than the file, or than a header can be; download it again"
                )
            return stream.read(length)
    except struct.error:
        why = "it ends too early; download it again"
    except (OSError, ValueError) as error:
        why = json_files.reason(error)
    raise InputError(f"{printable(file)}: not a readable safetensors file: {why}")


def read_header(file: Path) -> dict[str, Tensor]:
    """Return tensor name -> header entry of one safetensors file; reads only the header."""
    raw = header_bytes(file)
    where = f"{printable(file)}: not a readable safetensors file"
    try:
        with safe_open(file, "numpy"):  # safe_open checks names, dtypes, shapes and offsets
            pass
    except (SafetensorError, OSError) as error:
        raise InputError(f"{where}: {one_line(error)}; download it again") from None
    tensors = {}
    data_start = 8 + len(raw)
    for name, entry in parsed(raw, where).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        tensors[name] = Tensor(file, entry["dtype"], shape, data_start + begin, end - begin)
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the headers of several files as one.

    InputError if two files have a tensor with the same name.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        header = read_header(file)
        name = min(header.keys() & tensors.keys(), default="")
        if name:
            raise InputError(
                f"{printable(file)}: has the tensor {printable(name)}, as "
                f"{printable(tensors[name].file.name)} has, and engines differ in which one they "
                "load; move one of the files out of the folder"
            )
        tensors |= header
    return tensors


def stamp(folder: Path, override_tensors: Sequence[Path] = (), *, times: bool = True) -> str:
    """Return a hex digest that changes with configs, code, and the files of weights.

    Configs and code are read whole.  Of a file of weights its header, size, time and samples are
    read.  Other weights in the folder count too, since engines differ in what they open.
    generation_config.json counts, since engines read more than sampling defaults from it (for
    example tokens that Gemma 4 must never score).  Tokenizer, README and other files do not count.
    Without ``times`` a copy on another machine has the same digest.
    """
    digest = hashlib.sha256()
    weights = weight_files(folder)
    others = stamped_files(folder) - {*weights}
    texts = {file for file in others if file.suffix in (".json", ".py")}
    for file in sorted(texts):
        if file.name.startswith("tokenizer"):
            continue
        digest.update(os.fsencode(file.relative_to(folder)) + b"\0" + json_files.read_bytes(file))
    other_weights = sorted(others - texts)
    for file in [*weights, *override_tensors, *other_weights]:
        # Other weights may be pickled, without a header.
        header = b""
        if file not in other_weights:
            header = header_bytes(file)
        stat = file.stat()
        when = times_of(stat) if times else ""
        # Only the checkpoint's own weights are surely inside the folder.
        name = file.relative_to(folder) if file in weights else file.name
        digest.update(b"\0" + os.fsencode(name))
        digest.update(f"\0{stat.st_size}\0{when}\0".encode() + header + sampled(file))
    return digest.hexdigest()


def stamped_files(folder: Path) -> set[Path]:
    """Return the small files of a folder that its fingerprint depends on (``STAMPED``)."""
    files = set()
    for pattern in STAMPED:
        for file in folder.glob(pattern):
            if not file.is_dir():
                files.add(file)
    return files
