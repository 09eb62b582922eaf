"""References: the models that a run loads, the store's location, refusals, and failures."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.common import storage
from compare_q.backends.reference.store import STORE_MANIFEST, Reader
from compare_q.eval.common.cache import Cache
from compare_q.eval.text import vocabulary
from tests.support.comparisons import (
    KLD,
    N_WINDOWS,
    UNIFORM,
    Compare,
    Measured,
    Models,
    cut_divergence,
    fake,
    store_of,
    stub,
)
from tests.support.fake_engine import FakeEngine, digests_asked, windows_asked
from tests.support.stores import window_of
from tests.support.stub_engine import rounding_of_rows
from tests.support.toy import TOY_VOCAB, assert_refused, swap_letters


def left_behind(root: Path) -> list[str]:
    """Return the names in the cache's folder of references, without the lock files."""
    return [entry.name for entry in (root / "references").iterdir() if entry.suffix != ".lock"]


def column(ran: Measured, field: str) -> list[Any]:
    """Return a field of all rows, in the order of the file."""
    return [model[field] for model in ran.results["models"]]


def test_the_reference_runs_first_and_the_table_keeps_the_order(measured: Compare) -> None:
    """The first of two marked models is the reference; ``--mask`` keeps it."""
    ref = fake("ref", boost=3.0, reference=True)
    other = fake("other", boost=2.0, out_logits="none")
    models = [fake("one", vocab_size=501), fake("two", boost=1.0), ref, other]
    ran = measured(models)
    assert ran.status == 0, ran.err
    assert "ref is the reference, as the first of 2 that are marked; not: other" in ran.err
    assert ran.loaded == ["ref", "one", "two", "other"]
    assert list(ran.models) == ["one", "two", "ref", "other"]
    assert re.findall(r"^ (one|two|ref|other) ", ran.out, re.MULTILINE) == [
        "one",
        "two",
        "ref",
        "other",
    ]
    assert column(ran, "reference") == [False, False, True, False]
    assert ran.results["reference"]["label"] == "ref"
    assert None not in column(ran, "kld")
    assert list(measured(models, "-mask", "two").models) == ["two", "ref"]


def test_a_second_run_does_not_open_the_store(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows come from the cache, even if the store is missing.

    With one more model, the reference is scored again for its store.
    """
    first = measured(UNIFORM)
    store = store_of(own_cache)
    before = (store / STORE_MANIFEST).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "verify", lambda *_: pytest.fail("verified"))
        patch.setattr(Reader, "window", lambda *_: pytest.fail("read"))
        patch.setattr(FakeEngine, "load", lambda self: pytest.fail("loaded"))
        again = measured(UNIFORM)
        assert again.status == 0, again.err
        assert all(column(again, "from_cache"))
        shutil.rmtree(store)
        without = measured(UNIFORM)
    assert without.status == 0, without.err
    assert without.models["uniform"]["kld"] == first.models["uniform"]["kld"]
    assert without.results["reference"]["label"] == "ref"
    assert "contents" not in without.results["reference"]
    assert not store.exists()
    more = measured([*UNIFORM, fake("boosted", boost=1.0)])
    assert more.status == 0, more.err
    assert more.loaded == ["ref", "boosted"]
    assert store_of(own_cache) == store
    assert (store / STORE_MANIFEST).read_bytes() == before
    assert column(more, "from_cache") == [False, True, False]
    assert more.models["boosted"]["kld"] > 0


def test_divergences_of_another_reference_are_other_scores(measured: Compare) -> None:
    first = measured(UNIFORM)
    second = measured([fake("ref", boost=2.0, reference=True), fake("uniform")])
    alone = measured([fake("uniform")])
    assert second.loaded == ["ref", "uniform"]
    assert second.models["uniform"]["kld"] == pytest.approx(cut_divergence(2.0, 500), abs=1e-5)
    assert second.models["uniform"]["kld"] != first.models["uniform"]["kld"]
    assert (alone.models["uniform"]["kld"], alone.results["reference"]) == (None, None)
    # A label is a name, on which no number depends.
    renamed = measured([fake("other name", boost=3.0, reference=True), fake("uniform")])
    assert renamed.loaded == []
    assert renamed.models["uniform"]["kld"] == first.models["uniform"]["kld"]


def test_out_logits_names_the_folder_of_the_store(
    measured: Compare, own_cache: Path, tmp_path: Path
) -> None:
    """The stores of two models are in this folder, under their keys.

    A store has the windows of every text.
    """
    folder = tmp_path / "deep" / "kept"
    models = [fake("ref", boost=3.0, out_logits=str(folder)), fake("uniform")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    assert left_behind(own_cache) == []
    (store,) = folder.iterdir()
    assert len(Reader(store).windows) == N_WINDOWS
    assert store.name == ran.results["reference"]["key"]
    assert str(store) in ran.err
    assert measured(models, eval_len=50).loaded == ["ref", "uniform"]
    assert list(folder.iterdir()) == [store]
    assert len(Reader(store).windows) == 2 * N_WINDOWS
    other = fake("ref", boost=2.0, out_logits=str(folder))
    assert measured([other, models[1]]).loaded == ["ref", "uniform"]
    assert len(list(folder.iterdir())) == 2


def test_a_store_at_a_path_is_made_once_and_then_enough(
    measured: Compare, pair: Models, tmp_path: Path
) -> None:
    """A second run with another cache loads neither the reference nor its files.

    It does not delete the store.
    """
    path = tmp_path / "deep" / "bf16.reference"
    first = measured(pair, "-lf", path)
    assert first.status == 0, first.err
    assert Reader(path).identity["label"] == "ref"
    assert [entry.name for entry in path.parent.iterdir()] == ["bf16.reference"]
    alone = measured(pair[1:], "-lf", path)
    # A store made here and the same store given are one reference.
    assert (alone.status, alone.loaded) == (0, [])
    for flags in (["--cache-dir", tmp_path / "other", "-kld"], ["-cc", "-kld"]):
        fresh = measured(pair[1:], "-lf", path, *flags)
        assert (fresh.status, fresh.loaded) == (0, ["noisy"]), fresh.err
        assert fresh.tokens("noisy") == first.tokens("noisy")
        assert fresh.results["reference"]["label"] == "ref"
        assert "the most probable tokens of ref (" in fresh.out
    marked = measured(pair, "-lf", path, "--cache-dir", tmp_path / "third")
    assert marked.status == 0, marked.err
    assert "kept as the reference" not in marked.err
    assert marked.tokens("noisy") == first.tokens("noisy")
    assert len(Reader(path).windows) == N_WINDOWS


def test_clearing_forgets_the_store(measured: Compare, own_cache: Path) -> None:
    """``-cc`` makes a damaged store again, even if no run has noticed the damage."""
    measured(UNIFORM)
    store = store_of(own_cache)
    window = sorted(Reader(store).windows)[1]
    file = window_of(store, window)
    good = file.read_bytes()
    file.write_bytes(b"damaged")
    ran = measured(UNIFORM, "-cc")
    assert (ran.status, ran.loaded) == (0, ["ref", "uniform"]), ran.err
    assert window_of(store, window) == file
    assert file.read_bytes() == good
    assert not any(column(ran, "from_cache"))
    (store / STORE_MANIFEST).write_text("{")
    # No score depends on the store.
    assert (measured(UNIFORM).status, len(measured(UNIFORM).models)) == (0, 2)
    assert_refused(
        measured([*UNIFORM, fake("new", boost=1.0)]),
        f"{store / STORE_MANIFEST}: not a reference store",
    )
    ran = measured(UNIFORM, "-cc")
    assert ran.status == 0, ran.err
    assert len(Reader(store).windows) == N_WINDOWS


def assert_no_divergence(ran: Measured, reason: str) -> None:
    """Assert that the reference failed: status 1, the reason in its row.

    "uniform" has PPL and a note.
    """
    assert ran.status == 1, ran.out + ran.err
    (reference,) = (model for model in ran.results["models"] if model["reference"])
    assert reason in reference["error"]
    model = ran.models["uniform"]
    assert (model["kld"], model["same_top"], model["error"]) == (None, None, None)
    assert model["ppl"] == pytest.approx(500.0, rel=1e-5)
    assert "uniform: no KLD: the reference failed" in ran.out
    assert ran.results["reference"] is None


def test_a_failing_reference_leaves_perplexities(measured: Compare, own_cache: Path) -> None:
    ran = measured([fake("uniform"), fake("ref", boost=3.0, fail=0, reference=True)])
    assert_no_divergence(ran, "told to fail after 0 windows")
    assert left_behind(own_cache) == []


def test_a_reference_that_fails_the_second_time(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are in the cache, but its store was deleted.

    Models that need the store have PPL, but no KLD.
    """
    models = [fake("ref", boost=3.0, reference=True), fake("old", boost=1.0)]
    measured(models)
    shutil.rmtree(store_of(own_cache))

    def fail(self: FakeEngine) -> None:
        if self.options.boost == 3.0:
            raise MemoryError

    monkeypatch.setattr(FakeEngine, "load", fail)
    assert_no_divergence(measured([*models, fake("uniform")]), "out of memory")
    assert left_behind(own_cache) == []


def test_a_full_disk_loses_the_store_alone(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference keeps its PPL, and the table shows the reason.

    When there is space again, the store is made.
    """
    keep = storage.keep
    windows = list[str]()

    def full(folder: Path, what: str, pieces: Any) -> Path:
        if what.startswith("row."):
            windows.append(what)
            # The third window of three does not fit.
            if len(windows) > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        return keep(folder, what, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "keep", full)
        ran = measured(UNIFORM)
    assert ran.status == 1, ran.err
    assert column(ran, "error") == [None, None]
    assert all(column(ran, "ppl"))
    assert ran.models["uniform"]["kld"] is None
    (note,) = ran.models["ref"]["notes"]
    assert str(own_cache / "references") in note
    assert re.search(
        r"No space left on device; it takes about [\d.]+ [kM]B, and [\d.]+ \w+ are free", note
    )
    assert left_behind(own_cache) == []
    again = measured(UNIFORM)
    assert (again.status, again.loaded) == (0, ["ref", "uniform"])
    assert again.tokens("ref") == ran.tokens("ref")


def test_what_cannot_be_forgotten_ends_the_run(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured(UNIFORM).status == 0
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "unwritable", "it may only be read")
        assert_refused(measured(UNIFORM, "-cc"), "--cache-dir: ")
    monkeypatch.setattr(storage, "delete", lambda files: None)
    assert_refused(measured(UNIFORM, "-cc"), "cannot be deleted")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_recording_goes_on_in_the_next_run(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The two recorded windows of logits are kept; the next run completes the store."""
    n_recorded: list[int] = []
    pieces = FakeEngine.pieces

    def interrupted(self: FakeEngine, window: Any) -> Iterator[torch.Tensor]:
        if window.index == 2:
            (building,) = left_behind(own_cache)
            n_recorded.append(len(list((own_cache / "references" / building).glob("row.*"))))
            raise error
        return pieces(self, window)

    monkeypatch.setattr(FakeEngine, "pieces", interrupted)
    ran = measured(UNIFORM)
    assert n_recorded[0] == 2
    assert ran.status == (130 if error is KeyboardInterrupt else 2)
    assert len(left_behind(own_cache)) == 1
    assert list((own_cache / "scores").glob("*/record.*.json")) == []
    monkeypatch.setattr(FakeEngine, "pieces", pieces)
    scored_windows = windows_asked(monkeypatch)
    again = measured(UNIFORM)
    # Window 2 of the reference; then all three of the model, which had not begun.
    assert scored_windows == [2, *range(3)]
    assert again.status == 0, again.err
    assert again.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)
    assert [name for name in left_behind(own_cache) if name.startswith(".")] == []


def test_an_interrupted_recording_at_a_path_is_no_store_and_in_nobodys_way(
    measured: Compare, tmp_path: Path
) -> None:
    """A different reference (here with other engine options) replaces an unfinished recording."""
    path = tmp_path / "kept"
    assert (
        measured([fake("ref", boost=3.0, fail=2, reference=True), UNIFORM[1]], "-lf", path).status
        == 1
    )
    assert len(list(path.glob("row.*"))) == 2
    assert_refused(measured(UNIFORM[1:], "-lf", path), f"{path}: holds no reference")
    complete = measured(UNIFORM, "-lf", path)
    assert complete.status == 0, complete.err
    assert complete.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)
    assert not (path / "unfinished.json").exists()


@pytest.mark.parametrize("where", ["cache", "path"])
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
@pytest.mark.parametrize("what", ["row", "head"])
def test_a_damaged_store_is_found_before_a_model_loads(
    measured: Compare,
    own_cache: Path,
    pair: Models,
    noisy_stub: Path,
    tmp_path: Path,
    where: str,
    damage: str,
    what: str,
) -> None:
    """The store is in the cache, or at a path where another run made it.

    The reference must be scored again too.
    """
    flags: list[object] = []
    if where == "path":
        flags = ["-lf", tmp_path / "kept"]
    # A row that is not in the cache needs the store.
    new = stub(noisy_stub, "new", dtype="bfloat16")
    assert measured(pair, *flags).status == 0
    folder = tmp_path / "kept"
    if where == "cache":
        folder = store_of(own_cache)
    file = sorted(folder.glob(f"{what}.*"))[0]
    if damage == "flipped":
        data = bytearray(file.read_bytes())
        # In the middle are numbers: only the checksum can notice the change.
        data[len(data) // 2] ^= 16
        file.write_bytes(data)
        message = f"{file}: damaged"
    else:
        file.unlink()
        message = f"{file}: missing from the reference"
    assert_refused(measured([*pair, new], *flags), message)
    if where == "path":
        assert_refused(measured(pair, *flags, "--cache-dir", tmp_path / "other"), message)
        assert_refused(measured([new], *flags), message)


OTHER_WINDOWS: dict[str, dict[str, Any]] = {
    "text": {"path": "other.txt"},
    "length": {"eval_len": 50},
    "stride": {"eval_stride": 60},
    "warm-up": {"warmup_tokens": 1},
}


@pytest.mark.parametrize("change", OTHER_WINDOWS.values(), ids=OTHER_WINDOWS)
def test_a_store_of_other_windows(
    measured: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """The store grows by the windows of the run.

    Without the reference's model, it is refused if it lacks some.
    """
    (tmp_path / "other.txt").write_text("hgfedcba\n" * 100)
    path = tmp_path / "kept"
    first = measured(UNIFORM, "-lf", path)
    assert first.status == 0, first.err
    before = {file.name: file.read_bytes() for file in path.glob("row.*")}
    old = Reader(path).windows.keys()
    # ``-cc`` must not empty a store that this run cannot record again.
    for flags in ([], ["-cc"]):
        refused = measured(UNIFORM[1:], "-lf", path, *flags, **change)
        assert_refused(refused, f"{path}: ", "of the run's 3 windows")
    assert Reader(path).windows.keys() == old
    asked = digests_asked(monkeypatch)
    grown = measured(UNIFORM, "-lf", path, **change)
    assert grown.status == 0, grown.err
    recorded = {digest for label, digest in asked if label == "ref"}
    assert recorded
    assert not recorded & old
    assert Reader(path).windows.keys() == old | recorded
    Reader(path).verify()
    assert before.items() <= {file.name: file.read_bytes() for file in path.glob("row.*")}.items()
    asked.clear()
    assert measured(UNIFORM, "-lf", path).tokens("uniform") == first.tokens("uniform")
    assert measured(UNIFORM[1:], "-lf", path, **change).tokens("uniform") == grown.tokens("uniform")
    assert asked == []
    # Only the windows of this run are forgotten.
    cleared = measured(UNIFORM, "-lf", path, "-cc", **change)
    assert cleared.status == 0, cleared.err
    assert Reader(path).windows.keys() == old | recorded


def swapped(folder: Path, target: Path) -> Path:
    """Copy a model, and exchange "a" and "b" in its tokenizer."""
    swap_letters(shutil.copytree(folder, target))
    return target


@pytest.mark.parametrize("letters", ["abcd", "wxyz"])
def test_a_store_of_another_tokenizer(
    measured: Compare, stub_model: Path, tmp_path: Path, letters: str
) -> None:
    """The store is refused even if the text does not contain the exchanged tokens.

    The windows are then equal.
    """
    text = tmp_path / "text.txt"
    path = tmp_path / "kept"
    text.write_text(letters * 100)
    assert measured(UNIFORM, "-lf", path, path=str(text)).status == 0
    other = swapped(stub_model, tmp_path / "swapped")
    for specs in (UNIFORM, UNIFORM[1:]):
        ran = measured(specs, "-lf", path, path=str(text), tokenizer_dir=str(other))
        assert_refused(ran, f"{path}: the reference was made with another tokenizer")


def test_a_store_of_another_model(
    measured: Compare, pair: Models, noisy_stub: Path, tmp_path: Path
) -> None:
    path = tmp_path / "kept"
    assert measured(pair, "-lf", path).status == 0
    for other, how in (
        (stub(noisy_stub, "ref", reference=True), "by another model"),
        (
            {**pair[0], "engine": {**pair[0]["engine"], "dtype": "bfloat16"}},
            "with other engine options",
        ),
        (fake("ref", vocab_size=TOY_VOCAB, reference=True), "by another"),
    ):
        assert_refused(
            measured([other, pair[1]], "-lf", path), f"{path}: the reference was made {how}"
        )


def test_a_model_with_another_tokenizer(
    measured: Compare, stub_model: Path, tmp_path: Path
) -> None:
    """Tokenizers are compared by content: another formatting of the same tokenizer is accepted."""
    other = swapped(stub_model, tmp_path / "swapped")
    ran = measured([stub(stub_model, "ref", reference=True), stub(other, "bad")])
    assert_refused(
        ran, "bad: tokenizer_dir: is not this model's tokenizer: token 64 is 'b' in ", str(other)
    )
    same = Path(shutil.copytree(stub_model, tmp_path / "same"))
    content = json.loads((same / "tokenizer.json").read_text())
    (same / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert (same / "tokenizer.json").read_bytes() != (stub_model / "tokenizer.json").read_bytes()
    vocabulary.vocabulary_of_folder.cache_clear()
    ran = measured([stub(stub_model, "ref", reference=True), stub(same, "same")])
    assert ran.status == 0, ran.err
    assert abs(ran.models["same"]["kld"]) <= rounding_of_rows()


@pytest.mark.parametrize("kind", ["nothing", "a file", "a folder"])
def test_a_path_that_holds_something_else(measured: Compare, tmp_path: Path, kind: str) -> None:
    """The other content is neither read nor replaced."""
    path = tmp_path / "something"
    if kind == "a folder":
        path.mkdir()
        (path / "mine").write_text("")
    elif kind == "a file":
        path.write_bytes(b"no store")
    before = path.is_file() and path.read_bytes()
    assert_refused(measured(UNIFORM[1:], "-lf", path), f"{path}: holds ")
    if kind == "nothing":
        return
    assert_refused(
        measured(UNIFORM, "-lf", path), "--logits_file", f"{path}: holds no store of this compare_q"
    )
    assert path.is_dir() if kind == "a folder" else path.read_bytes() == before
