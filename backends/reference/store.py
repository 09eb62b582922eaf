"""A reference store: the final hidden states of every scored position, and the head once.

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from ..common import storage
from ..common.errors import InputError, ModelError
from ..common.kept_folder import KeptFolder
from ..common.message_text import one_line
from .head import Contents, Head

if TYPE_CHECKING:
    import torch

STORE_VERSION = 4
"""Version of the layout; others are not read.

1: one file per window, one or more files for the head, and a manifest that names them; compare_q
0.1 wrote it.  2: the manifest carries its own checksum, and a store can grow.  3: file names
contain checksums, and a store is created in its final place; compare_q 0.3 wrote it.  4: windows
are named by their digests instead of their numbers in one text.
"""
STORE_MANIFEST = "reference.json"
UNFINISHED = "unfinished.json"
WINDOW = re.compile(r"row\.([0-9a-f]{32}|\d{6,9})")
"""Stem of a window's file: "row", and the window's digest.

In older stores it is the window's number; these files are deleted like the others.
"""
OLDER_WINDOW = re.compile(r"row\.\d{6,9}")
HEAD = re.compile(r"head\.(\d{6,9})")
STEMS = re.compile(f"{WINDOW.pattern}|{HEAD.pattern}")
DOCUMENTS = re.compile(f"{re.escape(STORE_MANIFEST)}|{re.escape(UNFINISHED)}")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by the names that safetensors gives them."""
CANNOT = "an engine that cannot record a reference sets reference=False in its capabilities"
REMAKE_ADVICE = "run with -cc, or give another path, so that it is made again"
FileName = Annotated[
    str, Field(pattern=r"^(row\.[0-9a-f]{32}|head\.\d{6,9})\.[0-9a-f]{40}\.safetensors$")
]


def store_folder(path: Path) -> KeptFolder:
    """Return the folder of a store, to read, check and delete its files."""
    return KeptFolder(path, "the reference", STEMS, DOCUMENTS, has_manifest=True)


class Manifest(BaseModel):
    """Identity and contents of a store, and the names of its files.

    Attributes:
        identity: model, engine and hardware.
        contents: "states" or "logits".
        reason: why it holds logits; empty for states.
        head: without its weight, which is in files.
        made: compare_q created the folder, and may delete it when it is empty.
        files: the size of each file of tensors, by its name.
    """

    model_config = ConfigDict(frozen=True, strict=True, validate_by_name=True)

    version: int = STORE_VERSION
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
        match = WINDOW.fullmatch(storage.stem_of(name))
        if match:
            files[match[1]] = name
    return files


def heads_among(names: Iterable[str]) -> dict[int, str]:
    """Return the names of a head's files among ``names``, by their first entry, in order."""
    files = {}
    for name in names:
        match = HEAD.fullmatch(storage.stem_of(name))
        if match:
            files[int(match[1])] = name
    return dict(sorted(files.items()))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a store.

    InputError if it is missing, damaged or of another version.
    """
    file = folder / STORE_MANIFEST
    try:
        # A folder or a pipe of this name is not opened.
        if not file.is_file():
            raise ValueError("it is not there")
        content = storage.load_file(file)
        # Checked first: the other keys of a manifest depend on its version.
        version = content.get("version")
        if version != STORE_VERSION:
            raise InputError(f"{file}: layout {version}, this compare_q reads {STORE_VERSION}")
        # As JSON: in strict mode, pydantic makes a ``Head`` from an object only in JSON.
        return Manifest.model_validate_json(json.dumps(content))
    except InputError as error:
        raise InputError(f"{error}; {REMAKE_ADVICE}") from None
    except (OSError, ValueError) as error:  # pydantic's error is a ValueError
        raise InputError(
            f"{file}: not a reference store: {one_line(error)}; {REMAKE_ADVICE}"
        ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace a manifest, completely or not at all."""
    content = manifest.model_dump(by_alias=True)
    store_folder(folder).write_document(STORE_MANIFEST, content, indent=1)


class Reader:
    """A store to read; InputError names the file that is missing, damaged or of another version.

    Attributes:
        windows: the files of its windows, by the windows' digests.
        heads: the files of its head, by their first entry, in order.
        stored_bytes: bytes of all windows and the head.
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
        """Return 16 hexadecimal digits that identify the stored numbers of a window and the head.

        Scores that were compared with other numbers of the same window have another recording.
        Empty without this window.
        """
        name = self.windows.get(window)
        if name is None:
            return ""
        return hashlib.sha256(f"{name} {self.heads_digest}".encode()).hexdigest()[:16]

    def verify(
        self,
        windows: Collection[str] | None = None,
        advance: Callable[[], None] | None = None,
    ) -> None:
        """Check every byte of the head and of the ``windows`` (digests; None: all); InputError.

        ``advance`` is called after each file.
        """
        names = list(self.heads.values())
        for window, name in self.windows.items():
            if windows is None or window in windows:
                names.append(name)
        for problem in store_folder(self.path).problems(names):
            if problem:
                raise InputError(f"{problem}; {REMAKE_ADVICE}")
            if advance is not None:
                advance()

    def window_bytes(self, window: str) -> int:
        """Bytes of the window with this digest; 0 if the store does not have it."""
        return self.manifest.files.get(self.windows.get(window, ""), 0)

    def bytes_of(self, windows: Collection[str]) -> int:
        """Bytes of the head and of these windows (digests)."""
        n_bytes = 0
        for name in self.heads.values():
            n_bytes += self.manifest.files[name]
        for window in windows:
            n_bytes += self.window_bytes(window)
        return n_bytes

    def n_rows(self, window: str) -> int:
        """Scored positions of the window with this digest, read from its file."""
        with self._opened(window) as rows:
            return int(rows.get_shape()[0])

    def window(self, window: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """States [n, H] or logits [n, V] of rows ``begin`` to ``end`` of a window, on the CPU."""
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
        except Exception as error:
            # safetensors raises its own error class for missing and for damaged files.
            raise InputError(
                f"{file}: this window of the reference cannot be read: {one_line(error)}"
            ) from None

    def weight(
        self, first: int, last: int, device: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's weight [last - first, H] and its bias, if any, on a device."""
        import torch
        from safetensors import safe_open

        weights = []
        biases = []
        for begin, name in self.heads.items():
            with safe_open(self.path / name, "pt") as file:
                piece = file.get_slice("weight")
                end = begin + piece.get_shape()[0]
                low = min(max(first, begin), end) - begin
                high = max(min(last, end), begin) - begin
                # A rank that has only padding needs no entries, but a weight of shape [0, H].
                if low < high or first == last:
                    weights.append(piece[low:high])
                    if "bias" in file.keys():  # noqa: SIM118 (safe_open does not support ``in``)
                        biases.append(file.get_tensor("bias")[low:high])
        if not weights or sum(len(piece) for piece in weights) != last - first:
            missing = f"the reference's head lacks entries between {first} and {last}"
            raise InputError(f"{self.path}: {missing}; {REMAKE_ADVICE}")
        # A single piece is not copied: copying 1 GB of a head took longer than comparing it.
        weight = weights[0]
        if len(weights) > 1:
            weight = torch.cat(weights)
        bias = None
        if biases:
            bias = torch.cat(biases).to(device)
        return weight.to(device), bias


def open_reference(path: Path) -> Reader:
    """Return the store at ``path``; InputError names what is wrong with it."""
    # The file's state is read before the manifest: if the manifest is replaced in between, the kept
    # store has an old state, and is read again next time.
    state = storage.file_state(path / STORE_MANIFEST)
    if not (path / STORE_MANIFEST).is_file():
        raise InputError(
            f"{path}: holds no reference: there is no {STORE_MANIFEST}; name another path and mark "
            'the model as the reference ("reference": true), so that it is recorded'
        )
    if state is None:
        return Reader(path)
    return cached_reader(path, state)


@functools.lru_cache(maxsize=4)
def cached_reader(path: Path, _state: tuple[int, int, int]) -> Reader:
    """Return the store at ``path``, which is kept as long as its manifest has this state."""
    return Reader(path)


def unlabelled(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity without the model's label, which is only for display."""
    return {name: value for name, value in identity.items() if name != "label"}


def manifest_in(folder: Path, identity: Mapping[str, Any] | None = None) -> Manifest | None:
    """Return the manifest of an existing store, if any; InputError if it is another reference's."""
    if not os.path.lexists(folder / STORE_MANIFEST):
        return None
    manifest = read_manifest(folder)
    if identity is not None and unlabelled(manifest.identity) != unlabelled(identity):
        raise InputError(f"{folder}: contains another reference; give another path")
    return manifest


def is_older(folder: Path) -> bool:
    """Return True if a folder has a store of an older layout, also an unfinished one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return bool(storage.load((folder / STORE_MANIFEST).read_bytes())["version"] < STORE_VERSION)
    for file in store_folder(folder).own_tensor_files():
        if OLDER_WINDOW.fullmatch(storage.stem_of(file.name)):
            return True
    return False


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the key of a reference: 40 hexadecimal digits of its identity's SHA-256."""
    content = json.dumps(["reference", unlabelled(identity)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:40]


def key_in(folder: Path) -> str:
    """Return the key of the store in a folder, which may be unfinished; empty without a store."""
    with suppress(InputError):
        return key_of(read_manifest(folder).identity)
    unfinished = unfinished_in(folder)
    if not unfinished:
        return ""
    return key_of(unfinished["identity"])


def begin(folder: Path, identity: Mapping[str, Any]) -> None:
    """Prepare a folder for writers of the reference with this identity.

    Files of a killed run stay if they are of this reference, and are deleted otherwise.  InputError
    if the folder holds a damaged store or the store of another reference, or if it is a file.
    """
    kept_folder = store_folder(folder)
    kept_folder.sweep()
    if manifest_in(folder, identity) is not None:
        # It remains if a run was killed after it had written the manifest.
        kept_folder.delete([UNFINISHED])
        return
    is_new = not os.path.lexists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder}: is no folder; give another path") from None
    unfinished = unfinished_in(folder)
    if unfinished.get("identity") != unlabelled(identity):
        storage.delete(kept_folder.own_files())
        content = {
            "identity": unlabelled(identity),
            # compare_q created the folder, now or in the killed run (see ``Manifest``).
            "made": is_new or unfinished.get("made", False),
        }
        kept_folder.write_document(UNFINISHED, content)


def unfinished_in(folder: Path) -> dict[str, Any]:
    """Return the content of ``unfinished.json``; empty if it is missing or damaged."""
    with suppress(OSError, ValueError):
        content = storage.load((folder / UNFINISHED).read_bytes())
        if content.keys() == {"identity", "made"}:
            return content
    return {}


def was_made(folder: Path, manifest: Manifest | None) -> bool:
    """Return True if compare_q created the folder of a store, which may be unfinished."""
    if manifest is not None:
        return manifest.made
    is_made: bool = unfinished_in(folder).get("made", False)
    return is_made


def seal(folder: Path, identity: Mapping[str, Any], windows: Collection[str]) -> None:
    """Add the writers' files to the store in a folder, or create a store from these files.

    Windows of the store are not replaced.  ModelError if one of the ``windows`` (digests), or the
    head, is missing, or if the store has another head or other contents; InputError if it belongs
    to another reference.
    """
    old = manifest_in(folder, identity)
    listed: Mapping[str, int] = {}
    if old is not None:
        listed = old.files
    new = unlisted(folder, old)
    # The store's own windows come second, so that they replace those that were recorded again.
    by_window = windows_among(new) | windows_among(listed)
    check_complete(windows, by_window)
    if not new:
        return
    form = written_in(folder, new)
    if form is None:
        raise ModelError(f"{folder}: what was kept of the reference is not of one form; run again")
    head = head_to_seal(folder, form, new, old)
    heads = heads_among(new) | heads_among(listed)
    sizes = {}
    for name in sorted([*by_window.values(), *heads.values()]):
        if name in new:
            sizes[name] = (folder / name).stat().st_size
        else:
            sizes[name] = listed[name]
    manifest = Manifest(
        identity=dict(identity),
        contents=form.contents,
        reason=form.reason,
        head=head,
        made=was_made(folder, old),
        files=sizes,
    )
    write_manifest(folder, manifest)
    # Only now: a kill before this line leaves files that the next run finds.
    recorded_twice = [name for name in new if name not in sizes]
    store_folder(folder).delete([UNFINISHED, *recorded_twice])


def check_complete(windows: Collection[str], by_window: Mapping[str, str]) -> None:
    """ModelError if some of the ``windows`` (digests) have no file in ``by_window``."""
    missing = [window for window in windows if window not in by_window]
    if missing:
        count = f"{len(missing):,} of {len(windows):,} windows"
        raise ModelError(
            f"{count} of the reference were not kept, window {missing[0]} among them; {CANNOT}"
        )


class Form(NamedTuple):
    """The form of a store's files, from their headers."""

    contents: Contents
    reason: str  # why they are logits
    head: Head | None  # None as long as a part of it is missing


def head_to_seal(folder: Path, form: Form, new: Sequence[str], old: Manifest | None) -> Head:
    """Return the store's head, or the writers' head of a new store; ModelError: see ``seal``.

    ``form``: of the writers' files, whose names are ``new``.
    """
    if old is None:
        if form.head is None:
            raise ModelError(f"the reference's head was not kept; {CANNOT}")
        return form.head
    has_other_head = form.head is not None and form.head != old.head
    # A head's file that is not in the store has other bytes: equal bytes have the same name.
    if old.contents != form.contents or has_other_head or heads_among(new):
        conflict = "this run kept a reference with another head or other contents"
        raise ModelError(f"{folder}: {conflict}; delete the folder, or give another path")
    return old.head


def forget(folder: Path, windows: Collection[str]) -> None:
    """Delete the windows with these digests.

    The whole store is deleted if no other window is left in it, or its head is damaged.
    """
    manifest = None
    with suppress(InputError):  # a damaged manifest
        manifest = manifest_in(folder)
    if manifest is None or not remains_useful(folder, manifest, windows):
        discard(folder)
        return
    forgotten = []
    for name in [*manifest.files, *unlisted(folder, manifest)]:
        match = WINDOW.fullmatch(storage.stem_of(name))
        if match and match[1] in windows:
            forgotten.append(name)
    files = {name: size for name, size in manifest.files.items() if name not in forgotten}
    # Before the files are deleted: a kill between the two leaves a complete store.
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    store_folder(folder).delete(forgotten)


def remains_useful(folder: Path, manifest: Manifest, forgotten: Collection[str]) -> bool:
    """Return True if the store has other windows, and its head is undamaged."""
    if not manifest.windows.keys() - set(forgotten):
        return False
    kept_folder = store_folder(folder)
    return not any(kept_folder.problem_of(name) for name in manifest.heads.values())


def written_in(folder: Path, names: Sequence[str]) -> Form | None:
    """Return the form of the writers' files, from their headers.

    None if the files' forms differ, or one is damaged.  A window may exist twice, written by two
    runs.
    """
    kept_folder = store_folder(folder)
    forms: set[tuple[str, str, int, str]] = set()
    heads: set[Head] = set()
    n_entries: dict[int, int] = {}  # of each piece of the head, by the piece's first entry
    try:
        for name in names:
            facts, tensors = kept_folder.header(name)
            match = HEAD.fullmatch(storage.stem_of(name))
            if match is None:
                ((contents, tensor),) = tensors.items()
                forms.add((contents, tensor["dtype"], tensor["shape"][-1], facts["reason"]))
                continue
            first = int(match[1])
            if first in n_entries:
                return None
            n_entries[first] = int(tensors["weight"]["shape"][0])
            heads.add(Head(**facts["head"]))
        if len(forms) > 1 or len(heads) > 1:
            return None
        reason = ""
        if forms:
            contents, dtype, width, reason = forms.pop()
            if contents == "logits" and not heads:
                return Form("logits", reason, Head(width, DTYPES[dtype]))
            if contents != "states":
                return None
    except (ValueError, LookupError, TypeError, OverflowError):
        # The store of a pack is from an unknown source: its headers may have any content.
        return None
    if heads:
        head = heads.pop()
        if entries_from_zero(n_entries) >= head.vocab_size:
            return Form("states", reason, head)
    return Form("states", reason, None)


def entries_from_zero(n_entries: Mapping[int, int]) -> int:
    """Return the number of entries of a head without a gap; negative if a piece is missing.

    ``n_entries``: of each piece, by the piece's first entry.
    """
    end = 0
    for first, count in sorted(n_entries.items()):
        if first != end:
            return -1
        end += count
    return end


def unlisted(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return the windows' and head's files that the manifest does not list.

    Files of other references, which somebody moved here, are left out.
    """
    kept_folder = store_folder(folder)
    key = key_in(folder)
    names = []
    for file in kept_folder.own_tensor_files():
        is_listed = manifest is not None and file.name in manifest.files
        if not is_listed and not kept_folder.is_foreign(file.name, key):
            names.append(file.name)
    return names


def recorded(folder: Path, windows: Collection[str]) -> frozenset[str]:
    """Return those of the ``windows`` (digests) that need not be recorded again.

    They are in the store, or complete files of an earlier run that was killed.  Every byte of the
    latter is read; damaged files are deleted, and all of them if their forms differ.  One of them
    is left out until the head is written too: the run that records it also writes the head, which
    is then compared with the store's head.
    """
    kept_folder = store_folder(folder)
    manifest = manifest_in(folder)
    new = []
    for name in unlisted(folder, manifest):
        match = WINDOW.fullmatch(storage.stem_of(name))
        if match is None or match[1] in windows:
            new.append(name)
    undamaged = []
    for name, problem in zip(new, kept_folder.problems(new), strict=True):
        if not problem:
            undamaged.append(name)
    form = None
    if undamaged:
        form = written_in(folder, undamaged)
    usable: list[str] = []
    if form is not None:
        usable = undamaged
    kept_folder.delete(name for name in new if name not in usable)
    complete = set(windows_among(usable))
    has_head = manifest is None and form is not None and form.head is not None
    if complete and not has_head:
        complete.remove(max(complete))
    if manifest is not None:
        complete |= manifest.windows.keys() & set(windows)
    return frozenset(complete)


def is_free(folder: Path) -> bool:
    """Return True if a store may be made at a path.

    It does not exist, or holds only files of killed runs.
    """
    return store_folder(folder).is_free()


def discard(folder: Path) -> None:
    """Delete the store's files in a folder, and the folder if compare_q created it and it is empty.

    InputError, without deleting, if the folder or its manifest is a link.
    """
    manifest_file = folder / STORE_MANIFEST
    has_special_manifest = os.path.lexists(manifest_file) and not storage.is_regular(manifest_file)
    if folder.is_symlink() or has_special_manifest:
        raise InputError(f"{folder}: is a link or has one; compare_q deletes nothing through links")
    kept_folder = store_folder(folder)
    # The documents are read before they are deleted.
    is_made = unfinished_in(folder).get("made", False)
    if not is_made:
        with suppress(InputError):
            is_made = read_manifest(folder).made
    storage.delete(kept_folder.own_files())
    remaining = kept_folder.own_files()
    if remaining:
        raise InputError(f"{remaining[0]}: cannot be deleted; is the file yours?")
    kept_folder.sweep()
    if is_made:
        with suppress(OSError):  # a user's own files
            folder.rmdir()


def abandon(folder: Path, windows: Collection[str]) -> int:
    """Delete those of the ``windows`` (digests) that were recorded since the last ``seal``.

    Other unsealed windows are kept, since another run may be recording them.  Return the average
    size of the deleted files in bytes, 0 if there are none: a caller estimates from it how much
    space all windows would need.
    """
    kept_folder = store_folder(folder)
    names = []
    for window, name in windows_among(unlisted(folder, manifest_in(folder))).items():
        if window in windows:
            names.append(name)
    n_bytes = 0
    for name in names:
        n_bytes += storage.size_of(folder / name) or 0
    kept_folder.delete(names)
    kept_folder.sweep()
    return n_bytes // max(len(names), 1)


def tidy(folder: Path) -> None:
    """Discard a folder without any window, for example after a model failed to load."""
    for file in store_folder(folder).own_files():
        if file.name != UNFINISHED:
            return
    discard(folder)
