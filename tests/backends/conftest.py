"""Real vLLMs that the tests of several files share: each is started once, by the first test that
uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compare_q.backends.vllm.vllm_engine import VllmEngine
from tests.support.vllm_engine import engine


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def toy_engine(toy_model: Path, logs: Path) -> Iterator[VllmEngine]:
    """Batches of 64 tokens, so that every window is prefilled in chunks."""
    with engine(toy_model, logs / "toy.log", max_num_batched_tokens=64, max_num_seqs=4) as backend:
        yield backend
