"""The cache as a whole: its content, and what ``--cache-limit`` removes: the oldest entries first,
and none in use.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors

from compare_q.backends.common import storage
from compare_q.backends.reference.store import STORE_MANIFEST
from compare_q.backends.scoring import segments
from compare_q.eval.cli import cache_command as cache_listing
from compare_q.eval.common.cache import Cache
from compare_q.eval.run.claims import claimed
from tests.support.stores import numbers, store_of
from tests.support.toy import FAKE, Ran, assert_refused

Run = Callable[..., Ran]
Specs = Callable[..., tuple[Path, Path]]
DAY = 86_400
SEGMENT = f"alone.{'0' * 40}.safetensors"
# Names like those of compare_q's own files, in the same folders.
STRANGERS = {
    "notes.txt",
    "tokens/mine.npz",
    "scores/readme.json",
    "references/kept/row.0",
    "logs/app.20240115.log",
    f"scores/{'b' * 40}/notes.txt",
}


def key(digit: str) -> str:
    return digit * 40


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Tokens of 1,000 bytes (oldest), a log of 100, scores of 2,000, a reference of 3,000 (newest),
    and other files.
    """
    cache = Cache(tmp_path / "cache")
    cache.check_writable()
    root = cache.root
    (root / "tokens" / f"{key('a')}.npz").write_bytes(b"x" * 1000)
    scores = root / "scores" / key("b")
    reference = root / "references" / key("c")
    segments.write_record(scores, "s", {"label": "Q4 [/tmp/x] [h8]"})
    (scores / SEGMENT).write_bytes(b"x" * (2000 - (scores / "record.s.json").stat().st_size))
    (root / "logs" / f"W4A16_g32.{key('b')}.log").write_bytes(b"x" * 100)
    store_of(reference, numbers(20, 4), windows=1, identity={"label": "bf16"})
    (window,) = reference.glob("row.*")
    window.unlink()
    other_bytes = sum(sizes(reference).values())
    window.write_bytes(b"x" * (3000 - other_bytes))
    for name in STRANGERS:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("a user's own")
    for age, kind in enumerate(("references", "scores", "logs", "tokens")):
        for file in (root / kind).rglob("*"):
            os.utime(file, (age * -DAY + 1.7e9,) * 2)
    return cache


def names(cache: Cache) -> set[str]:
    return {
        file.relative_to(cache.root).as_posix() for file in cache.root.rglob("*") if file.is_file()
    }


def test_entries_are_what_compare_q_wrote(cache: Cache, compare_q: Run) -> None:
    listed_entries = [
        (entry.section, entry.label, entry.size) for entry in cache_listing.entries(cache)
    ]
    assert listed_entries == [
        ("references", "bf16", 3000),
        ("scores", "Q4 [/tmp/x] [h8]", 2000),
        ("logs", "", 100),
        ("tokens", "", 1000),
    ]
    ran = compare_q("cache", "--cache-dir", cache.root)
    # A label is no markup.
    assert "Q4 [/tmp/x] [h8]" in ran.out
    assert ran.out.splitlines()[-1] == (
        f"{cache.root}: 1 tokens 1.0 kB, 1 scores 2.0 kB, 1 references 3.0 kB, 1 logs 100 bytes, "
        "6.1 kB in all"
    )


@pytest.mark.parametrize(
    ("limit", "gold"),
    [
        # 1,000 + 100 + 2,000 + 3,000 bytes are in the cache.
        (6100, []),
        (6099, ["tokens"]),
        (5100, ["tokens"]),
        # Without the tokens 5,100 bytes are left, which is still too much.
        (5050, ["tokens", "logs"]),
        (0, ["tokens", "logs", "scores", "references"]),
    ],
)
def test_the_oldest_go_first_until_the_rest_fits(cache: Cache, limit: int, gold: list[str]) -> None:
    before = cache_listing.entries(cache)
    deleted, remaining = cache_listing.prune(cache, limit)
    remaining_paths = {entry.path for entry in cache_listing.entries(cache)}
    gone = [entry for entry in reversed(before) if entry.path not in remaining_paths]
    assert [entry.section for entry in gone] == gold
    assert deleted == sum(entry.size for entry in gone)
    assert remaining == 6100 - deleted <= limit
    assert names(cache) >= STRANGERS


def sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder, by name."""
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_scores_go_by_segment_and_their_records_with_the_last_one(
    cache: Cache, compare_q: Run
) -> None:
    """A segment of the oldest use, then tokens, then the other segment with the record; then the
    reference.
    """
    scores = cache.root / "scores" / key("b")
    (scores / "notes.txt").unlink()
    # A segment of compare_q 0.3.
    old = scores / f"0123456789abcdef-more.{'1' * 40}.safetensors"
    old.write_bytes(b"x" * 500)
    os.utime(old, (1.6e9, 1.6e9))
    os.utime(scores / SEGMENT, (1.8e9, 1.8e9))
    in_all = 6600
    listed = compare_q("cache", "--cache-dir", cache.root).out.splitlines()
    (line,) = [line for line in listed if "scores of" in line]
    assert line.startswith(time.strftime("%Y-%m-%d %H:%M", time.localtime(1.8e9)))
    assert "2.5 kB  scores of Q4 [/tmp/x] [h8], bbbbbbbb" in line
    assert cache_listing.prune(cache, in_all) == (0, in_all)
    assert cache_listing.prune(cache, in_all - 1) == (500, 6100)
    assert sizes(scores).keys() == {SEGMENT, "record.s.json"}
    # Tokens, log and reference are older than the segment.
    assert cache_listing.prune(cache, 2500) == (4100, 2000)
    assert sizes(scores).keys() == {SEGMENT, "record.s.json"}
    assert cache_listing.prune(cache, 1999) == (2000, 0)
    assert not scores.exists()
    assert cache_listing.entries(cache) == []


@pytest.mark.parametrize(
    ("section", "digit", "size"), [("references", "c", 3000), ("scores", "b", 2000)]
)
def test_what_is_claimed_stays(cache: Cache, section: str, digit: str, size: int) -> None:
    """A run with another cache scores windows, or records them into a store of this cache."""
    other = Cache(cache.root.with_name("other"))
    with claimed(other, cache.path(section, key(digit), ""), {"0" * 32}, lambda: None):
        assert cache_listing.prune(cache, 0) == (6100 - size, size)
    assert cache_listing.prune(cache, 0) == (size, 0)


OLDER = "has scores or references of an older compare_q, which are not used; --cache-limit deletes"


def make_older(cache: Cache, section: str) -> None:
    """Replace the cache's scores or its reference by those of compare_q 0.3, with any numbers."""
    if section == "scores":
        facts = storage.facts_line(
            {"version": 3, "key": key("b"), "tag": "alone", "windows": [[0, 3]]}
        )
        content = safetensors.save({"logprob": np.zeros(3, np.float32)}, metadata=facts)
        storage.keep(cache.root / "scores" / key("b"), "alone", [content])
        (cache.root / "scores" / key("b") / SEGMENT).unlink()
    else:
        folder = cache.root / "references" / key("c")
        (window,) = folder.glob("row.*")
        window.rename(folder / f"row.000000.{window.name.split('.')[2]}.safetensors")
        manifest = storage.load((folder / STORE_MANIFEST).read_bytes())
        (folder / STORE_MANIFEST).write_bytes(storage.dump({**manifest, "version": 3}))


@pytest.mark.parametrize("section", ["scores", "references"])
def test_older_scores_and_references_are_named_once_and_left_alone(
    cache: Cache, compare_q: Run, write_specs: Specs, section: str
) -> None:
    make_older(cache, section)
    before = names(cache)
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec, "--cache-dir", cache.root)
    assert ran.status == 0
    assert (ran.out + ran.err).count(OLDER) == 1
    assert names(cache) > before
    ran = compare_q("-d", data, "-m", spec, "--cache-dir", cache.root)
    assert OLDER not in ran.out + ran.err
    listed = compare_q("cache", "--cache-dir", cache.root)
    assert OLDER not in listed.out
    assert "bbbbbbbb" in listed.out
    assert "cccccccc" in listed.out
    assert compare_q("cache", "--cache-dir", cache.root, "--cache-limit", "0KB").status == 0
    assert {name for name in names(cache) if not name.startswith(("runs/", "format"))} == STRANGERS


def test_a_cache_that_may_only_be_read_names_older_scores_each_time(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is older; that is kept.
    assert Cache(cache.root).note_on_older() == ""
    (cache.root / "format").unlink()
    make_older(cache, "references")
    monkeypatch.setattr(Cache, "unwritable", "it may only be read")
    for _ in range(2):
        assert OLDER in Cache(cache.root).note_on_older()
    assert not (cache.root / "format").exists()


def test_what_a_run_uses_stays(cache: Cache) -> None:
    """Kept: this run's reference, another run's scores and log, and an entry that is being written
    (lock held).
    """
    cache.use("references", key("c"))
    other = Cache(cache.root)
    other.use("scores", key("b"))
    with cache.locked([cache.path("tokens", key("a"), ".lock")], lambda: None):
        assert cache_listing.prune(cache, 0) == (0, 6100)
    assert "over the limit of 10 bytes: in use" in cache_listing.limited(cache, 10)
    assert "tokens" not in [entry.section for entry in cache_listing.entries(cache)]
    # The other run has ended.
    del other
    assert cache_listing.prune(cache, 3000) == (2100, 3000)
    assert [entry.section for entry in cache_listing.entries(cache)] == ["references"]
    assert [*(cache.root / "runs").iterdir()] == [cache.marks]


def test_flags(compare_q: Run, write_specs: Specs, own_cache: Path) -> None:
    """A run's own entries stay with any limit; ``cache`` alone lists entries, with a limit it
    empties the cache.
    """
    data, spec = write_specs()
    ran = compare_q("-d", data, "-m", spec, "--cache-limit", "1KB")
    assert ran.status == 0, ran.err
    assert re.search(
        r"cache: deleted 0 bytes; \d+\.\d kB are left, over the limit of 1.0 kB: in use", ran.out
    )
    # A bare 20 must not mean 20 bytes: where something is deleted, a unit is required.
    for text in ("20", " 7 ", "0", "0.5", "", "lots", "1e400GB"):
        assert_refused(
            compare_q("cache", "--cache-limit", text), f"--cache-limit: {text!r}", "20GB"
        )
    listed = compare_q("cache")
    assert listed.status == 0
    assert re.search(r"\d+\.\d kB  scores of fake uniform, ", listed.out)
    assert f"{own_cache}: 1 tokens" in listed.out.replace("\n", "")


def test_a_run_says_the_size_of_a_large_cache(
    compare_q: Run, write_specs: Specs, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, models = write_specs([FAKE])
    line = ("-d", data, "-m", models)
    assert str(own_cache) not in compare_q(*line).err
    monkeypatch.setattr(cache_listing, "LARGE_BYTES", 100)
    assert str(own_cache) in compare_q(*line).err
    assert compare_q(*line, "--cache-limit", "1TB").err.count(str(own_cache)) == 0
