"""The toy model as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stale_inputs import write_gguf


@pytest.fixture(scope="session")
def toy_gguf(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model as a float32 GGUF without a tokenizer."""
    return write_gguf(toy_model, tmp_path_factory.mktemp("gguf") / "toy.gguf")
