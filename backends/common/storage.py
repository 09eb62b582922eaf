"""Files that compare_q writes: each appears complete or not at all, and carries its checksum.

Scores, reference stores and the cache use these files.  A file is written under a temporary name
and renamed, so that a kill leaves the old file, the new file or no file.  Every flipped bit is
found:

- tensors are in ``<stem>.<digest>.safetensors``; the digest is the first 40 digits of the SHA-256
  of all bytes.  Such a file never changes, and its header contains metadata with a checksum;
- a JSON file (a manifest, which is written after the files that it lists, or the record of a run)
  ends with an entry ``sha256`` of all bytes before that entry;
- an .npz file ends with a line with the same checksum, because its own checksums do not cover the
  arrays' names.

A process holds a lock on the temporary file that it writes.  The system releases the lock when the
process ends, so that ``sweep`` finds the files of killed processes.
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

from . import json_files
from .errors import InputError

TEMPORARY = re.compile(r"\.compare_q\.[0-9a-f]{16}\.part")
UNLOCKABLE_S = 86_400
"""On a file system without locks, a temporary file is kept for this long after its last change."""
RECENT_S = 1.0
"""Longest time in which two changes of a file may have the same time stamp."""
DIGEST_DIGITS = 40
TENSOR_FILE = re.compile(rf"(.+)\.([0-9a-f]{{{DIGEST_DIGITS}}})\.safetensors")
LARGEST_HEADER = 10_000_000
CHECKSUM_TAIL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}\n')
TAIL_BYTES = 80
ARRAYS_MARK = b"\nsha256 "
ARRAYS_TAIL_BYTES = 72
NOT_KEPT = "cannot be kept"
WRONG_CHECKSUM = "it does not have the checksum that it carries"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file that replaces the target if the block succeeds, and is deleted otherwise."""
    with temporary_next_to(target) as temporary:
        yield temporary
        os.replace(temporary, target)


@contextmanager
def temporary_next_to(target: Path) -> Iterator[Path]:
    """A new temporary file in the target's folder, deleted when the block ends.

    After a kill, ``sweep`` deletes it.
    """
    temporary = target.with_name(temporary_name())
    descriptor = hold(temporary)
    try:
        yield temporary
    finally:
        try:
            # An error here, for example because the folder was deleted, must not hide an error
            # of the block.
            with suppress(OSError):
                temporary.unlink()
        finally:
            os.close(descriptor)


@contextmanager
def keeping(title: str, folder: Path) -> Iterator[None]:
    """Raise OSErrors of a block that writes into a folder as InputError with ``NOT_KEPT``.

    An example is a full disk.  ``title``: of what the block writes, such as "the scores".
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{folder}: {title} {NOT_KEPT}: {error.strerror or error}") from None


def write_whole(target: Path, data: bytes) -> None:
    """Write a file that readers never see half-written; an OSError leaves the old one unchanged."""
    with replacing(target) as temporary:
        temporary.write_bytes(data)


def temporary_name() -> str:
    """A new, unique name of a temporary file."""
    return f".compare_q.{uuid.uuid4().hex[:16]}.part"


def hold(path: Path) -> int:
    """Return a descriptor that locks a folder or a new file.

    Until the descriptor is closed, ``sweep`` skips the path.
    """
    while True:
        flags = os.O_RDONLY
        if not path.is_dir():
            flags |= os.O_CREAT
        descriptor = os.open(path, flags, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        # ``sweep`` of another process deleted the file before it was locked.
        os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """True if a path has a temporary name and no process holds it.

    The check locks the path for a moment.
    """
    if not TEMPORARY.fullmatch(path.name):
        return False
    try:
        locked = _is_locked(path)
        if locked is None:
            return time.time() - path.lstat().st_mtime > UNLOCKABLE_S
    except OSError:
        return False
    return not locked


def is_held(path: Path) -> bool:
    """True if a process holds a temporary file.

    False also on a file system without locks, where it is unknown.
    """
    try:
        return _is_locked(path) is True
    except OSError:
        return False


def _is_locked(path: Path) -> bool | None:
    """Return True if a process has locked a path; None on a file system without locks.

    The check locks the path for a moment.  OSError if the path cannot be opened, or is a link.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def sweep(folder: Path) -> None:
    """Delete the temporary files in a folder whose processes have ended, as far as possible."""
    for file in files_in(folder):
        if is_abandoned(file):
            delete([file])


def files_in(folder: Path) -> list[Path]:
    """The regular files of a folder, without links, in the order of their names.

    Empty if the folder does not exist.
    """
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def is_regular(path: Path) -> bool:
    """True for a regular file that is not a link."""
    return size_of(path) is not None


def size_of(path: Path) -> int | None:
    """Bytes of a regular file that is not a link; None for anything else."""
    try:
        status = path.lstat()
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size


def file_state(file: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file's content is replaced.

    The value is inode, size and time of the last change.  None if the file is missing, or was
    changed within ``RECENT_S``: a second change may have the same time.  Parsed content can be
    kept for a file whose state is known.
    """
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    if time.time() - status.st_mtime < RECENT_S:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def times_of(status: os.stat_result) -> str:
    """Times (ns) of the last changes of a file's content and of its status.

    Users cannot set the second time.
    """
    return f"{status.st_mtime_ns} {status.st_ctime_ns}"


def delete(files: Iterable[Path]) -> None:
    """Delete the regular files among ``files``.

    Links are skipped, and so are files that cannot be deleted.
    """
    for file in files:
        if is_regular(file):
            with suppress(OSError):
                file.unlink()


def keep(folder: Path, stem: str, pieces: Iterable[Any]) -> Path:
    """Write the pieces of a safetensors file into ``<stem>.<digest>.safetensors``.

    Return the file's path.
    """
    digest = hashlib.sha256()
    with temporary_next_to(folder / stem) as temporary:
        with temporary.open("wb") as stream:
            for piece in pieces:
                # Both calls release the global interpreter lock.
                stream.write(piece)
                digest.update(piece)
        file = folder / f"{stem}.{digest.hexdigest()[:DIGEST_DIGITS]}.safetensors"
        os.replace(temporary, file)
    return file


def stem_of(name: str) -> str:
    """Return the stem in a file name that ``keep`` made; empty for other names."""
    match = TENSOR_FILE.fullmatch(name)
    if match is None:
        return ""
    return match[1]


def is_whole(file: Path) -> bool:
    """True if a file that ``keep`` wrote is unchanged; OSError if it cannot be read."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:DIGEST_DIGITS]
    return file.name.endswith(f".{digest}.safetensors")


def facts_line(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts as the metadata of a safetensors file."""
    return {"compare_q": dump(facts).decode()}


def header_of(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts, entries of the tensors) of a file that ``keep`` wrote.

    ValueError if the header is missing or the facts are damaged.
    """
    try:
        with json_files.open_regular(file) as stream:
            size = int.from_bytes(stream.read(8), "little")
            content = b""
            # These eight bytes may be anything: a damaged size must not fill the memory.
            if size <= LARGEST_HEADER:
                content = stream.read(size)
            header = parse(content)
        facts = load(header.pop("__metadata__")["compare_q"].encode())
        return facts, header
    except (OSError, KeyError, TypeError, AttributeError, InputError) as error:
        raise ValueError(f"it has no header: {error}") from None


def dump(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """JSON of a non-empty object without the key ``sha256``, with its checksum and a newline."""
    text = json.dumps(dict(value), indent=indent)
    # The checksum becomes the last entry, before the closing brace.
    body = text[:-1].rstrip().encode()
    digest = hashlib.sha256(body).hexdigest()
    return body + f', "sha256": "{digest}"}}\n'.encode()


def load(data: bytes) -> dict[str, Any]:
    """The object that ``dump`` wrote; ValueError if the checksum is missing or wrong."""
    tail = CHECKSUM_TAIL.fullmatch(data[-TAIL_BYTES:])
    if tail is None:
        raise ValueError("it has no checksum")
    digest = hashlib.sha256(data[:-TAIL_BYTES]).hexdigest()
    if digest.encode() != tail[1]:
        raise ValueError(WRONG_CHECKSUM)
    value = parse(data)
    del value["sha256"]
    return value


def load_file(file: Path, *, strict: bool = False) -> dict[str, Any]:
    """Return the object in a regular file in the format of ``dump``, also of another writer.

    ValueError if it is damaged, nested too deeply, or, if ``strict``, has NaN or a key twice.
    InputError if the file cannot be read, or is too large.
    """
    data = json_files.read_bytes(file)
    value = load(data)
    try:
        # Only for the errors.
        if strict:
            json_files.parsed(data, file.name)
        else:
            json_files.check_values(value, strict=False)
    except InputError as error:
        raise ValueError(str(error).removeprefix(f"{file.name}: ")) from None
    return value


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object, whose checksum is not checked; ValueError for anything else."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def write_arrays(file: Path, **arrays: Any) -> None:
    """Write arrays, or values that numpy converts to arrays, with their checksum."""
    import numpy as np

    with file.open("w+b") as stream:
        np.savez(stream, **arrays)
        stream.seek(0)
        # ``file_digest`` reads to the end, where the checksum is then appended.
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.write(ARRAYS_MARK + digest.encode())


def read_arrays(file: Path) -> dict[str, Any]:
    """The arrays that ``write_arrays`` wrote.

    ValueError if a byte changed, InputError if the file cannot be read.
    """
    import numpy as np

    with json_files.open_regular(file) as stream:
        descriptor = stream.fileno()
        body = os.fstat(descriptor).st_size - ARRAYS_TAIL_BYTES
        # The mark is checked first, because the file may be large, and not one of compare_q's.
        if body < 0 or os.pread(descriptor, len(ARRAYS_MARK), body) != ARRAYS_MARK:
            raise ValueError("it has no checksum")
        data = stream.read()
    digest = hashlib.sha256(memoryview(data)[:body]).hexdigest()
    if digest.encode() != data[body + len(ARRAYS_MARK) :]:
        raise ValueError(WRONG_CHECKSUM)
    with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
        return dict(loaded)
