"""ExLlamaV3 (1.6): EXL3 and unquantized models on NVIDIA GPUs, one window at a time.

Loaded and run as exllamav3's own compare_q did it: the model fills one GPU after the other (``device``,
``reserve_per_device`` and ``use_per_device`` say otherwise), and a window goes through ``Model.forward`` whole and
without a KV cache (``attn_mode`` "flash_attn_nc").  In spite of that name no flash-attn is needed or used: exllamav3
takes the first of its own Triton kernels, xformers and torch that can compute it, which the provenance names.

What that measures: unquantized weights are float16, bf16 ones too; so are logits and what enters a product.  EXL3
products of more than 144 rows, as of any usual window, reconstruct the weights in float16 and multiply these; decode
reads the trellis itself, and has a cache in float16 (written from the source of 1.6.5, never run).  The head is padded
to a multiple of 128 entries, and a quantized head has noise there: logits are cut to the config's vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from compare_q.backends.base import Capabilities, Layer, LoadRequest, Window
from compare_q.backends.checkpoint import files as checkpoint
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.head import Head
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.exllama.family import OUTPUT_FACTOR, ExLlamaEngine, ExLlamaOptions
from compare_q.backends.layers.groups import group_layers

if TYPE_CHECKING:
    import torch

PAGE = 256
"""Tokens of a page of exllamav3's cache."""
EXL3_PARTS = {"trellis", "su", "suh", "sv", "svh", "mcg", "mul1"}


class ExLlamaV3Options(ExLlamaOptions):
    """The ``engine`` object: arguments of ``Model.load``, in GiB."""

    device: str | None = Field(None, pattern=r"^cuda:\d+$")
    reserve_per_device: float | list[float] | None = None
    use_per_device: float | list[float] | None = None

    @model_validator(mode="after")
    def _one_way_to_split(self) -> ExLlamaV3Options:
        names = ("device", "reserve_per_device", "use_per_device")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} exclude each other")
        return self


class ExLlamaV3Engine(ExLlamaEngine):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("exllamav3",),
        fwd_fn="exllamav3",
        quant_method="exl3",
        packages=("exllamav3",),
        install=(
            "pip install 'exllamav3>=1.6' (compiles at its first import, with nvcc; compiled wheels: "
            "https://github.com/turboderp-org/exllamav3/releases)"
        ),
        summary="EXL3 and unquantized models, logits on NVIDIA GPUs",
        override_tensors=True,
        decodes=1,
    )
    options_type = ExLlamaV3Options
    methods = ("exl3",)
    """Quantization methods that it runs as they are: fp8 and mxfp4 become float16, and modelopt's NVFP4 garbage."""
    settings = "EXL3_"
    vocab_size = 0

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        super().check(request)
        check_overrides(request)

    def load_folder(self, folder: Path) -> None:
        from exllamav3 import Config, Model

        config = Config.from_directory(str(folder))
        for file in self.request.override_tensors:
            config.stc.add_tensor_files(str(file), warn_if_override=False)
            if str(file) not in config.stc.tensor_files:  # older versions look for files in a folder of that name
                raise ValueError(f"this version does not take {file} as override tensors; {self.capabilities.install}")
        if self.options.max_seq_len is not None:
            config.override_dynamic_seq_len(self.options.max_seq_len)
        self.vocab_size = config.vocab_size
        self.model = Model.from_config(config)
        tokens = self.request.max_tokens
        if self.request.decode is not None:  # before the model loads, which allocates the tensors of its caches
            from exllamav3 import Cache

            self.cache = Cache(self.model, max_num_tokens=-(-tokens // PAGE) * PAGE)
        self.model.load(
            max_chunk_size=tokens, max_output_size=tokens, max_output_factor=OUTPUT_FACTOR,
            **self.options.model_dump(exclude_none=True, exclude={"max_seq_len"}),
        )  # fmt: skip

    def logits(self, window: Window) -> torch.Tensor:
        import torch

        token_ids = torch.from_numpy(window.token_ids).long().unsqueeze(0)
        if self.request.decode is not None:
            return self._decoded(token_ids, self.request.decode.step)
        logits: torch.Tensor = self.model.forward(token_ids, {"attn_mode": "flash_attn_nc"})
        self.dtype = dtype_name(logits.dtype)
        return logits[0, :, : self.vocab_size]

    def _decoded(self, token_ids: torch.Tensor, step: int) -> torch.Tensor:
        """Logits [L, V] of tokens [1, L] in steps, as exllamav3's ``examples/generation_loop.py`` generates (1.6.5).

        Layers with a state get it from the step before, and give its slot back behind the window.
        """
        states: Any = None

        def forward(begin: int, end: int) -> torch.Tensor:
            nonlocal states
            shape = (1, self.cache.max_num_tokens)
            params = {"attn_mode": "flash_attn", "cache": self.cache, "past_len": begin, "batch_shape": shape}
            params |= {} if states is None else {"recurrent_states": states}
            logits: torch.Tensor = self.model.forward(token_ids[:, begin:end], params)
            states = params.get("recurrent_states")
            self.dtype = dtype_name(logits.dtype)
            return logits[0, :, : self.vocab_size].clone()

        logits = self.in_steps(token_ids.shape[1], step, forward)
        for state in states or ():
            self.cache.release_state(state)
        return logits

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None, Head] | str:
        """The head where it is not quantized; ``states`` from here on."""
        import torch

        module = self.model.modules[self.model.logit_layer_idx]
        kernel = type(module.inner).__name__
        if kernel != "LinearFP16" or module.pre_scale != 1.0:
            return f"its head is a {kernel}" if module.pre_scale == 1.0 else "its logits are scaled before the soft cap"
        if self.entered is None:
            forward, self.entered = module.forward, torch.empty(0)

            def enter(x: torch.Tensor, *rest: Any, **keys: Any) -> torch.Tensor:
                self.entered = x[0].clone() if self.request.decode else x[0]  # the next step may take the same memory
                logits: torch.Tensor = forward(x, *rest, **keys)
                return logits

            module.forward = enter
        weight, bias = module.inner.weight[: module.in_features_unpadded, : self.vocab_size].T, module.inner.bias
        head = Head(self.vocab_size, dtype_name(weight.dtype), module.softcap or None, module.post_scale)
        return weight, None if bias is None else bias[: self.vocab_size], head

    def layers(self) -> tuple[Layer, ...]:
        return group_layers(layer_of(module) for module in self._linears())

    def _linears(self) -> Iterator[Any]:
        """The model's Linear modules that hold weights."""
        return (module for module in self.model if type(module).__name__ == "Linear" and module.inner is not None)

    def provenance(self) -> dict[str, Any]:
        caches = (getattr(module, "dispatch_cache", {}) for module in self.model)
        attention = {cache["fn"].__name__ for cache in caches if "fn" in cache}
        return super().provenance() | {
            "model_class": type(self.model).__name__,
            "devices": sorted({str(module.device) for module in self._linears()}),
            "attention": sorted(attention),
            "override_tensors": [str(file) for file in self.request.override_tensors],
        }

    def close(self) -> None:
        config = None if self.model is None else self.model.config
        super().close()
        self.entered = None
        if config is not None:
            config.stc.close()


def layer_of(module: Any) -> Layer:
    """How a Linear of exllamav3 ran: which weights it holds, and the class that multiplied them."""
    inner = module.inner
    kernel = type(inner).__name__
    if kernel != "LinearEXL3":
        return Layer(module.key, dtype_name(inner.weight.dtype), "float16", kernel)
    if getattr(inner, "_fused_reconstruct", None) is not None:  # set by the first call of reconstruct_hgemm
        kernel += ".reconstruct_hgemm"
    return Layer(module.key, f"exl3 {inner.K:.1f} bpw", "float16", kernel)


def check_overrides(request: LoadRequest) -> None:
    """InputError where the engine would mix override tensors with the tensors that they should replace.

    Of a module with EXL3 tensors and a weight, exllamav3 takes the EXL3 tensors, whichever file they come from.
    """
    for file in request.override_tensors:
        if file.suffix != ".safetensors":
            raise InputError(f"model_dir: override tensors {file}: must be a .safetensors file")
    if not all(file.is_file() for file in request.override_tensors) or not Path(request.model_dir).is_dir():
        return
    stored = _parts(checkpoint.weight_files(Path(request.model_dir)))
    for module, given in _parts(request.override_tensors).items():
        if module not in stored:
            raise InputError(f"model_dir: override tensors hold {module}, which the model does not have")
        mixed = stored[module] & EXL3_PARTS - given
        if mixed and given & {"weight", *EXL3_PARTS}:
            raise InputError(f"model_dir: override tensors replace {module}, but not its {', '.join(sorted(mixed))}")


def _parts(files: Collection[Path]) -> dict[str, set[str]]:
    """Module -> the last part of the names of its tensors."""
    parts: dict[str, set[str]] = {}
    for name in checkpoint.read_headers(files):
        module, _, part = name.rpartition(".")
        parts.setdefault(module, set()).add(part)
    return parts
