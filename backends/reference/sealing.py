"""From what writers left behind to a store, and a store that grows; deleting what is ours, and nothing else.

A kill at any moment leaves the old store whole: files move in first, under names that the manifest does not list yet,
and the manifest is replaced last.  Run again, ``seal`` finishes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.common import owned
from backends.common.errors import InputError, ModelError
from backends.reference import journal, manifest
from backends.reference.manifest import MANIFEST, Manifest, Stored


def building_of(folder: Path, identity: Mapping[str, Any]) -> Path:
    """The folder beside a store's place in which a store of this identity is made."""
    digest = hashlib.sha256(json.dumps(unlabelled(identity), sort_keys=True).encode()).hexdigest()[:16]
    return folder.with_name(f".{folder.name}.{digest}.part")


def unlabelled(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without the model's label, which identifies nothing."""
    return {name: value for name, value in identity.items() if name != "label"}


def seal(building: Path, folder: Path, identity: Mapping[str, Any], n_windows: int) -> None:
    """Make one store of what the writers left in ``building`` and of the store that is at ``folder`` already.

    Windows that the store has stay as they are.  ValueError if one of the ``n_windows`` windows, or the head, is
    missing; ModelError if the store was made by another head or of other contents; InputError if another reference's
    store is there, or somebody else's file has the name of one of ours.
    """
    old = manifest.read(folder) if os.path.lexists(folder / MANIFEST) else None
    if old is not None and unlabelled(old.identity) != unlabelled(identity):
        raise InputError(f"{folder}: another reference is there; give another path")
    found = journal.kept(building, folder)
    there = manifest.windows_of({**(found.files if found else {}), **(old.files if old else {})})
    if (n_there := manifest.unbroken(there)) < n_windows:
        raise ValueError(f"the reference's window {n_there} was not kept")
    if found is None or not found.closed:
        if old is None or manifest.unbroken(old.windows) < n_windows:
            raise ValueError("the reference's head was not kept")
        return
    assert found.head is not None
    new = Manifest(dict(identity), found.contents, found.reason, found.head, found.files, made=False)
    if old is not None and old.files:
        check_agreement(folder, old, new)
    missing = {name: entry for name, entry in new.files.items() if old is None or name not in old.files}
    check_way(building, folder, missing)
    if old is None:
        old = replace(new, files={}, made=made_now(building, folder))
        manifest.write(folder, old)  # from here on the folder is a store, of no window yet
    for name in missing:
        move(building / name, folder / name)
    manifest.write(folder, replace(new, files={**missing, **old.files}, made=old.made))
    owned.sweep(folder)
    discard(building)


def check_agreement(folder: Path, old: Manifest, new: Manifest) -> None:
    """ModelError unless the windows of both can lie in one store."""
    again = f"delete {folder}, so that the reference is made again"
    if old.contents != new.contents:
        raise ModelError(f"the reference's store keeps {old.contents}, this run kept {new.contents}; {again}")
    if old.head != new.head or old.heads != new.heads:
        raise ModelError(f"the reference's head is not the one that its store has; {again}")


def check_way(building: Path, folder: Path, names: Mapping[str, Stored]) -> None:
    """InputError if a file that is neither a store's nor one of the writers' has the name of one of these files."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder}: is no folder; give another path")
    noted: dict[str, set[Stored]] = {}
    for share in journal.shares(building):
        for name, entry in share.files.items():
            noted.setdefault(name, set()).add(entry)
    for name in names:
        file = folder / name
        if os.path.lexists(file) and not (
            owned.is_regular(file) and Stored(file.stat().st_size, journal.digest_of(file)) in noted[name]
        ):
            raise InputError(f"{file}: is in the way of the reference, and was not made by compare_q; move it away")


def made_now(building: Path, folder: Path) -> bool:
    """Make a folder; False if it is there, and so is somebody else's, unless a run was killed while it made it."""
    making = building / journal.MAKING
    if not os.path.lexists(folder):
        making.write_bytes(b"")
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
    return making.is_file()


def move(source: Path, target: Path) -> None:
    """Move a file, if it has not been moved yet; ``target`` may lie on another file system."""
    try:
        os.replace(source, target)
    except FileNotFoundError:
        if not target.is_file():
            raise
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with owned.replacing(target) as temporary:
            shutil.copyfile(source, temporary)
        source.unlink()


def remove(folder: Path) -> None:
    """Delete a store: the files that its manifest lists, and the folder if compare_q made it and nothing else is in it.

    Nothing happens if there is no store.  InputError, and nothing is deleted, if the manifest is damaged, since then
    nobody knows what is the store's, or if the folder is a link.
    """
    if not os.path.lexists(folder / MANIFEST):
        return
    if folder.is_symlink() or not owned.is_regular(folder / MANIFEST):
        raise InputError(f"{folder}: is a link or has one; compare_q deletes nothing through links, delete it yourself")
    try:
        found = manifest.read(folder)
    except InputError:
        text = "cannot be read, and so does not say which files are the store's; delete the store yourself"
        raise InputError(f"{folder / MANIFEST}: {text}") from None
    delete(folder, [*found.files, MANIFEST])  # the manifest last: a kill leaves a store that says what is missing
    owned.sweep(folder)
    if found.made:
        with suppress(OSError):  # a user's own files
            folder.rmdir()


def own_files(folder: Path) -> list[Path]:
    """What has a name of ours in a folder that only compare_q uses and that is no link; journal and manifest last."""
    ours = (manifest.WINDOW, manifest.HEAD, journal.JOURNAL, journal.OLDER_JOURNAL)
    found = []
    with suppress(OSError):
        names = [] if folder.is_symlink() else os.listdir(folder)
        found = [name for name in names if name in (MANIFEST, journal.MAKING) or any(p.fullmatch(name) for p in ours)]
    last = sorted(found, key=lambda name: (name == MANIFEST, name.startswith("part."), name))
    return [folder / name for name in last if owned.is_regular(folder / name)]


def discard(folder: Path) -> None:
    """Delete what is ours in a folder that only compare_q uses: in the cache, or one in which a store is made.

    The folder itself goes too, if nothing else lies in it.
    """
    for file in own_files(folder):
        file.unlink(missing_ok=True)
    if not folder.is_symlink():
        owned.sweep(folder)
        with suppress(OSError):
            folder.rmdir()


def tidy(building: Path, folder: Path) -> None:
    """Discard what writers left in ``building`` if the store at ``folder`` has all of its windows, or if there is none.

    A run that was killed after its store had grown leaves such a folder, one whose model did not load an empty one.
    """
    found = journal.kept(building, folder)
    there = manifest.read(folder).windows if os.path.lexists(folder / MANIFEST) else frozenset()
    if found is None or manifest.windows_of(found.files) <= there:
        discard(building)


def delete(folder: Path, names: list[str]) -> None:
    """Unlink these files of a folder, as far as they are files and no links."""
    for name in names:
        if owned.is_regular(folder / name):
            with suppress(FileNotFoundError):
                (folder / name).unlink()
