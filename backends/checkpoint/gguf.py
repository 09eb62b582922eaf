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
from ..base import ModelFacts, ModelFiles, PlannedModel, ServingFacts, Storage, TensorBytes
from ..common.errors import InputError
from ..common.json_files import LARGEST_JSON_BYTES, is_file, is_folder, open_regular
from ..common.message_text import bytes_in_words, one_line, printable
from ..common.storage import times_of
from ..hub import SILENT, Watch
from .checkpoint_config import scaling_json, step_numbers
from .formats import UNEXPLAINED
from .safetensors_files import sampled

STRUCT_CODES = {
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
STRING = 8
ARRAY = 9
TOKENS_KEY = "tokenizer.ggml.tokens"
TOKEN_TYPES_KEY = "tokenizer.ggml.token_type"
MERGES_KEY = "tokenizer.ggml.merges"
BLOCK_PREFIX = re.compile(r"blk\.(\d{1,9})\.")
HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)/(.+\.gguf)")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
ORDINARY_TOKEN_TYPES = (1, 6)
"""Types of normal tokens and bytes, whose strings are those of the HF vocabulary.

Converters change the spaces of user-defined tokens.
"""
AS_IN_HF = {"gpt2", "llama"}
"""Tokenizers with the token strings of the HF vocabulary.

They are byte-level BPE and SentencePiece; WordPiece has other strings.
"""
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
LONG_FACTORS = "rope_factors_long"
ORIGINAL = "{}.rope.scaling.original_context_length"
T = TypeVar("T")
TOWERS = ("v.", "a.", "mm.", "resampler.")
GGUF_ROUTERS = {"ffn_gate_inp", "ffn_gate_inp_shexp"}
GGUF_OTHER_EMBEDDINGS = {"position_embd", "token_types", "per_layer_token_embd", "embed_tokens"}


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

    # by name; the tokens are bytes, other arrays of strings are None
    fields: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    digest: str  # SHA-256 of its bytes


@cache
def read_header(file: Path, size: int, mtime_ns: int) -> GgufHeader:
    """Return the header of ``file``; InputError if it is damaged.

    ``size`` and ``mtime_ns`` are part of the cache's key: a changed file is read again.
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
    """Return the merges of a file's tokenizer, which ``read_header`` skips.

    Empty if the file has no merges; InputError if it is damaged.
    """
    # The reader raises other errors for a damaged file; this raises InputError.
    header_of(file)
    with (
        open_regular(file) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        merges = _Reader(data, (MERGES_KEY,)).header().fields.get(MERGES_KEY)
    if not isinstance(merges, list):
        return []
    return [merge.decode(errors="replace") for merge in merges]


def header_of(file: Path) -> GgufHeader:
    """Return the header of a file in its present state; InputError if it is damaged."""
    stat = file.stat()
    return read_header(file, stat.st_size, stat.st_mtime_ns)


def field(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a field of a header; ``{}`` in ``name`` is replaced by the architecture.

    None if the field is missing, has another type, or is a float beyond 10 ** 9 or NaN.
    """
    value = fields.get(name.format(fields.get("general.architecture", "")))
    if type(value) is not kind:
        return None
    # False for NaN, too.
    if isinstance(value, float) and not abs(value) < 1e9:
        return None
    return value


class _Reader:
    """Reads a header once; struct.error or ValueError if it is damaged.

    ``arrays``: names of the arrays of strings whose values are read.  ``position``: number of bytes
    read so far.
    """

    def __init__(self, data: mmap.mmap, arrays: Collection[str] = (TOKENS_KEY,)) -> None:
        self.data = data
        self.arrays = arrays
        self.position = 0

    def header(self) -> GgufHeader:
        """Read the whole header."""
        magic, version, n_tensors, n_fields = self.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF of version 2 or 3")
        fields = {}
        for _ in range(n_fields):
            name = self.string().decode()
            field_type = self.numbers("I")[0]
            fields[name] = self.value(field_type, keep=name in self.arrays)
        tensors = [self.tensor() for _ in range(n_tensors)]
        # The tensors begin at the next multiple of the alignment.
        alignment = max(field(fields, "general.alignment", int) or 32, 1)
        start = -(-self.position // alignment) * alignment
        placed = [tensor._replace(start=start + tensor.start) for tensor in tensors]
        for tensor in placed:
            if tensor.start + (tensor.nbytes or 0) > len(self.data):
                raise ValueError(f"cut off before the end of {tensor.name}")
        digest = hashlib.sha256(self.data[: self.position]).hexdigest()
        return GgufHeader(fields, tuple(placed), digest)

    def tensor(self) -> GgufTensor:
        """Read the next tensor; its ``start`` is counted from the end of the header."""
        name = self.string().decode()
        (n_dimensions,) = self.numbers("I")
        *shape, type_number, offset = self.numbers(f"{n_dimensions}QIQ")
        if type_number not in TYPES:
            return GgufTensor(name, tuple(shape), f"ggml type {type_number}", None, offset)
        type_name, block_elements, block_bytes = TYPES[type_number]
        nbytes = math.prod(shape) // block_elements * block_bytes
        return GgufTensor(name, tuple(shape), type_name, nbytes, offset)

    def advance(self, size: int) -> int:
        """Return the start of the next ``size`` bytes, and count them as read.

        ValueError if the header is too long.
        """
        self.position += size
        if self.position > LARGEST_JSON_BYTES:
            raise ValueError(f"its header is longer than {bytes_in_words(LARGEST_JSON_BYTES)}")
        return self.position - size

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """Read the next numbers, little-endian and without padding; ``codes`` as in ``struct``."""
        layout = f"<{codes}"
        return struct.unpack_from(layout, self.data, self.advance(struct.calcsize(layout)))

    def string(self) -> bytes:
        """Read the next string."""
        begin = self.advance(self.numbers("Q")[0])
        return self.data[begin : self.position]

    def value(self, field_type: int, *, keep: bool) -> Any:
        """Read a field's value; without ``keep`` None for an array of strings (mostly merges)."""
        element_type = field_type
        count = 1
        if field_type == ARRAY:
            element_type, count = self.numbers("IQ")
        if element_type in STRUCT_CODES:
            values = self.numbers(f"{count}{STRUCT_CODES[element_type]}")
            if field_type == ARRAY:
                return values
            return values[0]
        # llama.cpp has no arrays of arrays either.
        if element_type != STRING:
            raise ValueError(f"a field of unknown type {element_type}")
        # No string is shorter than its length, of 8 bytes: a wrong count raises here, before the
        # strings are read.
        self.position = self.advance(8 * count)
        if field_type == STRING:
            return self.string().decode(errors="replace")
        if keep:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.position += 8 + struct.unpack_from("<Q", self.data, self.position)[0]
        return None


@dataclass(frozen=True)
class GgufModel:
    """A model with all its shards."""

    files: tuple[Path, ...]
    fields: dict[str, Any]  # of the first shard
    tensors: tuple[GgufTensor, ...]  # of all shards in order
    digest: str  # of all headers, hex

    @property
    def head(self) -> str:
        """The role of the tensors that make the logits: "head", or "embedding" if it is tied."""
        if any(self.role(tensor) == "head" for tensor in self.tensors):
            return "head"
        return "embedding"

    def role(self, tensor: GgufTensor) -> str:
        """Return the role of a tensor: "layer", "head" or "embedding"; "" if its bits do not count.

        Only matrices of the text model and their scales count, without multi-token prediction.
        """
        module, _, part = tensor.name.rpartition(".")
        is_matrix = part == "weight" and len(tensor.shape) > 1
        # The global scale of an NVFP4 matrix: its bits count with those of the matrix.
        is_scale = part == "scale"
        if not (is_matrix or is_scale) or has_no_role(tensor.name) or self.is_draft(tensor):
            return ""
        return {"output": "head", "token_embd": "embedding"}.get(module, "layer")

    def is_draft(self, tensor: GgufTensor) -> bool:
        """True for multi-token-prediction modules, which are the last of the blocks."""
        block = BLOCK_PREFIX.match(tensor.name)
        n_blocks = self.field("{}.block_count", int)
        if block is None or not n_blocks:
            return False
        n_drafts = self.field("{}.nextn_predict_layers", int) or 0
        return int(block[1]) >= n_blocks - n_drafts

    @property
    def architecture(self) -> str:
        """The architecture that the header names; "None" without one."""
        return str(self.fields.get("general.architecture"))

    def field(self, name: str, kind: type[T]) -> T | None:
        """Return a field of the first shard, as the function ``field`` does."""
        return field(self.fields, name, kind)

    def has(self, name: str) -> bool:
        """True if the name of a tensor begins with ``name``."""
        return any(tensor.name.startswith(name) for tensor in self.tensors)

    @cached_property
    def facts(self) -> ModelFacts:
        """Vocabulary and context."""
        context = self.field("{}.context_length", int)
        original = self.field(ORIGINAL, int)
        factor = self.field("{}.rope.scaling.factor", float)
        is_yarn = self.field("{}.rope.scaling.type", str) == "yarn"
        # Converters write a context length to which the factor is not applied.
        if is_yarn and context and factor and original:
            context = max(context, int(original * factor))
        vocab_size = self.field("{}.vocab_size", int)
        tokens = self.field(TOKENS_KEY, list)
        if tokens:
            vocab_size = len(tokens)
        changes_above = None
        # With two sets of rope factors, llama.cpp uses the long set for long contexts.
        if self.has(LONG_FACTORS):
            changes_above = original
        return ModelFacts(vocab_size, context, self.vocabulary() or None, changes_above)

    def rope(self, context: int) -> dict[str, Any]:
        """Return the rope scaling that llama.cpp reads from the file; ``context``: in tokens."""
        original = self.field(ORIGINAL, int)
        name = self.field("{}.rope.scaling.type", str)
        if self.has(LONG_FACTORS):
            return scaling_json("longrope", None, original, context)
        # llama3's factors, computed by the converter.
        if self.has("rope_freqs"):
            return scaling_json("rope_freqs", None, original, context)
        if name is None or name == "none":
            return {}
        if not original:
            original = None
            # As llama.cpp: yarn's default is the trained context.  Linear scaling needs none, since
            # it changes all positions.
            if name == "yarn":
                original = self.field("{}.context_length", int)
        factor = self.field("{}.rope.scaling.factor", float)
        return scaling_json(name, factor, original, context)

    def vocabulary(self) -> dict[int, str]:
        """Return id -> token of ordinary tokens.

        Empty if the file's strings are not those of an HF vocabulary.
        """
        tokens = self.field(TOKENS_KEY, list) or []
        types = self.field(TOKEN_TYPES_KEY, tuple) or ()
        if len(tokens) != len(types) or self.field("tokenizer.ggml.model", str) not in AS_IN_HF:
            return {}
        vocabulary = {}
        for number, token_type in enumerate(types):
            if token_type in ORDINARY_TOKEN_TYPES:
                vocabulary[number] = tokens[number].decode(errors="replace")
        return vocabulary

    def merges(self) -> list[str]:
        """Return the merges of the tokenizer, read from the file again."""
        if MERGES_KEY not in self.fields or not self.files:
            return []
        return merges_in(self.files[0])

    def storage(self) -> Storage:
        """Return the stored size by the convention above; a note if a tensor's type is unknown."""
        bits = {"layer": 0, "head": 0, "embedding": 0}
        numel = dict(bits)
        sizes_of_ends = set()
        for tensor in self.tensors:
            if self.role(tensor) in ("head", "embedding") and len(tensor.shape) > 1:
                sizes_of_ends.add(tensor.numel)
        for tensor in self.tensors:
            role = self.role(tensor)
            if not role:
                continue
            is_in_block = BLOCK_PREFIX.match(tensor.name) is not None
            if role == "layer" and not is_in_block and tensor.numel in sizes_of_ends:
                return Storage(note=f"{tensor.name}: {UNEXPLAINED}")
            if tensor.nbytes is None:
                return Storage(note=f"{tensor.name}: {tensor.type_name} is not known")
            bits[role] += tensor.nbytes * 8
            if not tensor.name.endswith(".scale"):
                numel[role] += tensor.numel
        if not numel["layer"] or not numel[self.head]:
            return Storage(note=f"{self.files[0]}: no weight matrices found in its header")
        head_bits = bits[self.head]
        bpw_layer = bits["layer"] / numel["layer"]
        return Storage(bpw_layer, head_bits / numel[self.head], bits["layer"] + head_bits)

    def serving(self) -> ServingFacts:
        """Return what the memory and the steps of a server depend on, from the header.

        The KV cache has no size here, because llama.cpp logs it.  With a sliding window, that size
        is an upper bound.
        """
        dense = self.field("{}.feed_forward_length", int)
        if not dense:
            # One number per layer.
            dense = max(self.field("{}.feed_forward_length", tuple) or (0,))
        expert = self.field("{}.expert_feed_forward_length", int) or dense
        shared = self.field("{}.expert_shared_feed_forward_length", int) or 0
        hidden = self.field("{}.embedding_length", int)
        experts_per_token = self.field("{}.expert_used_count", int)
        numbers = step_numbers(hidden, dense, experts_per_token, expert, shared)
        slides = bool(self.field("{}.attention.sliding_window", int))
        # ggml computes in float32.
        return ServingFacts(
            self.facts.vocab_size, kv_is_upper=slides, step_numbers=numbers, float_bytes=4
        )

    def placed(self) -> list[TensorBytes]:
        """Return the tensors, and where their bytes are."""
        placed = []
        for file in self.files:
            for tensor in header_of(file).tensors:
                nbytes = tensor.nbytes or 0
                placed.append(
                    TensorBytes(tensor.name, file, tensor.start, nbytes, tensor.shape[::-1])
                )
        return placed

    def stamp(self, *, times: bool = True) -> str:
        """Return the hex digest of headers, names, sizes, times and a sample of the weights.

        Without ``times`` a copy on another machine has the same digest.
        """
        digest = hashlib.sha256(self.digest.encode())
        for file in self.files:
            stat = file.stat()
            time = ""
            if times:
                time = times_of(stat)
            digest.update(f"\0{file.name}\0{stat.st_size}\0{time}".encode() + sampled(file))
        return digest.hexdigest()


def has_no_role(name: str) -> bool:
    """True for tensors of other towers, routers, norms and embeddings of something but tokens."""
    layer = name.rpartition(".")[0].rpartition(".")[2]
    if layer in GGUF_ROUTERS or layer in GGUF_OTHER_EMBEDDINGS:
        return True
    return "norm" in layer or name.startswith(TOWERS)


def shard_names(name: str) -> list[str]:
    """Return the names of all shards of a model in order, by the ``name`` of one.

    If the model is not split, return ``name`` alone.
    """
    shard = SHARD.fullmatch(name)
    if shard is None or not int(shard[3]):
        return [name]
    numbers = range(1, int(shard[3]) + 1)
    return [f"{shard[1]}-{number:05d}-of-{shard[3]}.gguf" for number in numbers]


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, or a folder that has GGUF files and no safetensors."""
    if is_folder(path):
        return not any(path.glob("*.safetensors")) and any(path.glob("*.gguf"))
    return path.suffix.lower() == ".gguf"


def read_model(path: Path) -> GgufModel:
    """Return the headers of a model; ``path``: one of its files, or a folder with one model.

    InputError for missing, damaged or wrong files.
    """
    if path.is_dir():
        path = path / first_file_in(path)
    files = tuple(path.with_name(name) for name in shard_names(path.name))
    for file in files:
        if not is_file(file):
            advice = ""
            if len(files) > 1:
                advice = f"; shard of {path.name}, put all {len(files)} into one folder"
            raise InputError(f"model_dir: {printable(file)}: no such file{advice}")
    headers = [header_of(file) for file in files]
    fields = headers[0].fields
    count = field(fields, "split.count", int) or 0
    is_only_file = len(files) == 1 and count in (0, 1)
    if count != len(files) and not is_only_file:
        raise InputError(
            f"{files[0]}: one of {count} shards; keep the names that it was split under"
        )
    tensors: list[GgufTensor] = []
    for header in headers:
        tensors += header.tensors
    numbers = [field(header.fields, "split.no", int) or 0 for header in headers]
    n_tensors = field(fields, "split.tensors.count", int)
    if numbers != list(range(len(files))) or n_tensors not in (None, len(tensors)):
        raise InputError(f"{files[0]}: its shards are not of one model; download them again")
    digest = hashlib.sha256("".join(header.digest for header in headers).encode()).hexdigest()
    return GgufModel(files, fields, tuple(tensors), digest)


def first_file_in(folder: Path) -> str:
    """Return the name of the first file of a folder's only model; InputError if it has others."""
    names = set()
    for file in folder.glob("*.gguf"):
        # The projector of a multimodal model is a separate file, but not a model.
        if "mmproj" not in file.name:
            names.add(shard_names(file.name)[0])
    if not names:
        raise InputError(f"model_dir: {folder}: holds no .gguf file")
    if len(names) > 1:
        some = ", ".join(sorted(names)[:5])
        raise InputError(f"model_dir: {folder}: holds {len(names)} GGUF models ({some}); name one")
    return names.pop()


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
        """Return (repository, files of all shards in order) of a model on the hub."""
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

    def placed(self) -> list[TensorBytes]:
        return self.model.placed()

    def storage(self) -> Storage:
        return self.model.storage()

    def serving(self) -> ServingFacts:
        return self.model.serving()
