"""Short construction of the models that engines get."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_q import backends
from compare_q.backends.base import PlannedModel


def planned(
    label: str, load_fn: str, model_dir: str, max_tokens: int, options: Mapping[str, Any] | None = None,
    override_tensors: tuple[Path, ...] = (), **more: Any,
) -> PlannedModel:  # fmt: skip
    """A model whose engine is the one that has this ``load_fn``."""
    having = (name for name, engine in backends.engines() if load_fn in engine.capabilities.load_fns)
    return PlannedModel(
        label=label, engine=next(having, load_fn), load_fn=load_fn, model_dir=model_dir, max_tokens=max_tokens,
        options=dict(options or {}), override_tensors=override_tensors, **more,
    )  # fmt: skip
