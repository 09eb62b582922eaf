"""The common part of ExLlamaV2 and ExLlamaV3: loading on NVIDIA GPUs, prefill, checks of folders."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from compare_q.backends.base import PlannedModel, Window
from compare_q.backends.checkpoint import files as checkpoint
from compare_q.backends.checkpoint.config import ROPE, CheckpointConfig, has_longrope, rope
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.messages import dtype_name, one_line
from compare_q.backends.common.options import EngineOptions
from compare_q.backends.common.packages import computing
from compare_q.backends.hub import local_folder
from compare_q.backends.layers.groups import WITHOUT_CACHE
from compare_q.backends.logits_engine import LogitsEngine

if TYPE_CHECKING:
    import torch

OUTPUT_FACTOR = 4
"""Float16 logits of windows that the split leaves memory for: the logits, and 2.5 times as much to process them."""
NOT_GPUS = {"max_seq_len", "cache_mode"}
"""Options that do not select GPUs."""


class ExLlamaOptions(EngineOptions):
    """The ``engine`` object; ``max_seq_len`` selects longrope factors."""

    max_seq_len: int | None = Field(None, gt=0)


class ExLlamaEngine(LogitsEngine):
    """One model in the package that has the name of its load_fn.

    ``methods``: quantization methods that it reads; ``settings``: prefix of its environment variables.
    """

    files = HuggingFaceFolder
    methods: ClassVar[tuple[str, ...]]
    settings: ClassVar[str]
    dtype = ""

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        longest = cls(model).options.max_seq_len
        if longest is not None and longest < model.max_tokens:
            raise InputError(f"engine.max_seq_len: {longest} is too short for windows of {model.max_tokens} tokens")
        folder = expanded(model.model_dir)
        if folder.is_dir():
            cls.check_folder(folder, CheckpointConfig.read(folder), model)

    @classmethod
    def check_folder(cls, folder: Path, config: CheckpointConfig, model: PlannedModel) -> None:
        """InputError for a local folder with a format, length or files that the engine would load wrong."""
        method = config.quantization.get("quant_method")
        others = [file for file in checkpoint.strays(folder) if file not in model.override_tensors]
        if stray := [file for file in others if not file.name.startswith("consolidated")]:
            raise InputError(f"model_dir: {stray[0]}: {model.load_fn} would load it as well; move it out of the folder")
        if method is not None and method not in cls.methods:
            raise InputError(
                f"model_dir: {model.load_fn} does not read {method} models; it reads {', '.join(cls.methods)}"
            )
        if model.options.get("max_seq_len") is None and has_longrope(config.raw):
            raise InputError(
                f"engine.max_seq_len: missing; this model's longrope factors depend on it in {model.load_fn}, so set "
                "it to what you serve with"
            )

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        return 0 if model.options.keys() - NOT_GPUS else None

    @classmethod
    def versions(cls) -> dict[str, str]:
        return computing(*cls.capabilities.packages) | machine.variables((cls.settings,))

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        importlib.import_module(cls.capabilities.packages[0])

    def load(self) -> None:
        import torch

        name, decode = self.capabilities.packages[0], self.planned.decode
        if not torch.cuda.is_available():
            raise ModelError(f"{name} needs an NVIDIA GPU; torch sees none")
        folder = local_folder(self.planned.model_dir)
        try:
            self.load_folder(folder)
        except Exception as error:  # any error of the compiler, the loader or CUDA fails this model
            less = '; a smaller "batch" takes less memory' if decode is not None and decode.batch > 1 else ""
            raise ModelError(f"{name} could not load {folder}: {one_line(error)}{less}") from error

    @abstractmethod
    def load_folder(self, folder: Path) -> None:
        """Load the model; may raise any error."""

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        """Yield a whole window at once, because exllama computes all logits of a forward pass."""
        yield self.cut(self.forward(token_ids_of([window])))[0]

    @abstractmethod
    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, L, V or more] of one window's tokens, int64 [1, L], in prefill."""

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [B, n, V] without padding, and note their dtype."""
        self.dtype = dtype_name(logits.dtype)
        return logits[..., : self.model.config.vocab_size]

    def provenance(self) -> dict[str, Any]:
        config = CheckpointConfig.read(local_folder(self.planned.model_dir))
        return {
            "dtype": self.dtype,
            "batch": "one window at a time",
            ROPE: rope(config, self.options.max_seq_len or self.planned.max_tokens),
            **WITHOUT_CACHE,
            "options": self.options.model_dump(exclude_none=True),
        }

    def close(self) -> None:
        if self.model is not None:
            self.model.unload()
        self.model = None


def token_ids_of(windows: Sequence[Window]) -> torch.Tensor:
    """The tokens of windows of one length, int64 [B, L], in CPU memory."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([window.token_ids for window in windows])).long()
