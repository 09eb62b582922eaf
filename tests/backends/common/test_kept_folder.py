"""A kept folder: which files are compare_q's, in which order they are deleted, what is damaged."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from compare_q.backends.common import storage
from compare_q.backends.common.kept_folder import KeptFolder
from tests.support.flips import KilledError, killed_at
from tests.support.toy import refusal

CONTENTS = ("one", "two")


@pytest.fixture
def kept(tmp_path: Path) -> KeptFolder:
    """A folder with two files of tensors, a document, and files of a user."""
    stems = re.compile(r"row\.\d")
    documents = re.compile(r"list\.json")
    kept = KeptFolder(tmp_path / "kept", "the reference", stems, documents, has_manifest=True)
    kept.create()
    for number, content in enumerate(CONTENTS):
        kept.add(f"row.{number}", [content.encode()])
    kept.write_document("list.json", {"files": 2})
    digest = "0" * 40
    # Names that are nearly compare_q's: without a digest, of another stem, with another ending.
    for name in ("notes", "row.0.safetensors", f"other.{digest}.safetensors", "list.json.old"):
        (kept.path / name).write_text("a user's")
    (kept.path / f"row.7.{digest}.safetensors").symlink_to(tmp_path)
    return kept


def test_only_own_files_are_listed(kept: KeptFolder) -> None:
    one, two = kept.own_tensor_files()
    assert [one.read_text(), two.read_text()] == list(CONTENTS)
    assert kept.own_files() == [kept.path / "list.json", one, two]
    assert kept.tensor_files(re.compile(r"row\.1")) == [two]
    assert not kept.is_free()
    assert replace(kept, path=kept.path / "nowhere").is_free()
    assert replace(kept, path=kept.path / "nowhere").own_files() == []


def test_a_link_is_read_but_owns_nothing(kept: KeptFolder) -> None:
    link = kept.path.with_name("link")
    link.symlink_to(kept.path)
    linked = replace(kept, path=link)
    assert linked.own_files() == []
    assert linked.own_tensor_files() == []
    assert len(linked.tensor_files(kept.stems)) == 2


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("n_deleted", [0, 1, 2, 3])
def test_a_kill_between_two_deletions(
    kept: KeptFolder, monkeypatch: pytest.MonkeyPatch, n_deleted: int, has_manifest: bool
) -> None:
    """A manifest is deleted before the files that it lists, and a record after its scores."""
    folder = replace(kept, has_manifest=has_manifest)
    with suppress(KilledError), killed_at(n_deleted, monkeypatch):
        storage.delete(folder.own_files())
    names = [file.name for file in folder.own_files()]
    assert len(names) == 3 - n_deleted
    if has_manifest:
        # Before any deletion, the manifest is the first file.
        assert "list.json" not in names[n_deleted == 0 :]
    elif names:
        assert names[-1] == "list.json"
    assert (kept.path / "notes").exists()


def test_problems(kept: KeptFolder) -> None:
    """Each file is checked, in the order of the names, and a message begins with its path."""
    one, two = kept.own_tensor_files()
    two.write_text("other")
    names = [one.name, two.name, "row.9", "folder"]
    (kept.path / "folder").mkdir()
    assert list(kept.problems(names)) == [
        "",
        f"{two}: damaged: its checksum is not the one in its name",
        f"{kept.path / 'row.9'}: missing from the reference",
        f"{kept.path / 'folder'}: is not a file",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_cannot_be_read(kept: KeptFolder) -> None:
    one, _ = kept.own_tensor_files()
    one.chmod(0)
    assert kept.problem_of(one.name) == f"{one}: cannot be read: Permission denied"


def test_what_cannot_be_written_is_reported(kept: KeptFolder) -> None:
    nowhere = replace(kept, path=kept.path / "nowhere")
    message = refusal(nowhere.add, "row.0", [b"one"])
    assert message == f"{nowhere.path}: the reference cannot be kept: No such file or directory"
    in_a_file = replace(kept, path=kept.path / "notes" / "deep")
    assert "the reference cannot be kept: Not a directory" in refusal(in_a_file.create)
