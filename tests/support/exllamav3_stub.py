"""A stand-in for the part of exllamav3's API that the engine uses, with random float16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.support.toy import TOY_VOCAB

HIDDEN = 64
# exllamav3 pads the 320 entries of ``TOY_VOCAB`` to a multiple of 128.
PADDED = 384


def install(site: Path) -> None:
    """Write the stand-in as a package into a folder of ``$PYTHONPATH``, with a stand-in GPU."""
    package = site / "exllamav3"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "from tests.support.exllamav3_stub import Config, Model\n"
        "torch.cuda.is_available = lambda: True\n"
    )
    about = site / "exllamav3-1.6.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: exllamav3\nVersion: 1.6.0\n")


class SafetensorsCollection:
    def __init__(self, directory: str) -> None:
        self.tensor_files = [directory]

    def add_tensor_files(self, directory: str, warn_if_override: bool = True) -> None:
        self.tensor_files.append(directory)

    def close(self) -> None: ...


class Config:
    def __init__(self, directory: str) -> None:
        self.stc = SafetensorsCollection(directory)
        self.vocab_size = TOY_VOCAB

    @staticmethod
    def from_directory(directory: str, **kwargs: Any) -> Config:
        return Config(directory)

    def override_dynamic_seq_len(self, new_max_position_embeddings: int) -> None: ...


class LinearFP16:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class LinearEXL3(LinearFP16):
    K: float = 4
    _fused_reconstruct: bool | None = None


class Linear:
    def __init__(self, key: str, inner: LinearFP16) -> None:
        self.dispatch_cache: dict[Any, Any] = {}
        self.bc_attn: dict[int, Any] = {}
        self.key = key
        self.inner = inner
        self.device = torch.device("cpu")
        self.in_features_unpadded = HIDDEN
        self.softcap = 0.0
        self.pre_scale = 1.0
        self.post_scale = 1.0

    def forward(
        self, x: torch.Tensor, params: dict[str, Any], out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.inner.forward(x)


class Attention(Linear):
    """A module that does not count as a Linear."""


class Model:
    last: ClassVar[Any] = None

    def __init__(self, config: Config) -> None:
        Model.last = self
        self.config = config
        self.loaded: dict[str, Any] = {}
        self.params: dict[str, Any] | None = {}
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(TOY_VOCAB, HIDDEN, generator=generator).half()
        head = torch.randn(HIDDEN, PADDED, generator=generator).half() / 4
        # The padding of a quantized head contains noise.
        head[:, TOY_VOCAB:] += 8.0
        self.modules = [
            Attention("model.layers.0.self_attn", LinearFP16(head)),
            Linear("lm_head", LinearFP16(head)),
        ]
        self.logit_layer_idx = 1

    @staticmethod
    def from_config(config: Config, component: str = "text", **kwargs: Any) -> Model:
        return Model(config)

    def __iter__(self) -> Iterator[Any]:
        yield from self.modules

    def load_gen(
        self,
        device: Any = None,
        reserve_per_device: Any = None,
        use_per_device: Any = None,
        max_chunk_size: int = 2048,
        max_output_size: int = 32,
        max_output_factor: int = 1,
    ) -> None:
        arguments = {
            "device": device,
            "reserve_per_device": reserve_per_device,
            "use_per_device": use_per_device,
            "max_chunk_size": max_chunk_size,
            "max_output_size": max_output_size,
            "max_output_factor": max_output_factor,
        }
        self.loaded = {name: value for name, value in arguments.items() if value is not None}
        # A chunk goes through each module as it is loaded.
        for module in self:
            module.dispatch_cache["fn"] = Model.load_gen
            if isinstance(module.inner, LinearEXL3):
                module.inner._fused_reconstruct = True

    def load(self, *args: Any, **kwargs: Any) -> None:
        self.load_gen(*args, **kwargs)

    def forward(
        self, input_ids: torch.Tensor, params: dict[str, Any] | None = None
    ) -> torch.Tensor:
        self.params = params
        assert input_ids.dtype == torch.int64
        assert input_ids.is_contiguous()
        return self.modules[-1].forward(self.embedding[input_ids], {})

    def unload(self) -> None: ...
