"""The store: keys by content, files whole or absent."""

from __future__ import annotations

from pathlib import Path

import filelock
import pytest

from backends.common.errors import InputError
from eval.common.cache import Cache, default_root

KEY = "0" * 40


def files(root: Path) -> dict[str, bytes]:
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_key_follows_content_and_not_order() -> None:
    first = Cache.key("scores", {"a": 1, "b": {"c": [1, 2], "d": None}})
    assert len(first) == 40
    assert Cache.key("scores", {"b": {"d": None, "c": [1, 2]}, "a": 1}) == first
    others = [
        Cache.key("tokens", {"a": 1, "b": {"c": [1, 2], "d": None}}),
        Cache.key("scores", {"a": 2, "b": {"c": [1, 2], "d": None}}),
        Cache.key("scores", {"a": "1", "b": {"c": [1, 2], "d": None}}),
        Cache.key("scores", {"a": 1, "b": {"c": [2, 1], "d": None}}),
        Cache.key("scores", {"a": 1, "b": {"c": [1, 2]}}),
    ]
    assert len({first, *others}) == 6


def test_entries_lie_under_their_kind(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "cache")
    assert files(cache.root) == {}  # the probe is gone
    with cache.write("tokens", KEY, ".npz") as file:
        file.write_bytes(b"new")
    assert files(cache.root) == {f"tokens/{KEY}.npz": b"new"}
    assert cache.path("tokens", KEY, ".npz").read_bytes() == b"new"


def test_an_entry_appears_only_when_its_block_ends(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    target = cache.path("scores", KEY, ".json")
    for content in (b"first", b"second"):
        before = target.read_bytes() if target.exists() else None
        with cache.write("scores", KEY, ".json") as file:
            file.write_bytes(content)
            assert file.parent == target.parent  # one file system, so that the replacement is atomic
            assert (target.read_bytes() if target.exists() else None) == before
        assert files(tmp_path) == {f"scores/{KEY}.json": content}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    cache = Cache(tmp_path)

    def fail(content: bytes | None) -> None:
        with cache.write("scores", KEY, ".json") as file:
            if content is not None:
                file.write_bytes(content)
            raise error

    for content in (None, b"half"):
        with pytest.raises(error):
            fail(content)
        assert files(tmp_path) == {}
    cache.path("scores", KEY, ".json").write_bytes(b"old")
    with pytest.raises(error):
        fail(b"half")
    assert files(tmp_path) == {f"scores/{KEY}.json": b"old"}


def test_clear_removes_one_entry(tmp_path: Path) -> None:
    cache, other = Cache(tmp_path), "1" * 40
    for suffix in (".json", ".parquet", ".npz"):
        for kind, key in (("scores", KEY), ("scores", other), ("tokens", KEY)):
            cache.path(kind, key, suffix).write_bytes(b"")
    cache.clear("scores", KEY)
    kept = {
        f"{entry}{suffix}" for entry in (f"scores/{other}", f"tokens/{KEY}") for suffix in (".json", ".parquet", ".npz")
    }
    assert set(files(tmp_path)) == kept
    cache.clear("scores", KEY)  # nothing there is fine
    assert set(files(tmp_path)) == kept


@pytest.mark.parametrize("below", ["", "cache", "deep/cache"])
def test_unwritable_root_names_the_flag(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / below
    with pytest.raises(InputError) as caught:
        Cache(root)
    assert str(caught.value).startswith(f"--cache-dir: {root}: cannot be written: ")
    assert len(str(caught.value).splitlines()) == 1


def test_one_lock_an_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with cache.lock("scores", KEY):
        with pytest.raises(filelock.Timeout):
            Cache(tmp_path).lock("scores", KEY).acquire(timeout=0)
        Cache(tmp_path).lock("scores", "1" * 40).acquire(timeout=0).lock.release()
    cache.lock("scores", KEY).acquire(timeout=0).lock.release()


@pytest.mark.parametrize("label", ["../../etc/passwd", "EXL3 4.0 [h6]", "a\nb\0", "x" * 300])
def test_logs_have_safe_names(tmp_path: Path, label: str) -> None:
    cache = Cache(tmp_path)
    file = cache.log_file(label, KEY)
    file.write_text("log")
    assert file.parent == tmp_path / "logs"
    assert list((tmp_path / "logs").iterdir()) == [file]
    assert cache.log_file(label, "1" * 40) != file


def test_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPARE_Q_CACHE", str(tmp_path / "mine"))
    assert default_root() == tmp_path / "mine"
    monkeypatch.delenv("COMPARE_Q_CACHE")
    elsewhere = default_root()
    assert "compare_q" in elsewhere.parts
    assert elsewhere.is_absolute()
    monkeypatch.setenv("COMPARE_Q_CACHE", "")
    assert default_root() == elsewhere
