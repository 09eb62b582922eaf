"""The cache as a whole: its content, and what ``--cache-limit`` removes: the oldest entries first, and none in use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from compare_q.backends.scoring import segments
from compare_q.eval.cli import cache as cache_listing
from compare_q.eval.common.cache import Cache
from tests.support.stores import numbers, store_of
from tests.support.toy import Ran, assert_refused

Run = Callable[..., Ran]
Specs = Callable[..., tuple[Path, Path]]
DAY = 86_400
SEGMENT = f"alone.{'0' * 40}.safetensors"
STRANGERS = {
    "notes.txt", "tokens/mine.npz", "scores/readme.json", "references/kept/row.0", "logs/app.20240115.log",
    f"scores/{'b' * 40}/notes.txt",
}  # fmt: skip


def key(digit: str) -> str:
    return digit * 40


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Tokens of 1,000 bytes (oldest), a log of 100, scores of 2,000, a reference of 3,000 (newest), and other files."""
    cache = Cache(tmp_path / "cache")
    cache.check_writable()
    root = cache.root
    (root / "tokens" / f"{key('a')}.npz").write_bytes(b"x" * 1000)
    scores, reference = root / "scores" / key("b"), root / "references" / key("c")
    segments.write_record(scores, "s", {"label": "Q4 [/tmp/x] [h8]"})
    (scores / SEGMENT).write_bytes(b"x" * (2000 - (scores / "record.s.json").stat().st_size))
    (root / "logs" / f"W4A16_g32.{key('b')}.log").write_bytes(b"x" * 100)
    store_of(reference, numbers(20, 4), windows=1, identity={"label": "bf16"})
    (window,) = reference.glob("row.*")
    window.write_bytes(b"x" * (3000 - sum(file.stat().st_size for file in reference.iterdir() if file != window)))
    for name in STRANGERS:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("a user's own")
    for age, kind in enumerate(("references", "scores", "logs", "tokens")):
        for file in (root / kind).rglob("*"):
            os.utime(file, (age * -DAY + 1.7e9,) * 2)
    return cache


def names(cache: Cache) -> set[str]:
    return {file.relative_to(cache.root).as_posix() for file in cache.root.rglob("*") if file.is_file()}


def test_entries_are_what_compare_q_wrote(cache: Cache, compare_q: Run) -> None:
    found = [(entry.section, entry.label, entry.size) for entry in cache_listing.entries(cache)]
    assert found == [
        ("references", "bf16", 3000), ("scores", "Q4 [/tmp/x] [h8]", 2000), ("logs", "", 100), ("tokens", "", 1000),
    ]  # fmt: skip
    ran = compare_q("cache", "--cache-dir", cache.root)
    assert "Q4 [/tmp/x] [h8]" in ran.out  # a label is no markup
    assert ran.out.splitlines()[-1] == (
        f"{cache.root}: 1 tokens 1.0 kB, 1 scores 2.0 kB, 1 references 3.0 kB, 1 logs 100 bytes, 6.1 kB in all"
    )


@pytest.mark.parametrize(
    ("limit", "gold"),
    [
        (6100, []), (6099, ["tokens"]), (5100, ["tokens"]), (5050, ["tokens", "logs"]),
        (0, ["tokens", "logs", "scores", "references"]),
    ],
)  # fmt: skip
def test_the_oldest_go_first_until_the_rest_fits(cache: Cache, limit: int, gold: list[str]) -> None:
    removed, left = cache_listing.prune(cache, limit)
    assert [entry.section for entry in removed] == gold
    assert left == 6100 - sum(entry.size for entry in removed) <= limit
    assert names(cache) >= STRANGERS


def test_what_a_run_uses_stays(cache: Cache) -> None:
    """Kept: this run's reference, another run's scores and log, and an entry that is being written (lock held)."""
    cache.use("references", key("c"))
    other = Cache(cache.root)
    other.use("scores", key("b"))
    with cache.locked([cache.path("tokens", key("a"), ".lock")], lambda: None):
        removed, left = cache_listing.prune(cache, 0)
        assert (removed, left) == ([], 6100)
    assert "over the limit of 10 bytes: in use" in cache_listing.limited(cache, 10)
    assert "tokens" not in [entry.section for entry in cache_listing.entries(cache)]
    del other  # the run has ended
    assert [entry.section for entry in cache_listing.prune(cache, 3000)[0]] == ["logs", "scores"]
    assert [*(cache.root / "runs").iterdir()] == [cache.marks]


def test_flags(compare_q: Run, write_specs: Specs, own_cache: Path) -> None:
    """A run's own entries stay with any limit; ``cache`` alone lists entries, with a limit it empties the cache."""
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec, "--cache-limit", "1KB")
    assert ran.status == 0, ran.err
    assert re.search(
        r"cache: removed 0 entries, 0 bytes; \d+\.\d kB are left, over the limit of 1.0 kB: in use", ran.out
    )
    for text in ("20", " 7 ", "0", "0.5", "", "lots", "1e400GB"):  # 20 must not mean 20 bytes
        assert_refused(compare_q("cache", "--cache-limit", text), f"--cache-limit: {text!r}", "20GB")
    listed = compare_q("cache")
    assert listed.status == 0
    assert re.search(r"\d+\.\d kB  scores of fake uniform, ", listed.out)
    assert f"{own_cache}: 1 tokens" in listed.out.replace("\n", "")
