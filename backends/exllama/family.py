"""What the engines of the ExLlama family share: loading on NVIDIA GPUs, and what they would load as another model."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from compare_q.backends.base import LoadRequest, LogitsEngine
from compare_q.backends.checkpoint import files as checkpoint
from compare_q.backends.checkpoint.config import CheckpointConfig, has_longrope
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.options import EngineOptions
from compare_q.backends.common.packages import computing
from compare_q.backends.hub import local_folder
from compare_q.backends.layers.groups import NO_CACHE

OUTPUT_FACTOR = 4
"""Windows of float16 logits that the split leaves room for: the logits, and 2.5 times as much to keep them."""


class ExLlamaOptions(EngineOptions):
    """The ``engine`` object: how the model is split, and the length that longrope factors depend on."""

    max_seq_len: int | None = Field(None, gt=0)


class ExLlamaEngine(LogitsEngine):
    """One model, whose package has the name of its load_fn; all its options but ``max_seq_len`` name GPUs, by their
    places among all.

    ``methods``: the quantization methods that it reads; ``settings``: what the names of its variables begin with;
    ``cache``: keys and values, in decode only.
    """

    files = HuggingFaceFolder
    methods: ClassVar[tuple[str, ...]]
    settings: ClassVar[str]
    dtype = ""
    cache: Any = None

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        longest = cls(request).options.max_seq_len
        if longest is not None and longest < request.max_tokens:
            raise InputError(f"engine.max_seq_len: {longest} is too short for windows of {request.max_tokens} tokens")
        folder = expanded(request.model_dir)
        if folder.is_dir():
            cls.check_folder(folder, CheckpointConfig.read(folder), request)

    @classmethod
    def check_folder(cls, folder: Path, config: CheckpointConfig, request: LoadRequest) -> None:
        """InputError if a local model has a format, a length or files that the engine would get wrong."""
        method = config.quantization.get("quant_method")
        others = [file for file in checkpoint.strays(folder) if file not in request.override_tensors]
        if stray := [file for file in others if not file.name.startswith("consolidated")]:
            raise InputError(
                f"model_dir: {stray[0]}: {request.load_fn} would load it as well; move it out of the folder"
            )
        if method is not None and method not in cls.methods:
            raise InputError(
                f"model_dir: {request.load_fn} does not read {method} models; it reads {', '.join(cls.methods)}"
            )
        if request.options.get("max_seq_len") is None and has_longrope(config.raw):
            raise InputError(
                f"engine.max_seq_len: missing; this model's longrope factors depend on it in {request.load_fn}, so set "
                "it to what you serve with"
            )

    @classmethod
    def gpus(cls, request: LoadRequest) -> int | None:
        return 0 if request.options.keys() - {"max_seq_len"} else None

    @classmethod
    def versions(cls) -> dict[str, str]:
        return computing(*cls.capabilities.packages) | machine.variables((cls.settings,))

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        importlib.import_module(cls.capabilities.packages[0])

    def load(self) -> None:
        import torch

        name = self.capabilities.packages[0]
        if not torch.cuda.is_available():
            raise ModelError(f"{name} needs an NVIDIA GPU; torch sees none")
        folder = local_folder(self.request.model_dir)
        try:
            self.load_folder(folder)
        except Exception as error:  # whatever the compiler, the loader or CUDA raises: one model's failure
            raise ModelError(f"{name} could not load {folder}: {one_line(error)}") from error

    @abstractmethod
    def load_folder(self, folder: Path) -> None:
        """Load the model; whatever the engine raises."""

    def provenance(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "batch": "one window at a time",
            **({NO_CACHE: "windows are scored whole, without one"} if self.cache is None else {"kv_cache": "float16"}),
            "options": self.options.model_dump(exclude_none=True),
        }

    def close(self) -> None:
        if self.model is not None:
            self.model.unload()
        self.model = self.cache = None
