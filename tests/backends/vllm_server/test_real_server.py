"""A real ``vllm serve`` of the toy model: its scores equal those of vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import ScoreRequest
from compare_q.backends.vllm.vllm_engine import VllmEngine
from compare_q.backends.vllm_server.server_engine import VllmServerEngine
from tests.support.real_server import running
from tests.support.toy import GPU, TOY_CONTEXT, toy_windows
from tests.support.vllm_server import request_for, scores_of

# Same kernels, other batches; vLLM's log_softmax on a CPU is off by up to 1.7e-5.
ATOL_REAL = 1e-3 if GPU else 5e-5


@pytest.fixture(scope="module")
def real_server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(toy_model, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.mark.engine
def test_real_server_against_vllm_in_this_process(real_server: str, toy_engine: VllmEngine) -> None:
    windows = toy_windows(6, TOY_CONTEXT - 1, 3)
    request = request_for(real_server, TOY_CONTEXT - 1, concurrency=4)
    VllmServerEngine.check(request)
    backend = VllmServerEngine(request)
    backend.load()
    served = scores_of(backend, windows)
    assert served.keys() == set(range(6))
    for scores in served.values():
        assert len(scores.logprob) == TOY_CONTEXT - 4
    again = scores_of(backend, windows[:1])  # a cached prefix must not shorten the answer
    np.testing.assert_allclose(again[0].logprob, served[0].logprob, atol=ATOL_REAL)

    for scores in toy_engine.score(windows, ScoreRequest()):
        np.testing.assert_allclose(
            served[scores.window].logprob, scores.logprob, atol=ATOL_REAL, rtol=0
        )
