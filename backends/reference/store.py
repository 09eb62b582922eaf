"""The reference of a KL divergence on disk: the final hidden states of every scored position, and the head, once.

A store is a folder of files that carry their checksum in their name (``backends/common/storage.py``):

- ``row.000000.<digest>.safetensors``: window 0's ``states`` [T, H] in the model's dtype, taken where they enter the
  head; or, where the head cannot be recomputed, window 0's ``logits`` [T, V] as the engine made them, in its dtype;
- ``head.000000.<digest>.safetensors``: the head's ``weight`` [n, H] of vocabulary entries 0 to n, ``bias`` [n] if it
  has one, and in its facts what else the head does; one file a tensor-parallel rank, named by its first entry;
- ``reference.json``, the manifest, written last: the model, text and method that the store is of (``identity``), its
  contents ("states" or "logits"), what the head does, and the size of each file that belongs to the store.

For a vocabulary of 128,256 and H = 4,096, 16-bit states take 8,192 bytes a token, 16-bit logits 256,512, and float32
logits, as llama.cpp makes them, 513,024.  Logits come back as the engine made them: product in the model's dtype, bias,
soft cap, scale.  Nothing is rounded: float16 in place of float32 cost up to 3.3e-4 nats a token, and made small
divergences negative.

A store is made, and grows, in its place.  ``begin`` says whose it will be, in ``unfinished.json``; processes write
files (``backends/reference/recorder.py``); after a kill ``recorded`` says which of them need not be written again;
``seal`` makes a store of them.  A kill at any moment leaves the old store whole, since its manifest does not list what
is new.  This file knows no engine, and does not know what makes two references the same.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from compare_q.backends.common import storage
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference.head import Contents, Head

if TYPE_CHECKING:
    import torch

VERSION = 3
"""Version of the layout; others are not read.

1: one file a window, one or more for the head, and a manifest that names them; compare_q 0.1 wrote it.
2: the manifest carries its own checksum, and a store grows.
3: files carry their checksum in their name, and a store is made in its place.
"""
MANIFEST, UNFINISHED = "reference.json", "unfinished.json"
WINDOW, HEAD = re.compile(r"row\.(\d{6,9})"), re.compile(r"head\.(\d{6,9})")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes by the names that safetensors gives them."""
FileName = Annotated[str, Field(pattern=r"^(row|head)\.\d{6,9}\.[0-9a-f]{40}\.safetensors$")]


class Manifest(BaseModel):
    """A store's ``identity``, contents, why logits are kept (``reason``), head, and the bytes of its files by name.

    ``made``: compare_q made the folder, and may delete it once it is empty.
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
    def windows(self) -> dict[int, str]:
        """The files of windows by their numbers, in order."""
        return numbered(self.files, WINDOW)

    @property
    def heads(self) -> dict[int, str]:
        """The files of the head by their first entries, in order."""
        return numbered(self.files, HEAD)


def unbroken(windows: Collection[int]) -> int:
    """n, where windows 0 to n - 1 are there and window n is not."""
    return next(index for index in range(len(windows) + 1) if index not in windows)


def numbered(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Of some names those of windows or of a head, by their numbers in order."""
    matches = ((pattern.fullmatch(storage.what_of(name)), name) for name in names)
    return dict(sorted((int(match[1]), name) for match, name in matches if match))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store; InputError if it is missing, damaged or of another version."""
    file = folder / MANIFEST
    try:
        if not file.is_file():
            raise ValueError("it is not there")
        content = storage.load(file.read_bytes())
        if content.get("version") == VERSION:
            return Manifest.model_validate_json(json.dumps(content))
    except (OSError, ValueError) as error:  # of pydantic too
        raise InputError(f"{file}: not a reference store: {one_line(error)}; delete it") from None
    raise InputError(f"{file}: layout {content.get('version')}, this compare_q reads {VERSION}; delete the store")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in the place of the one that is there, whole or not at all."""
    storage.write_whole(folder / MANIFEST, storage.dump(manifest.model_dump(by_alias=True), indent=1))


def holds_upstreams_logits(path: Path) -> bool:
    """True for reference logits of ExLlamaV3's compare_q: one file per window in a folder, or one file for all."""
    folder = path if path.is_dir() else path.with_name(f"{path.name}.rows")
    if folder.is_dir() and any(folder.glob("row_*.safetensors")):
        return True
    with suppress(Exception):  # safetensors raises its own for what is something else
        from safetensors import safe_open

        if storage.is_regular(path):  # a pipe would be waited for
            with safe_open(path, "np") as file:
                return any(re.fullmatch(r"tensor(\.\d+)?", name) for name in file.keys())  # noqa: SIM118
    return False


class Reader:
    """A store to read; InputError names the file that is missing, damaged or of another version.

    ``n_windows``: windows 0 to n - 1 are there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.manifest = manifest = read_manifest(folder)
        self.identity, self.contents, self.reason = manifest.identity, manifest.contents, manifest.reason
        self.head, self.windows = manifest.head, manifest.windows
        self.n_windows = unbroken(self.windows)

    @property
    def head_digests(self) -> list[str]:
        """Checksums of the head's files, which are in their names."""
        return list(self.manifest.heads.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all windows and the head."""
        return sum(self.manifest.files.values())

    def verify(self, advance: Callable[[], None] = lambda: None) -> None:
        """Check every file; calls ``advance`` after each."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for problem in pool.map(problem_of, (self.path / name for name in self.manifest.files)):
                if problem:
                    raise InputError(f"{problem}; delete {self.path}, so that it is made again")
                advance()

    def window_bytes(self, index: int) -> int:
        """Bytes of window ``index``; 0 where there is none."""
        return self.manifest.files.get(self.windows.get(index, ""), 0)

    def n_rows(self, index: int) -> int:
        """Scored positions of window ``index``, read from its file."""
        rows: int = self._slice(index, lambda opened: opened.get_shape()[0])
        return rows

    def window(self, index: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """States [n, H] or logits [n, V], by ``contents``, of rows ``begin`` to ``end`` of a window, on the CPU."""
        tensor: torch.Tensor = self._slice(index, lambda opened: opened[begin:end])
        return tensor

    def _slice(self, index: int, use: Callable[[Any], Any]) -> Any:
        """``use`` of the opened tensor that holds a window."""
        from safetensors import safe_open

        file = self.path / self.windows.get(index, f"row.{index:06d}")
        try:
            with safe_open(file, "pt") as opened:
                return use(opened.get_slice(self.contents))
        except Exception as error:  # safetensors raises its own for missing and for damaged files
            raise InputError(f"{file}: window {index} of the reference cannot be read: {one_line(error)}") from None

    def head_parts(self, first: int, last: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """(first entry, weight, bias) of the stored pieces of vocabulary entries ``first`` to ``last``, in order."""
        from safetensors import safe_open

        for begin, name in self.manifest.heads.items():
            with safe_open(self.path / name, "pt") as file:
                weight = file.get_slice("weight")
                end = begin + weight.get_shape()[0]
                low, high = min(max(first, begin), end), max(min(last, end), begin)
                if low < high or first == last:  # a rank that holds nothing but padding asks for nothing
                    bias = file.get_tensor("bias")[low - begin : high - begin] if "bias" in file.keys() else None  # noqa: SIM118
                    yield low, weight[low - begin : high - begin], bias

    def weight(self, first: int, last: int, device: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's weight [last - first, H] and bias on a device."""
        import torch

        parts = list(self.head_parts(first, last))
        if not parts or sum(len(weight) for _, weight, _ in parts) != last - first:
            raise InputError(f"{self.path}: the reference's head lacks entries between {first} and {last}; delete it")
        # One piece is not copied: 1 GB of a head took longer to copy than to compare.
        weight = parts[0][1] if len(parts) == 1 else torch.cat([weight for _, weight, _ in parts])
        biases = [bias for _, _, bias in parts if bias is not None]
        return weight.to(device), torch.cat(biases).to(device) if biases else None


def open_reference(path: Path) -> Reader:
    """Return the store at ``path``; InputError names what is wrong with it."""
    if (path / MANIFEST).is_file():
        return Reader(path)
    if holds_upstreams_logits(path):
        raise InputError(
            f"{path}: holds logits that ExLlamaV3's compare_q kept, which cannot be read; name another path and mark "
            'the model as the reference ("reference": true), so that it is recorded anew'
        )
    raise InputError(f"{path}: holds no reference: there is no {MANIFEST}")


def problem_of(file: Path) -> str:
    """What is wrong with a file of a store, of which every byte is read; empty if nothing is."""
    if not os.path.lexists(file):
        return f"{file}: missing from the reference"
    if not storage.is_regular(file):
        return f"{file}: is no file"
    try:
        return "" if storage.is_whole(file) else f"{file}: damaged: its checksum is not the one in its name"
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"


def unlabelled(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without the model's label, which identifies nothing."""
    return {name: value for name, value in identity.items() if name != "label"}


def manifest_in(folder: Path, identity: Mapping[str, Any]) -> Manifest | None:
    """The manifest of the store that is there already, if there is one; InputError if it is another reference's."""
    manifest = read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    if manifest is not None and unlabelled(manifest.identity) != unlabelled(identity):
        raise InputError(f"{folder}: another reference is there; give another path")
    return manifest


def begin(folder: Path, identity: Mapping[str, Any]) -> None:
    """Make a folder ready for those who write the reference of this identity into it.

    What a killed run has left there of this reference stays, and of another reference goes.  InputError if another
    reference's store is there, or a user's file has the folder's name.
    """
    storage.sweep(folder)
    if manifest_in(folder, identity) is not None:
        storage.delete([folder / UNFINISHED])  # the run that wrote the manifest was killed just then
        return
    made = not os.path.lexists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder}: is no folder; give another path") from None
    unfinished = unfinished_in(folder)
    if unfinished is None or unfinished["identity"] != unlabelled(identity):
        storage.delete(own_files(folder))
        made = made or bool(unfinished and unfinished["made"])
        storage.write_whole(folder / UNFINISHED, storage.dump({"identity": unlabelled(identity), "made": made}))


def unfinished_in(folder: Path) -> dict[str, Any] | None:
    """What ``begin`` has said of a folder; None if it has said nothing, or that is damaged."""
    with suppress(OSError, ValueError):
        content = storage.load((folder / UNFINISHED).read_bytes())
        if content.keys() == {"identity", "made"}:
            return content
    return None


def seal(folder: Path, identity: Mapping[str, Any], n_windows: int) -> None:
    """Make one store of the store that is in a folder already, and of what writers have left there.

    Windows that the store has stay as they are.  ValueError if one of the ``n_windows`` windows, or the head, is
    missing; ModelError if the store was made by another head or of other contents; InputError if it is another
    reference's.
    """
    old = manifest_in(folder, identity)
    listed = {} if old is None else old.files
    new = unlisted(folder, old)
    windows = numbered(new, WINDOW) | numbered(listed, WINDOW)
    if (n_there := unbroken(windows)) < n_windows:
        raise ValueError(f"the reference's window {n_there} was not kept")
    if not new:
        return
    written = written_in(folder, new)
    if written is None:
        raise ModelError(f"{folder}: what was kept of the reference is not of one form; run again")
    head = written.head if old is None else old.head
    if head is None:
        raise ValueError("the reference's head was not kept")
    if old is not None and (
        old.contents != written.contents or written.head not in (None, head) or numbered(new, HEAD)
    ):
        raise ModelError(
            f"{folder}: this run kept a reference with another head or other contents; delete it, so that the "
            "reference is made again"
        )
    names = [*windows.values(), *(numbered(new, HEAD) | numbered(listed, HEAD)).values()]
    made = (unfinished_in(folder) or {"made": False})["made"] if old is None else old.made
    files = {name: (folder / name).stat().st_size if name in new else listed[name] for name in sorted(names)}
    write_manifest(folder, Manifest(
        identity=dict(identity), contents=written.contents, reason=written.reason, head=head, made=made, files=files
    ))  # fmt: skip
    storage.delete([folder / UNFINISHED, *(folder / name for name in new if name not in files)])


@dataclass(frozen=True)
class Written:
    """What writers have left together; ``head``: None as long as a piece of it is missing."""

    contents: Contents
    reason: str
    head: Head | None


def written_in(folder: Path, names: Sequence[str]) -> Written | None:
    """What files are together, by their headers; None if they are not of one form, or one of them is damaged.

    A window that was written twice, by two runs, is no harm.
    """
    forms: set[tuple[str, str, int, str]] = set()
    heads: set[Head] = set()
    pieces: dict[int, int] = {}
    try:
        for name in names:
            (facts, tensors), piece = storage.header_of(folder / name), HEAD.fullmatch(storage.what_of(name))
            if piece and int(piece[1]) in pieces:
                return None
            if piece:
                pieces[int(piece[1])] = tensors["weight"]["shape"][0]
                heads.add(Head(**facts["head"]))
            else:
                ((contents, tensor),) = tensors.items()
                forms.add((contents, tensor["dtype"], tensor["shape"][-1], facts["reason"]))
        contents, dtype, width, reason = forms.pop() if forms else ("states", "", 0, "")
        head = heads.pop() if heads else None
        if forms or heads or contents not in ("states", "logits") or (contents == "logits" and head):
            return None
        if contents == "logits":
            return Written("logits", reason, Head(width, DTYPES[dtype]))
    except (ValueError, KeyError, TypeError):
        return None
    end = 0
    for first, count in sorted(pieces.items()):
        end = end + count if first == end else -1
    return Written("states", reason, head if head is not None and end >= head.vocab_size else None)


def unlisted(folder: Path, manifest: Manifest | None) -> list[str]:
    """The windows' and head's files in a folder that its manifest does not list."""
    listed = {} if manifest is None else manifest.files
    names = [file.name for file in own_files(folder) if storage.what_of(file.name)]
    return [name for name in names if name not in listed]


def recorded(folder: Path) -> frozenset[int]:
    """Windows that need not be recorded again: the store's, and what an earlier run has left, checked by every byte.

    What is damaged, or not of one form, is deleted.  As long as no process has come to its end, and so has left a head,
    one window is not among them: the run that records it writes the head, which is then compared with the store's.
    """
    manifest = read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    new = unlisted(folder, manifest)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = dict(zip(new, pool.map(problem_of, (folder / name for name in new)), strict=True))
    whole = [name for name in new if not problems[name]]
    written = written_in(folder, whole) if whole else None
    if written is None:
        whole = []
    storage.delete(folder / name for name in new if name not in whole)
    windows = set(numbered(whole, WINDOW))
    if windows and (manifest is not None or written is None or written.head is None):
        windows.remove(max(windows))
    return frozenset(windows) | frozenset({} if manifest is None else manifest.windows)


def own_files(folder: Path) -> list[Path]:
    """What has a name of ours in a folder that is no link; the manifest first, without which nothing is a store."""
    files = [] if folder.is_symlink() else [file for file in storage.files_in(folder) if is_own(file.name)]
    return sorted(files, key=lambda file: bool(storage.what_of(file.name)))


def is_own(name: str) -> bool:
    """Whether only a file of a store has this name."""
    what = storage.what_of(name)
    return name in (MANIFEST, UNFINISHED) or bool(WINDOW.fullmatch(what) or HEAD.fullmatch(what))


def is_free(folder: Path) -> bool:
    """Whether a store may be made at a path: nothing is there, or a folder with nothing but what killed runs left."""
    with suppress(OSError):
        return all(is_own(name) or storage.TEMPORARY.fullmatch(name) for name in os.listdir(folder))
    return not os.path.lexists(folder)


def discard(folder: Path) -> None:
    """Delete what is ours in a folder, and the folder if compare_q made it and nothing else is in it.

    InputError, and nothing is deleted, if the folder is a link or its manifest is one.
    """
    if folder.is_symlink() or (os.path.lexists(folder / MANIFEST) and not storage.is_regular(folder / MANIFEST)):
        raise InputError(f"{folder}: is a link or has one; compare_q deletes nothing through links, delete it yourself")
    made = (unfinished_in(folder) or {"made": False})["made"]
    with suppress(InputError):
        made = made or read_manifest(folder).made
    storage.delete(own_files(folder))
    storage.sweep(folder)
    if made:
        with suppress(OSError):  # a user's own files
            folder.rmdir()


def tidy(folder: Path) -> None:
    """Discard a folder in which nothing was kept, as of a model that did not load."""
    if not any(storage.what_of(file.name) or file.name == MANIFEST for file in own_files(folder)):
        discard(folder)
