"""The cache: files named by a hash of what they depend on, and written whole or not at all.

Layout: ``<cache>/<section>/<key>.<suffix>`` in ``tokens`` and ``trials``, a folder
``<cache>/<section>/<key>`` in ``scores`` (``backends/scoring/segments.py``) and ``references``,
logs of engines in ``logs``.  A key covers the content of models and texts, not their paths.  In
``runs`` every running run lists the entries that it uses, which ``--cache-limit``
(``eval/cli/cache_command.py``) does not delete.

``format`` names the versions of segments and stores; a run of another version says once that older
ones are not used.

A cache that cannot be written is still read, without locks.  Only files with the names that
compare_q gives are deleted.  Links are not followed or deleted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from ...backends.common import json_files, storage
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line
from ...backends.reference import store as reference_store
from ...backends.scoring import segments

CACHE_VARIABLE = "COMPARE_Q_CACHE"
"""Environment variable with the folder of the cache."""
FORMAT_FILE = "format"
"""File of a cache with the ``VERSIONS`` of the compare_q that looked for older entries last."""
VERSIONS = f"segments {segments.SEGMENT_VERSION}, references {reference_store.STORE_VERSION}\n"
KEY_DIGITS = 40
ENTRY_NAMES = {
    "tokens": re.compile(r"([0-9a-f]{40})\.npz"),
    "scores": re.compile(r"([0-9a-f]{40})"),
    "references": re.compile(r"([0-9a-f]{40})"),
    "trials": re.compile(r"([0-9a-f]{40})\.jsonl"),
    "logs": re.compile(r".*\.([0-9a-f]{40})\.log", re.DOTALL),
}
"""Section -> the names of its files, or of its folders (scores and references)."""
SUFFIXES = {"tokens": ".npz", "trials": ".jsonl"}
"""Section -> the suffix of its files, if their names are keys with a suffix."""
LARGEST_LOG = 16 * 2**20
"""If an engine's log has more bytes, the next run begins a new one."""
ALL_LOGS = 256 * 2**20
"""Bytes of all logs together above which a run deletes the oldest ones."""
LOCK_POLL_S = 0.5
"""Seconds between two attempts to get a lock, and two checks of whether the run was stopped."""


def default_root() -> Path:
    """Return ``$COMPARE_Q_CACHE``, or a folder in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    return Path(user_cache_path("compare_q", appauthor=False))


def do_nothing() -> None:
    """Default of a callback."""


class Cache:
    """A folder of content-keyed files.

    Attributes:
        marks: file in ``runs`` that lists the entries that this run uses; None before the first.
        temporary: (section, key) of entries that this run makes only for itself, and deletes.
        locks: lock files of this run.
        logs: files that engines of this run write.
        release: ends the marks and locks of this run; called when the run has ended.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marks: Path | None = None
        self.temporary: set[tuple[str, str]] = set()
        self.locks: set[Path] = set()
        self.logs: set[Path] = set()
        self.using = threading.Lock()
        self.release: Callable[[], object] = do_nothing

    @cached_property
    def unwritable(self) -> str:
        """Reason why the cache cannot be written; empty if it can.

        The first access makes folders.  It also deletes files that killed runs left half-written,
        and locks that no process holds.
        """
        folders = [self.root / section for section in (*ENTRY_NAMES, "runs")]
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return error.strerror or one_line(error)
            if not os.access(folder, os.W_OK | os.X_OK):
                return "it may only be read"
        # Marks of killed runs name their temporary entries, and ``sweep`` deletes such marks:
        # the entries must be deleted before.
        self.sweep_runs()
        for folder in (self.root, *folders):
            storage.sweep(folder)
        files: list[Path] = []
        for folder in folders:
            files += storage.files_in(folder)
        for file in files:
            if file.suffix == ".lock":
                remove_lock(file)
        return ""

    def check_writable(self) -> None:
        """InputError if the cache cannot be written, or if its path cannot be sent to a worker."""
        json_files.check_unicode("--cache-dir", self.root)
        if self.unwritable:
            raise InputError(f"--cache-dir: {self.root}: cannot be written: {self.unwritable}")

    def note_on_older(self) -> str:
        """Return a line if the cache has scores or references of an older compare_q, else "".

        It is returned the first time that this version opens the cache, and always if the cache may
        only be read.
        """
        file = self.root / FORMAT_FILE
        if not self.root.is_dir():
            return ""
        with suppress(InputError):
            if json_files.read_bytes(file) == VERSIONS.encode():
                return ""
        has_older = self.has_older()
        if not self.unwritable:
            with suppress(OSError):  # a full disk
                storage.write_whole(file, VERSIONS.encode())
        if not has_older:
            return ""
        return (
            f"{self.root}: has scores or references of an older compare_q, which are not used; "
            "--cache-limit deletes what was not used for longest, these first"
        )

    def has_older(self) -> bool:
        """Return True if a folder of scores, or a reference store, is of an older version.

        All files of an entry have one version, so one of them is read.
        """
        entries: list[tuple[str, Path]] = []
        for section in ("scores", "references"):
            with suppress(OSError):  # the section does not exist
                for path in (self.root / section).iterdir():
                    entries.append((section, path))
        for section, path in entries:
            if not ENTRY_NAMES[section].fullmatch(path.name):
                continue
            if section == "scores":
                is_older = segments.is_older(path)
            else:
                is_older = reference_store.is_older(path)
            if is_older:
                return True
        return False

    @staticmethod
    def key(section: str, identity: Mapping[str, Any]) -> str:
        """Return the key of an entry, 40 digits: the SHA-256 of its identity as canonical JSON."""
        canonical = json.dumps([section, identity], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_DIGITS]

    def path(self, section: str, key: str, suffix: str) -> Path:
        """Return the path of an entry, which may not exist."""
        return self.root / section / f"{key}{suffix}"

    def log_file(self, label: str, key: str) -> Path:
        """Return the log file of the engine that computes an entry."""
        self.check_writable()
        name = re.sub(r"[^\w.-]", "_", label)[:60]
        file = self.root / "logs" / f"{name}.{key}.log"
        while os.path.lexists(file) and not storage.is_regular(file):  # a pipe
            file = file.with_name(f"_{file.name}")
        # Another worker of this run may already write into the file; then it is not emptied.
        is_first_use = file not in self.logs
        self.logs.add(file)
        size = storage.size_of(file) or 0
        if is_first_use and size > LARGEST_LOG and key not in self.used_by_runs(others=True):
            storage.delete([file])
        self.limit_logs()
        return file

    def limit_logs(self) -> None:
        """Delete the oldest logs until the others take at most ``ALL_LOGS`` bytes.

        The logs of running models are kept, and do not count.
        """
        keys_in_use = self.used_by_runs()
        logs = []
        for file in storage.files_in(self.root / "logs"):
            name = ENTRY_NAMES["logs"].fullmatch(file.name)
            if name and name[1] not in keys_in_use and file not in self.logs:
                with suppress(OSError):  # deleted in the meantime
                    status = file.lstat()
                    logs.append((status.st_mtime, file, status.st_size))
        total = sum(size for _, _, size in logs)
        for _, file, size in sorted(logs):
            if total <= ALL_LOGS:
                break
            storage.delete(own_files("logs", file))
            total -= size

    @contextmanager
    def write(self, section: str, key: str, suffix: str) -> Iterator[Path]:
        """Yield a temporary path, whose file becomes the entry if the block succeeds.

        InputError for a full disk.
        """
        self.check_writable()
        target = self.path(section, key, suffix)
        try:
            with storage.replacing(target) as file:
                yield file
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise InputError(f"{target}: cannot be written: {reason}") from None

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a path for a file that is deleted after the block.

        After a kill the next run deletes it.
        """
        self.check_writable()
        with storage.temporary_next_to(self.root / "scratch") as file:
            yield file

    def lock_at(self, file: Path) -> FileLock:
        """Return a lock whose file is deleted when the run ends.

        Runs of other users can acquire it too.
        """
        self.locks.add(file)
        return FileLock(str(file), mode=0o666)

    @contextmanager
    def locked(
        self,
        files: Iterable[Path],
        check: Callable[[], None],
        waits: Callable[[], None] = do_nothing,
    ) -> Iterator[None]:
        """Hold the locks of these files while the block runs; wait for those that other runs hold.

        They are acquired in the order of their real paths, so that two runs never wait for each
        other.  While waiting, ``waits`` is called once, and ``check`` often, which raises
        StoppedError if the run was stopped.  A lock in a folder that cannot be written, or on a
        full disk, is left out: finished scores are served from there.
        """
        self.unwritable  # noqa: B018 - creates the folders
        has_waited = False
        # Two names of one file, such as a link and its target, are one lock.
        real_paths = {os.path.realpath(file) for file in files}
        with ExitStack() as acquired_locks:
            for real_path in sorted(real_paths):
                file = Path(real_path)
                while os.access(file.parent, os.W_OK):
                    check()
                    try:
                        lock = self.lock_at(file)
                        acquired_locks.enter_context(lock.acquire(timeout=LOCK_POLL_S))
                        break
                    except Timeout:
                        if not has_waited:
                            waits()
                        has_waited = True
                    except OSError as error:
                        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                            raise
                        break
            yield

    def use(self, section: str, key: str, *, temporary: bool = False) -> None:
        """Mark an entry as used by this run, so that no run deletes it before this run ends.

        On a full disk the mark is missing.  ``temporary``: if the entry does not exist, this run
        makes it only for itself, and deletes it when it ends.  After a kill the next run deletes it
        (``sweep_runs``).
        """
        if self.unwritable:
            return
        words = key
        with self.using, suppress(OSError):
            if temporary and not os.path.lexists(self.path(section, key, "")):
                self.temporary.add((section, key))
            if (section, key) in self.temporary:
                words = f"{key} {section}/{key}"
            if self.marks is None:
                marks = self.root / "runs" / storage.temporary_name()
                descriptor = storage.hold(marks)
                self.release = weakref.finalize(self, end_run, marks, descriptor, self.locks)
                # Set last: if the file cannot be made, the next call tries again.
                self.marks = marks
            with self.marks.open("a", encoding="utf-8") as file:
                file.write(f"{words}\n")
        # --cache-limit deletes what was not used for longest, by the time of the last change.
        with suppress(OSError):
            os.utime(self.path(section, key, SUFFIXES.get(section, "")))

    def sweep_runs(self) -> None:
        """Delete the marks of killed runs, and their temporary entries that no other run uses."""
        folder = self.root / "runs"
        abandoned = [file for file in storage.files_in(folder) if storage.is_abandoned(file)]
        entries = set[tuple[str, str]]()
        for file in abandoned:
            for word in words_in(file):
                section, slash, key = word.partition("/")
                if slash and section in ("scores", "references"):
                    entries.add((section, key))
        words_of_running = set[str]()
        if entries:
            for file in {*storage.files_in(folder)} - {*abandoned}:
                words_of_running.update(words_in(file))
        for section, key in entries:
            if key not in words_of_running:
                self.remove(section, self.path(section, key, ""))
        # Last: if this process is killed here, the next run still knows the entries.
        storage.delete(abandoned)

    def used_by_runs(self, *, others: bool = False) -> set[str]:
        """Return the keys of entries that runs use; delete marks of killed runs.

        ``others``: without the entries of this run.
        """
        self.sweep_runs()
        files = {*storage.files_in(self.root / "runs")}
        if others:
            files -= {self.marks}
        keys: set[str] = set()
        for file in files:
            for word in words_in(file):
                # "KEY" is an entry that the run uses; "SECTION/KEY" says that it is temporary.
                if "/" not in word:
                    keys.add(word)
        return keys

    def clear(self, section: str, key: str) -> None:
        """Delete an entry: its file, or compare_q's files in its folder; logs are kept.

        InputError if a file cannot be deleted.
        """
        if section == "logs":
            return
        path = self.path(section, key, SUFFIXES.get(section, ""))
        self.remove(section, path)
        remaining_files = own_files(section, path)
        if remaining_files:
            raise InputError(f"{remaining_files[0]}: cannot be deleted; is the file yours?")

    @staticmethod
    def remove(section: str, path: Path) -> None:
        """Delete compare_q's files at one path of a section, and the folder if it is empty then."""
        storage.delete(own_files(section, path))
        if path.is_dir() and not path.is_symlink():
            storage.sweep(path)
            with suppress(OSError):  # a user's own files
                path.rmdir()


def words_in(file: Path) -> list[str]:
    """Return the words of a run's marks: keys, and SECTION/KEY of temporary entries.

    A file that was deleted has no words.
    """
    with suppress(InputError):
        return json_files.read_bytes(file).decode(errors="replace").split()
    return []


def own_files(section: str, path: Path) -> list[Path]:
    """Return compare_q's files at a path of a section, without links.

    There are none if compare_q does not use this name.
    """
    if not ENTRY_NAMES[section].fullmatch(path.name):
        return []
    if section == "scores":
        return segments.scores_folder(path).own_files()
    if section == "references":
        return reference_store.store_folder(path).own_files()
    if storage.is_regular(path):
        return [path]
    return []


def remove_lock(file: Path) -> None:
    """Delete a lock file that no process holds; a process that waits for it creates a new one."""
    with suppress(Timeout, OSError), FileLock(str(file), timeout=0):
        file.unlink(missing_ok=True)


def end_run(marks: Path, descriptor: int, locks: set[Path]) -> None:
    """Delete the marks and locks of a run that has ended; the next run deletes a killed run's.

    ``descriptor``: of the marks, which is open as long as the run uses them.
    """
    marks.unlink(missing_ok=True)
    os.close(descriptor)
    for file in locks:
        remove_lock(file)
