"""The header of one GGUF file: its fields and tensors.  No engine.

Read here and not with ``gguf.GGUFReader``, which makes an array of every string: SmolLM2's header (49,152 tokens and
48,900 merges, 98 MB file) takes it 2.2 s, and this file 0.06 s.  Block sizes are the ``gguf`` package's.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import LARGEST, open_regular
from compare_q.backends.common.messages import bytes_in_words, one_line, printable
from compare_q.backends.common.packages import package_folder

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a field's type -> ``struct``'s code."""
STRING, ARRAY = 8, 9
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
USED = {
    "general.architecture": str, "general.alignment": int, "tokenizer.ggml.model": str, TOKENS: list,
    TOKEN_TYPES: tuple, "split.no": int, "split.count": int, "split.tensors.count": int, "{}.context_length": int,
    "{}.vocab_size": int, "{}.rope.scaling.type": str, "{}.rope.scaling.factor": float,
    "{}.rope.scaling.original_context_length": int, "{}.block_count": int, "{}.nextn_predict_layers": int,
}  # fmt: skip
"""Fields that this file uses (``{}``: the architecture) -> their types as ``_Reader`` reads them."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a header.

    ``shape`` is in ggml's order (a matrix's inputs first); ``type_number`` is ggml's number of the tensor's type.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int | None:
        """Bytes on disk; None if the ggml type is not known."""
        block = block_sizes().get(self.type_number)
        return None if block is None else self.numel // block[0] * block[1]

    @property
    def type_name(self) -> str:
        """ggml's name of the type: ``q4_1``, ``q6_K``."""
        if self.type_number not in block_sizes():
            return f"ggml type {self.type_number}"
        name: str = constants().GGMLQuantizationType(self.type_number).name
        return name.lower().replace("_k", "_K")


GgufHeader = tuple[dict[str, Any], tuple[GgufTensor, ...], str]
"""One file's fields by name, its tensors in order, and the SHA-256 of its header's bytes.

Of arrays of strings only the tokens are kept, as bytes; the others are None.
"""


@cache
def block_sizes() -> dict[int, tuple[int, int]]:
    """ggml type -> (elements, bytes) of a block."""
    return {int(number): size for number, size in constants().GGML_QUANT_SIZES.items()}


@cache
def constants() -> ModuleType:
    """``gguf.constants`` alone: beside vLLM the whole package imports Mistral's tokenizers and OpenCV, 0.35 s."""
    folder = package_folder("gguf")
    spec = folder and spec_from_file_location("gguf_constants", folder / "constants.py")
    if not spec or spec.loader is None:
        raise InputError("gguf is not installed: pip install gguf")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_header(file: Path) -> GgufHeader:
    """A file's header, read once while the file stays as it is; InputError in one line if it is damaged."""
    stat = file.stat()
    return _read_header(file, stat.st_size, stat.st_mtime_ns)


@cache
def _read_header(file: Path, size: int, mtime_ns: int) -> GgufHeader:
    """The header of ``file``; ``size`` and ``mtime_ns`` make a changed file another one for the cache."""
    try:
        with open_regular(file) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
        raise InputError(f"{printable(file)}: not a readable GGUF file: {one_line(error)}") from None


def check_fields(fields: dict[str, Any]) -> None:
    """ValueError if a field that is used has another type, or a value with which nothing can be computed."""
    for template, expected in USED.items():
        name = template.format(fields.get("general.architecture", ""))
        if name in fields and type(fields[name]) is not expected:
            raise ValueError(f"{name} is of another type")
        if expected is float and not abs(fields.get(name, 0)) < 1e9:
            raise ValueError(f"{name} is {fields[name]}")
    if fields.get("general.alignment", 32) < 1:
        raise ValueError(f"general.alignment is {fields['general.alignment']}")
    tokens, types = fields.get(TOKENS, ()), fields.get(TOKEN_TYPES)
    if types is not None and len(types) != len(tokens):
        raise ValueError(f"{len(types)} token types for {len(tokens)} tokens")


class _Reader:
    """Goes through a header once; struct.error or ValueError where the header is damaged."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def header(self) -> GgufHeader:
        """The whole header."""
        magic, version, n_tensors, n_fields = self.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF of version 2 or 3")
        fields = {}
        for _ in range(n_fields):
            name = self.string().decode()
            fields[name] = self.value(self.numbers("I")[0], keep=name == TOKENS)
        placed = [self.tensor() for _ in range(n_tensors)]
        check_fields(fields)
        alignment = fields.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        for tensor, offset in placed:
            if start + offset + (tensor.nbytes or 0) > len(self.data):
                raise ValueError(f"cut off before the end of {tensor.name}")
        digest = hashlib.sha256(self.data[: self.at]).hexdigest()
        return fields, tuple(tensor for tensor, _ in placed), digest

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """The next numbers, little-endian and without padding; ``codes`` as ``struct`` has them."""
        return struct.unpack_from(f"<{codes}", self.data, self.passed(struct.calcsize(f"<{codes}")))

    def passed(self, size: int) -> int:
        """Where the next ``size`` bytes begin, which count as read; the header of a sparse file may have terabytes."""
        self.at += size
        if self.at > LARGEST:
            raise ValueError(f"its header is longer than {bytes_in_words(LARGEST)}")
        return self.at - size

    def string(self) -> bytes:
        """The next string."""
        begin = self.passed(self.numbers("Q")[0])
        return self.data[begin : self.at]

    def value(self, field_type: int, *, keep: bool = False) -> Any:
        """A field's value; None for an array of strings (mostly merges), unless ``keep`` asks for it."""
        inner, count = self.numbers("IQ") if field_type == ARRAY else (field_type, 1)
        if inner in NUMBERS:
            values = self.numbers(f"{count}{NUMBERS[inner]}")
            return values if field_type == ARRAY else values[0]
        if inner != STRING:  # llama.cpp has no arrays of arrays either
            raise ValueError(f"a field of unknown type {inner}")
        self.at = self.passed(8 * count)  # no string is shorter
        if field_type == STRING:
            return self.string().decode(errors="replace")
        if keep:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
        return None

    def tensor(self) -> tuple[GgufTensor, int]:
        """The next tensor, and the offset of its bytes."""
        name = self.string().decode()
        (dimensions,) = self.numbers("I")
        *shape, type_number, offset = self.numbers(f"{dimensions}QIQ")
        return GgufTensor(name, tuple(shape), type_number), offset
