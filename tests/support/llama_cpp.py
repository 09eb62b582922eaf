"""llama.cpp for tests: a mark for tests that need it, and the toy model loaded in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.llamacpp import LlamacppEngine
from tests.support.toy import planned

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
# By default, llama.cpp keeps keys and values in float16.
EXACT_OPTIONS = {"type_k": "f32", "type_v": "f32", "flash_attn": False}


def runs_llama_cpp(test: Any) -> Any:
    """Mark a test that loads a model in llama.cpp."""
    return pytest.mark.engine(needs_llama_cpp(test))


def loaded(
    model: object, log: Path | None = None, tokens: int = 100, **options: Any
) -> LlamacppEngine:
    engine = LlamacppEngine(planned("m", "llamacpp", str(model), tokens, options, log_file=log))
    engine.load()
    return engine
