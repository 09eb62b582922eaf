"""A small engine with a head, to test references without Transformers: ``load_fn: "stub"``.

Its model is a folder with an embedding [V, H], a head [V, H] (``model.safetensors``, float32) and
the toy tokenizer.  A state is the tanh of the mean of all embeddings up to its token; the logits
are the product of states and head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from compare_q.backends.base import Capabilities, ModelFacts, ModelFiles, PlannedModel, Window
from compare_q.backends.common.engine_options import EngineOptions
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference.head import Head
from tests.support.toy import TOY_VOCAB, rounds_by_place, save_toy_tokenizer

LOCATION = f"{__name__}:StubEngine"
"""The engine's entry in ``backends.ENGINES``."""
HIDDEN = 16


class StubOptions(EngineOptions, strict=True):
    """The stub's ``engine`` object."""

    dtype: Literal["float32", "bfloat16"] = "float32"


def save_stub_model(folder: Path, *, noise: float = 0.0, vocab_size: int = TOY_VOCAB) -> Path:
    """Write a model with fixed weights plus ``noise``.

    The head may have entries beyond the toy tokenizer's.
    """
    # The order of the draws decides the weights.
    generator = torch.Generator().manual_seed(0)
    embedding = 2 * torch.randn(TOY_VOCAB, HIDDEN, generator=generator)
    head = 2 * torch.randn(TOY_VOCAB, HIDDEN, generator=generator)
    more_entries = torch.randn(TOY_VOCAB, HIDDEN, generator=generator)
    head = torch.cat((head, more_entries))[:vocab_size]
    embedding = embedding + noise * torch.randn(embedding.shape, generator=generator)
    head = head + noise * torch.randn(head.shape, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"embedding": embedding, "head": head}, folder / "model.safetensors")
    save_toy_tokenizer(folder)
    return folder


def states_and_head(
    folder: Path, token_ids: Sequence[int], dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (states [L, H], head [V, H]) in a dtype."""
    weights = load_file(folder / "model.safetensors")
    ids = torch.tensor([int(token) for token in token_ids])
    embedded = weights["embedding"][ids]
    means = embedded.cumsum(0) / torch.arange(1, len(embedded) + 1)[:, None]
    torch_dtype = getattr(torch, dtype)
    return means.tanh().to(torch_dtype), weights["head"].to(torch_dtype)


def stub_logits(folder: Path, token_ids: Sequence[int], dtype: str = "float32") -> torch.Tensor:
    """Logits [L, V] of one window."""
    states, head = states_and_head(folder, token_ids, dtype)
    return states @ head.T


def rounding_of_rows() -> float:
    """Return a bound of the KLD of the stub from itself in float32."""
    if rounds_by_place(100, HIDDEN, TOY_VOCAB, torch.float32):
        # With AVX2 it is up to 1e-10.
        return 1e-9
    return 0.0


class StubFiles(ModelFiles):
    """The stub's folder."""

    def facts(self) -> ModelFacts:
        head = load_file(Path(self.planned.model_dir) / "model.safetensors")["head"]
        return ModelFacts(vocab_size=len(head), tokenizer=Path(self.planned.model_dir))

    def stamp(self) -> str:
        weights = (Path(self.planned.model_dir) / "model.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest()


class StubEngine(LogitsEngine):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("stub",),
        fwd_fn="stub",
        packages=(),
        install="nothing to install",
        summary="for tests",
    )
    files = StubFiles
    options_type = StubOptions

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.dtype = self.options.dtype
        self.folder = Path(model.model_dir)
        self.last = torch.empty(0)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}

    def load(self) -> None:
        """Do nothing: the weights are read for each window."""

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        self.last, head = states_and_head(self.folder, window.token_ids.tolist(), self.dtype)
        yield self.last @ head.T

    def head(self) -> Any:
        weight = states_and_head(self.folder, [0], self.dtype)[1]
        return weight, None, Head(len(weight), self.dtype)

    def states(self) -> torch.Tensor:
        return self.last
