"""A real ``vllm serve`` of the toy model: its scores equal those of vLLM in this process.

Its KL divergence is a bound, or an estimate, of the exact one of vLLM in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from compare_q.backends.base import ScoreRequest, Window
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.vllm.vllm_engine import VllmEngine
from compare_q.backends.vllm_server.client import Connection
from compare_q.backends.vllm_server.server_engine import Sample, VllmServerEngine
from tests.support.real_server import running
from tests.support.sampled import collected
from tests.support.stores import recorded
from tests.support.toy import GPU, TOY_CONTEXT, toy_windows
from tests.support.transformers_models import changed, loaded
from tests.support.vllm_engine import against
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


@pytest.fixture(scope="module")
def reference(
    toy_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransformersEngine]:
    """The toy with another head, in Transformers."""
    head = load_file(toy_model / "model.safetensors")["lm_head.weight"]
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    other_head = (head + 0.1 * head.float().std() * noise).to(head.dtype)
    folder = tmp_path_factory.mktemp("reference") / "toy"
    changed(toy_model, folder, {}, **{"lm_head.weight": other_head})
    engine = loaded(folder, dtype="float32")
    yield engine
    engine.close()


def sampled_windows(reference: TransformersEngine, count: int, n_tokens: int) -> list[Window]:
    """Windows of 8 tokens that the reference has continued."""
    prompts = np.random.default_rng(3).integers(0, 256, (count, 8)).tolist()
    text = collected(reference.sample(prompts, n_tokens, 1), count, n_tokens)
    windows = []
    for index, (token_ids, logprobs) in enumerate(zip(text.token_ids, text.logprobs, strict=True)):
        window = Window(
            index,
            np.array([*prompts[index], *token_ids], np.int32),
            ((8, 8 + n_tokens),),
            sampler_logprobs=np.array(logprobs, np.float32),
        )
        windows.append(window)
    return windows


def server_engine(url: str) -> VllmServerEngine:
    backend = VllmServerEngine(request_for(url, TOY_CONTEXT - 1, concurrency=4))
    backend.load()
    return backend


def exact_klds(engine: VllmEngine, windows: list[Window], store: Path) -> dict[int, np.ndarray]:
    klds = {}
    for scores in engine.score(windows, against(store)):
        assert scores.kld is not None
        klds[scores.window] = scores.kld.astype(np.float64)
    return klds


@pytest.mark.engine
def test_bound_of_a_real_server(
    real_server: str, toy_engine: VllmEngine, reference: TransformersEngine, tmp_path: Path
) -> None:
    windows = toy_windows(6, 120)
    store = recorded(reference, windows, tmp_path)
    exact = exact_klds(toy_engine, windows, store)
    bounds = scores_of(server_engine(real_server), windows, commits=2, reference=store)
    n_bound = n_exact = 0.0
    for scores in toy_engine.score(windows, against(store)):
        served = bounds[scores.window]
        assert served.kld_kind == "bound"
        assert served.kld is not None
        # The exact KLD was computed in float32.
        assert (served.kld <= exact[scores.window] + ATOL_REAL).all()
        np.testing.assert_array_equal(served.same_top, scores.same_top)
        np.testing.assert_array_equal(served.top1, scores.top1)
        n_bound += served.kld.sum()
        n_exact += exact[scores.window].sum()
    assert n_bound > 0.4 * n_exact


@pytest.mark.engine
def test_bound_of_a_real_server_and_itself(
    real_server: str, toy_engine: VllmEngine, tmp_path: Path
) -> None:
    windows = toy_windows(4, 120)
    store = recorded(toy_engine, windows, tmp_path)
    for scores in scores_of(server_engine(real_server), windows, reference=store).values():
        assert scores.kld is not None
        assert scores.same_top is not None
        assert scores.kld.max() < ATOL_REAL
        assert scores.same_top.all()


@pytest.mark.engine
def test_estimate_of_a_real_server(
    real_server: str, toy_engine: VllmEngine, reference: TransformersEngine, tmp_path: Path
) -> None:
    """The mean over 1,600 sampled tokens lies within its error of their exact KLD."""
    windows = sampled_windows(reference, 16, 100)
    store = recorded(reference, windows, tmp_path)
    exact = exact_klds(toy_engine, windows, store)
    estimates = scores_of(server_engine(real_server), windows, commits=6, reference=store)
    differences = []
    for index, scores in estimates.items():
        assert scores.kld_kind == "estimate"
        assert scores.kld is not None
        differences.append(scores.kld - exact[index])
    all_differences = np.concatenate(differences)
    error = all_differences.std(ddof=1) / np.sqrt(len(all_differences))
    mean = np.concatenate(list(exact.values())).mean()
    assert error < 0.1 * mean
    assert abs(all_differences.mean()) < 4 * error


@pytest.mark.engine
def test_a_real_server_names_its_limit(real_server: str) -> None:
    """A sample with more tokens per position than the server allows has as many as it allows."""
    served = server_engine(real_server).served

    async def question(connection: Connection) -> Sample:
        return await served.sample(connection, served.info.served, 30)

    sample = served.connected(question)
    assert sample.top == 20
    assert not sample.no_top
