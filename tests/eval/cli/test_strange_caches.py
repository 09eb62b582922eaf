"""Caches in which something else lies where a file was: nothing is waited for, and what was there is made again."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import FAKE, Run, Specs
from tests.support.hostile import patience
from tests.support.toy import assert_refused

MAKE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo, "folder": os.mkdir, "end": lambda file: file.symlink_to("/dev/zero"),
    "bytes": lambda file: file.write_bytes(b"\xff" * 99),
}  # fmt: skip

Whole = tuple[list[object], list[str], Path]


@pytest.fixture
def whole(compare_q: Run, write_specs: Specs, own_cache: Path, tmp_path: Path) -> Whole:
    """(a command line with a reference and another model, the table's rows, the cache with marks of a killed run)."""
    models = [{**FAKE, "label": "ref", "reference": True}, {**FAKE, "label": "other", "engine": {"boost": 1.0}}]
    data, spec = write_specs(models)
    words: list[object] = ["-d", data, "-m", spec]
    rows = re.findall(r"(?:ref|other) .*", compare_q(*words).out)
    for suffix in ("keys", "lock"):
        (own_cache / "runs" / f"gone.{suffix}").touch()
    return words, rows, shutil.copytree(own_cache, tmp_path / "whole")


@pytest.mark.parametrize("kind", MAKE)
def test_something_else_in_the_place_of_files(compare_q: Run, own_cache: Path, whole: Whole, kind: str) -> None:
    """Of all tokens, scores, logs and marks; of the reference's windows, beside scores; of its manifest."""
    words, rows, kept = whole
    files = [file.relative_to(kept) for file in sorted(kept.rglob("*")) if file.is_file()]
    stored = [file for file in files if file.parts[0] == "references"]
    others = [file for file in files if file not in stored and (file.parts[0], kind) != ("tokens", "folder")]
    manifest = [file for file in stored if file.suffix == ".json"]
    assert {file.parts[0] for file in others} >= {"scores", "logs", "runs"}
    for chosen in (others, stored[1:], manifest):
        shutil.rmtree(own_cache)
        shutil.copytree(kept, own_cache)
        for file in chosen:
            (own_cache / file).unlink()
            MAKE[kind](own_cache / file)
        with patience():
            listed, ran = compare_q("cache"), compare_q(*words)
        assert (listed.status, listed.err) == (0, "")
        if chosen is manifest and kind == "bytes":
            assert_refused(ran, f"{own_cache / manifest[0]}: ", "; delete it")
        else:
            assert ran.status == 0, ran.err
            assert re.findall(r"(?:ref|other) .*", ran.out) == rows


def test_a_reference_whose_removal_was_killed_is_made_again(compare_q: Run, own_cache: Path, whole: Whole) -> None:
    """The last file is gone, and its folder is not."""
    (folder,) = (own_cache / "references").glob("*/")
    for file in folder.iterdir():
        file.unlink()
    shutil.rmtree(own_cache / "scores")
    ran = compare_q(*whole[0])
    assert ran.status == 0, ran.err
    assert (folder / "reference.json").is_file()


@pytest.mark.parametrize("place", ["cache", "gone", "path", "folder"])
def test_a_finished_table_where_nothing_may_be_written(
    compare_q: Run, write_specs: Specs, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It is served wherever the reference's store lies; in the cache the store may be gone, since nothing needs it."""
    models = [{**FAKE, "label": "ref", "reference": True}, {**FAKE, "label": "other", "engine": {"boost": 1.0}}]
    flags = ["-lf", tmp_path / "kept"] if place == "path" else []
    models[0] |= {"out_logits": str(tmp_path / "kept")} if place == "folder" else {}
    data, spec = write_specs(models)
    rows = re.findall(r"(?:ref|other) .*", compare_q("-d", data, "-m", spec, *flags).out)
    if place == "gone":
        shutil.rmtree(own_cache / "references")
        (own_cache / "references").mkdir()
    access, before = os.access, set(tmp_path.rglob("*")) | set(own_cache.rglob("*"))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))  # root may write
    ran = compare_q("-d", data, "-m", spec, *flags)
    assert ran.status == 0, ran.err
    assert re.findall(r"(?:ref|other) .*", ran.out) == rows
    assert "2 of 2 rows come from the cache" in ran.out
    assert set(tmp_path.rglob("*")) | set(own_cache.rglob("*")) == before
