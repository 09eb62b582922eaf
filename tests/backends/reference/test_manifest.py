"""What a store says of itself: whole or refused, or of another layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.common import checked
from backends.common.errors import InputError
from backends.reference.reading import open_reference
from backends.reference.store import MANIFEST, VERSION, Reader, window_file
from tests.support.flips import flips
from tests.support.stores import state_store
from tests.support.toy import refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return state_store(tmp_path / "store", windows=3).path


def edit(store: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a store's manifest, and give it the checksum of what it says now."""
    manifest = json.loads((store / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    (store / MANIFEST).write_bytes(checked.dump(manifest, indent=1))


def test_every_flipped_bit_of_a_manifest_is_found(folder: Path) -> None:
    for file, position in flips([folder / MANIFEST], seed=3):
        assert refusal(Reader, folder).startswith(f"{file}: not a reference store: "), position
    Reader(folder).verify()


@pytest.mark.parametrize("kind", ["row", "head"])
def test_every_flipped_bit_of_a_file_is_found(folder: Path, kind: str) -> None:
    for file, position in flips(sorted(folder.glob(f"{kind}.*")), seed=4):
        problem = f"{file}: damaged: its checksum is not the manifest's"
        assert refusal(Reader(folder).verify) == f"{problem}; delete {folder}, so that it is made again", position
    Reader(folder).verify()


def test_a_manifest_that_was_cut_off_is_found(folder: Path) -> None:
    good = (folder / MANIFEST).read_bytes()
    for length in range(len(good)):
        (folder / MANIFEST).write_bytes(good[:length])
        with pytest.raises(InputError):
            Reader(folder)


@pytest.mark.parametrize("version", [1, VERSION])
def test_a_manifest_without_a_checksum_is_not_read(folder: Path, version: int) -> None:
    """The scale of compare_q 0.1's logits, say, might be any other number."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest | {"version": version}))
    assert refusal(Reader, folder).endswith("not a reference store: it has no checksum; delete it")


def test_a_manifest_of_another_version(folder: Path) -> None:
    edit(folder, lambda manifest: manifest.update(version=VERSION + 1))
    text = refusal(Reader, folder)
    assert text.startswith(f"{folder / MANIFEST}: layout {VERSION + 1}, this compare_q reads {VERSION}; ")
    assert refusal(open_reference, folder) == text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"version": 1}', "\xff\xfe", "[" * 100_000, '{"version": ' + "9" * 5000]
)
def test_a_manifest_that_is_none(folder: Path, content: str) -> None:
    (folder / MANIFEST).write_text(content, encoding="latin-1")
    assert refusal(Reader, folder).startswith(f"{folder / MANIFEST}: not a reference store: ")


@pytest.mark.parametrize("key", ["identity", "kind", "reason", "head", "files", "version"])
@pytest.mark.parametrize("value", [..., None, 7, "x", [], [[]], {"x": 1}])
def test_a_manifest_with_a_value_of_another_type(folder: Path, key: str, value: Any) -> None:
    edit(folder, lambda manifest: manifest.pop(key) if value is ... else manifest.update({key: value}))
    if (key, value) not in [("identity", {"x": 1}), ("reason", "x")]:
        refusal(Reader, folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["head"].update(temperature=2.0),
        lambda found: found["head"].update(scale="1"),
        lambda found: found["head"].update(vocab_size=1.5),
        lambda found: found["files"].update({"../outside": {"bytes": 1, "sha256": "0" * 64}}),
        lambda found: found["files"].update({"notes.txt": {"bytes": 1, "sha256": "0" * 64}}),
        lambda found: found["files"][window_file(0)].update(bytes=-1),
        lambda found: found["files"][window_file(0)].update(sha256="0"),
        lambda found: found["files"].update({window_file(0): []}),
    ],
)
def test_a_manifest_with_a_strange_value(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(folder, change)
    assert "not a reference store: " in refusal(Reader, folder)


def test_pipes_are_not_waited_for(folder: Path) -> None:
    file = folder / window_file(1)
    file.unlink()
    os.mkfifo(file)
    assert refusal(Reader(folder).verify).startswith(f"{file}: is no file; ")
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    os.mkfifo(folder / "row_000000.safetensors")
    refusal(open_reference, folder)


def test_windows_behind_a_gap_do_not_count(folder: Path) -> None:
    edit(folder, lambda manifest: manifest["files"].pop(window_file(1)))
    assert Reader(folder).n_windows == 1
