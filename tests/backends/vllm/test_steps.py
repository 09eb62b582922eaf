"""Decode in vLLM: its steps and graphs, and a real vLLM that decodes what it prefills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Decode
from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm.decode_steps import Steps
from compare_q.backends.vllm.hooks import RequestRows
from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.toy import ATOL_LOGPROB, toy_windows
from tests.support.vllm_engine import WINDOWS, against, assert_exact, engine, scores_of


def request(start: int, n_rows: int, length: int = 10, window: int = 7) -> RequestRows:
    return RequestRows([window, [(1, length)]], start, 0, n_rows, length, None)


def test_steps_are_counted_by_hand() -> None:
    """Two windows of ten tokens and one of three, with four tokens per step: 4, 4, 2 and 3."""
    graph: Any = SimpleNamespace(last="NONE")
    steps = Steps(4, graph)
    assert steps.count([request(0, 4), request(0, 4), request(0, 3, 3)]) == ""
    graph.last = "FULL"
    assert steps.count([request(4, 4), request(4, 4)]) == steps.count([request(8, 2)]) == ""
    assert steps.report() == {
        "tokens_a_step": {"2": 1, "3": 1, "4": 4},
        "windows_a_step": 3,
        "graphs": {"FULL": 2, "NONE": 1},
    }


# The whole window, too few tokens, the rest at once, one of the last two, between two steps.
@pytest.mark.parametrize(("start", "n_rows"), [(0, 10), (0, 3), (4, 6), (8, 1), (2, 4)])
def test_other_steps_are_told(start: int, n_rows: int) -> None:
    graph: Any = SimpleNamespace(last="FULL")
    fault = Steps(4, graph).count([request(0, 4), request(start, n_rows)])
    assert (
        fault
        == f"vLLM computed {n_rows} tokens of window 7 at position {start} in one step, and not 4"
    )


@pytest.fixture(scope="module")
def decoding(toy_model: Path, logs: Path) -> Iterator[VllmEngine]:
    """A vLLM that decodes one token of each of three windows per step."""
    with engine(toy_model, logs / "decode.log", decode=Decode(1, 3)) as backend:
        yield backend


@pytest.mark.engine
def test_decode_scores_what_prefill_does(
    decoding: VllmEngine, toy_store: Path, toy_logits: Any
) -> None:
    """In float32, so that batches differ little by rounding.

    Every token of the six windows is a separate step.
    """
    scores = scores_of(decoding, WINDOWS, against(toy_store))
    for window in WINDOWS:
        assert_exact(scores[window.index], toy_logits(window), window, ATOL_LOGPROB)
        assert np.abs(scores[window.index].kld).max() < 1e-5
    provenance = decoding.provenance()
    steps = provenance["scorer"]["steps"]
    assert steps["tokens_a_step"] == {"1": sum(len(window.token_ids) for window in WINDOWS)}
    assert steps["windows_a_step"] == 3
    # A step has at most one token of each of three windows.
    assert sum(steps["graphs"].values()) >= steps["tokens_a_step"]["1"] / 3
    assert provenance["batch"] == "3 windows at a time"
    assert provenance["scorer"]["decode_difference"] <= 0.001
    assert not any("decode" in note for note in provenance["notes"])
    assert {cache["prefill"] for cache in provenance["kv_cache_layers"]} == {""}


@pytest.mark.engine
def test_a_window_that_is_alone_is_decoded_too(decoding: VllmEngine) -> None:
    """vLLM 0.32 would compute all tokens of such a window in one step.

    The engine can then score more windows.
    """
    for window in (WINDOWS[0], replace(WINDOWS[1], index=0)):
        scores_of(decoding, [window])
        assert decoding.provenance()["scorer"]["steps"]["tokens_a_step"] == {
            "1": len(window.token_ids)
        }
    assert not decoding.llm.llm_engine.has_unfinished_requests()


@pytest.mark.engine
def test_steps_of_another_size_stop_the_model(
    decoding: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "route", decoding.probe.result(WINDOWS))
    monkeypatch.setattr(decoding.driver, "step", 2)
    with pytest.raises(
        ModelError,
        match=r"vLLM computed 1 tokens of window \d at position \d in one step, and not 2",
    ):
        scores_of(decoding, WINDOWS)


@pytest.mark.engine
def test_a_bug_of_decode_is_refused_in_decode_alone(
    decoding: VllmEngine,
    toy_engine: VllmEngine,
    toy_store: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of at most three tokens lose half of V.

    A decode kernel did so (turboquant_plus, issue 99).
    """

    def halved(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *others = arguments
        if len(value) <= 3:
            value = value.clone()
            value[..., value.shape[-1] // 2 :] = 0
        return (query, key, value, *others)

    windows = toy_windows(4, 100)
    hooks = []
    for backend in (toy_engine, decoding):
        (model,) = backend.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        hooks += [
            layer.self_attn.attn.register_forward_pre_hook(halved) for layer in model.model.layers
        ]
    for backend in (toy_engine, decoding):
        monkeypatch.setattr(backend, "route", None)  # probe them again
    in_prefill = scores_of(toy_engine, windows, against(toy_store)).values()
    assert max(scores.kld.max() for scores in in_prefill if scores.kld is not None) < 1e-5
    with pytest.raises(ModelError, match="decode"):
        scores_of(decoding, windows)
    for hook in hooks:
        hook.remove()
