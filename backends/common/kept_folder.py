"""A folder in which compare_q keeps files of tensors and documents.

A user's own files may be in it too.  A file of tensors is ``<stem>.<digest>.safetensors`` and
never changes; its name contains its checksum.  A document is a JSON file with a checksum inside,
and may be replaced (``backends/common/storage.py``).  Readers take no lock, because a file is
complete or absent.

Reference stores, segments of scores and reference packs are such folders.  Their modules define
the stems, the documents, and the versions of their content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import storage


@dataclass(frozen=True)
class KeptFolder:
    """compare_q's files in one folder, which may be missing.

    Attributes:
        path: the folder.
        title: of the content, in messages: "the reference".
        stems: stems of the files of tensors, also those of older versions.
        documents: names of the documents.
        has_manifest: True if one of the documents lists the files of tensors.
    """

    path: Path
    title: str
    stems: re.Pattern[str]
    documents: re.Pattern[str]
    has_manifest: bool

    def is_own(self, name: str) -> bool:
        """Return True if a file with this name can only be compare_q's."""
        if self.documents.fullmatch(name):
            return True
        return self.stems.fullmatch(storage.stem_of(name)) is not None

    def own_files(self) -> list[Path]:
        """Return compare_q's files in the order to delete them; empty if the folder is a link."""
        if self.path.is_symlink():
            return []
        documents = []
        for file in storage.files_in(self.path):
            if self.documents.fullmatch(file.name):
                documents.append(file)
        tensors = self.own_tensor_files()
        # A kill may interrupt the deletion.  Without its manifest, the rest of a store counts as
        # left by a killed run.  Without their record, the rest of the scores would not be used.
        if self.has_manifest:
            return documents + tensors
        return tensors + documents

    def own_tensor_files(self) -> list[Path]:
        """Return the files of tensors, also of older versions; empty if the folder is a link."""
        if self.path.is_symlink():
            return []
        return self.tensor_files(self.stems)

    def tensor_files(self, stems: re.Pattern[str]) -> list[Path]:
        """Return the files of tensors with these stems, to read them: also through a link."""
        files = []
        for file in storage.files_in(self.path):
            if stems.fullmatch(storage.stem_of(file.name)):
                files.append(file)
        return files

    def create(self) -> None:
        """Create the folder if it is missing; InputError if that fails."""
        with storage.keeping(self.title, self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def add(self, stem: str, pieces: Iterable[Any]) -> Path:
        """Write the pieces of a safetensors file, and return its path; thread-safe.

        InputError if it cannot be written; nothing of the file is left then.
        """
        with storage.keeping(self.title, self.path):
            return storage.keep(self.path, stem, pieces)

    def write_document(
        self, name: str, content: Mapping[str, Any], indent: int | None = None
    ) -> None:
        """Write or replace a document, completely or not at all; OSError if that fails."""
        storage.write_whole(self.path / name, storage.dump(content, indent))

    def header(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (facts, entries of the tensors) of a file; ValueError if it has no header."""
        return storage.header_of(self.path / name)

    def is_foreign(self, name: str, key: str) -> bool:
        """Return True if the header of a file has another key; False if it is damaged."""
        with suppress(ValueError):
            facts, _ = self.header(name)
            return bool(facts.get("key") != key)
        return False

    def problems(self, names: Iterable[str]) -> Iterator[str]:
        """Read every byte of these files, on all cores; yield ``problem_of`` each, in order."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from pool.map(self.problem_of, names)

    def problem_of(self, name: str) -> str:
        """Read every byte of a file; return what is wrong with it, or an empty string."""
        file = self.path / name
        if not os.path.lexists(file):
            return f"{file}: missing from {self.title}"
        if not storage.is_regular(file):
            return f"{file}: is not a file"
        try:
            is_whole = storage.is_whole(file)
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror}"
        if is_whole:
            return ""
        return f"{file}: damaged: its checksum is not the one in its name"

    def delete(self, names: Iterable[str]) -> None:
        """Delete these files, as far as possible, in this order."""
        storage.delete(self.path / name for name in names)

    def sweep(self) -> None:
        """Delete the temporary files of killed processes."""
        storage.sweep(self.path)

    def is_free(self) -> bool:
        """Return True if the folder is missing, or holds only files of killed runs."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return not os.path.lexists(self.path)
        for name in names:
            if not self.is_own(name) and not storage.TEMPORARY.fullmatch(name):
                return False
        return True
