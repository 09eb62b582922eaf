"""A GGUF model, all shards of it: where it is, what identifies it, what its headers say.  No engine.

On the hub it is ``owner/repository/file.gguf``.

Bits a weight are by the convention of ``backends/checkpoint/stored_bits.py``: a layer's matrices with their block
scales (and NVFP4's global scales); not norms, biases, router gates, rope factors, embeddings, and blocks that only
draft tokens; a tied head has the embedding's.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from compare_q.backends import hub
from compare_q.backends.base import LoadRequest, ModelFacts, ModelFiles, Storage
from compare_q.backends.checkpoint.config import extended_by_yarn
from compare_q.backends.checkpoint.files import sampled
from compare_q.backends.checkpoint.gguf_header import TOKEN_TYPES, TOKENS, GgufTensor, read_header
from compare_q.backends.checkpoint.stored_bits import UNEXPLAINED
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import is_file
from compare_q.backends.common.messages import printable
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.hub import SILENT, Watch

BLOCK = re.compile(r"blk\.(\d{1,9})\.")
HUB_FILE = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)/(.+\.gguf)")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
NORMAL, BYTE = 1, 6
"""Token types whose strings are the HF vocabulary's; converters rewrite the spaces of user-defined ones."""
AS_IN_HF = {"gpt2", "llama"}
"""Tokenizers (byte-level BPE, SentencePiece) whose token strings are the HF vocabulary's; WordPiece's are not."""
TOWERS = ("v.", "a.", "mm.", "resampler.")
ROUTERS = {"ffn_gate_inp", "ffn_gate_inp_shexp"}
OTHER_EMBEDDINGS = {"position_embd", "token_types", "per_layer_token_embd", "embed_tokens"}


@dataclass(frozen=True)
class GgufModel:
    """A model with all its shards: ``fields`` of the first shard, ``tensors`` of all shards in order.

    ``digest`` is a hex digest of all headers.
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
        """The role of the tensors that make the logits: "head", or "embedding" where head and embedding are tied."""
        return "head" if any(self.role(tensor) == "head" for tensor in self.tensors) else "embedding"

    def role(self, tensor: GgufTensor) -> str:
        """Where a tensor's bits belong: "layer", "head", "embedding", or "" for nowhere.

        Multi-token-prediction modules are the last of the blocks, and belong nowhere.
        """
        number, blocks = BLOCK.match(tensor.name), self.field("block_count")
        drafts = number and blocks is not None and int(number[1]) >= blocks - (self.field("nextn_predict_layers") or 0)
        path, _, part = tensor.name.rpartition(".")
        last = path.rpartition(".")[2]
        outside = last in ROUTERS | OTHER_EMBEDDINGS or "norm" in last or tensor.name.startswith(TOWERS)
        is_matrix = part == "scale" or (part == "weight" and len(tensor.shape) > 1)
        if drafts or outside or not is_matrix:
            return ""
        return {"output": "head", "token_embd": "embedding"}.get(path, "layer")

    def field(self, name: str) -> Any:
        """A field whose name begins with the architecture's; None if the file has none."""
        return self.fields.get(f"{self.architecture}.{name}")

    @cached_property
    def facts(self) -> ModelFacts:
        """Vocabulary and context; llama.cpp takes the long ones of two sets of rope factors if its context is long."""
        tokens = self.fields.get(TOKENS)
        has_long = any(tensor.name.startswith("rope_factors_long") for tensor in self.tensors)
        return ModelFacts(
            len(tokens) if tokens else self.field("vocab_size"), self.context, self.vocabulary() or None,
            self.field("rope.scaling.original_context_length") if has_long else None,
        )  # fmt: skip

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence, with yarn's extension (converters write the length without it)."""
        length: int | None = self.field("context_length")
        factor = self.field("rope.scaling.factor")
        original = self.field("rope.scaling.original_context_length")
        if length is None or self.field("rope.scaling.type") != "yarn" or not factor:
            return length
        return extended_by_yarn(length, factor, original)

    def vocabulary(self) -> dict[int, str]:
        """Id -> token of ordinary tokens; empty where the file's strings are not an HF vocabulary's."""
        tokens, types = self.fields.get(TOKENS), self.fields.get(TOKEN_TYPES)
        if not tokens or not types or self.fields.get("tokenizer.ggml.model") not in AS_IN_HF:
            return {}
        ordinary = (number for number, token_type in enumerate(types) if token_type in (NORMAL, BYTE))
        return {number: tokens[number].decode(errors="replace") for number in ordinary}

    def storage(self) -> Storage:
        """Stored size by the convention above; None with a note where a tensor's type is not known."""
        bits = {"layer": 0, "head": 0, "embedding": 0}
        numel = dict(bits)
        ends = {each.numel for each in self.tensors if self.role(each) in ("head", "embedding") and len(each.shape) > 1}
        for tensor in self.tensors:
            if not (role := self.role(tensor)):
                continue
            if role == "layer" and tensor.numel in ends and not BLOCK.match(tensor.name):
                return Storage(note=f"{tensor.name}: {UNEXPLAINED}")
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

        With ``times`` off, a copy on another machine has the same digest.
        """
        digest = hashlib.sha256(self.digest.encode())
        for file in self.files:
            stat = file.stat()
            when = stat.st_mtime_ns if times else ""
            digest.update(f"\0{file.name}\0{stat.st_size}\0{when}".encode() + sampled(file))
        return digest.hexdigest()


def shard_names(name: str) -> list[str]:
    """The names of all shards of the model that ``name`` belongs to, in order; ``name`` alone if it is not split."""
    match = SHARD.fullmatch(name)
    count = int(match[3]) if match else 0
    if not match or not count:
        return [name]
    return [f"{match[1]}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def model_files(path: Path) -> tuple[Path, ...]:
    """The files of a model: ``path`` is any of them, or a folder with no other model.  InputError if one is missing."""
    if path.is_dir():
        # A multimodal model's projector lies beside it and is no model of its own.
        names = {shard_names(file.name)[0] for file in path.glob("*.gguf") if "mmproj" not in file.name}
        if len(names) != 1:
            found = f"{len(names)} GGUF models ({', '.join(sorted(names)[:5])}); name one" if names else "no .gguf file"
            raise InputError(f"model_dir: {path}: holds {found}")
        path = path / names.pop()
    files = tuple(path.with_name(name) for name in shard_names(path.name))
    for file in files:
        if not is_file(file):
            where = f"; shard of {path.name}, put all {len(files)} into one folder" if len(files) > 1 else ""
            raise InputError(f"model_dir: {printable(file)}: no such file{where}")
    return files


def read_model(path: Path) -> GgufModel:
    """The headers of the model at ``path`` (see ``model_files``), read once while its files stay as they are.

    InputError in one line for a missing, damaged or incomplete file.
    """
    files = model_files(path)
    each_fields, each_tensors, digests = zip(*(read_header(file) for file in files), strict=True)
    fields: dict[str, Any] = each_fields[0]
    numbers = [own.get("split.no", 0) for own in each_fields]
    if fields.get("split.count", 0) not in ({0, 1} if len(files) == 1 else {len(files)}):
        raise InputError(f"{files[0]}: one of {fields['split.count']} shards; keep the names that it was split under")
    tensors = tuple(tensor for own in each_tensors for tensor in own)
    if numbers != list(range(len(files))) or len(tensors) != fields.get("split.tensors.count", len(tensors)):
        raise InputError(f"{files[0]}: its shards are not of one model; download them again")
    return GgufModel(files, fields, tensors, hashlib.sha256("".join(digests).encode()).hexdigest())


class GgufFiles(ModelFiles):
    """The files of the GGUF model that a request names."""

    @property
    def is_remote(self) -> bool:
        match = HUB_FILE.fullmatch(self.request.model_dir)
        return match is not None and not Path(match[1]).parent.is_dir()  # else a path, though it may be mistyped

    @property
    def model(self) -> GgufModel:
        """The headers of a model that is on this machine; InputError if it is not, or damaged."""
        return read_model(Path(self.request.model_dir))

    def hub_files(self) -> tuple[str, list[str]]:
        """The repository of a remote model, and the files of all its shards there, in order."""
        owner, name, path = self.request.model_dir.split("/", 2)
        folder, slash, file = path.rpartition("/")
        return f"{owner}/{name}", [f"{folder}{slash}{shard}" for shard in shard_names(file)]

    def fetch(self, watch: Watch = SILENT) -> LoadRequest:
        if not self.is_remote:
            return self.request
        repository, names = self.hub_files()
        folder = hub.fetch("model", repository, self.request.revision, names, watch)
        return replace(self.request, model_dir=str(folder / names[0]))

    def cached(self) -> LoadRequest | None:
        if not self.is_remote:
            return self.request
        repository, names = self.hub_files()
        with suppress(InputError):
            folder = hub.cached("model", repository, self.request.revision, names, "")
            return replace(self.request, model_dir=str(folder / names[0]))
        return None

    def would_fetch(self) -> str:
        repository, names = self.hub_files()
        return hub.would_fetch(repository, self.request.revision, names)

    def facts(self) -> ModelFacts:
        return self.model.facts

    def stamp(self) -> str:
        return self.model.stamp()

    def content(self) -> str:
        return self.model.stamp(times=False)

    def weight_files(self) -> tuple[Path, ...]:
        return self.model.files

    def storage(self) -> Storage:
        return self.model.storage()
