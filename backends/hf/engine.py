"""Hugging Face Transformers, one window at a time, with upstream's four ways to load.

``transformers``: fp16 on one device; ``transformers_auto``: fp16, ``device_map="auto"``; ``transformers_auto_bf16``:
the same in bf16; ``transformers_mm``: fp16, the language model of an image-text model.  Without a GPU the device is the
CPU.  ``dtype`` in ``engine`` replaces the dtype.  ``streaming`` keeps one decoder layer on the device at a time
(``backends/hf/streaming.py``); ``noise`` makes the model the noise floor (``backends/layers/noise.py``).

Quantized checkpoints run as Transformers runs them, most of them decompressed to the dtype; ``quantization_config`` in
``engine`` quantizes while loading, or changes how a quantized checkpoint is loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compare_q.backends.base import (
    Capabilities,
    Decode,
    Layer,
    ModelFacts,
    PlannedModel,
    Storage,
    Window,
)
from compare_q.backends.checkpoint.config import ROPE, CheckpointConfig, rope
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import dtype_name, one_line
from compare_q.backends.common.options import parse_options
from compare_q.backends.common.packages import check_installed
from compare_q.backends.hf.long_windows import BehindBase
from compare_q.backends.hf.quantization import (
    check_complete,
    check_dtype,
    check_packages,
    check_resident,
    transformers_config,
)
from compare_q.backends.hf.streaming import Streamer, decoder_layers
from compare_q.backends.layers.groups import WITHOUT_CACHE, group_layers
from compare_q.backends.layers.noise import OPTIONS, Noise, NoiseOptions, provenance_of, seed_of
from compare_q.backends.logits_engine import PIECE_ELEMENTS, LogitsEngine
from compare_q.backends.reference.head import Head

if TYPE_CHECKING:
    import torch

DTYPES = {
    "transformers": "float16", "transformers_auto": "float16", "transformers_auto_bf16": "bfloat16",
    "transformers_mm": "float16",
}  # fmt: skip
"""Upstream's ways to load, and the dtype that it gives each."""
DEVICE_MAP_AUTO = {"transformers_auto", "transformers_auto_bf16"}
PROMPT = 2048
"""Tokens of a prompt at a time, before tokens that are decoded: as in vLLM's chunks, so that masks stay small."""
PLACEMENT = ("device_map", "max_memory", "offload_folder")
LONGEST_SEEN = "max_seq_len_cached"
"""Where a rotary embedding notes the longest sequence that it has seen."""
OURS = {"streaming", "streaming_windows", "quantization_config", *OPTIONS}


class TransformersOptions(NoiseOptions):
    """The ``engine`` object: arguments of ``from_pretrained`` that change what runs."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    device_map: str | dict[str, int | str] | None = None
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    max_memory: dict[int | str, int | str] | None = None
    offload_folder: str | None = None
    trust_remote_code: bool = False
    quantization_config: dict[str, Any] | None = Field(None, min_length=1)
    streaming: bool = False
    streaming_windows: int | None = Field(None, ge=1)


class TransformersFolder(HuggingFaceFolder):
    """The same files, in the dtype that upstream gives each of its ways to load, and perhaps quantized on the way."""

    def facts(self) -> ModelFacts:
        found = super().facts()
        return found if "dtype" in self.planned.options else replace(found, dtype=DTYPES[self.planned.load_fn])

    def storage(self) -> Storage:
        on_load = (self.planned.options.get("quantization_config") or {}).get("quant_method")
        if on_load and not self.config.quantization:
            return Storage(note=f"quantized by {on_load} while loading; the checkpoint does not say what that stores")
        return super().storage()


class TransformersEngine(LogitsEngine):
    """A causal language model of Transformers."""

    capabilities = Capabilities(
        load_fns=tuple(DTYPES),
        fwd_fn="transformers",
        packages=("transformers",),
        install="pip install 'transformers>=5.5' accelerate 'compressed-tensors>=0.15' greenlet",
        summary="any checkpoint Transformers runs, logits on GPU or CPU",
        decodes=1,
        decodes_behind_prompts=True,
    )
    files = TransformersFolder
    options_type = TransformersOptions

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.checkpoint = TransformersFolder(model)
        self.rotary: list[Any] = []
        self.streamer: Streamer | None = None
        self.noise: Noise | None = None
        self.behind: BehindBase | None = None

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        options = parse_options(TransformersOptions, model.options)
        seed_of(model.options)
        check_installed("accelerate", cls.capabilities.install)
        found = TransformersFolder(model)
        stored = {} if found.is_remote else found.config.quantization
        for where, config in (("engine.quantization_config", options.quantization_config or {}), ("model_dir", stored)):
            check_packages(where, config)
        check_dtype(options.dtype or DTYPES[model.load_fn], stored)
        if options.streaming:
            check_streaming(options, stored)
            if model.decode is not None:
                raise InputError("engine.streaming: reads every layer once a step, which takes hours; leave it out")
        elif options.streaming_windows:
            raise InputError('engine.streaming_windows: needs "streaming": true')

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        if {"device_map", "max_memory"} & model.options.keys():
            return 0
        return None if model.load_fn in DEVICE_MAP_AUTO else 1

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401
        from transformers.quantizers import auto  # noqa: F401

    def load(self) -> None:
        import torch
        import transformers
        from transformers.quantizers.auto import AutoHfQuantizer

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder, stored = self.checkpoint.folder, self.checkpoint.config.quantization
        loader = (
            transformers.AutoModelForImageTextToText
            if self.planned.load_fn == "transformers_mm"
            else transformers.AutoModelForCausalLM
        )
        arguments = self._arguments(torch.cuda.is_available())
        if stored and not AutoHfQuantizer.supports_quant_method(stored):
            raise ModelError(f"{folder}: Transformers does not run quant_method {stored.get('quant_method')!r}")
        try:
            self.model, found = loader.from_pretrained(folder, output_loading_info=True, **arguments)
        except Exception as error:  # whatever Transformers, accelerate or a quantizer raises: one model's failure
            raise ModelError(f"Transformers could not load {folder}: {one_line(error)}") from error
        check_complete(folder, found, on_load=bool(self.options.quantization_config) and not stored)
        check_resident(folder, self.model, stored)
        self.model.eval()
        self.behind = BehindBase.of(self.model)
        self.rotary = [module for module in self.model.modules() if LONGEST_SEEN in vars(module)]
        if (seed := seed_of(self.planned.options)) is not None:
            self.noise = Noise(dict(enumerate(dict.fromkeys(decoder_layers(self.model, "noise")))), seed)
        if self.options.streaming:
            device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
            self.streamer = Streamer(self.model, self._forward, device, self.options.streaming_windows)

    def _arguments(self, cuda: bool) -> dict[str, Any]:
        options = self.options.model_dump(exclude_none=True, exclude=OURS)
        one_device = "cuda:0" if cuda else "cpu"
        device_map = "auto" if self.planned.load_fn in DEVICE_MAP_AUTO and cuda else one_device
        if self.options.streaming:
            device_map = "cpu"
        if self.options.quantization_config:
            options["quantization_config"] = transformers_config(self.options.quantization_config)
        return {"dtype": DTYPES[self.planned.load_fn], "device_map": device_map, "use_safetensors": True, **options}

    def prepare(self, windows: Sequence[Window]) -> None:
        if self.streamer is not None:
            self.streamer.prepare(windows)

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        import torch

        made: Iterator[torch.Tensor] = torch.inference_mode()(self._pieces)(window)  # not between the pieces
        return made

    def _pieces(self, window: Window) -> Iterator[torch.Tensor]:
        if self.planned.decode is not None:
            yield from self._decoded(window, self.planned.decode)
        else:
            yield from self._forward(window) if self.streamer is None else self.streamer.forwarded(window)
        if self.noise is not None and (missed := self.noise.missed()):
            raise ModelError(missed)

    def _forward(self, window: Window) -> Iterator[torch.Tensor]:
        """The layers run here, and the head with what follows it whenever a piece is asked for."""
        import torch

        self._forget_lengths()
        token_ids = torch.from_numpy(window.token_ids).long().unsqueeze(0).to(self.model.device)
        if self.noise is not None:
            self.noise.begin(token_ids[0], torch.arange(len(window.token_ids)))
        rows = max(PIECE_ELEMENTS // self.model.config.get_text_config().vocab_size, 1)
        if self.behind is None or len(window.token_ids) <= rows:
            return iter([self.model(token_ids, use_cache=False).logits[0]])
        return self.behind.pieces(token_ids, rows)

    def _decoded(self, window: Window, decode: Decode) -> Iterator[torch.Tensor]:
        """``pieces`` of a window that is fed ``step`` tokens at a time, with the cache that the model makes itself.

        ``generate`` does the same, unless a model's generation config names another cache.
        """
        import torch

        self._forget_lengths()
        token_ids = torch.from_numpy(window.token_ids).long().unsqueeze(0).to(self.model.device)
        cache: Any = None

        def forward(begin: int, end: int, **keys: Any) -> torch.Tensor:
            nonlocal cache
            if self.noise is not None:
                self.noise.begin(token_ids[0, begin:end], torch.arange(begin, end))
            found = self.model(token_ids[:, begin:end], past_key_values=cache, use_cache=True, **keys)
            cache = found.get("past_key_values")
            if cache is None or cache.get_seq_length() != end:
                raise ModelError(f"phase: {type(self.model).__name__} keeps no cache of all tokens, which decode needs")
            logits: torch.Tensor = found.logits[0]
            return logits

        for begin, end, in_steps in decode.stretches(window):
            if in_steps:
                yield from self.in_steps(begin, end, decode.step, forward)
                continue
            for at in range(begin, end, PROMPT):
                forward(at, min(at + PROMPT, end), **({} if self.behind is None else {"logits_to_keep": 1}))
            yield torch.empty(end - begin, 0)

    def _forget_lengths(self) -> None:
        """Dynamic rotary factors would stay those of a longer window or question before."""
        for module in self.rotary:
            for name in [name for name in vars(module) if name.endswith(LONGEST_SEEN)]:
                setattr(module, name, 0)

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None, Head] | str:
        """The output embedding, with the soft cap and the scale that the config names; ``states`` from here on."""
        import torch

        module = self.model.get_output_embeddings()
        if not isinstance(module, torch.nn.Linear) or type(module.weight) is not torch.nn.Parameter:
            return f"its head is {'missing' if module is None else 'a ' + type(module).__name__}"
        if module.weight.is_meta:
            return "its head is not resident"
        if self.entered is None:
            self.entered = torch.empty(0)
            module.register_forward_pre_hook(self._enter)
        config = self.model.config.get_text_config()
        scale = config_number(config, "logit_scale", 1.0) / config_number(config, "logits_scaling", 1.0)
        head = Head(
            module.weight.shape[0], dtype_name(module.weight.dtype),
            config_number(config, "final_logit_softcapping", 0.0) or None, scale,
        )  # fmt: skip
        return module.weight.detach(), None if module.bias is None else module.bias.detach(), head

    def _enter(self, _: Any, given: tuple[Any, ...]) -> None:
        self.entered = given[0][0]

    def layers(self) -> tuple[Layer, ...]:
        from compare_q.backends.hf import layers as transformers_layers

        asked = self.checkpoint.config.quantization or self.options.quantization_config or {}
        return group_layers(transformers_layers.layers(self.model, asked, self.checkpoint.folder))

    def provenance(self) -> dict[str, Any]:
        parameters = next(self.model.parameters())
        return {
            "model_class": type(self.model).__name__,
            "dtype": dtype_name(self.model.dtype),
            "device": str(parameters.device),
            "attention": self.model.config._attn_implementation,
            "batch": "one window at a time",
            ROPE: rope(CheckpointConfig(self.model.config.to_dict()), self.planned.max_tokens),
            **(WITHOUT_CACHE if self.planned.decode is None else {"kv_cache": dtype_name(self.model.dtype)}),
            **({} if self.streamer is None else {"streamed_windows": self.streamer.group}),
            **provenance_of(seed_of(self.planned.options)),
            "options": self.options.model_dump(exclude_none=True),
        }

    def close(self) -> None:
        if self.streamer is not None:
            self.streamer.close()
        self.streamer = None
        self.model = self.entered = self.noise = self.behind = None
        self.rotary = []


def check_streaming(options: TransformersOptions, stored: dict[str, Any]) -> None:
    """InputError if ``streaming`` cannot go with the other options, the checkpoint or the installed packages."""
    for name in (*PLACEMENT, "quantization_config"):
        if getattr(options, name) is not None:
            raise InputError(f"engine.streaming: cannot go with {name}; leave one of them out")
    if stored:
        raise InputError(
            f"engine.streaming: streams unquantized checkpoints only, this one is quantized with "
            f"{stored.get('quant_method')}"
        )
    if importlib.util.find_spec("greenlet") is None:
        raise InputError("engine.streaming: needs greenlet: pip install greenlet")


def config_number(config: Any, name: str, missing: float) -> float:
    """A number of a config, ``missing`` if the config has none; MPT's logit_scale may be a word, which is no number."""
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and value else missing
