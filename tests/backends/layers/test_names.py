"""Which layers are fused, and that the list has what the installed vLLM fuses."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from compare_q.backends.layers.names import FUSED

NOT_LANGUAGE = {("fc1", "fc3"), ("q", "k", "v"), ("gate_proj", "dense_h_to_4h"), ("q_conv1d", "k_conv1d", "v_conv1d")}
"""Layers of vision towers, and convolutions."""
MAPPING = re.compile(r"\bpacked_modules_mapping = (\{[^{}]*\})")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_the_installed_vllm_fuses_is_known() -> None:
    """Its models say so in literals, read here without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None  # noqa: PT018
    fused = {
        tuple(name.split(".")[-1] for name in ast.literal_eval(members))
        for file in (Path(spec.origin).parent / "model_executor" / "models").rglob("*.py")
        for literal in MAPPING.findall(file.read_text(encoding="utf-8"))
        for members in getattr(ast.parse(literal, mode="eval").body, "values", ())
        if isinstance(members, ast.List) and len(members.elts) > 1
    }
    assert ("q_proj", "k_proj", "v_proj") in fused
    known = [set(group) for group in FUSED]
    assert [group for group in fused - NOT_LANGUAGE if not any(len(set(group) & names) > 1 for names in known)] == []
