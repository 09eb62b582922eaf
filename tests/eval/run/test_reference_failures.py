"""References that fail: the other models keep their perplexities, and what was recorded is used by the next run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.comparisons import KLD, Compare, Measured, fake, left_behind, store_of, toy
from tests.support.fake_engine import FakeEngine
from tests.support.toy import assert_refused, needs_accelerate


def assert_no_divergence(ran: Measured, label: str, reason: str) -> None:
    """A failed reference: status 1, the reason at its row, PPL and a note for the other."""
    assert ran.status == 1, ran.out + ran.err
    failed = next(model for model in ran.results["models"] if model["reference"])
    assert reason in failed["error"]
    model = ran.models[label]
    assert (model["kld"], model["same_top"], model["error"]) == (None, None, None)
    assert model["ppl"] == pytest.approx(500.0, rel=1e-5)
    assert f"{label}: no KLD: the reference failed" in ran.out
    assert ran.results["reference"] is None


def test_a_failing_reference_leaves_perplexities(measured: Compare, own_cache: Path) -> None:
    ran = measured([fake("uniform"), fake("ref", boost=3.0, fail=0, reference=True)])
    assert_no_divergence(ran, "uniform", "told to fail after 0 windows")
    assert left_behind(own_cache) == []


def damaged(folder: Path, target: Path) -> Path:
    """A copy of a model whose weights are no safetensors file."""
    shutil.copytree(folder, target)
    (target / "model.safetensors").write_bytes(b"no safetensors file at all")
    return target


@needs_accelerate
def test_a_reference_with_damaged_weights_leaves_perplexities(
    measured: Compare, toy_model: Path, tmp_path: Path
) -> None:
    broken = damaged(toy_model, tmp_path / "broken")
    ran = measured([toy(broken, "ref", reference=True), fake("uniform")])
    assert_no_divergence(ran, "uniform", "model.safetensors: not a readable safetensors file")


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("broken"), "RuntimeError: broken"), (MemoryError(), "out of memory")]
)
def test_a_reference_that_fails_the_second_time(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """Its scores are in the cache and its store is gone; what needs the store has no divergence, and PPL."""
    models = [fake("ref", boost=3.0, reference=True), fake("old", boost=1.0)]
    measured(models)
    shutil.rmtree(store_of(own_cache))

    def fail(self: FakeEngine) -> None:
        if self.options.boost == 3.0:
            raise error

    monkeypatch.setattr(FakeEngine, "load", fail)
    ran = measured([*models, fake("uniform")])
    assert_no_divergence(ran, "uniform", reason)
    assert left_behind(own_cache) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_recording_goes_on_in_the_next_run(
    measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Two windows of logits were recorded, and stay; then the store is whole."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    made: list[list[str]] = []
    asked: list[int] = []
    pieces = FakeEngine.pieces

    def interrupted(self: FakeEngine, window: Any) -> Iterator[torch.Tensor]:
        if window.index == 2:
            (building,) = left_behind(own_cache)
            made.append(sorted(file.name[:10] for file in (own_cache / "references" / building).glob("row.*")))
            raise error
        return pieces(self, window)

    def counted(self: FakeEngine, window: Any) -> Iterator[torch.Tensor]:
        asked.append(window.index)
        return pieces(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "pieces", interrupted)
        ran = measured(models)
    assert made[0] == ["row.000000", "row.000001"]
    assert ran.status == (130 if error is KeyboardInterrupt else 2)
    assert len(left_behind(own_cache)) == 1
    assert list((own_cache / "scores").glob("*/record.*.json")) == []
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "pieces", counted)
        again = measured(models)
    assert asked == [2, *range(3)]
    assert again.status == 0, again.err
    assert again.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)
    assert [name for name in left_behind(own_cache) if name.startswith(".")] == []


def test_an_interrupted_recording_at_a_path_is_no_store_and_in_nobodys_way(measured: Compare, tmp_path: Path) -> None:
    """Another reference (here: of other engine options) takes the place of what is not finished."""
    path, models = tmp_path / "kept", [fake("ref", boost=3.0, reference=True), fake("uniform")]
    broken = [fake("ref", boost=3.0, fail=2, reference=True), models[1]]
    assert measured(broken, "-lf", path).status == 1
    assert len(list(path.glob("row.*"))) == 2
    assert_refused(measured(models[1:], "-lf", path), f"{path}: holds no reference")
    whole = measured(models, "-lf", path)
    assert whole.status == 0, whole.err
    assert whole.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)
    assert not (path / "unfinished.json").exists()
