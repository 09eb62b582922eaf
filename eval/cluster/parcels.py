"""Files between the driver and a node that share no disk: which are sent, and what is checked where they arrive.

Scores, and the windows of a reference that is being recorded, come from the node as they become whole; a reference
store goes to a node once, and every file of it is kept only with the SHA-256 that its manifest has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from backends.common import storage
from backends.common.errors import InputError, ModelError
from backends.reference import store as reference_store
from backends.reference.store import MANIFEST, Manifest
from backends.scoring import segments
from eval.common.cache import Cache

PIECE = 1 << 24
"""Bytes of a large file that travel at a time: two of them fit into the smallest object store that Ray makes, 75 MB."""
Parcel = tuple[str, str, bytes]
"""A folder, by what it is for, the name of a file in it, and the file's content."""
KNOWN = {
    "scores": (segments.RECORD, storage.KEPT),
    "record": (storage.KEPT,),
}
"""What comes from a node: the files of a worker's folders, in the order in which they are to be kept."""


@dataclass
class Outbox:
    """What a worker has written on a node and the driver has not got yet; ``folders``: by what they are for."""

    folders: Mapping[str, Path]
    sent: dict[Path, int] = field(default_factory=dict)

    def waiting(self) -> Iterator[Parcel]:
        """The files that are new.

        Every file is whole once it has its name.
        A session's record comes before the last of its scores, and a window of the reference before its scores.
        """
        scores = [file for file in self.files("scores") if order_of("scores", file.name) < len(KNOWN["scores"])]
        for file in self.files("record"):
            if file not in self.sent and order_of("record", file.name) == 0:
                yield "record", file.name, self.noted(file, file.read_bytes())
        for file in sorted(scores, key=lambda file: order_of("scores", file.name)):
            if file not in self.sent:
                yield "scores", file.name, self.noted(file, file.read_bytes())

    def noted(self, file: Path, data: bytes) -> bytes:
        """The content of a file that is sent now."""
        self.sent[file] = len(data)
        return data

    def files(self, purpose: str) -> list[Path]:
        """The files of a folder that are no links."""
        folder = self.folders.get(purpose)
        return [] if folder is None else storage.files_in(folder)


def order_of(purpose: str, name: str) -> int:
    """When a file is to be kept, among those of its folder; what is not known comes last."""
    patterns = KNOWN[purpose]
    return next((number for number, pattern in enumerate(patterns) if pattern.fullmatch(name)), len(patterns))


def keep(folders: Mapping[str, Path], parcel: Parcel) -> None:
    """Write a file that has come from a node.

    ModelError if it is none that a worker writes, or if its name has a checksum that is not its own; InputError if it
    cannot be written.
    """
    purpose, name, data = parcel
    folder = folders.get(purpose)
    if folder is None or order_of(purpose, name) == len(KNOWN[purpose]):
        raise ModelError(f"its node sent a file that no worker writes: {name[:80]!r}")
    if storage.what_of(name) and not storage.is_content_of(name, data):
        raise ModelError(f"{name}: came from its node with another checksum")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_whole(folder / name, data)
    except OSError as error:
        raise InputError(f"{folder}: what came from a node cannot be kept: {error.strerror}") from None


class StoreCopy:
    """The copy of a reference store in the cache of a node, made by one worker of the node at a time.

    ``origin``: the bytes of the store's manifest.  What the copy has already of it, by name and checksum, stays.
    """

    def __init__(self, cache: Cache, origin: bytes) -> None:
        self.origin, self.manifest = origin, parsed(origin)
        self.key = Cache.key("copied reference", {"identity": self.manifest.identity})
        self.cache, self.folder = cache, cache.path("references", self.key, "")
        self.lock = FileLock(str(cache.path("references", self.key, ".lock")), thread_local=False)
        self.part: Path | None = None

    def missing(self) -> list[str] | None:
        """The files that the copy lacks; from now on nobody else adds to it.  None while another worker does."""
        self.cache.check_writable()
        self.cache.use("references", self.key)
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        return [name for name, size in self.manifest.files.items() if not is_of_size(self.folder / name, size)]

    def add(self, name: str, piece: bytes, *, last: bool) -> None:
        """Take the next piece of a file; with the ``last`` one the file is checked, and ModelError if it is damaged."""
        if self.part is None:
            self.part = self.folder / storage.temporary_name()
        with self.part.open("ab") as stream:
            stream.write(piece)
        if last:
            part, self.part = self.part, None
            if not storage.is_content_of(name, part.read_bytes()):
                part.unlink()
                raise ModelError(f"{name}: a file of the reference came to its node with another checksum")
            os.replace(part, self.folder / name)

    def close(self) -> str:
        """The folder of the copy, which is whole now."""
        storage.write_whole(self.folder / MANIFEST, self.origin)
        self.lock.release()
        return str(self.folder)


def parsed(origin: bytes) -> Manifest:
    """The manifest in these bytes; ModelError if they are damaged."""
    try:
        return reference_store.manifest_of(storage.load(origin))
    except (ValueError, KeyError, TypeError):
        raise ModelError("the reference's manifest came to its node damaged") from None


def is_seen(folder: Path, origin: bytes) -> bool:
    """Whether the store of this manifest lies at this very path: by the manifest's bytes and the sizes of its files."""
    try:
        if (folder / MANIFEST).read_bytes() != origin:
            return False
        return all(is_of_size(folder / name, size) for name, size in parsed(origin).files.items())
    except OSError:
        return False


def is_of_size(file: Path, size: int) -> bool:
    """Whether there is a file, and no link, of so many bytes."""
    return storage.size_of(file) == size


def pieces(file: Path) -> Iterator[tuple[bytes, bool]]:
    """(piece, whether it is the last one) of a file; an empty file is one empty piece."""
    with file.open("rb") as stream:
        piece = stream.read(PIECE)
        while True:
            following = stream.read(PIECE)
            yield piece, not following
            if not following:
                return
            piece = following
