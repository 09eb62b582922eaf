"""ExLlamaV3 (1.6): EXL3 and unquantized models on NVIDIA GPUs, one window at a time in prefill.

The model fills one GPU after the other, unless ``device``, ``reserve_per_device`` or ``use_per_device`` is set.  A
window is one ``Model.forward`` without a KV cache (``attn_mode`` "flash_attn_nc").  Despite that name, flash-attn is
not needed: exllamav3 tries its Triton kernels, xformers and torch in this order.  The provenance names what ran.

Unquantized weights (also bf16 ones), activations and logits are float16.  EXL3 products of more than 144 rows, as in
most windows, reconstruct the weights in float16 and multiply with these.  The head is padded to a multiple of 128
entries.  In the padding a quantized head has noise; logits are cut to the config's vocabulary.

Decode runs windows of one length as a rectangular batch, as in ``examples/generation_loop.py``.  Products of up to 144
rows read the trellis.  With up to 8 windows per step each attention block is one CUDA graph, and with up to 8 tokens
each MLP.  The cache is in float16, or in 2 to 8 bits per key and value.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from compare_q.backends.base import Capabilities, Decode, Layer, PlannedModel, Window
from compare_q.backends.checkpoint import files as checkpoint
from compare_q.backends.checkpoint.config import ROPE, CheckpointConfig, has_longrope, rope
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from compare_q.backends.checkpoint.formats import FORMATS
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.json_files import expanded
from compare_q.backends.common.messages import dtype_name, one_line
from compare_q.backends.common.options import EngineOptions
from compare_q.backends.common.packages import computing
from compare_q.backends.hub import local_folder
from compare_q.backends.layers import groups
from compare_q.backends.layers.names import by_module
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference.head import Head

if TYPE_CHECKING:
    import torch

NAME, METHOD = "exllamav3", "exl3"
"""The package, whose name is also the load_fn, and the only quantization method that it runs unchanged.

exllamav3 would convert fp8 and mxfp4 to float16, and modelopt's NVFP4 to garbage.
"""
OUTPUT_FACTOR = 4
"""Memory that the split over GPUs leaves free, in sizes of a window's float16 logits: the logits, and 2.5 times as much
to process them."""
NOT_GPUS = {"max_seq_len", "cache_mode"}
"""Options that do not select GPUs."""
PAGE = 256
"""Tokens per page of exllamav3's cache."""
FP16 = "FP16"
ATTENTION_NOTES = ("fn", "fn_qc")
"""Keys of a module's ``dispatch_cache`` for the function that computed its attention (second: quantized cache)."""
SPLITS = {"device", "reserve_per_device", "use_per_device"}
EXL3_PARTS = set(FORMATS["trellis"][1].split())


class ExLlamaV3Options(EngineOptions):
    """The ``engine`` object: arguments of ``Model.load``, in GiB; bits of keys and values, in the form of ``-cq``.

    ``max_seq_len`` selects longrope factors.
    """

    max_seq_len: int | None = Field(None, gt=0)
    cache_mode: str | None = Field(None, pattern=r"^(FP16|[2-8](,[2-8])?)$")
    device: str | None = Field(None, pattern=r"^cuda:\d+$")
    reserve_per_device: float | list[float] | None = None
    use_per_device: float | list[float] | None = None

    @model_validator(mode="after")
    def _one_way_to_split(self) -> ExLlamaV3Options:
        given = [name for name in self.model_fields_set & SPLITS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(sorted(given))} exclude each other")
        return self


class ExLlamaV3Engine(LogitsEngine):
    """See the module's docstring.

    In decode, keys and values are in ``cache``.  ``ahead``: the windows to be scored; ``decoded``: index -> (logits,
    states) of the windows that already ran together with an earlier window.
    """

    capabilities = Capabilities(
        load_fns=(NAME,),
        fwd_fn=NAME,
        quant_method=METHOD,
        packages=(NAME,),
        install=(
            "pip install 'exllamav3>=1.6' (compiles at its first import, with nvcc; compiled wheels: "
            "https://github.com/turboderp-org/exllamav3/releases)"
        ),
        summary="EXL3 and unquantized models, logits on NVIDIA GPUs",
        override_tensors=True,
        decodes=512,
    )
    files = HuggingFaceFolder
    options_type = ExLlamaV3Options

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.dtype = ""
        self.cache: Any = None
        self.ahead: Sequence[Window] = ()
        self.decoded: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        longest = cls(model).options.max_seq_len
        if longest is not None and longest < model.max_tokens:
            raise InputError(f"engine.max_seq_len: {longest} is too short for windows of {model.max_tokens} tokens")
        check_folder(expanded(model.model_dir), model)
        if model.options.get("cache_mode") is not None and model.decode is None:
            raise InputError('engine.cache_mode: only with "phase": "decode"; prefill scores windows without a cache')
        check_overrides(model)

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        return 0 if model.options.keys() - NOT_GPUS else None

    @classmethod
    def versions(cls) -> dict[str, str]:
        return computing(NAME) | machine.variables(("EXL3_",))

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        importlib.import_module(NAME)

    def load(self) -> None:
        import torch

        decode = self.planned.decode
        if not torch.cuda.is_available():
            raise ModelError(f"{NAME} needs an NVIDIA GPU; torch sees none")
        folder = local_folder(self.planned.model_dir)
        try:
            self._load(folder)
        except Exception as error:  # any error of the compiler, the loader or CUDA fails this model
            less = '; a smaller "batch" takes less memory' if decode is not None and decode.batch > 1 else ""
            raise ModelError(f"{NAME} could not load {folder}: {one_line(error)}{less}") from error

    def _load(self, folder: Path) -> None:
        """Load the model; may raise any error."""
        from exllamav3 import Cache, CacheLayer_fp16, CacheLayer_quant, Config, Model

        config = Config.from_directory(str(folder))
        for file in self.planned.override_tensors:
            config.stc.add_tensor_files(str(file), warn_if_override=False)
            if str(file) not in config.stc.tensor_files:  # older versions of exllamav3 expect a folder
                raise ValueError(f"this version does not take {file} as override tensors; {self.capabilities.install}")
        if self.options.max_seq_len is not None:
            config.override_dynamic_seq_len(self.options.max_seq_len)
        self.model = Model.from_config(config)
        chunk = tokens = self.planned.max_tokens
        kept = OUTPUT_FACTOR * tokens
        if (decode := self.planned.decode) is not None:  # loading allocates the cache's tensors
            keys, _, values = (self.options.cache_mode or FP16).partition(",")
            quantized = {} if keys == FP16 else {"k_bits": int(keys), "v_bits": int(values or keys)}
            self.cache = Cache(  # also holds the states of layers without keys and values
                self.model, decode.batch * pages(tokens), CacheLayer_quant if quantized else CacheLayer_fp16,
                max_batch_size=decode.batch, **quantized,
            )  # fmt: skip
            chunk = pages(decode.batch * decode.step)  # loading runs a chunk of this length through the cache
            kept += decode.batch * tokens
        self.model.load(
            max_chunk_size=chunk, max_output_size=chunk, max_output_factor=math.ceil(kept / chunk),
            **self.options.model_dump(exclude_none=True, exclude=NOT_GPUS),
        )  # fmt: skip
        self._forget_kernels()

    def prepare(self, windows: Sequence[Window]) -> None:
        self.ahead, self.decoded = windows, {}
        self._forget_kernels()

    def _forget_kernels(self) -> None:
        """Forget which kernels ran: scoring may run different kernels from loading or from the check of decode."""
        for module in self.model:
            for name in ATTENTION_NOTES:
                getattr(module, "dispatch_cache", {}).pop(name, None)
            if type(getattr(module, "inner", None)).__name__ == "LinearEXL3":
                module.inner._fused_reconstruct = None

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        if self.planned.decode is None:  # at once: exllamav3 computes all logits of a forward pass
            yield self.cut(self.model.forward(token_ids_of([window]), {"attn_mode": "flash_attn_nc"}))[0]
            return
        if window.index not in self.decoded:
            self._decode(window, self.planned.decode)
        found, self.entered = self.decoded.pop(window.index)
        yield found.clone()  # a view would keep the whole batch in memory while the next one runs

    def _decode(self, window: Window, decode: Decode) -> None:
        """Run ``window`` and the following windows of equal length, up to a batch, ``decode.step`` tokens at a time.

        Layers with a state get the state of the previous step; its slot is freed at the end.
        """
        places = (place for place, other in enumerate(self.ahead) if other.index == window.index)
        following = self.ahead[next(places, len(self.ahead)) + 1 :]
        length = len(window.token_ids)
        alike = takewhile(lambda other: len(other.token_ids) == length, following)
        together = [window, *islice(alike, decode.batch - 1)]
        token_ids, shape = token_ids_of(together), (len(together), pages(self.planned.max_tokens))
        states: Any = None

        def forward(begin: int, end: int) -> torch.Tensor:
            nonlocal states
            params = {"attn_mode": "flash_attn", "cache": self.cache, "past_len": begin, "batch_shape": shape}
            params |= {} if states is None else {"recurrent_states": states}
            logits = self.model.forward(token_ids[:, begin:end].contiguous(), params)
            states = params.get("recurrent_states")
            return self.cut(logits)

        logits = next(self.in_steps(0, length, decode.step, forward, length))
        for state in states or ():
            self.cache.release_state(state)
        entered = [None] * len(together) if self.entered is None else self.entered
        rows = zip(together, logits, entered, strict=True)
        self.decoded = {each.index: (own, its_states) for each, own, its_states in rows}

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [B, n, V] without padding, and note their dtype."""
        self.dtype = dtype_name(logits.dtype)
        return logits[..., : self.model.config.vocab_size]

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None, Head] | str:
        """Return the head if it is not quantized; ``states`` are kept from now on."""
        import torch

        module = self.model.modules[self.model.logit_layer_idx]
        kernel = type(module.inner).__name__
        if kernel != "LinearFP16" or module.pre_scale != 1.0:
            return f"its head is a {kernel}" if module.pre_scale == 1.0 else "its logits are scaled before the soft cap"
        if self.entered is None:
            forward, self.entered = module.forward, torch.empty(0)

            def enter(x: torch.Tensor, *rest: Any, **keys: Any) -> torch.Tensor:
                self.entered = x.clone() if self.planned.decode else x[0]  # the next step may reuse the memory
                logits: torch.Tensor = forward(x, *rest, **keys)
                return logits

            module.forward = enter
        size, bias = self.model.config.vocab_size, module.inner.bias
        weight = module.inner.weight[: module.in_features_unpadded, :size].T
        head = Head(size, dtype_name(weight.dtype), module.softcap or None, module.post_scale)
        return weight, None if bias is None else bias[:size], head

    def layers(self) -> tuple[Layer, ...]:
        return groups.group_layers(layer_of(module) for module in self._linears())

    def _linears(self) -> list[Any]:
        """Return the model's Linear modules with weights."""
        return [module for module in self.model if type(module).__name__ == "Linear" and module.inner is not None]

    def provenance(self) -> dict[str, Any]:
        caches, batch = groups.group_kv_caches(self.kv_caches()), 1
        config = CheckpointConfig.read(local_folder(self.planned.model_dir))
        cached: dict[str, Any] = groups.WITHOUT_CACHE
        if self.planned.decode is not None:
            batch = self.planned.decode.batch
            cached = {"kv_cache": groups.kv_formats(caches), "kv_cache_layers": [asdict(each) for each in caches]}
        return {
            "dtype": self.dtype,
            "batch": f"{batch} windows at a time" if batch > 1 else "one window at a time",
            ROPE: rope(config, self.options.max_seq_len or self.planned.max_tokens),
            **cached,
            "options": self.options.model_dump(exclude_none=True),
            "model_class": type(self.model).__name__,
            "devices": sorted({str(module.device) for module in self._linears()}),
            "attention": sorted({name for module in self.model for name in attention_of(module)}),
            "override_tensors": [str(file) for file in self.planned.override_tensors],
        }

    def kv_caches(self) -> Iterator[groups.KVCache]:
        """Yield the caches that decode reads; layers with a window or a state are not in ``Cache.layers``.

        Latent attention has one vector instead of keys and values, in the format of keys.
        """
        from exllamav3 import CacheLayer_quant

        for layer in () if self.cache is None else self.cache.layers.values():
            keys = getattr(layer, "k_bits", 0)
            values = layer.v_bits if isinstance(layer, CacheLayer_quant) else keys
            stored = "float16" if not keys else f"q{keys}" if keys == values else f"q{keys} (values q{values})"
            yield groups.KVCache(
                layer.attention.key, 1, stored, groups.DYNAMIC if keys else "", prefill="",
                attention=", ".join(sorted(attention_of(layer.attention))),
                token_bytes=float(layer.storage_size()) / layer.max_num_tokens,
            )  # fmt: skip

    def close(self) -> None:
        model, self.model = self.model, None
        self.entered = self.cache = None
        self.decoded = {}
        if model is not None:
            model.unload()
            model.config.stc.close()


def token_ids_of(windows: Sequence[Window]) -> torch.Tensor:
    """The tokens of windows of one length, int64 [B, L], in CPU memory."""
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([window.token_ids for window in windows])).long()


def pages(tokens: int) -> int:
    """Return ``tokens`` rounded up to whole pages of the cache."""
    return math.ceil(tokens / PAGE) * PAGE


def attention_of(module: Any) -> set[str]:
    """Return what computed a module's attention: the chosen functions, and graphs that have run.

    Latent attention stores its graphs with the functions.  Only some graphs record whether they have run.
    """
    notes = getattr(module, "dispatch_cache", {})
    graphs = [each for each in getattr(module, "bc_attn", {}).values() if each and getattr(each, "slot_widths", True)]
    graphs += [each for each in notes.values() if each and not callable(each)]
    functions = {notes[name].__name__ for name in ATTENTION_NOTES if name in notes}
    return functions | {type(each).__name__ for each in graphs}


def layer_of(module: Any) -> Layer:
    """Return how a Linear of exllamav3 ran."""
    inner = module.inner
    kernel = type(inner).__name__
    if kernel != "LinearEXL3":
        return Layer(module.key, dtype_name(inner.weight.dtype), "float16", kernel)
    reconstructed = getattr(inner, "_fused_reconstruct", None) is not None  # set by reconstruct_hgemm's first call
    kernel += ".reconstruct_hgemm" if reconstructed else ".exl3_gemm"  # or gemv, mgemm, in graphs
    return Layer(module.key, f"exl3 {inner.K:.1f} bpw", "float16", kernel)


def check_folder(folder: Path, model: PlannedModel) -> None:
    """InputError for a local folder with a format, length or files that exllamav3 would load incorrectly."""
    if not folder.is_dir():
        return
    config = CheckpointConfig.read(folder)
    method = config.quantization.get("quant_method")
    others = [file for file in checkpoint.strays(folder) if file not in model.override_tensors]
    if stray := [file for file in others if not file.name.startswith("consolidated")]:
        raise InputError(f"model_dir: {stray[0]}: {NAME} would load it as well; move it out of the folder")
    if method not in (None, METHOD):
        raise InputError(f"model_dir: {NAME} does not read {method} models; it reads {METHOD}")
    if model.options.get("max_seq_len") is None and has_longrope(config.raw):
        raise InputError(
            f"engine.max_seq_len: missing; this model's longrope factors depend on it in {NAME}, so set it to what "
            "you serve with"
        )


def check_overrides(model: PlannedModel) -> None:
    """InputError if the engine would mix override tensors with the tensors that they should replace.

    For a module with both EXL3 tensors and a weight, exllamav3 uses the EXL3 tensors, from whichever file.
    """
    for file in model.override_tensors:
        if file.suffix != ".safetensors":
            raise InputError(f"model_dir: override tensors {file}: must be a .safetensors file")
    if not all(file.is_file() for file in model.override_tensors) or not Path(model.model_dir).is_dir():
        return
    stored = by_module(checkpoint.read_headers(checkpoint.weight_files(Path(model.model_dir))))
    for module, given in by_module(checkpoint.read_headers(model.override_tensors)).items():
        if module not in stored:
            raise InputError(f"model_dir: override tensors hold {module}, which the model does not have")
        mixed = stored[module].keys() & EXL3_PARTS - given.keys()
        if mixed and given.keys() & {"weight", *EXL3_PARTS}:
            raise InputError(f"model_dir: override tensors replace {module}, but not its {', '.join(sorted(mixed))}")
