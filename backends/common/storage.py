"""What compare_q keeps on disk: files that appear whole or not at all, and carry their checksum.

The one idiom of scores, reference stores and the cache.  A file is written beside its place and renamed, so that a kill
at any moment leaves the old file, the new one or none.  Every flipped bit is found, because

- tensors lie in ``<what>.<digest>.safetensors``, the digest being of all bytes (SHA-256, its first 40 digits): such a
  file is never changed, and what it is needs no list, since facts in its header say it (with a checksum of their own);
- JSON ends with an entry ``sha256`` of all bytes before it: a manifest, which is written after the files that it lists,
  the record of a session, a line of a trace;
- behind arrays (.npz, whose own checksums leave out the arrays' names) stands a line with the same.

Anybody can read the files.  A process holds a lock on the temporary file that it writes, and the system ends the lock
with the process, so that ``sweep`` knows what a killed process has left.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError

TEMPORARY = re.compile(r"\.compare_q\.[0-9a-f]{16}\.part")
UNLOCKABLE_S = 86_400
"""Where the file system has no locks, a temporary file is kept for a day after its last change."""
KEPT = re.compile(r"(.+)\.([0-9a-f]{40})\.safetensors")
LARGEST_HEADER = 10_000_000
TAIL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
TAIL_BYTES = 80
MARK, ARRAYS_TAIL_BYTES = b"\nsha256 ", 72
WRONG = "it does not have the checksum that it carries"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside the target, which replaces the target when the block ends well and else vanishes."""
    with beside(target) as temporary:
        yield temporary
        os.replace(temporary, target)


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A new temporary file beside the target, which vanishes when the block ends, or in a ``sweep`` after a kill."""
    temporary = target.with_name(temporary_name())
    descriptor = hold(temporary)
    try:
        yield temporary
    finally:
        try:
            with suppress(OSError):  # the folder has vanished, say: what went wrong first is what counts
                temporary.unlink()
        finally:
            os.close(descriptor)


def write_whole(target: Path, data: bytes) -> None:
    """Write a file that a reader finds old or new, never half-written; OSError leaves the old one."""
    with replacing(target) as temporary:
        temporary.write_bytes(data)


def temporary_name() -> str:
    """A new name that only a temporary file of compare_q has."""
    return f".compare_q.{uuid.uuid4().hex[:16]}.part"


def hold(path: Path) -> int:
    """A descriptor with a lock on a folder, or on a file, which is made: until it is closed, the path is not swept."""
    while True:
        descriptor = os.open(path, os.O_RDONLY | (0 if path.is_dir() else os.O_CREAT), 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # swept between these two lines


def is_abandoned(path: Path) -> bool:
    """Whether a path has a temporary name, and no process holds it: for a while the caller itself does."""
    if not TEMPORARY.fullmatch(path.name):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > UNLOCKABLE_S
    finally:
        os.close(descriptor)
    return True


def sweep(folder: Path) -> None:
    """Remove the temporary files in a folder whose processes are gone; what cannot be removed stays."""
    delete(filter(is_abandoned, files_in(folder)))


def files_in(folder: Path) -> list[Path]:
    """The files of a folder in the order of their names: no links, folders or pipes; none if there is no folder."""
    try:
        return [folder / name for name in sorted(os.listdir(folder)) if is_regular(folder / name)]
    except OSError:
        return []


def is_regular(path: Path) -> bool:
    """Whether there is a file that is no link, no folder, no pipe."""
    return size_of(path) is not None


def size_of(path: Path) -> int | None:
    """Bytes of a file that is no link, no folder, no pipe; None where there is none, or none any more."""
    try:
        there = path.lstat()
    except (OSError, ValueError):
        return None
    return there.st_size if stat.S_ISREG(there.st_mode) else None


def delete(files: Iterable[Path]) -> None:
    """Unlink these, as far as they are files and no links; what resists stays."""
    for file in files:
        if is_regular(file):
            with suppress(OSError):
                file.unlink()


def keep(folder: Path, what: str, pieces: Iterable[Any]) -> Path:
    """Write the pieces of a safetensors file into ``<what>.<digest>.safetensors``, which appears whole."""
    digest = hashlib.sha256()
    with beside(folder / what) as temporary:
        with temporary.open("wb") as stream:
            for piece in pieces:
                stream.write(piece)  # Python's lock is released here and in the next line
                digest.update(piece)
        file = folder / f"{what}.{digest.hexdigest()[:40]}.safetensors"
        os.replace(temporary, file)
    return file


def what_of(name: str) -> str:
    """What a file of this name holds; empty if ``keep`` gives no such name."""
    kept = KEPT.fullmatch(name)
    return kept[1] if kept else ""


def is_content_of(name: str, data: bytes) -> bool:
    """Whether these are the bytes of the kept file of this name."""
    return name.endswith(f".{hashlib.sha256(data).hexdigest()[:40]}.safetensors")


def is_whole(file: Path) -> bool:
    """Whether a kept file has the bytes that it was written with; OSError if it cannot be read."""
    with file.open("rb") as stream:
        return file.name.endswith(f".{hashlib.file_digest(stream, 'sha256').hexdigest()[:40]}.safetensors")


def facts_line(facts: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a safetensors file that is to be kept."""
    return {"compare_q": dump(facts).decode()}


def header_of(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a kept file says of itself, its facts, and of its tensors, as safetensors has it (``dtype``, ``shape``).

    The facts are checked; ValueError if there is no header, or if they are damaged.
    """
    try:
        with json_files.open_regular(file) as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = parse(stream.read(size) if size <= LARGEST_HEADER else b"")
        return load(header.pop("__metadata__")["compare_q"].encode()), header
    except (OSError, KeyError, TypeError, AttributeError, InputError) as error:
        raise ValueError(f"it has no header: {error}") from None


def dump(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """An object of at least one entry, none of which is called ``sha256``, with its checksum; ends with a newline."""
    body = json.dumps(dict(value), indent=indent)[:-1].rstrip().encode()
    return body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def load(data: bytes) -> dict[str, Any]:
    """The object without its checksum; ValueError if it has none, or if any byte is another one."""
    tail = TAIL.fullmatch(data[-TAIL_BYTES:])
    if tail is None:
        raise ValueError("it has no checksum")
    if hashlib.sha256(data[:-TAIL_BYTES]).hexdigest().encode() != tail[1]:
        raise ValueError(WRONG)
    value = parse(data)
    del value["sha256"]
    return value


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object without a look at its checksum; ValueError for whatever else it may be."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def write_arrays(file: Path, **arrays: Any) -> None:
    """Arrays of any shape, or what numpy makes arrays of, with their checksum."""
    import numpy as np

    with file.open("w+b") as stream:
        np.savez(stream, **arrays)
        stream.seek(0)
        stream.write(MARK + hashlib.file_digest(stream, "sha256").hexdigest().encode())


def read_arrays(file: Path) -> dict[str, Any]:
    """What ``write_arrays`` wrote; ValueError if any byte is another one, InputError if there is no file to read."""
    import numpy as np

    with json_files.open_regular(file) as stream:
        body = os.fstat(stream.fileno()).st_size - ARRAYS_TAIL_BYTES
        if body < 0 or os.pread(stream.fileno(), len(MARK), body) != MARK:  # a file of terabytes is not read for that
            raise ValueError("it has no checksum")
        data = stream.read()
    if hashlib.sha256(memoryview(data)[:body]).hexdigest().encode() != data[body + len(MARK) :]:
        raise ValueError(WRONG)
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)
