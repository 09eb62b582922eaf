"""The folder of ``pack -o``: two packs with one name, signals and kills, and packs that are not
replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common import storage
from compare_q.backends.reference import pack_files
from compare_q.eval.cli import pack_target
from compare_q.eval.cli.pack_target import NEW, OLD, reserved
from tests.support import ROOT
from tests.support.fake_engine import digests_asked
from tests.support.processes import wait_until
from tests.support.texts import tokenize
from tests.support.toy import FAKE, Run, Specs, assert_refused, refusal

Words = Callable[..., tuple[object, ...]]
SLOW = """
import sys, time
from compare_q.backends.reference import pack_files
from compare_q.eval.cli import main
def write_manifest(folder, **facts):
    (folder / "waits").touch()
    time.sleep(120)
pack_files.write_manifest = write_manifest
sys.exit(main.main(sys.argv[1:]))
"""
"""``pack`` as a process whose assembly of the pack does not end by itself."""


@pytest.fixture
def words(write_specs: Specs, tmp_path: Path) -> Words:
    """Return the command line that makes ``fake.pack`` with this number of windows."""

    def command(windows: int = 2, **data: Any) -> tuple[object, ...]:
        data_file, models = write_specs([{**FAKE, "engine": {"vocab_size": 400}}], **data)
        flags = ("--no-floor", "--logits", "-r", windows)
        return "pack", "-d", data_file, "-m", models, "-o", tmp_path / "fake.pack", *flags

    return command


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def unfinished(folder: Path, name: str, *parts: str) -> Path:
    """Make the hidden folder that a killed process leaves."""
    hidden_folder = folder / f".{name}{pack_target.HIDDEN_SUFFIX}"
    for part in parts:
        (hidden_folder / part).mkdir(parents=True)
        (hidden_folder / part / "file").write_text(part)
    return hidden_folder


def test_a_second_pack_of_this_name_is_refused_before_anything_is_scored(
    compare_q: Run, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_digests = digests_asked(monkeypatch)
    with reserved(tmp_path / "fake.pack"), reserved(tmp_path / "other.pack"):
        assert_refused(compare_q(*words()), "fake.pack: another compare-q is making this pack")
    assert scored_digests == []
    assert compare_q(*words()).status == 0
    assert len(pack_files.verified(tmp_path / "fake.pack").windows) == 2
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_pack_is_assembled_leaves_nothing(
    compare_q: Run, words: Words, tmp_path: Path, own_cache: Path, number: signal.Signals
) -> None:
    arguments = list(map(str, words()))
    tokenize(Path(arguments[2]), own_cache)
    command = [sys.executable, "-c", SLOW, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        hidden_folder = tmp_path / f".fake.pack{pack_target.HIDDEN_SUFFIX}"
        wait_until(lambda: (hidden_folder / NEW / "waits").exists() or process.poll() is not None)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert hidden(tmp_path) == []
    assert not (tmp_path / "fake.pack").exists()
    assert compare_q(*words()).status == 0


def test_what_killed_processes_left_is_deleted_and_a_replaced_pack_is_put_back(
    tmp_path: Path,
) -> None:
    # Killed between the two renames.
    between = unfinished(tmp_path, "between", NEW, OLD)
    # Killed after both renames.
    renamed = unfinished(tmp_path, "renamed", OLD)
    (tmp_path / "renamed").mkdir()
    # A user's folder with a name like those of compare_q.
    mine = unfinished(tmp_path, "mine", "notes")
    with reserved(tmp_path / "running"):
        running = tmp_path / f".running{pack_target.HIDDEN_SUFFIX}"
        (running / NEW).mkdir()
        with reserved(tmp_path / "x.pack"):
            assert not between.exists()
            assert not renamed.exists()
        assert (running / NEW).exists()
    assert (tmp_path / "between" / "file").read_text() == OLD
    assert list((tmp_path / "renamed").iterdir()) == []
    assert hidden(tmp_path) == [mine.name]


def test_a_pack_that_is_not_replaced_is_named_before_anything_is_scored(
    compare_q: Run, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare_q(*words(3)).status == 0
    target = tmp_path / "fake.pack"
    manifest = (target / pack_files.PACK_MANIFEST).read_bytes()
    scored_digests = digests_asked(monkeypatch)

    def refused(command: tuple[object, ...], *parts: str) -> None:
        ran = compare_q(*command)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.splitlines()[-1].startswith("error: -o: ")
        assert all(part in ran.err.splitlines()[-1] for part in parts)
        assert scored_digests == []
        assert hidden(tmp_path) == []

    refused(words(2), "fake.pack: is a pack with 3 windows already")
    refused(
        words(4, eval_len=50, eval_stride=50), "fake.pack: is a pack of another text", "(text.txt)"
    )
    other = storage.load(manifest) | {"model_digest": "0" * 64, "model": "other/model"}
    (target / pack_files.PACK_MANIFEST).write_bytes(storage.dump(other))
    refused(words(4), "fake.pack: is a pack of another model (other/model)")
    (target / pack_files.PACK_MANIFEST).write_bytes(manifest)
    assert compare_q(*words(4)).status == 0
    assert len(pack_files.verified(target).windows) == 4


def test_a_pack_of_a_pack_is_refused(compare_q: Run, words: Words, tmp_path: Path) -> None:
    assert compare_q(*words()).status == 0
    ran = compare_q("pack", tmp_path / "fake.pack", "-o", tmp_path / "again.pack")
    assert (ran.status, "is a reference pack already" in ran.err.splitlines()[-1]) == (2, True)


def test_a_target_without_a_parent_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert "exists and is not a reference pack" in refusal(pack_target.existing, tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert "exists and is not a reference pack" in refusal(pack_target.existing, tmp_path / "link")
    assert "does not exist" in refusal(pack_target.existing, tmp_path / "no" / "x.pack")
