"""The cache: keys depend on content, and files are complete or absent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compare_q.backends.scoring import segments
from compare_q.eval.common import cache as cache_module
from compare_q.eval.common.cache import Cache
from tests.support.scores import random_scores, random_windows
from tests.support.stores import digest, state_store, window_of
from tests.support.toy import refusal

KEY = "0" * 40


def files(root: Path) -> dict[str, bytes]:
    return {
        file.relative_to(root).as_posix(): file.read_bytes()
        for file in root.rglob("*")
        if file.is_file()
    }


def test_key_follows_content_and_not_order() -> None:
    one = {"a": 1, "b": {"c": [1, 2], "d": None}}
    first = Cache.key("scores", one)
    assert len(first) == 40
    assert Cache.key("scores", {"b": {"d": None, "c": [1, 2]}, "a": 1}) == first
    changes = ({"a": 2}, {"a": "1"}, {"b": {"c": [2, 1], "d": None}}, {"b": {"c": [1, 2]}})
    keys = {first, Cache.key("tokens", one)}
    keys |= {Cache.key("scores", one | change) for change in changes}
    # The first key, that of tokens, and those of four changes.
    assert len(keys) == 6


def test_clear_removes_one_entry(tmp_path: Path) -> None:
    """Tokens, scores and a reference (even with a damaged manifest) are removed; logs are kept."""
    cache = Cache(tmp_path)
    other = "1" * 40
    cache.check_writable()
    windows = random_windows(2)
    for key in (KEY, other):
        cache.path("tokens", key, ".npz").write_bytes(b"")
        cache.log_file("label", key).write_text("log")
        scored = [(window, random_scores(window)) for window in windows]
        segments.commit(cache.path("scores", key, ""), "alone", scored, "s", 1.0)
        segments.write_record(cache.path("scores", key, ""), "s", {"label": "W4A16"})
        (state_store(cache.path("references", key, "")).path / "reference.json").write_text("{")
    before = {name: data for name, data in files(tmp_path).items() if not name.endswith(".log")}
    for section in ("tokens", "scores", "references", "logs"):
        cache.clear(section, KEY)
        # A missing entry is accepted.
        cache.clear(section, KEY)
    gone = {name for name in before if KEY in name}
    # One file of tokens, two of scores and four of the reference.
    assert len(gone) == 1 + 2 + 4
    logs = {f"logs/label.{key}.log" for key in (KEY, other)}
    assert set(files(tmp_path)) == set(before) - gone | logs
    assert not cache.path("scores", KEY, "").exists()


def test_only_what_is_ours_is_cleared(tmp_path: Path) -> None:
    """A user's files in an entry's folder are kept, and so are links and their targets."""
    cache = Cache(tmp_path / "cache")
    outside = tmp_path / "outside"
    store = state_store(outside).path
    cache.check_writable()
    for section in ("scores", "references"):
        folder = cache.path(section, KEY, "")
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        window = window_of(store, digest(1))
        (folder / window.name).symlink_to(window)
        cache.path(section, "1" * 40, "").symlink_to(store)
    cache.path("tokens", KEY, ".npz").symlink_to(outside / "reference.json")
    before = files(tmp_path)
    for section in ("scores", "references", "tokens"):
        for key in (KEY, "1" * 40):
            cache.clear(section, key)
    assert files(tmp_path) == before
    assert cache.path("tokens", KEY, ".npz").is_symlink()


def test_a_cache_that_may_only_be_read_serves_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only cache has no lock files and no marks of use, which would have to be written."""
    with Cache(tmp_path).write("tokens", KEY, ".npz") as file:
        file.write_bytes(b"tokens")
    before = files(tmp_path)
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    cache = Cache(tmp_path)
    cache.use("tokens", KEY)
    file = cache.path("tokens", KEY, ".lock")
    with cache.locked([file], lambda: None), cache.locked([file], lambda: None):
        assert cache.path("tokens", KEY, ".npz").read_bytes() == b"tokens"
    reason = "cannot be written: it may only be read"
    assert refusal(cache.check_writable) == f"--cache-dir: {tmp_path}: {reason}"
    assert cache.used_by_runs() == set()
    assert files(tmp_path) == before


def test_temporary_entries_of_a_killed_run_are_deleted(tmp_path: Path) -> None:
    """Entries from before the run, those that another run uses, and a running run's stay."""
    earlier, temporary, shared, ours = (letter * 40 for letter in "abcd")
    complete = state_store(tmp_path / "outside").path
    cache = Cache(tmp_path / "cache")
    cache.check_writable()

    def store(key: str) -> Path:
        folder = cache.path("references", key, "")
        shutil.copytree(complete, folder)
        return folder

    killed = Cache(cache.root)
    stay = [store(earlier)]
    for key in (earlier, temporary, shared):
        killed.use("references", key, temporary=True)
    stay.append(store(shared))
    gone = store(temporary)
    cache.use("references", ours, temporary=True)
    cache.use("references", shared)
    stay.append(store(ours))
    Cache(cache.root).check_writable()
    assert gone.exists()
    # The system closes the file of a killed process, and with it ends the lock.
    detached = killed.release.detach()  # type: ignore[attr-defined]
    os.close(detached[2][1])
    Cache(cache.root).check_writable()
    assert not gone.exists()
    assert all(files(folder) for folder in stay)
    assert cache.used_by_runs() == {ours, shared}


@pytest.mark.engine
def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    """Temporary files, locks and marks of a killed process are removed, not a running one's."""
    code = (
        "import os, signal, sys, pathlib\n"
        "from compare_q.eval.common.cache import Cache\n"
        "cache = Cache(pathlib.Path(sys.argv[1]))\n"
        "cache.use('tokens', '0' * 40)\n"
        "lock = cache.path('tokens', '0' * 40, '.lock')\n"
        "with cache.locked([lock], int), cache.write('tokens', '0' * 40, '.npz') as file:\n"
        "    file.write_bytes(b'half')\n"
        "    print('writing', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == "writing\n"
        before = files(tmp_path)
        # The lock, the mark of use and the half file.
        assert len(before) == 3
        Cache(tmp_path).check_writable()
        assert files(tmp_path) == before
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.wait() == -signal.SIGKILL
    assert files(tmp_path) == before
    Cache(tmp_path).check_writable()
    assert files(tmp_path) == {}


def test_logs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go, but not those of running models; a log that is too long begins anew."""
    monkeypatch.setattr(cache_module, "LARGEST_LOG", 100)
    monkeypatch.setattr(cache_module, "ALL_LOGS", 250)
    keys = [str(number) * 40 for number in range(5)]
    logs = []
    for number, key in enumerate(keys):
        log = Cache(tmp_path).log_file("label", key)
        log.write_bytes(b"x" * 100)
        os.utime(log, (number, number))
        logs.append(log)
    users_file = tmp_path / "logs" / "mine.txt"
    users_file.write_bytes(b"x" * 1000)
    assert [log.exists() for log in logs] == [False, False, True, True, True]
    other = Cache(tmp_path)
    other.use("scores", keys[2])
    cache = Cache(tmp_path)
    fresh = cache.log_file("label", "a" * 40)
    fresh.write_bytes(b"x" * 101)
    assert [log.exists() for log in logs[2:]] == [True, True, True]
    # Another worker of the same run.
    assert cache.log_file("label", "a" * 40).stat().st_size == 101
    assert not Cache(tmp_path).log_file("label", "a" * 40).exists()
    assert logs[2].exists()
    assert users_file.exists()
