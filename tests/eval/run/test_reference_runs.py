"""Which models a run with a reference loads, and where the reference's store lies."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from compare_q.backends.reference.store import MANIFEST, Reader
from tests.support.comparisons import KLD, N_WINDOWS, Compare, Models, cut_divergence, fake, left_behind, store_of
from tests.support.fake_engine import FakeEngine
from tests.support.stores import window_of
from tests.support.toy import assert_refused


def test_the_reference_runs_first_and_the_table_keeps_the_order(measured: Compare) -> None:
    models = [fake("one", vocab_size=501), fake("two", boost=1.0), fake("ref", boost=3.0, reference=True), fake("four")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    assert ran.loaded == ["ref", "one", "two", "four"]
    assert list(ran.models) == ["one", "two", "ref", "four"]
    assert re.findall(r"^ (one|two|ref|four) ", ran.out, re.MULTILINE) == ["one", "two", "ref", "four"]
    assert [model["reference"] for model in ran.results["models"]] == [False, False, True, False]
    assert ran.results["reference"]["label"] == "ref"


def test_a_second_run_does_not_open_the_store(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All from the cache, the store there or not; a model more, and the reference is measured again for its store."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    first = measured(models)
    store = store_of(own_cache)
    before = (store / MANIFEST).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "verify", lambda *_: pytest.fail("verified"))
        patch.setattr(Reader, "window", lambda *_: pytest.fail("read"))
        patch.setattr(FakeEngine, "load", lambda self: pytest.fail("loaded"))
        again = measured(models)
        assert again.status == 0, again.err
        assert all(model["from_cache"] for model in again.results["models"])
        shutil.rmtree(store)
        without = measured(models)
    assert without.status == 0, without.err
    assert without.models["uniform"]["kld"] == first.models["uniform"]["kld"]
    assert without.results["reference"]["label"] == "ref"
    assert "contents" not in without.results["reference"]
    assert not store.exists()
    more = measured([*models, fake("boosted", boost=1.0)])
    assert more.status == 0, more.err
    assert more.loaded == ["ref", "boosted"]
    assert store_of(own_cache) == store
    assert (store / MANIFEST).read_bytes() == before
    assert [model["from_cache"] for model in more.results["models"]] == [False, True, False]
    assert more.models["boosted"]["kld"] > 0


def test_divergences_of_another_reference_are_other_scores(measured: Compare) -> None:
    first = measured([fake("ref", boost=3.0, reference=True), fake("uniform")])
    second = measured([fake("ref", boost=2.0, reference=True), fake("uniform")])
    alone = measured([fake("uniform")])
    assert second.loaded == ["ref", "uniform"]
    assert second.models["uniform"]["kld"] == pytest.approx(cut_divergence(2.0, 500), abs=1e-5)
    assert second.models["uniform"]["kld"] != first.models["uniform"]["kld"]
    assert alone.models["uniform"]["kld"] is None
    assert alone.results["reference"] is None
    renamed = measured([fake("other name", boost=3.0, reference=True), fake("uniform")])
    assert renamed.loaded == []
    assert renamed.models["uniform"]["kld"] == first.models["uniform"]["kld"]


def test_out_logits_names_the_folder_of_the_store(measured: Compare, own_cache: Path, tmp_path: Path) -> None:
    """Stores of two texts lie beside each other there, under their keys."""
    models = [fake("ref", boost=3.0, out_logits=str(tmp_path / "deep" / "kept")), fake("uniform")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    assert left_behind(own_cache) == []
    (store,) = (tmp_path / "deep" / "kept").iterdir()
    assert Reader(store).n_windows == N_WINDOWS
    assert store.name == ran.results["reference"]["key"]
    assert str(store) in ran.err
    assert measured(models, eval_len=50).loaded == ["ref", "uniform"]
    assert len(list((tmp_path / "deep" / "kept").iterdir())) == 2


def test_a_store_at_a_path_is_made_once_and_then_enough(measured: Compare, pair: Models, tmp_path: Path) -> None:
    """A second run, with another cache, needs neither the reference nor its model."""
    path = tmp_path / "deep" / "bf16.reference"
    first = measured(pair, "-lf", path)
    assert first.status == 0, first.err
    assert Reader(path).identity["label"] == "ref"
    assert [entry.name for entry in path.parent.iterdir()] == ["bf16.reference"]
    alone = measured(pair[1:], "-lf", path)
    assert alone.status == 0, alone.err
    assert alone.loaded == []  # a store made here and the same store given are one reference
    fresh = measured(pair[1:], "-lf", path, "--cache-dir", tmp_path / "other", "-kld")
    assert fresh.status == 0, fresh.err
    assert fresh.loaded == ["noisy"]
    assert fresh.tokens("noisy") == first.tokens("noisy")
    assert fresh.results["reference"]["label"] == "ref"
    assert "the most probable tokens of ref (" in fresh.out
    marked = measured(pair, "-lf", path, "--cache-dir", tmp_path / "third")
    assert marked.status == 0, marked.err
    assert "kept as the reference" not in marked.err
    assert marked.tokens("noisy") == first.tokens("noisy")


def test_a_store_at_a_path_is_not_cleared_without_its_model(measured: Compare, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    measured([fake("ref", boost=3.0, reference=True), fake("uniform")], "-lf", path)
    ran = measured([fake("uniform")], "-lf", path, "-cc")
    assert ran.status == 0, ran.err
    assert ran.loaded == ["uniform"]
    assert Reader(path).n_windows == N_WINDOWS


def test_the_mask_keeps_the_reference(measured: Compare) -> None:
    models = [fake("EXL3 4.0"), fake("bf16", boost=3.0, reference=True), fake("AWQ", boost=1.0)]
    ran = measured(models, "-mask", "exl3")
    assert ran.status == 0, ran.err
    assert list(ran.models) == ["EXL3 4.0", "bf16"]
    assert ran.models["EXL3 4.0"]["kld"] == pytest.approx(KLD, abs=1e-6)


def test_the_first_of_two_marked_models_is_the_reference(measured: Compare, tmp_path: Path) -> None:
    ran = measured([fake("a", reference=True), fake("b"), fake("c", out_logits=str(tmp_path))])
    assert (ran.status, ran.results["reference"]["label"]) == (0, "a")
    assert "a is the reference, as the first of 2 that are marked; not: c" in ran.err
    assert [model["reference"] for model in ran.results["models"]] == [True, False, False]
    assert all(model["kld"] is not None for model in ran.results["models"])


def test_clearing_forgets_the_store(measured: Compare, own_cache: Path) -> None:
    """A damaged store is made again, even where nobody looked at it."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    measured(models)
    store = store_of(own_cache)
    window = window_of(store, 1)
    good = window.read_bytes()
    window.write_bytes(b"damaged")
    ran = measured(models, "-cc")
    assert ran.status == 0, ran.err
    assert ran.loaded == ["ref", "uniform"]
    assert window.read_bytes() == good
    assert not any(model["from_cache"] for model in ran.results["models"])
    (store / MANIFEST).write_text("{")
    assert_refused(measured(models), f"{store / MANIFEST}: not a reference store")
    ran = measured(models, "-cc")
    assert ran.status == 0, ran.err
    assert Reader(store).n_windows == N_WINDOWS
