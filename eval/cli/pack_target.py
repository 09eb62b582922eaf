"""The folder of ``pack -o``: what it may replace, and how a pack appears there whole.

A pack is made in a hidden folder next to the target, ``.NAME.unfinished``.  The process locks this
folder before it scores anything, so that a second ``pack`` with the same target is refused at once.
When the pack is complete, it is renamed to the target.  The system releases the lock of a killed
process, so that ``sweep`` finds its folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ...backends.common import storage
from ...backends.common.errors import InputError
from ...backends.common.message_text import amount, printable
from ...backends.reference import pack_files
from ...backends.reference.pack_files import Manifest

HIDDEN_SUFFIX = ".unfinished"
NEW = "compare_q.new"
"""Folder in the hidden folder: the pack that is made."""
OLD = "compare_q.old"
"""Folder in the hidden folder: the pack that is replaced, while the new one gets its name."""
LOCK_ATTEMPTS = 10
"""Maximum number of attempts to create and lock the hidden folder: another process may delete it
between the two steps."""


def existing(target: Path) -> Manifest | None:
    """Return the manifest of a pack that may be replaced by one of more windows.

    None if nothing exists there; InputError for anything else.
    """
    check_parent(target)
    if not os.path.lexists(target):
        return None
    if target.is_symlink() or not pack_files.is_pack(target):
        raise InputError(
            f"-o: {printable(target)}: exists and is not a reference pack; name another folder"
        )
    return pack_files.read(target)


def check_parent(target: Path) -> None:
    """InputError unless the folder that is to contain the pack exists."""
    if not target.absolute().parent.is_dir():
        raise InputError(
            f"-o: {printable(target)}: the folder {printable(target.parent)} does not exist"
        )


def check_replaced(
    target: Path, replaced: Manifest, identity: Mapping[str, str], n_windows: int
) -> None:
    """InputError unless a new pack may replace another one.

    It must have the same text and model, and more windows.
    """
    n_replaced = len(replaced.windows)
    if identity["model_digest"] != replaced.model_digest:
        difference = f"of another model ({replaced.model})"
    elif identity["text_digest"] != replaced.text_digest:
        title = pack_files.title_of_text(replaced)
        difference = f"of another text, or of other windows ({title})"
    elif n_windows <= n_replaced:
        difference = f"with {amount(n_replaced, 'window')} already"
    else:
        return
    raise InputError(
        f"-o: {printable(target)}: is a pack {printable(difference)}; name another folder"
    )


@contextmanager
def reserved(target: Path) -> Iterator[Path]:
    """Yield the hidden folder next to the target, locked and empty.

    It is deleted when the block ends.

    InputError if another process is making a pack with this name.
    """
    check_parent(target)
    target = Path(os.path.abspath(target))
    folder = target.with_name(f".{target.name}{HIDDEN_SUFFIX}")
    with storage.keeping("the pack", target.parent):
        sweep(target.parent)
        descriptor = lock_new(folder, target)
    try:
        yield folder
    finally:
        try:
            settle(folder)
        finally:
            # A signal may have interrupted the first attempt.
            settle(folder)
            if descriptor is not None:
                os.close(descriptor)


def lock_new(folder: Path, target: Path) -> int | None:
    """Create a folder and lock it; return the descriptor of the lock.

    None on a file system without locks.
    """
    for _ in range(LOCK_ATTEMPTS):
        try:
            folder.mkdir()
        except FileExistsError:
            is_new = False
        else:
            is_new = True
        descriptor = locked(folder)
        if descriptor is not None:
            settle_content(folder)
            return descriptor
        # No process holds our own new folder: this file system has no locks.
        if is_new and folder.is_dir() and not storage.is_held(folder):
            return None
        if folder.is_dir():
            break
    raise InputError(
        f"-o: {printable(target)}: another compare-q is making this pack; wait until it has ended, "
        f"or name another folder (if none is running, delete {printable(folder)})"
    )


def locked(folder: Path) -> int | None:
    """Lock an existing folder and return the descriptor.

    None if a process holds it, or if the lock is not possible.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The folder may have been deleted and made again between opening and locking it.
        if os.path.samestat(os.fstat(descriptor), folder.lstat()):
            return descriptor
    except OSError:
        # Another process holds it or has deleted it, or the file system has no locks.
        pass
    os.close(descriptor)
    return None


def replace(folder: Path, target: Path) -> None:
    """Give the new pack in a hidden folder the name of the target.

    The pack that it replaces is deleted.
    """
    if os.path.lexists(target):
        target.rename(folder / OLD)
    (folder / NEW).rename(target)


def settle(folder: Path) -> None:
    """Delete a hidden folder.

    A replaced pack gets its name back if a kill came between the two renames.
    """
    settle_content(folder)
    # The user may have put files into it.
    with suppress(OSError):
        folder.rmdir()


def settle_content(folder: Path) -> None:
    """Give a replaced pack its name back if nothing has it, and empty the folder."""
    target = folder.with_name(folder.name[1:].removesuffix(HIDDEN_SUFFIX))
    if (folder / OLD).exists() and not os.path.lexists(target):
        (folder / OLD).rename(target)
    for name in (NEW, OLD):
        shutil.rmtree(folder / name, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Settle the hidden folders of processes that were killed.

    A folder with anything else in it is kept.
    """
    for folder in parent.glob(f".*{HIDDEN_SUFFIX}"):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if not set(os.listdir(folder)) <= {NEW, OLD}:
            continue
        descriptor = locked(folder)
        if descriptor is not None:
            settle(folder)
            os.close(descriptor)
