"""The stand-in server, one per test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from compare_q.backends.vllm_server import client
from tests.support.vllm_server import Stub


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    server = Stub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
