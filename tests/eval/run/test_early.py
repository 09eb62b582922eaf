"""The first model's worker, which is there while the text is tokenized: who gets one, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.common import machine
from backends.common.machine import Gpu
from eval.common import processes
from tests.support.comparisons import Compare, fake
from tests.support.threaded import Told, threaded

GIB = 1 << 30
H200 = [Gpu("0", "NVIDIA H200", "580.1", 143771.0)]
TWO = [fake("a"), fake("b", boost=1.0, reference=True)]


@pytest.fixture
def told(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Workers on a machine with a GPU; the text is tokenized once the reference's worker is prepared, or has died."""
    monkeypatch.setattr(machine, "available_memory", lambda: 20 * GIB)
    told, apart = threaded(monkeypatch, gpus=H200), processes.apart

    def later(*given: Any, **keys: Any) -> Any:
        told.await_that(lambda: ("b", "prepare done") in told.steps or told.fails == {})
        return apart(*given, **keys)

    monkeypatch.setattr(processes, "apart", later)
    told.fails = {("nobody", "waits"): "so that there is something"}
    return told


def test_the_references_engine_is_imported_while_the_text_is_tokenized(measured: Compare, told: Told) -> None:
    ran = measured(TWO)
    assert ran.status == 0, ran.err
    assert told.of("b") == ["prepare", "load", "score"]
    assert told.before(("b", "prepare done"), ("a", "prepare"))
    assert ran.models["b"]["seconds"]["spare"] > 0


def test_a_text_that_is_tokenized_needs_no_early_worker(measured: Compare, told: Told) -> None:
    assert measured(TWO).status == 0
    told.steps.clear()
    assert measured([*TWO, fake("c", boost=2.0)]).status == 0
    assert told.of("b") == []
    told.steps.clear()
    assert measured(TWO, "-cc").status == 0  # forgets the tokens, too
    assert told.of("b") == ["prepare", "load", "score"]


@pytest.mark.parametrize("why", ["no GPU", "off", "memory"])
def test_no_early_worker(measured: Compare, own_cache: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: GIB if why == "memory" else 20 * GIB)
    told = threaded(monkeypatch, gpus=[] if why == "no GPU" else H200, spares=why != "off")
    assert measured(TWO[1:]).status == 0
    assert told.of("b") == ["load", "score"]


def test_an_early_worker_that_dies_is_none(measured: Compare, own_cache: Path, told: Told) -> None:
    told.fails = {("b", "prepare"): "dies"}
    ran = measured(TWO)
    assert ran.status == 0, ran.err
    assert told.of("b") == ["prepare", "load", "score"]
    assert not list(own_cache.glob("runs/*.died"))
    assert ran.models["b"]["seconds"]["spare"] == 0
