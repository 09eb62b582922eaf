"""A reference store: the final hidden states of every scored position, and the head once, in a
folder.

The names of its files contain their checksums (``backends/common/storage.py``):

- ``row.<window>.<digest>.safetensors``: the ``states`` [T, H] of a window in the model's dtype,
  taken where they enter the head; or, if the head cannot be recomputed, its ``logits`` [T, V] in
  the engine's dtype.  ``<window>`` is the digest of the window's tokens and scored positions
  (``Window.digest``);
- ``head.000000.<digest>.safetensors``: the head's ``weight`` [n, H] of vocabulary entries 0 to n,
  ``bias`` [n] if it has one, and in its metadata soft cap and scale; one file per tensor-parallel
  rank, named by its first entry;
- ``reference.json``, the manifest, written last: model, engine and hardware (``identity``),
  contents ("states" or "logits"), soft cap and scale of the head, and the size of each file of the
  store.

A store knows nothing of texts: it holds the windows of any text that its model has scored, and
grows by others.

For a vocabulary of 128,256 and H = 4,096, 16-bit states take 8,192 bytes per token, 16-bit logits
256,512, and float32 logits 513,024.  Logits are recomputed as the engine computed them: product in
the model's dtype, bias, soft cap, scale.  Nothing is rounded; float16 instead of float32 would cost
up to 3.3e-4 nats per token.

A store is created and extended in its final place.  ``begin`` writes its identity to
``unfinished.json``; processes write files (``backends/reference/recorder.py``); after a kill,
``recorded`` returns the windows that are complete; ``seal`` writes the manifest.  A kill at any
moment leaves the old store intact, because its manifest lists only old files.  Two runs may record
different windows at once: ``begin``, ``seal``, ``forget`` and ``discard`` are called with the
store's lock (``eval/run/claims.py``), and no run holds it while windows are scored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from ..common import storage
from ..common.errors import InputError, ModelError
from ..common.message_text import one_line
from .head import Contents, Head

if TYPE_CHECKING:
    import torch

VERSION = 4
"""Version of the layout; others are not read.

1: one file per window, one or more files for the head, and a manifest that names them; compare_q
0.1 wrote it.  2: the manifest carries its own checksum, and a store can grow.  3: file names
contain checksums, and a store is created in its final place; compare_q 0.3 wrote it.  4: windows
are named by their digests instead of their numbers in one text.
"""
MANIFEST, UNFINISHED = "reference.json", "unfinished.json"
WINDOW = re.compile(r"row\.([0-9a-f]{32}|\d{6,9})")
"""File name of a window, by its digest; by a number in older stores, whose files are deleted like
these."""
OLDER_WINDOW = re.compile(r"row\.\d{6,9}")
HEAD = re.compile(r"head\.(\d{6,9})")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by the names that safetensors gives them."""
CANNOT = "an engine that cannot record a reference sets reference=False in its capabilities"
AGAIN = "run with -cc, or give another path, so that it is made again"
FileName = Annotated[
    str, Field(pattern=r"^(row\.[0-9a-f]{32}|head\.\d{6,9})\.[0-9a-f]{40}\.safetensors$")
]


class Manifest(BaseModel):
    """A store's identity, contents, why it holds logits (``reason``), head, and the size of its
    files by name.

    ``made``: compare_q created the folder, and may delete it when it is empty.
    """

    model_config = ConfigDict(frozen=True, strict=True, validate_by_name=True)

    version: int = VERSION
    identity: dict[str, Any]
    contents: Contents = Field(validation_alias="kind", serialization_alias="kind")
    reason: str
    head: Head
    made: bool = False
    files: dict[FileName, NonNegativeInt]

    @property
    def windows(self) -> dict[str, str]:
        """The windows' files by the windows' digests."""
        return windows_among(self.files)

    @property
    def heads(self) -> dict[int, str]:
        """The head's files by their first entry, in order."""
        return heads_among(self.files)


def windows_among(names: Iterable[str]) -> dict[str, str]:
    """Return the names of windows' files among ``names``, by the windows' digests."""
    files = {}
    for name in sorted(names):
        match = WINDOW.fullmatch(storage.what_of(name))
        if match:
            files[match[1]] = name
    return files


def heads_among(names: Iterable[str]) -> dict[int, str]:
    """Return the names of a head's files among ``names``, by the number of their first entry, in
    order.
    """
    files = {}
    for name in names:
        match = HEAD.fullmatch(storage.what_of(name))
        if match:
            files[int(match[1])] = name
    return dict(sorted(files.items()))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a store; InputError if it is missing, damaged or of another version."""
    file = folder / MANIFEST
    try:
        if not file.is_file():
            raise ValueError("it is not there")
        content = storage.load_file(file)
        if content.get("version") == VERSION:
            return Manifest.model_validate_json(json.dumps(content))
    except InputError as error:
        raise InputError(f"{error}; {AGAIN}") from None
    except (OSError, ValueError) as error:  # of pydantic too
        raise InputError(f"{file}: not a reference store: {one_line(error)}; {AGAIN}") from None
    raise InputError(
        f"{file}: layout {content.get('version')}, this compare_q reads {VERSION}; {AGAIN}"
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace a manifest, completely or not at all."""
    storage.write_whole(
        folder / MANIFEST, storage.dump(manifest.model_dump(by_alias=True), indent=1)
    )


class Reader:
    """A store to read; InputError names the file that is missing, damaged or of another version.

    ``windows``: the files of its windows, by the windows' digests; ``heads``: the files of its
    head, by their first entry; ``stored_bytes``: of all windows and the head.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.manifest = read_manifest(folder)
        self.identity = self.manifest.identity
        self.contents = self.manifest.contents
        self.reason = self.manifest.reason
        self.head = self.manifest.head
        self.windows = self.manifest.windows
        self.stored_bytes = sum(self.manifest.files.values())
        self.heads = self.manifest.heads
        self.heads_digest = "".join(self.heads.values())

    def recording(self, window: str) -> str:
        """Return 16 hexadecimal digits that identify the stored numbers of a window and the head;
        empty without it.

        Scores that were compared with other numbers of the same window have another recording.
        """
        name = self.windows.get(window)
        if name is None:
            return ""
        return hashlib.sha256(f"{name} {self.heads_digest}".encode()).hexdigest()[:16]

    def verify(
        self, windows: Collection[str] | None = None, advance: Callable[[], None] = lambda: None
    ) -> None:
        """Check every byte of the head and of the ``windows`` (digests; None: all).

        ``advance`` is called after each file.
        """
        names = list(self.heads.values())
        asked = self.windows if windows is None else windows
        names += [name for window, name in self.windows.items() if window in asked]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for problem in pool.map(problem_of, (self.path / name for name in names)):
                if problem:
                    raise InputError(f"{problem}; {AGAIN}")
                advance()

    def window_bytes(self, window: str) -> int:
        """Bytes of the window with this digest; 0 if the store does not have it."""
        return self.manifest.files.get(self.windows.get(window, ""), 0)

    def bytes_of(self, windows: Collection[str]) -> int:
        """Bytes of the head and of these windows (digests)."""
        head = sum(self.manifest.files[name] for name in self.heads.values())
        return head + sum(map(self.window_bytes, windows))

    def n_rows(self, window: str) -> int:
        """Scored positions of the window with this digest, read from its file."""
        with self._opened(window) as rows:
            return int(rows.get_shape()[0])

    def window(self, window: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """States [n, H] or logits [n, V], by ``contents``, of rows ``begin`` to ``end`` of a
        window, on the CPU.
        """
        with self._opened(window) as rows:
            tensor: torch.Tensor = rows[begin:end]
            return tensor

    @contextmanager
    def _opened(self, window: str) -> Iterator[Any]:
        """The opened tensor of a window, to read a slice of it."""
        from safetensors import safe_open

        file = self.path / self.windows.get(window, f"row.{window}")
        try:
            with safe_open(file, "pt") as opened:
                yield opened.get_slice(self.contents)
        except (
            Exception
        ) as error:  # safetensors raises its own error class for missing and for damaged files
            raise InputError(
                f"{file}: this window of the reference cannot be read: {one_line(error)}"
            ) from None

    def weight(
        self, first: int, last: int, device: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's weight [last - first, H] and bias on a device."""
        import torch
        from safetensors import safe_open

        weights, biases = [], []
        for begin, name in self.heads.items():
            with safe_open(self.path / name, "pt") as file:
                piece = file.get_slice("weight")
                end = begin + piece.get_shape()[0]
                low, high = min(max(first, begin), end) - begin, max(min(last, end), begin) - begin
                if low < high or first == last:  # a rank that has only padding needs no entries
                    weights.append(piece[low:high])
                    biases += [file.get_tensor("bias")[low:high]] if "bias" in file.keys() else []  # noqa: SIM118
        if not weights or sum(map(len, weights)) != last - first:
            raise InputError(
                f"{self.path}: the reference's head lacks entries between {first} and {last}; {AGAIN}"
            )
        # A single piece is not copied: copying 1 GB of a head took longer than comparing it.
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return weight.to(device), torch.cat(biases).to(device) if biases else None


def open_reference(path: Path) -> Reader:
    """Return the store at ``path``; InputError names what is wrong with it."""
    version = storage.version_of(path / MANIFEST)
    if version is not None and (path / MANIFEST).is_file():
        return reader_of_version(path, version)
    if (path / MANIFEST).is_file():
        return Reader(path)
    raise InputError(
        f"{path}: holds no reference: there is no {MANIFEST}; name another path and mark the model as the reference "
        '("reference": true), so that it is recorded'
    )


@functools.lru_cache(maxsize=4)
def reader_of_version(path: Path, _version: tuple[int, int, int]) -> Reader:
    """Return the store at ``path``; the process keeps it as long as its manifest has this version."""
    return Reader(path)


def problem_of(file: Path) -> str:
    """Read every byte of a file of a store, and return what is wrong with it; empty if nothing is."""
    if not storage.is_regular(file):
        return (
            f"{file}: {'is not a file' if os.path.lexists(file) else 'missing from the reference'}"
        )
    try:
        return (
            ""
            if storage.is_whole(file)
            else f"{file}: damaged: its checksum is not the one in its name"
        )
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"


def unlabelled(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity without the model's label, which is only for display."""
    return {name: value for name, value in identity.items() if name != "label"}


def manifest_in(folder: Path, identity: Mapping[str, Any] | None = None) -> Manifest | None:
    """Return the manifest of an existing store, if any; InputError if it is another reference's."""
    manifest = read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    if manifest and identity is not None and unlabelled(manifest.identity) != unlabelled(identity):
        raise InputError(f"{folder}: contains another reference; give another path")
    return manifest


def is_older(folder: Path) -> bool:
    """Return True if a folder has a store of an older layout, also one that a killed run has not
    finished.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return bool(storage.load((folder / MANIFEST).read_bytes())["version"] < VERSION)
    return any(OLDER_WINDOW.fullmatch(storage.what_of(file.name)) for file in own_files(folder))


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the key of a reference, 40 hexadecimal digits: the SHA-256 of its identity as
    canonical JSON.
    """
    content = json.dumps(["reference", unlabelled(identity)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:40]


def key_in(folder: Path) -> str:
    """Return the key of the reference whose store is in a folder, or is being made there; empty if
    there is none.
    """
    with suppress(InputError):
        return key_of(read_manifest(folder).identity)
    unfinished = unfinished_in(folder)
    return key_of(unfinished["identity"]) if unfinished else ""


def begin(folder: Path, identity: Mapping[str, Any]) -> None:
    """Prepare a folder for writers of the reference with this identity.

    Files of a killed run stay if they are of this reference, and are deleted otherwise.  InputError
    if the folder holds the store of another reference, or a user's file.
    """
    storage.sweep(folder)
    if manifest_in(folder, identity) is not None:
        storage.delete(
            [folder / UNFINISHED]
        )  # left by a run that was killed after writing the manifest
        return
    made = not os.path.lexists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder}: is no folder; give another path") from None
    unfinished = unfinished_in(folder)
    if unfinished.get("identity") != unlabelled(identity):
        storage.delete(own_files(folder))
        content = {"identity": unlabelled(identity), "made": made or unfinished.get("made", False)}
        storage.write_whole(folder / UNFINISHED, storage.dump(content))


def unfinished_in(folder: Path) -> dict[str, Any]:
    """Return ``identity`` and ``made`` in ``unfinished.json``; empty if it does not exist or is
    damaged.
    """
    with suppress(OSError, ValueError):
        content = storage.load((folder / UNFINISHED).read_bytes())
        if content.keys() == {"identity", "made"}:
            return content
    return {}


def seal(folder: Path, identity: Mapping[str, Any], windows: Collection[str]) -> None:
    """Add the writers' files to the store in a folder, or create a store from these files.

    Windows of the store are not replaced.  ModelError if one of the ``windows`` (digests), or the
    head, is missing, or if the store has another head or other contents; InputError if it belongs
    to another reference.
    """
    old = manifest_in(folder, identity)
    listed = old.files if old else {}
    new = unlisted(folder, old)
    by_window = windows_among(new) | windows_among(listed)
    missing = [window for window in windows if window not in by_window]
    if missing:
        count = f"{len(missing):,} of {len(windows):,} windows"
        raise ModelError(
            f"{count} of the reference were not kept, window {missing[0]} among them; {CANNOT}"
        )
    if not new:
        return
    written = written_in(folder, new)
    if written is None:
        raise ModelError(f"{folder}: what was kept of the reference is not of one form; run again")
    contents, reason, new_head = written
    head = old.head if old else new_head
    if head is None:
        raise ModelError(f"the reference's head was not kept; {CANNOT}")
    new_heads = heads_among(new)
    if old and (old.contents != contents or new_head not in (None, head) or new_heads):
        conflict = "this run kept a reference with another head or other contents"
        raise ModelError(f"{folder}: {conflict}; delete the folder, or give another path")
    heads = new_heads | heads_among(listed)
    files = {}
    for name in sorted([*by_window.values(), *heads.values()]):
        files[name] = (folder / name).stat().st_size if name in new else listed[name]
    made = old.made if old else unfinished_in(folder).get("made", False)
    manifest = Manifest(
        identity=dict(identity), contents=contents, reason=reason, head=head, made=made, files=files
    )
    write_manifest(folder, manifest)
    storage.delete([folder / UNFINISHED, *(folder / name for name in new if name not in files)])


def forget(folder: Path, windows: Collection[str]) -> None:
    """Delete the windows with these digests; the whole store, if no other window is left in it or
    its head is damaged.

    The manifest is written before files are deleted, so that a kill between the two leaves a store
    that is whole.
    """
    manifest = None
    with suppress(InputError):  # a damaged manifest
        manifest = manifest_in(folder)
    others = set(manifest.windows if manifest else ()) - set(windows)
    damaged = manifest is not None and any(
        problem_of(folder / name) for name in manifest.heads.values()
    )
    if manifest is None or not others or damaged:
        discard(folder)
        return
    dropped = []
    for name in [*manifest.files, *unlisted(folder, manifest)]:
        match = WINDOW.fullmatch(storage.what_of(name))
        if match and match[1] in windows:
            dropped.append(name)
    files = {name: size for name, size in manifest.files.items() if name not in dropped}
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    storage.delete(folder / name for name in dropped)


def written_in(folder: Path, names: Sequence[str]) -> tuple[Contents, str, Head | None] | None:
    """Return (contents, why they are logits, head) of the writers' files, from their headers.

    The head is None as long as a part of it is missing.  None if the files' forms differ, or one is
    damaged.  A window may exist twice, written by two runs.
    """
    forms: set[tuple[str, str, int, str]] = set()
    heads: set[Head] = set()
    pieces: dict[int, int] = {}
    try:
        for name in names:
            facts, tensors = storage.header_of(folder / name)
            piece = HEAD.fullmatch(storage.what_of(name))
            if piece and int(piece[1]) in pieces:
                return None
            if piece:
                pieces[int(piece[1])] = int(tensors["weight"]["shape"][0])
                heads.add(Head(**facts["head"]))
            else:
                ((contents, tensor),) = tensors.items()
                forms.add((contents, tensor["dtype"], tensor["shape"][-1], facts["reason"]))
        contents, dtype, width, reason = forms.pop() if forms else ("states", "", 0, "")
        head = heads.pop() if heads else None
        if contents == "logits" and not (forms or heads or head):
            return "logits", reason, Head(width, DTYPES[dtype])
        if contents != "states" or forms or heads:
            return None
    except (ValueError, LookupError, TypeError, OverflowError):
        return None
    end = 0
    for first, count in sorted(pieces.items()):
        end = end + count if first == end else -1
    return "states", reason, head if head is not None and end >= head.vocab_size else None


def unlisted(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return the windows' and head's files that the manifest does not list, without files of other
    references.
    """
    key = key_in(folder)
    names = []
    for file in own_files(folder):
        is_listed = manifest is not None and file.name in manifest.files
        if storage.what_of(file.name) and not is_listed and not is_foreign(file, key):
            names.append(file.name)
    return names


def is_foreign(file: Path, key: str) -> bool:
    """Return True if a file's metadata name another reference's key."""
    with suppress(ValueError):
        return bool(storage.header_of(file)[0].get("key") != key)
    return False


def recorded(folder: Path, windows: Collection[str]) -> frozenset[str]:
    """Return those of the ``windows`` (digests) that need not be recorded again.

    They are in the store, or complete files of an earlier run that was killed.  Every byte of the
    latter is read; damaged files are deleted, and all of them if their forms differ.  One of them
    is left out until the head is written too: the run that records it also writes the head, which
    is then compared with the store's head.
    """
    manifest = manifest_in(folder)
    new = []
    for name in unlisted(folder, manifest):
        window = WINDOW.fullmatch(storage.what_of(name))
        if window is None or window[1] in windows:
            new.append(name)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = list(pool.map(problem_of, (folder / name for name in new)))
    undamaged = [name for name, problem in zip(new, problems, strict=True) if not problem]
    written = written_in(folder, undamaged) if undamaged else None
    storage.delete(folder / name for name in new if written is None or name not in undamaged)
    complete = set(windows_among(undamaged)) if written else set()
    has_head = manifest is None and written is not None and written[2] is not None
    if complete and not has_head:
        complete.remove(max(complete))
    stored = set(manifest.windows) if manifest else set()
    return frozenset(complete | (stored & set(windows)))


def own_files(folder: Path) -> list[Path]:
    """Return the files in a folder that have names of a store, the manifest first; none if the
    folder is a link.
    """
    files = (
        []
        if folder.is_symlink()
        else [file for file in storage.files_in(folder) if is_own(file.name)]
    )
    return sorted(files, key=lambda file: bool(storage.what_of(file.name)))


def is_own(name: str) -> bool:
    """Return True if a file name can only belong to a store."""
    what = storage.what_of(name)
    return name in (MANIFEST, UNFINISHED) or bool(WINDOW.fullmatch(what) or HEAD.fullmatch(what))


def is_free(folder: Path) -> bool:
    """Return True if a store may be made at a path: it does not exist, or holds only files of
    killed runs.
    """
    with suppress(OSError):
        return all(is_own(name) or storage.TEMPORARY.fullmatch(name) for name in os.listdir(folder))
    return not os.path.lexists(folder)


def discard(folder: Path) -> None:
    """Delete the store's files in a folder, and the folder if compare_q created it and it is empty
    then.

    InputError, without deleting, if the folder or its manifest is a link.
    """
    if folder.is_symlink() or (
        os.path.lexists(folder / MANIFEST) and not storage.is_regular(folder / MANIFEST)
    ):
        raise InputError(f"{folder}: is a link or has one; compare_q deletes nothing through links")
    made = unfinished_in(folder).get("made", False)
    with suppress(InputError):
        made = made or read_manifest(folder).made
    storage.delete(own_files(folder))
    if left := own_files(folder):
        raise InputError(f"{left[0]}: cannot be deleted; is the file yours?")
    storage.sweep(folder)
    if made:
        with suppress(OSError):  # a user's own files
            folder.rmdir()


def abandon(folder: Path, windows: Collection[str]) -> int:
    """Delete those of the ``windows`` (digests) that were recorded since the last ``seal``.

    Return the bytes of an average one, 0 if there are none.  Windows that another run is recording
    are kept.
    """
    new = windows_among(unlisted(folder, manifest_in(folder)))
    files = [folder / name for window, name in new.items() if window in windows]
    sizes = [storage.size_of(file) or 0 for file in files]
    storage.delete(files)
    storage.sweep(folder)
    return sum(sizes) // max(len(sizes), 1)


def tidy(folder: Path) -> None:
    """Discard a folder without any window, for example after a model failed to load."""
    if not any(storage.what_of(file.name) or file.name == MANIFEST for file in own_files(folder)):
        discard(folder)
