"""llama.cpp for tests: where it is needed, and the toy model loaded in it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from compare_q.backends.base import Decode, PlannedModel
from compare_q.backends.llamacpp import LlamacppEngine
from tests.support.toy import planned

Test = TypeVar("Test", bound=Callable[..., Any])

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": False}


def runs_llama_cpp(test: Test) -> Test:
    """Mark a test that loads a model in llama.cpp."""
    return pytest.mark.engine(needs_llama_cpp(test))


def request_for(model: object, log: Path | None = None, tokens: int = 100, **options: Any) -> PlannedModel:
    return planned("m", "llamacpp", str(model), tokens, options, log_file=log)


def loaded(*arguments: Any, decode: Decode | None = None, **options: Any) -> LlamacppEngine:
    engine = LlamacppEngine(request_for(*arguments, **options).updated(decode=decode))
    engine.load()
    return engine
