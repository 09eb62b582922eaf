"""A checkpoint on disk: where it is, what identifies it, what its headers say.  No engine, no torch."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.common.errors import InputError


@dataclass(frozen=True)
class Tensor:
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
    """The safetensors files of the model: the files that the index names, else all files of the Hugging Face format.

    InputError for a damaged index, and for a file that it names and that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in names if not (folder / name).is_file()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: not a safetensors index: {error!r}") from None
        if missing:
            raise InputError(f"{folder / missing[0]}: named in {index.name} but missing; download the model again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    # Mistral's repositories hold the same weights twice, as model*.safetensors and as consolidated*.safetensors.
    return [file for file in files if file.name.startswith("model")] or files


def strays(folder: Path) -> list[Path]:
    """The other safetensors files of the folder: an engine that loads every file would load another model."""
    known = set(weight_files(folder))
    return [file for file in sorted(folder.glob("*.safetensors")) if file not in known]


def sampled(file: Path) -> bytes:
    """SHA-256 of 64 blocks of 4 KiB, evenly spread over a file: weights that were replaced keep size and header."""
    size, block = file.stat().st_size, 4096
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for part in range(64):
            stream.seek(max(size - block, 0) * part // 63)
            digest.update(stream.read(block))
    return digest.digest()


def header_bytes(file: Path) -> bytes:
    """The JSON header of a safetensors file, as stored."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            return stream.read(length)
    except (OSError, ValueError, struct.error) as error:
        raise InputError(f"{file}: not a readable safetensors file: {error}") from None


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensor name -> header entry of one safetensors file; reads only the header."""
    raw = header_bytes(file)
    tensors = {}
    try:
        for name, entry in json.loads(raw).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + len(raw) + begin, end - begin)
                if 8 + len(raw) + end > file.stat().st_size:
                    raise ValueError(f"cut off before the end of {name}")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{file}: not a readable safetensors file: {error!r}") from None
    return tensors


def read_headers(files: Iterable[Path]) -> dict[str, Tensor]:
    """The headers of several files as one; a later file replaces an earlier one's tensors."""
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


def stamp(folder: Path, override_tensors: Sequence[Path] = (), *, times: bool = True) -> str:
    """Hex digest that changes when configs, code, or the headers, sizes, times or sampled weights of the files change.

    generation_config.json counts, since engines take more from it than sampling defaults (for example the tokens that
    Gemma 4 must never score).  Tokenizer, README and other files do not: after an edit of such a file nothing has to be
    computed again.  With ``times`` off, a copy of the folder on another machine has the same digest.
    """
    digest = hashlib.sha256()
    patterns = ("config.json", "generation_config.json", "*quant*.json", "params.json", "*.py")
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for file in [*weight_files(folder), *override_tensors]:
        header, stat = header_bytes(file), file.stat()
        when = stat.st_mtime_ns if times else ""
        digest.update(f"\0{file.name}\0{stat.st_size}\0{when}\0".encode() + header + sampled(file))
    return digest.hexdigest()
