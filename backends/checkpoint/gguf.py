"""A GGUF model with all its shards: files, headers, fingerprint, stored size.  No engine.

A model on the hub is named ``owner/repository/file.gguf``.

Bits per weight follow the convention of ``backends/checkpoint/folder.py``.  This file has its own
reader of headers: ``gguf.GGUFReader`` makes an array of every string, and takes 2.2 s instead of
0.06 s for 49,152 tokens and their merges.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .. import hub
from ..base import ModelFacts, ModelFiles, Placed, PlannedModel, ServingFacts, Storage
from ..common.errors import InputError
from ..common.json_files import LARGEST, is_file, is_folder, open_regular
from ..common.message_text import bytes_in_words, one_line, printable
from ..common.storage import times_of
from ..hub import SILENT, Watch
from .checkpoint_config import scaling_json, step_numbers
from .formats import UNEXPLAINED
from .safetensors_files import sampled

NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF's number of a field's type -> ``struct``'s code."""
STRING, ARRAY = 8, 9
TOKENS, TOKEN_TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
BLOCK = re.compile(r"blk\.(\d{1,9})\.")
HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)/(.+\.gguf)")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
NORMAL, BYTE = 1, 6
"""Token types with the strings of the HF vocabulary; converters change the spaces of user-defined
ones."""
AS_IN_HF = {"gpt2", "llama"}
"""Tokenizers with the token strings of the HF vocabulary (byte-level BPE, SentencePiece; not
WordPiece)."""
TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_K", 256, 84),
    11: ("q3_K", 256, 110),
    12: ("q4_K", 256, 144),
    13: ("q5_K", 256, 176),
    14: ("q6_K", 256, 210),
    15: ("q8_K", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
"""ggml's number of a type -> its name, and the elements and bytes of a block."""
LONG_FACTORS, ORIGINAL = "rope_factors_long", "{}.rope.scaling.original_context_length"
T = TypeVar("T")
TOWERS = ("v.", "a.", "mm.", "resampler.")
ROUTERS = {"ffn_gate_inp", "ffn_gate_inp_shexp"}
OTHER_EMBEDDINGS = {"position_embd", "token_types", "per_layer_token_embd", "embed_tokens"}


class GgufTensor(NamedTuple):
    """One tensor of a header."""

    name: str
    shape: tuple[int, ...]  # in ggml's order: a matrix's inputs first
    type_name: str  # ggml's: "q4_1", "q6_K"
    nbytes: int | None  # on disk; None if the type is unknown
    start: int = 0  # of its bytes in the file

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class GgufHeader(NamedTuple):
    """The header of one file."""

    fields: dict[
        str, Any
    ]  # by name; the tokens are kept as bytes, other arrays of strings are None
    tensors: tuple[GgufTensor, ...]
    digest: str  # SHA-256 of its bytes


@cache
def read_header(file: Path, size: int, mtime_ns: int) -> GgufHeader:
    """The header of ``file``; InputError if it is damaged.  It is read again if size or time
    change.
    """
    try:
        with (
            open_regular(file) as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data).header()
    except struct.error:
        raise InputError(
            f"{printable(file)}: not a readable GGUF file: it ends too early; download it again"
        ) from None
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(
            f"{printable(file)}: not a readable GGUF file: {one_line(error)}"
        ) from None


def merges_in(file: Path) -> list[str]:
    """The merges of a file's tokenizer, which ``read_header`` skips; empty if the file has no
    merges; InputError.
    """
    header_of(file)  # InputError for a damaged file
    with (
        open_regular(file) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found = _Reader(data, (MERGES,)).header().fields.get(MERGES)
    return [merge.decode(errors="replace") for merge in found] if isinstance(found, list) else []


def header_of(file: Path) -> GgufHeader:
    """The header of a file as it is now; InputError if it is damaged."""
    stat = file.stat()
    return read_header(file, stat.st_size, stat.st_mtime_ns)


def field(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a field of a header; None if it is missing, has another type, or is a float beyond 10
    ** 9 or NaN.

    ``{}`` in ``name`` is replaced by the architecture.
    """
    value = fields.get(name.format(fields.get("general.architecture", "")))
    return (
        value
        if type(value) is kind and not (isinstance(value, float) and not abs(value) < 1e9)
        else None
    )


class _Reader:
    """Reads a header once; struct.error or ValueError if it is damaged.

    ``kept``: the arrays of strings whose values are read.  ``at``: bytes read so far.
    """

    def __init__(self, data: mmap.mmap, kept: Collection[str] = (TOKENS,)) -> None:
        self.data, self.kept, self.at = data, kept, 0

    def header(self) -> GgufHeader:
        """The whole header."""
        magic, version, n_tensors, n_fields = self.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF of version 2 or 3")
        fields = {}
        for _ in range(n_fields):
            name = self.string().decode()
            fields[name] = self.value(self.numbers("I")[0], keep=name in self.kept)
        placed = []
        for _ in range(n_tensors):
            name, (dimensions,) = self.string().decode(), self.numbers("I")
            *shape, type_number, offset = self.numbers(f"{dimensions}QIQ")
            type_name, elements, size = TYPES.get(type_number, (f"ggml type {type_number}", 1, 0))
            nbytes = math.prod(shape) // elements * size if size else None
            placed.append((GgufTensor(name, tuple(shape), type_name, nbytes), offset))
        alignment = max(field(fields, "general.alignment", int) or 32, 1)
        start = -(-self.at // alignment) * alignment
        for tensor, offset in placed:
            if start + offset + (tensor.nbytes or 0) > len(self.data):
                raise ValueError(f"cut off before the end of {tensor.name}")
        digest = hashlib.sha256(self.data[: self.at]).hexdigest()
        return GgufHeader(
            fields,
            tuple(tensor._replace(start=start + offset) for tensor, offset in placed),
            digest,
        )

    def passed(self, size: int) -> int:
        """Return the start of the next ``size`` bytes, and count them as read; ValueError if the
        header is too long.
        """
        self.at += size
        if self.at > LARGEST:
            raise ValueError(f"its header is longer than {bytes_in_words(LARGEST)}")
        return self.at - size

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """The next numbers, little-endian and without padding; ``codes`` as in ``struct``."""
        return struct.unpack_from(f"<{codes}", self.data, self.passed(struct.calcsize(f"<{codes}")))

    def string(self) -> bytes:
        """The next string."""
        begin = self.passed(self.numbers("Q")[0])
        return self.data[begin : self.at]

    def value(self, field_type: int, *, keep: bool) -> Any:
        """A field's value; without ``keep`` None for an array of strings (mostly merges)."""
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


@dataclass(frozen=True)
class GgufModel:
    """A model: ``fields`` of the first shard, ``tensors`` of all shards in order, a hex ``digest``
    of all headers.
    """

    files: tuple[Path, ...]
    fields: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    digest: str

    @property
    def head(self) -> str:
        """The role of the tensors that make the logits: "head", or "embedding" if it is tied."""
        return (
            "head" if any(self.role(tensor) == "head" for tensor in self.tensors) else "embedding"
        )

    def role(self, tensor: GgufTensor) -> str:
        """The role of a tensor: "layer", "head", "embedding", or "" if its bits do not count.

        Multi-token-prediction modules are the last of the blocks, and do not count.
        """
        number, blocks = BLOCK.match(tensor.name), self.field("{}.block_count", int)
        drafts = (
            number
            and blocks
            and int(number[1]) >= blocks - (self.field("{}.nextn_predict_layers", int) or 0)
        )
        path, _, part = tensor.name.rpartition(".")
        last = path.rpartition(".")[2]
        outside = (
            last in ROUTERS | OTHER_EMBEDDINGS or "norm" in last or tensor.name.startswith(TOWERS)
        )
        is_matrix = part == "scale" or (part == "weight" and len(tensor.shape) > 1)
        if drafts or outside or not is_matrix:
            return ""
        return {"output": "head", "token_embd": "embedding"}.get(path, "layer")

    def field(self, name: str, kind: type[T]) -> T | None:
        """A field of the first shard, as the function ``field`` returns it."""
        return field(self.fields, name, kind)

    def has(self, name: str) -> bool:
        """True if the name of a tensor begins with ``name``."""
        return any(tensor.name.startswith(name) for tensor in self.tensors)

    @cached_property
    def facts(self) -> ModelFacts:
        """Vocabulary and context; with two sets of rope factors, llama.cpp uses the long set for
        long contexts.
        """
        tokens, context = self.field(TOKENS, list), self.field("{}.context_length", int)
        original, factor = self.field(ORIGINAL, int), self.field("{}.rope.scaling.factor", float)
        if context and factor and original and self.field("{}.rope.scaling.type", str) == "yarn":
            context = max(context, int(original * factor))  # converters do not write the factor
        vocab_size = len(tokens) if tokens else self.field("{}.vocab_size", int)
        changes_above = original if self.has(LONG_FACTORS) else None
        return ModelFacts(vocab_size, context, self.vocabulary() or None, changes_above)

    def rope(self, context: int) -> dict[str, Any]:
        """The rope scaling that llama.cpp reads from the file, for a context of ``context`` tokens."""
        original, name = self.field(ORIGINAL, int), self.field("{}.rope.scaling.type", str)
        if self.has(LONG_FACTORS):
            return scaling_json("longrope", None, original, context)
        if self.has("rope_freqs"):  # llama3's factors, computed by the converter
            return scaling_json("rope_freqs", None, original, context)
        if name is None or name == "none":
            return {}
        stated = self.field("{}.context_length", int) if name == "yarn" else None
        return scaling_json(
            name, self.field("{}.rope.scaling.factor", float), original or stated, context
        )

    def vocabulary(self) -> dict[int, str]:
        """Id -> token of ordinary tokens; empty if the file's strings are not those of an HF
        vocabulary.
        """
        tokens, types = self.field(TOKENS, list) or [], self.field(TOKEN_TYPES, tuple) or ()
        if len(tokens) != len(types) or self.field("tokenizer.ggml.model", str) not in AS_IN_HF:
            return {}
        ordinary = (
            number for number, token_type in enumerate(types) if token_type in (NORMAL, BYTE)
        )
        return {number: tokens[number].decode(errors="replace") for number in ordinary}

    def merges(self) -> list[str]:
        """The merges of the tokenizer, read from the file again."""
        return merges_in(self.files[0]) if MERGES in self.fields and self.files else []

    def storage(self) -> Storage:
        """Stored size by the convention above; None with a note if a tensor's type is unknown."""
        bits = {"layer": 0, "head": 0, "embedding": 0}
        numel = dict(bits)
        ends = {
            each.numel
            for each in self.tensors
            if self.role(each) in ("head", "embedding") and len(each.shape) > 1
        }
        for tensor in self.tensors:
            if not (role := self.role(tensor)):
                continue
            if role == "layer" and tensor.numel in ends and not BLOCK.match(tensor.name):
                return Storage(note=f"{tensor.name}: {UNEXPLAINED}")
            if tensor.nbytes is None:
                return Storage(note=f"{tensor.name}: {tensor.type_name} is not known")
            bits[role] += tensor.nbytes * 8
            numel[role] += 0 if tensor.name.endswith(".scale") else tensor.numel
        if not numel["layer"] or not numel[self.head]:
            return Storage(note=f"{self.files[0]}: no weight matrices found in its header")
        head = bits[self.head]
        return Storage(
            bits["layer"] / numel["layer"], head / numel[self.head], bits["layer"] + head
        )

    def serving(self) -> ServingFacts:
        """Sizes by ``CheckpointConfig.serving``; ggml computes in float32, and llama.cpp logs the
        size of its cache.
        """
        dense = self.field("{}.feed_forward_length", int) or max(
            self.field("{}.feed_forward_length", tuple) or (0,)
        )
        expert = self.field("{}.expert_feed_forward_length", int) or dense
        shared = self.field("{}.expert_shared_feed_forward_length", int) or 0
        hidden, chosen = (
            self.field("{}.embedding_length", int),
            self.field("{}.expert_used_count", int),
        )
        numbers = step_numbers(hidden, dense, chosen, expert, shared)
        slides = bool(self.field("{}.attention.sliding_window", int))
        return ServingFacts(
            self.facts.vocab_size, kv_is_upper=slides, step_numbers=numbers, float_bytes=4
        )

    def placed(self) -> list[Placed]:
        """The tensors, and where their bytes are."""
        return [
            Placed(tensor.name, file, tensor.start, tensor.nbytes or 0, tensor.shape[::-1])
            for file in self.files
            for tensor in header_of(file).tensors
        ]

    def stamp(self, *, times: bool = True) -> str:
        """Hex digest of headers, names, sizes, times and a sample of the weights.

        Without ``times`` a copy on another machine has the same digest.
        """
        digest = hashlib.sha256(self.digest.encode())
        for file in self.files:
            stat = file.stat()
            when = times_of(stat) if times else ""
            digest.update(f"\0{file.name}\0{stat.st_size}\0{when}".encode() + sampled(file))
        return digest.hexdigest()


def shard_names(name: str) -> list[str]:
    """The names of all shards of a model in order, by the ``name`` of one; only ``name`` if it is
    not split.
    """
    match = SHARD.fullmatch(name)
    shards = range(1, int(match[3]) + 1) if match else ()
    return [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in shards if match] or [name]


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, or a folder that has GGUF files and no safetensors."""
    if is_folder(path):
        return not any(path.glob("*.safetensors")) and any(path.glob("*.gguf"))
    return path.suffix.lower() == ".gguf"


def read_model(path: Path) -> GgufModel:
    """The headers of a model; ``path``: one of its files, or a folder with one model.

    InputError for missing, damaged or wrong files.
    """
    if path.is_dir():
        # The projector of a multimodal model is a separate file, but not a model.
        names = {
            shard_names(file.name)[0] for file in path.glob("*.gguf") if "mmproj" not in file.name
        }
        if len(names) != 1:
            found = (
                f"{len(names)} GGUF models ({', '.join(sorted(names)[:5])}); name one"
                if names
                else "no .gguf file"
            )
            raise InputError(f"model_dir: {path}: holds {found}")
        path = path / names.pop()
    files = tuple(path.with_name(name) for name in shard_names(path.name))
    for file in files:
        if not is_file(file):
            where = (
                f"; shard of {path.name}, put all {len(files)} into one folder"
                if len(files) > 1
                else ""
            )
            raise InputError(f"model_dir: {printable(file)}: no such file{where}")
    headers = list(map(header_of, files))
    fields, numbers = (
        headers[0].fields,
        [field(header.fields, "split.no", int) or 0 for header in headers],
    )
    if (count := field(fields, "split.count", int) or 0) not in (
        {0, 1} if len(files) == 1 else {len(files)}
    ):
        raise InputError(
            f"{files[0]}: one of {count} shards; keep the names that it was split under"
        )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    if numbers != list(range(len(files))) or field(fields, "split.tensors.count", int) not in (
        None,
        len(tensors),
    ):
        raise InputError(f"{files[0]}: its shards are not of one model; download them again")
    digest = hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()
    return GgufModel(files, fields, tensors, digest)


def is_hub_file(name: str) -> bool:
    """True if ``name`` can be a GGUF file of the hub (``owner/model/file.gguf``).

    If a folder here has the owner's name, ``name`` is a path, possibly a mistyped one.
    """
    match = HUB_FILE.fullmatch(name)
    return match is not None and not Path(match[1]).parent.is_dir()


class GgufFiles(ModelFiles):
    """The files of a GGUF model, on disk or on the hub."""

    @property
    def is_remote(self) -> bool:
        return is_hub_file(self.planned.model_dir)

    @property
    def model(self) -> GgufModel:
        """The headers of a model on this machine; InputError if it is missing or damaged."""
        return read_model(Path(self.planned.model_dir))

    def hub_files(self) -> tuple[str, list[str]]:
        """(repository, files of all shards in order) of a model on the hub."""
        owner, name, path = self.planned.model_dir.split("/", 2)
        folder, slash, file = path.rpartition("/")
        return f"{owner}/{name}", [f"{folder}{slash}{shard}" for shard in shard_names(file)]

    def fetch(self, watch: Watch = SILENT) -> PlannedModel:
        if not self.is_remote:
            return self.planned
        repository, names = self.hub_files()
        folder = hub.fetch("model", repository, self.planned.revision, names, watch)
        return self.planned.updated(model_dir=str(folder / names[0]))

    def cached(self) -> PlannedModel | None:
        if not self.is_remote:
            return self.planned
        repository, names = self.hub_files()
        with suppress(InputError):
            folder = hub.cached("model", repository, self.planned.revision, names)
            return self.planned.updated(model_dir=str(folder / names[0]))
        return None

    def would_fetch(self) -> str:
        repository, names = self.hub_files()
        return hub.would_fetch(repository, self.planned.revision, names)

    def facts(self) -> ModelFacts:
        return self.model.facts

    def stamp(self) -> str:
        return self.model.stamp()

    def content(self) -> str:
        return self.model.stamp(times=False)

    def weight_files(self) -> tuple[Path, ...]:
        return self.model.files

    def placed(self) -> list[Placed]:
        return self.model.placed()

    def storage(self) -> Storage:
        return self.model.storage()

    def serving(self) -> ServingFacts:
        return self.model.serving()
