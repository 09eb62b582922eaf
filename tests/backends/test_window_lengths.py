"""A window's scores do not depend on how long the longest window of the run is.

Stored scores are found by the window alone.  vLLM is not among these engines: it batches windows,
so that roundings depend on which windows run together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stale_inputs import write_gguf
from compare_q import backends
from compare_q.backends.base import Engine, ScoreRequest, Window
from compare_q.backends.logits_engine import LogitsEngine
from tests.support.fake_engine import FakeEngine
from tests.support.llama_cpp import needs_llama_cpp
from tests.support.toy import planned, save_llama, toy_windows

LONG_CONTEXT = 2048
LENGTHS = (24, 256, 300)
LONGEST = 1200


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model whose context is longer than llama.cpp's batches."""
    return save_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=LONG_CONTEXT)


@pytest.fixture(scope="module")
def long_gguf(long_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(long_model, tmp_path_factory.mktemp("gguf") / "long.gguf")


def scored_together(
    load_fn: str, model: Path | str, options: dict[str, Any], windows: list[Window]
) -> list[tuple[torch.Tensor, bytes]]:
    """Return the logits and log-probabilities of each window in a run of these windows."""
    longest = max(len(window.token_ids) for window in windows)
    plan = planned("toy", load_fn, str(model), longest, options)
    engine_class: type[Engine] = FakeEngine
    if load_fn != "fake":
        engine_class = backends.engine_class(plan.engine)
    engine = engine_class(plan)
    assert isinstance(engine, LogitsEngine)
    engine.load()
    all_scores = list(engine.score(windows, ScoreRequest()))
    results = []
    for window, scores in zip(windows, all_scores, strict=True):
        results.append((engine.logits(window).clone(), scores.logprob.tobytes()))
    engine.close()
    return results


def check(load_fn: str, model: Path | str, options: dict[str, Any]) -> None:
    """Assert that windows have the same logits and scores alone, and after a longer window."""
    (long_window,) = toy_windows(1, LONGEST)
    for length in LENGTHS:
        (window,) = toy_windows(1, length)
        ((logits, scores),) = scored_together(load_fn, model, options, [window])
        second = replace(window, index=1)
        _, (later_logits, later_scores) = scored_together(
            load_fn, model, options, [long_window, second]
        )
        assert torch.equal(logits, later_logits)
        assert scores == later_scores


def test_the_fake_engine() -> None:
    check("fake", "fake", {"noise": "bf16"})


@pytest.mark.engine
@pytest.mark.parametrize(
    "options",
    [{}, {"attn_implementation": "eager"}, {"streaming": True, "streaming_windows": 2}],
    ids=["sdpa", "eager", "streamed"],
)
def test_transformers(long_model: Path, options: dict[str, Any]) -> None:
    check("transformers_auto_bf16", long_model, options)


@pytest.mark.engine
@needs_llama_cpp
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flash_attn": False},
        {"n_batch": 64, "n_ubatch": 32},
        {"type_k": "q8_0", "type_v": "q8_0"},
    ],
    ids=["default", "no flash attention", "small batches", "quantized cache"],
)
def test_llama_cpp(long_gguf: Path, options: dict[str, Any]) -> None:
    """llama.cpp's context, and the limits of its batches, follow the longest window of the run."""
    check("llamacpp", long_gguf, options)
