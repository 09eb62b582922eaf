"""What tells one installation from another: versions, commits, plugins; and the files that options name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.common import options, packages
from backends.hf.quantization import PACKAGES
from tests.support.toy import refusal


def install(site: Path, name: str, version: str, entry_points: str = "", **url: Any) -> None:
    """What pip leaves of a distribution that was installed into ``site``."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)
    if url:
        (folder / "direct_url.json").write_text(json.dumps(url))


def test_what_may_compute_counts_and_what_does_not_counts_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = packages.computing("own", plugins=("engine.plugins",))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    plugin = "[engine.plugins]\nx = y:z\n"
    install(tmp_path, "peft", "9.1", url="https://x", vcs_info={"vcs": "git", "commit_id": "abc"})
    install(tmp_path, "flash_attn_3", "9.2")
    install(tmp_path, "own", "9.3")
    install(tmp_path, "some-plugin", "9.4", plugin)
    install(tmp_path, "colours", "9.5", plugin.replace("engine", "other"))
    after = packages.computing("own", plugins=("engine.plugins",))
    new = {"peft": "9.1 abc", "flash-attn-3": "9.2", "own": "9.3", "some-plugin": "9.4"}
    assert after == before | new


def test_whatever_a_quantization_needs_may_compute() -> None:
    assert {package for needed in PACKAGES.values() for package in needed} <= {*packages.COMPUTING}


def test_a_working_copy_counts_by_its_newest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "peft", "9.1", url=f"file://{code}", dir_info={"editable": True})
    seen = {packages.computing()["peft"]}
    (code / ".#a.py").symlink_to("me@here.1")  # an editor's lock, with which no change counted
    for name in "ab":
        (code / f"{name}.py").write_text("")
        seen.add(packages.computing()["peft"])
    assert len(seen) == 3


def test_options_that_name_files_count_with_their_content(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.json", tmp_path / "draft"
    folder.mkdir()
    given = {"dtype": "auto", "config": {"paths": [str(file), str(tmp_path / "none")]}, "model": str(folder)}
    written = {"offload_folder": str(folder)}
    assert options.named_files({**written, "dtype": "auto"}) == {}
    seen = []
    for change in (lambda: file.write_text("1"), lambda: file.write_text("2"),
                   lambda: (folder / "x").write_text(""), lambda: (folder / "x").rename(folder / "y")):  # fmt: skip
        change()
        seen.append(options.named_files(given))
    assert [set(each) for each in seen] == [{str(file), str(folder)}] * 4
    assert len({repr(each) for each in seen}) == 4
    for number in range(options.MOST_FILES + 1):
        (folder / str(number)).touch()
    assert "more than 1,000 files" in refusal(options.named_files, given)
