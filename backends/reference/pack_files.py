"""A reference pack: a folder with all data of a reference that comparisons need, without the
reference's model.

    pack.json           the manifest, written last, with its own checksum
    README.md           a dataset card
    states/             the reference store (``backends/reference/store.py``)
    tokens.safetensors  the tokens of the text (``eval/text/text_tokens.py``)
    scores.safetensors  the reference's own scores of every scored token, as its engine computed them, by window
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from .. import hub
from ..common import json_files, storage
from ..common.engine_options import describe
from ..common.errors import InputError
from ..common.json_files import expanded, is_folder
from ..common.message_text import amount, bytes_in_words, one_line, shortened
from . import store
from .store import Reader

FORMAT = 2
"""Version of the layout; others are refused.

1: windows were numbered, and the store named its text; compare_q 0.3 wrote it.
2: windows are found by their digests.
"""
MANIFEST, STATES, TOKENIZER = "pack.json", "states", "tokenizer"
TOKENS, SCORES, CARD = "tokens.safetensors", "scores.safetensors", "README.md"
COMPARED = ("logprob", "top1_logprob", "entropy")
"""Scores of ``SCORES``, each float32 [N], in nats.

``digests`` uint8 [W, 16] of the file are the digests of its windows, and ``ends`` int64 [W] where
their scores end.
"""
DIGEST_BYTES = 16
LONGEST_NAME = 40
"""Characters of the model's name in the label of a pack's row."""
PATTERNS = (MANIFEST, CARD, f"{STATES}/*", f"{TOKENIZER}/*", TOKENS, SCORES)
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

    format: int = FORMAT
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
        return f"{shortened(name, LONGEST_NAME)} (pack)"


def is_pack(folder: Path) -> bool:
    """Return True if a folder has the manifest of a pack."""
    return is_folder(folder) and (folder / MANIFEST).is_file()


def resolve(
    name: str, revision: str | None = None, watch: hub.Watch = hub.SILENT, *, download: bool = True
) -> Path:
    """Return the folder of a pack, which is downloaded if it is a data set on the hub; InputError
    with the reason.
    """
    folder = expanded(name)
    if is_folder(folder) or not hub.is_hub_id(name):
        if not is_pack(folder):
            raise InputError(f"{name}: is not a reference pack: it has no {MANIFEST}")
        return folder
    get = hub.fetch("dataset", name, revision, PATTERNS, watch) if download else None
    return get or hub.cached("dataset", name, revision, PATTERNS)


def read(folder: Path) -> Manifest:
    """Return the manifest of a pack.

    InputError if it is missing, damaged, or of another version of the layout.
    """
    file = folder / MANIFEST
    try:
        content = storage.load_file(file, strict=True)
        if content.get("format") == FORMAT:
            return Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        why = describe(error, Manifest.model_fields)
        raise InputError(f"{file}: is not a manifest of a reference pack: {why}") from None
    except ValueError as error:
        raise InputError(
            f"{file}: is not a manifest of a reference pack: {one_line(error)}"
        ) from None
    advice = "update compare_q"
    if content.get("format") == 1:
        advice = "record it again with this compare_q (compare-q pack), in another folder"
    raise InputError(
        f"{file}: format {content.get('format')}, this compare_q reads {FORMAT}; {advice}"
    )


def verified(folder: Path) -> Manifest:
    """Return the manifest, after every byte of a pack was read; InputError names the first damaged
    file.
    """
    manifest, states = read(folder), []
    for name in manifest.files:
        try:
            found = (folder / name).stat()
        except OSError as error:
            raise InputError(f"{folder / name}: cannot be read: {error.strerror}") from None
        states.append((name, found.st_size, storage.times_of(found)))
    json_files.check_no_pipes(folder / TOKENIZER)
    _verify(folder, manifest.model_dump_json(), tuple(states))
    return manifest


@lru_cache
def _verify(folder: Path, manifest: str, states: tuple[tuple[str, int, str], ...]) -> None:
    """Read every byte; files with unchanged sizes and times are read only once per process."""
    found = Manifest.model_validate_json(manifest)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = list(
            filter(
                None,
                pool.map(lambda pair: problem_of(folder / pair[0], pair[1]), found.files.items()),
            )
        )
    if wrong:
        raise InputError(wrong[0])
    check_store(folder, found)


def problem_of(file: Path, expected: File) -> str:
    """Return what is wrong with a file of a pack; empty if nothing is."""
    try:
        with json_files.open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != expected.bytes:
                return f"{file}: damaged: it has {size:,} bytes instead of {expected.bytes:,}"
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except InputError as error:  # a pipe or a device, or no permission
        return str(error)
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    return (
        ""
        if digest == expected.sha256
        else f"{file}: damaged: it has not the checksum in {MANIFEST}"
    )


def check_store(folder: Path, manifest: Manifest) -> None:
    """InputError unless the store of a pack matches the manifest, and its files have the form of
    the store.
    """
    opened = Reader(folder / STATES)
    listed = {f"{STATES}/{name}" for name in opened.manifest.files}
    lacking = sorted(listed - manifest.files.keys())
    written = None if lacking else store.written_in(folder / STATES, list(opened.manifest.files))
    expected = (opened.contents, opened.reason, opened.head)
    absent = [window for window in manifest.windows if window not in opened.windows]
    problem = ""
    if lacking:
        problem = f"lacks {lacking[0]}"
    elif written != expected:
        problem = "its files are not of one form, or have other shapes than its manifest says"
    elif absent:
        problem = f"lacks {len(absent):,} of the {len(manifest.windows):,} windows in {MANIFEST}, {absent[0]} among them"
    elif opened.windows.keys() != set(manifest.windows):
        problem = (
            f"has {len(opened.windows):,} windows, {MANIFEST} lists {len(set(manifest.windows)):,}"
        )
    if problem:
        raise InputError(f"{folder}: {STATES}: {problem}")


def arrays_of(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (numpy arrays, metadata) of a safetensors file; InputError if it is damaged."""
    from safetensors import safe_open

    try:
        with safe_open(file, "np") as opened:
            names = opened.keys()
            tensors = {name: opened.get_tensor(name) for name in names}
            return tensors, opened.metadata() or {}
    except Exception as error:  # safetensors raises its own error class
        raise InputError(f"{file}: damaged: {one_line(error)}") from None


def write_scores(
    folder: Path, windows: Sequence[str], ends: Sequence[int], columns: Mapping[str, Any]
) -> None:
    """Write the engine's own scores of the windows with these digests, which users reproduce from
    the pack's states.

    ``columns``: float32 [N] by the names in ``COMPARED``; ``ends``: where the scores of each window
    end.
    """
    import numpy as np
    from safetensors.numpy import save_file

    digests = np.frombuffer(bytes.fromhex("".join(windows)), np.uint8).reshape(
        len(windows), DIGEST_BYTES
    )
    scores = {name: columns[name] for name in COMPARED}
    save_file({"ends": np.array(ends, np.int64), "digests": digests, **scores}, folder / SCORES)


def scores_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the engine's own scores: digest of the window -> name in ``COMPARED`` -> float32 [T]."""
    arrays, _ = arrays_of(folder / SCORES)
    try:
        check_array(arrays, "digests", "u", 2)
        check_array(arrays, "ends", "i", 1)
        for name in COMPARED:
            check_array(arrays, name, "f", 1)
        digests = [row.tobytes().hex() for row in arrays["digests"]]
        edges = [0, *arrays["ends"].tolist()]
        scores = {}
        for digest, (begin, end) in zip(digests, itertools.pairwise(edges), strict=True):
            if begin > end or any(end > len(arrays[name]) for name in COMPARED):
                raise ValueError("its windows do not fit its scores")
            scores[digest] = {name: arrays[name][begin:end] for name in COMPARED}
        return scores
    except ValueError as error:
        raise InputError(f"{folder / SCORES}: damaged: {error}") from None


def check_array(arrays: Mapping[str, Any], name: str, kind: str, dimensions: int) -> None:
    """ValueError unless there is an array of this name, number of dimensions and kind.

    ``kind``: numpy's letter, such as "i" for integers with a sign and "f" for floats.
    """
    if name not in arrays:
        raise ValueError(f"it has no {name}")
    found = arrays[name]
    if found.dtype.kind != kind or found.ndim != dimensions:
        raise ValueError(f"{name} has the wrong type or shape: {found.dtype} {list(found.shape)}")


def data_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a data spec for the text of a pack."""
    manifest = read(folder)
    keys = {
        key: value for key, value in manifest.text.items() if key != "trust_remote_code"
    }  # the user's to give
    return {
        **keys,
        "tokenizer_dir": str(folder.absolute() / TOKENIZER),
        "pack": str(folder.absolute()),
    }


def entries_of(folder: Path) -> Iterator[tuple[str, File]]:
    """Yield (name, size and checksum) of every file below a folder, in order."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            yield (
                file.relative_to(folder).as_posix(),
                File(bytes=file.stat().st_size, sha256=digest),
            )


def write_manifest(folder: Path, **facts: Any) -> Manifest:
    """Write the manifest of a pack whose other files are complete, and return it."""
    manifest = Manifest(**facts, files=dict(entries_of(folder)))
    storage.write_whole(folder / MANIFEST, storage.dump(manifest.model_dump(mode="json"), indent=1))
    return manifest


def title_of_text(manifest: Manifest) -> str:
    """Return the name of a pack's text."""
    return str(
        manifest.text.get("dataset_display_name")
        or manifest.text.get("path")
        or manifest.text.get("dataset")
    )


def facts_in_words(manifest: Manifest, opened: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) of the facts that readers need about a pack; ``opened``: contents and
    bytes of its store.
    """
    floor = "not measured" if manifest.floor_kld is None else f"KLD {manifest.floor_kld:.5g} nats"
    count = amount(len(manifest.windows), "window")
    scored = amount(manifest.scored_tokens, "scored token")
    revision = f", revision {manifest.revision}" if manifest.revision else ""
    contents = f"{opened['contents']}, {bytes_in_words(opened['bytes'])}"
    whole = sum(file.bytes for file in manifest.files.values())
    if whole:
        contents += f"; {bytes_in_words(whole)} with tokens, scores and tokenizer"
    return [
        ("reference", f"{manifest.model}{revision}"),
        (
            "engine",
            f"{manifest.engine}, on {manifest.provenance.get('where') or 'unknown hardware'}",
        ),
        ("text", f"{opened['text']}: {count}, {scored}"),
        (
            "perplexity",
            f"{manifest.ppl:.6g}"
            + (f" ± {manifest.ppl_stderr:.2g}" if manifest.ppl_stderr else ""),
        ),
        ("noise floor", floor),
        ("contents", contents),
        (
            "licenses",
            f"model {manifest.model_license or 'not known'}, text {manifest.text_license or 'not known'}",
        ),
        ("made", manifest.created),
    ]
