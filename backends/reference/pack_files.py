"""A reference pack: a folder with all that comparisons need of a reference, except its model.

    pack.json           the manifest, written last, with its own checksum
    README.md           a dataset card
    states/             the reference store (``backends/reference/store.py``)
    tokens.safetensors  the tokens of the text (``eval/text/text_tokens.py``)
    scores.safetensors  the reference's own scores of every scored token, by window, as its engine
                        computed them
    tokenizer/          the files of the tokenizer

A pack is untrusted data.  Nothing in it is executed or unpickled, file names cannot point outside
the folder, safetensors checks shapes before it allocates, and ``verified`` reads every byte before
anything is used.  ``compare-q pack`` creates packs, and nothing changes them afterwards.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from .. import hub
from ..common import json_files, storage
from ..common.engine_options import describe
from ..common.errors import InputError
from ..common.json_files import expanded, is_folder
from ..common.kept_folder import KeptFolder
from ..common.message_text import amount, bytes_in_words, one_line, shortened
from . import store
from .store import Reader

PACK_FORMAT = 2
"""Version of the layout; others are refused.

1: windows were numbered, and the store named its text; compare_q 0.3 wrote it.
2: windows are found by their digests.
"""
PACK_MANIFEST = "pack.json"
CARD_FILE = "README.md"
STATES = "states"
TOKENS_FILE = "tokens.safetensors"
SCORES_FILE = "scores.safetensors"
TOKENIZER = "tokenizer"
ENGINE_SCORES = ("logprob", "top1_logprob", "entropy")
"""Scores of ``SCORES_FILE``, each float32 [N], in nats.

``digests`` uint8 [W, 16] of the file are the digests of its windows, and ``ends`` int64 [W] where
their scores end.
"""
DIGEST_BYTES = 16
LONGEST_MODEL_NAME = 40
"""Characters of the model's name in the label of a pack's row."""
PATTERNS = (PACK_MANIFEST, CARD_FILE, f"{STATES}/*", f"{TOKENIZER}/*", TOKENS_FILE, SCORES_FILE)
"""Files of a data set on the hub that are downloaded."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*){0,2}$")]
WindowDigest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Facts = dict[str, Any]


class File(BaseModel):
    """Size and SHA-256 of one file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    bytes: NonNegativeInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Sizes(BaseModel):
    """Bits per weight and sizes of the reference; None if they are not known."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    bpw_layer: float | None = None
    bpw_head: float | None = None
    vram_bits: float | None = None
    file_bytes: NonNegativeInt | None = None


class Manifest(BaseModel):
    """Contents and origin of a pack, and the checksums of its files."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    format: int = PACK_FORMAT
    model: str = Field(description="the reference: hub id or name of the folder")
    revision: str | None = Field(None, description="its revision on the hub")
    model_digest: str = Field("", description="digest of its files")
    text: Facts = Field(description="data spec of the text")
    text_digest: str = Field(description="digest of the windows")
    vocabulary: str = Field(description="digest of the tokenizer's vocabulary")
    windows: list[WindowDigest] = Field(
        description="digests of the windows, in the order of the text"
    )
    scored_tokens: NonNegativeInt
    engine: str = Field(description="engine, package and version that made it")
    provenance: Facts = Field(description="what ran: versions, hardware, options, kernels")
    storage: Sizes = Field(description="bits per weight and sizes of the reference")
    ppl: float = Field(description="perplexity of the reference")
    ppl_stderr: float | None = None
    floor_kld: float | None = Field(
        None, description="KLD of the same weights with other roundings, nats per token"
    )
    floor_kld_stderr: float | None = None
    model_license: str | None = Field(None, description="None: not known")
    text_license: str | None = None
    created: str
    command: list[str]
    files: dict[FileName, File]

    @property
    def summary(self) -> str:
        """A short description of the reference."""
        return f"{self.model}, {self.engine}"

    @property
    def label(self) -> str:
        """A short label for the pack's row: the last part of the model's name."""
        name = self.model.rpartition("/")[2]
        return f"{shortened(name, LONGEST_MODEL_NAME)} (pack)"


def is_pack(folder: Path) -> bool:
    """Return True if a folder has the manifest of a pack."""
    return is_folder(folder) and (folder / PACK_MANIFEST).is_file()


def resolve(
    name: str, revision: str | None = None, watch: hub.Watch = hub.SILENT, *, download: bool = True
) -> Path:
    """Return the folder of a pack; InputError with the reason if there is none.

    A data set on the hub is downloaded, or only found in the local cache.
    """
    folder = expanded(name)
    if is_folder(folder) or not hub.is_hub_id(name):
        if not is_pack(folder):
            raise InputError(f"{name}: is not a reference pack: it has no {PACK_MANIFEST}")
        return folder
    if download:
        return hub.fetch("dataset", name, revision, PATTERNS, watch)
    return hub.cached("dataset", name, revision, PATTERNS)


def read(folder: Path) -> Manifest:
    """Return the manifest of a pack.

    InputError if it is missing, damaged, or of another version of the layout.
    """
    file = folder / PACK_MANIFEST
    try:
        content = storage.load_file(file, strict=True)
        if content.get("format") == PACK_FORMAT:
            return Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        fault = describe(error, Manifest.model_fields)
        raise InputError(f"{file}: is not a manifest of a reference pack: {fault}") from None
    except ValueError as error:
        fault = one_line(error)
        raise InputError(f"{file}: is not a manifest of a reference pack: {fault}") from None
    version = content.get("format")
    advice = "update compare_q"
    if version == 1:
        advice = "record it again with this compare_q (compare-q pack), in another folder"
    raise InputError(f"{file}: format {version}, this compare_q reads {PACK_FORMAT}; {advice}")


def verified(folder: Path) -> Manifest:
    """Return the manifest, after every byte of a pack was read.

    InputError names the first damaged file.
    """
    manifest = read(folder)
    states = []
    for name in manifest.files:
        file = folder / name
        try:
            status = file.stat()
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror}") from None
        states.append((name, status.st_size, storage.times_of(status)))
    json_files.check_no_pipes(folder / TOKENIZER)
    # The manifest as a text and the states of the files are the key of ``_verify``'s cache.
    _verify(folder, manifest.model_dump_json(), tuple(states))
    return manifest


@lru_cache
def _verify(folder: Path, content: str, _states: tuple[tuple[str, int, str], ...]) -> None:
    """Read every byte; files with unchanged sizes and times are read only once per process.

    ``content``: the manifest as JSON, because a key of the cache must be hashable.
    """
    manifest = Manifest.model_validate_json(content)
    for problem in pack_folder(folder, manifest.files).problems(manifest.files):
        if problem:
            raise InputError(problem)
    check_store(folder, manifest)


@dataclass(frozen=True)
class PackFolder(KeptFolder):
    """The folder of a pack: its manifest has the sizes and checksums of its files."""

    files: Mapping[str, File]

    def problem_of(self, name: str) -> str:
        """Read every byte of a file; return what is wrong with it, or an empty string."""
        file = self.path / name
        expected = self.files[name]
        try:
            with json_files.open_regular(file) as stream:
                size = os.fstat(stream.fileno()).st_size
                # A file of another size may be huge, and is not read.
                if size != expected.bytes:
                    return f"{file}: damaged: it has {size:,} bytes instead of {expected.bytes:,}"
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except InputError as error:  # a pipe or a device, or no permission
            return str(error)
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror}"
        if digest != expected.sha256:
            return f"{file}: damaged: it has not the checksum in {PACK_MANIFEST}"
        return ""


def pack_folder(path: Path, files: Mapping[str, File]) -> PackFolder:
    """Return the folder of a pack with these files, by their names."""
    no_stems = re.compile("(?!)")  # its files have plain names
    manifest_name = re.compile(re.escape(PACK_MANIFEST))
    return PackFolder(path, "the pack", no_stems, manifest_name, has_manifest=True, files=files)


def check_store(folder: Path, manifest: Manifest) -> None:
    """InputError unless the store of a pack matches the manifest, and its files are of one form."""
    problem = problem_of_store(Reader(folder / STATES), manifest)
    if problem:
        raise InputError(f"{folder}: {STATES}: {problem}")


def problem_of_store(opened: Reader, manifest: Manifest) -> str:
    """Return how the store of a pack differs from the pack's manifest; empty if it does not."""
    listed = {f"{STATES}/{name}" for name in opened.manifest.files}
    lacking = sorted(listed - manifest.files.keys())
    if lacking:
        return f"lacks {lacking[0]}"
    form = store.written_in(opened.path, list(opened.manifest.files))
    if form != store.Form(opened.contents, opened.reason, opened.head):
        return "its files are not of one form, or have other shapes than its manifest says"
    absent = [window for window in manifest.windows if window not in opened.windows]
    n_windows = len(manifest.windows)
    if absent:
        count = f"{len(absent):,} of the {n_windows:,} windows in {PACK_MANIFEST}"
        return f"lacks {count}, {absent[0]} among them"
    distinct = set(manifest.windows)
    if opened.windows.keys() != distinct:
        return f"has {len(opened.windows):,} windows, {PACK_MANIFEST} lists {len(distinct):,}"
    return ""


def arrays_of(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (numpy arrays, metadata) of a safetensors file; InputError if it is damaged."""
    from safetensors import safe_open

    try:
        with safe_open(file, "np") as opened:
            names = opened.keys()
            arrays = {name: opened.get_tensor(name) for name in names}
            return arrays, opened.metadata() or {}
    except Exception as error:  # safetensors raises its own error class
        raise InputError(f"{file}: damaged: {one_line(error)}") from None


def write_scores(
    folder: Path, windows: Sequence[str], ends: Sequence[int], columns: Mapping[str, Any]
) -> None:
    """Write the engine's own scores of windows, which users reproduce from the pack's states.

    ``windows``: their digests; ``columns``: float32 [N] by the names in ``ENGINE_SCORES``;
    ``ends``: where the scores of each window end.
    """
    import numpy as np
    from safetensors.numpy import save_file

    digests = np.frombuffer(bytes.fromhex("".join(windows)), np.uint8)
    arrays = {
        "ends": np.array(ends, np.int64),
        "digests": digests.reshape(len(windows), DIGEST_BYTES),
    }
    for name in ENGINE_SCORES:
        arrays[name] = columns[name]
    save_file(arrays, folder / SCORES_FILE)


def scores_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the engine's own scores: digest -> name in ``ENGINE_SCORES`` -> float32 [T].

    The digests are those of the windows.  InputError if they are damaged.
    """
    arrays, _ = arrays_of(folder / SCORES_FILE)
    try:
        return scores_by_window(arrays)
    except ValueError as error:
        raise InputError(f"{folder / SCORES_FILE}: damaged: {error}") from None


def scores_by_window(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Cut the arrays of ``SCORES_FILE`` at the ends of the windows.

    ValueError if they do not fit.
    """
    check_array(arrays, "digests", "u", 2)
    check_array(arrays, "ends", "i", 1)
    for name in ENGINE_SCORES:
        check_array(arrays, name, "f", 1)
    shortest = min(len(arrays[name]) for name in ENGINE_SCORES)
    digests = [row.tobytes().hex() for row in arrays["digests"]]
    edges = [0, *arrays["ends"].tolist()]
    scores = {}
    for digest, (begin, end) in zip(digests, itertools.pairwise(edges), strict=True):
        if begin > end or end > shortest:
            raise ValueError("its windows do not fit its scores")
        scores[digest] = {name: arrays[name][begin:end] for name in ENGINE_SCORES}
    return scores


def check_array(arrays: Mapping[str, Any], name: str, kind: str, dimensions: int) -> None:
    """ValueError unless there is an array of this name, number of dimensions and kind.

    ``kind``: numpy's letter, such as "i" for integers with a sign and "f" for floats.
    """
    if name not in arrays:
        raise ValueError(f"it has no {name}")
    array = arrays[name]
    if array.dtype.kind != kind or array.ndim != dimensions:
        raise ValueError(f"{name} has the wrong type or shape: {array.dtype} {list(array.shape)}")


def data_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a data spec for the text of a pack."""
    keys = {}
    for key, value in read(folder).text.items():
        # Only the user may allow code of others to run.
        if key != "trust_remote_code":
            keys[key] = value
    keys["tokenizer_dir"] = str(folder.absolute() / TOKENIZER)
    keys["pack"] = str(folder.absolute())
    return keys


def entries_of(folder: Path) -> Iterator[tuple[str, File]]:
    """Yield (name, size and checksum) of every file below a folder, in order."""
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        name = file.relative_to(folder).as_posix()
        yield name, File(bytes=file.stat().st_size, sha256=digest)


def write_manifest(folder: Path, **facts: Any) -> Manifest:
    """Write the manifest of a pack whose other files are complete, and return it."""
    manifest = Manifest(**facts, files=dict(entries_of(folder)))
    content = manifest.model_dump(mode="json")
    pack_folder(folder, manifest.files).write_document(PACK_MANIFEST, content, indent=1)
    return manifest


def title_of_text(manifest: Manifest) -> str:
    """Return the name of a pack's text."""
    text = manifest.text
    if text.get("dataset_display_name"):
        return str(text["dataset_display_name"])
    if text.get("dataset") == "sampled":
        prompts = text.get("path") or text.get("dataset_path")
        return f"sampled after prompts of {prompts}"
    return str(text.get("path") or text.get("dataset"))


def facts_in_words(manifest: Manifest, opened: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of the facts that readers need about a pack.

    ``opened``: name of the text ("text"), and "contents" and "bytes" of the pack's store.
    """
    reference = manifest.model
    if manifest.revision:
        reference += f", revision {manifest.revision}"
    hardware = manifest.provenance.get("where") or "unknown hardware"
    n_windows = amount(len(manifest.windows), "window")
    n_tokens = amount(manifest.scored_tokens, "scored token")
    perplexity = f"{manifest.ppl:.6g}"
    if manifest.ppl_stderr:
        perplexity += f" ± {manifest.ppl_stderr:.2g}"
    noise_floor = "not measured"
    if manifest.floor_kld is not None:
        noise_floor = f"KLD {manifest.floor_kld:.5g} nats"
    contents = f"{opened['contents']}, {bytes_in_words(opened['bytes'])}"
    n_bytes = sum(file.bytes for file in manifest.files.values())
    # A pack's card is written before its manifest, when the other files are not listed yet.
    if n_bytes:
        contents += f"; {bytes_in_words(n_bytes)} with tokens, scores and tokenizer"
    model_license = manifest.model_license or "not known"
    text_license = manifest.text_license or "not known"
    return [
        ("reference", reference),
        ("engine", f"{manifest.engine}, on {hardware}"),
        ("text", f"{opened['text']}: {n_windows}, {n_tokens}"),
        ("perplexity", perplexity),
        ("noise floor", noise_floor),
        ("contents", contents),
        ("licenses", f"model {model_license}, text {text_license}"),
        ("made", manifest.created),
    ]
