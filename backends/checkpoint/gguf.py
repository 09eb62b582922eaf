"""A GGUF model on disk, all shards of it: where it is, what identifies it, what its own headers say.  No engine.

Read here and not with ``gguf.GGUFReader``, which makes an array of every string: SmolLM2's header (49,152 tokens and
48,900 merges, 98 MB file) takes it 2.2 s, and this file 0.06 s.  Block sizes are the ``gguf`` package's.

Bits a weight are by the convention of ``backends/checkpoint/stored_bits.py``: a layer's matrices with their block
scales (and NVFP4's global scales); not norms, biases, router gates, rope factors and embeddings; a tied head has the
embedding's.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from backends.base import ModelFacts, Storage
from backends.checkpoint import files as checkpoint
from backends.common.errors import InputError
from backends.common.messages import one_line
from backends.common.packages import installed_versions

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL, BYTE = 1, 6
"""Token types whose strings are the HF vocabulary's; converters rewrite the spaces of user-defined ones."""
AS_IN_HF = {"gpt2", "llama"}
"""Tokenizers (byte-level BPE, SentencePiece) whose token strings are the HF vocabulary's; WordPiece's are not."""
USED = {
    "general.architecture": str, "general.alignment": int, "tokenizer.ggml.model": str, TOKENS: list,
    TOKEN_TYPES: tuple, "split.no": int, "split.count": int, "split.tensors.count": int, "{}.context_length": int,
    "{}.vocab_size": int, "{}.rope.scaling.type": str, "{}.rope.scaling.factor": float,
    "{}.rope.scaling.original_context_length": int,
}  # fmt: skip
"""Fields that this file uses (``{}``: the architecture) -> what ``_Header`` makes of them."""
TOWERS = ("v.", "a.", "mm.", "resampler.")
ROUTERS = {"ffn_gate_inp", "ffn_gate_inp_shexp"}
OTHER_EMBEDDINGS = {"position_embd", "token_types", "per_layer_token_embd", "embed_tokens"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a header; ``shape`` in ggml's order (a matrix's inputs first), ``kind`` a ggml type's number."""

    name: str
    shape: tuple[int, ...]
    kind: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int | None:
        """Bytes on disk; None if the ggml type is not known."""
        block = block_sizes().get(self.kind)
        return None if block is None else self.numel // block[0] * block[1]

    @property
    def type_name(self) -> str:
        """ggml's name of the type: ``q4_1``, ``q6_K``."""
        import gguf

        if self.kind not in block_sizes():
            return f"ggml type {self.kind}"
        name: str = gguf.GGMLQuantizationType(self.kind).name
        return name.lower().replace("_k", "_K")

    @property
    def role(self) -> str:
        """Where its bits belong: "layer", "head", "embedding", or "" for nowhere."""
        path, _, part = self.name.rpartition(".")
        last = path.rpartition(".")[2]
        outside = last in ROUTERS | OTHER_EMBEDDINGS or "norm" in last or self.name.startswith(TOWERS)
        if outside or not (part == "scale" or (part == "weight" and len(self.shape) > 1)):
            return ""
        return {"output": "head", "token_embd": "embedding"}.get(path, "layer")


@dataclass(frozen=True)
class GgufModel:
    """Headers of all shards: ``fields`` are the first one's, ``tensors`` all in order; ``digest`` of the header bytes.

    Of arrays of strings only the tokens are kept, as bytes.
    """

    files: tuple[Path, ...]
    fields: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    digest: str

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def head(self) -> str:
        """The role of the tensors that make the logits: "head", or "embedding" where they are tied."""
        return "head" if any(tensor.role == "head" for tensor in self.tensors) else "embedding"

    def field(self, name: str) -> Any:
        """A field of the architecture's own; None if it is not there."""
        return self.fields.get(f"{self.architecture}.{name}")

    @cached_property
    def facts(self) -> ModelFacts:
        """Vocabulary and context."""
        tokens = self.fields.get(TOKENS)
        return ModelFacts(len(tokens) if tokens else self.field("vocab_size"), self.context, self.vocabulary() or None)

    @property
    def context(self) -> int | None:
        """Longest sequence, yarn's extension included (converters write the length before it)."""
        length: int | None = self.field("context_length")
        factor = self.field("rope.scaling.factor")
        original = self.field("rope.scaling.original_context_length")
        if length is None or self.field("rope.scaling.type") != "yarn" or not (factor and original):
            return length
        return max(length, int(original * factor))

    def vocabulary(self) -> dict[int, str]:
        """Id -> token of ordinary tokens; empty where the file's strings are not those of an HF vocabulary."""
        tokens, kinds = self.fields.get(TOKENS), self.fields.get(TOKEN_TYPES)
        if not tokens or not kinds or self.fields.get("tokenizer.ggml.model") not in AS_IN_HF:
            return {}
        ordinary = (number for number, kind in enumerate(kinds) if kind in (NORMAL, BYTE))
        return {number: tokens[number].decode(errors="replace") for number in ordinary}

    def storage(self) -> Storage:
        """Stored size by the convention above; None with a note where a tensor's type is not known."""
        bits = {"layer": 0, "head": 0, "embedding": 0}
        numel = dict(bits)
        for tensor in self.tensors:
            if not (role := tensor.role):
                continue
            if tensor.nbytes is None:
                known = installed_versions(("gguf",)).get("gguf")
                return Storage(note=f"{tensor.name}: {tensor.type_name} is not known to gguf {known}")
            bits[role] += tensor.nbytes * 8
            numel[role] += 0 if tensor.name.endswith(".scale") else tensor.numel
        if not numel["layer"] or not numel[self.head]:
            return Storage(note=f"{self.files[0]}: no weight matrices found in its header")
        head = bits[self.head]
        return Storage(bits["layer"] / numel["layer"], head / numel[self.head], bits["layer"] + head)

    def stamp(self, *, times: bool = True) -> str:
        """Hex digest that changes when the files do: headers, names, sizes, times, a sample of the weights.

        ``times`` off: the same for a copy on another machine.
        """
        digest = hashlib.sha256(self.digest.encode())
        for file in self.files:
            stat = file.stat()
            when = stat.st_mtime_ns if times else ""
            digest.update(f"\0{file.name}\0{stat.st_size}\0{when}".encode() + checkpoint.sampled(file))
        return digest.hexdigest()


@cache
def block_sizes() -> dict[int, tuple[int, int]]:
    """ggml type -> (elements, bytes) of a block."""
    import gguf

    return {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


def shard_names(name: str) -> list[str]:
    """The names of all shards of the model that ``name`` belongs to, in order; ``name`` alone if it is not split."""
    match = SHARD.fullmatch(name)
    count = int(match[3]) if match else 0
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)] if match else [name]


def model_files(path: Path) -> tuple[Path, ...]:
    """The files of the model at ``path``: any file of it, or a folder that holds no other; InputError if one misses."""
    if path.is_dir():
        # A multimodal model's projector lies beside it and is no model of its own.
        names = {shard_names(file.name)[0] for file in path.glob("*.gguf") if "mmproj" not in file.name}
        if len(names) != 1:
            found = f"{len(names)} GGUF models ({', '.join(sorted(names)[:5])}); name one" if names else "no .gguf file"
            raise InputError(f"model_dir: {path}: holds {found}")
        path = path / names.pop()
    files = tuple(path.with_name(name) for name in shard_names(path.name))
    for file in files:
        if not file.is_file():
            where = f"; shard of {path.name}, put all {len(files)} into one folder" if len(files) > 1 else ""
            raise InputError(f"model_dir: {file}: no such file{where}")
    return files


def read_model(path: Path) -> GgufModel:
    """The headers of the model at ``path`` (see ``model_files``), read once while its files stay as they are.

    InputError in one line for a missing, damaged or incomplete file.
    """
    files = model_files(path)
    shards = [_read(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fields = shards[0].fields
    numbers = [shard.fields.get("split.no", 0) for shard in shards]
    if fields.get("split.count", 0) not in ({0, 1} if len(files) == 1 else {len(files)}):
        raise InputError(f"{files[0]}: one of {fields['split.count']} shards; keep the names that it was split under")
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    if numbers != list(range(len(files))) or len(tensors) != fields.get("split.tensors.count", len(tensors)):
        raise InputError(f"{files[0]}: its shards are not of one model; download them again")
    digest = hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()
    return GgufModel(files, fields, tensors, digest)


def check_fields(fields: dict[str, Any]) -> None:
    """ValueError if one that is used has another type, or a value that nothing can be computed with."""
    for template, kind in USED.items():
        name = template.format(fields.get("general.architecture", ""))
        if name in fields and type(fields[name]) is not kind:
            raise ValueError(f"{name} is of another type")
        if kind is float and not abs(fields.get(name, 0)) < 1e9:
            raise ValueError(f"{name} is {fields[name]}")
    if fields.get("general.alignment", 32) < 1:
        raise ValueError(f"general.alignment is {fields['general.alignment']}")
    tokens, kinds = fields.get(TOKENS, ()), fields.get(TOKEN_TYPES)
    if kinds is not None and len(kinds) != len(tokens):
        raise ValueError(f"{len(kinds)} token types for {len(tokens)} tokens")


@cache
def _read(file: Path, size: int, mtime_ns: int) -> GgufModel:
    """One file; ``size`` and ``mtime_ns`` make a changed file another one for the cache."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).model(file)
    except struct.error:  # a number that lies behind the end of the file
        raise InputError(f"{file}: not a readable GGUF file: cut off inside its header, or damaged") from None
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(f"{file}: not a readable GGUF file: {one_line(error)}") from None


class _Header:
    """A reader that goes through a header once; struct.error or ValueError where it is damaged."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def model(self, file: Path) -> GgufModel:
        """The whole header."""
        magic, version, n_tensors, n_fields = self.take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF of version 2 or 3")
        fields = {}
        for _ in range(n_fields):
            name = self.text().decode()
            fields[name] = self.value(self.take("I")[0], keep=name == TOKENS)
        found = [self.tensor() for _ in range(n_tensors)]
        check_fields(fields)
        alignment = fields.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        for tensor, offset in found:
            if start + offset + (tensor.nbytes or 0) > len(self.data):
                raise ValueError(f"cut off before the end of {tensor.name}")
        digest = hashlib.sha256(self.data[: self.at]).hexdigest()
        return GgufModel((file,), fields, tuple(tensor for tensor, _ in found), digest)

    def take(self, codes: str) -> tuple[Any, ...]:
        """Numbers, little-endian and without padding."""
        values = struct.unpack_from(f"<{codes}", self.data, self.at)
        self.at += struct.calcsize(f"<{codes}")
        return values

    def text(self) -> bytes:
        """A string."""
        (length,) = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at]

    def value(self, kind: int, *, keep: bool = False) -> Any:
        """A field's value; of an array of strings (merges, mostly) None, unless it is to be kept."""
        inner, count = self.take("IQ") if kind == ARRAY else (kind, 1)
        if inner in NUMBERS:
            values = self.take(f"{count}{NUMBERS[inner]}")
            return values if kind == ARRAY else values[0]
        if inner != STRING:  # llama.cpp has no arrays of arrays either
            raise ValueError(f"a field of unknown type {inner}")
        if kind == STRING:
            return self.text().decode(errors="replace")
        if keep:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
        return None

    def tensor(self) -> tuple[GgufTensor, int]:
        """One tensor, and the offset of its bytes."""
        name = self.text().decode()
        (dimensions,) = self.take("I")
        *shape, kind, offset = self.take(f"{dimensions}QIQ")
        return GgufTensor(name, tuple(shape), kind), offset
