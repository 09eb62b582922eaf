"""Hugging Face Transformers, one window at a time, with the four load functions of ExLlamaV3's
compare_q.

``transformers``: fp16 on one device; ``transformers_auto``: fp16, ``device_map="auto"``;
``transformers_auto_bf16``: the same in bf16; ``transformers_mm``: fp16, the language model of an
image-text model.  Without a GPU the device is the CPU.  ``dtype`` in ``engine`` overrides the
dtype; one-line calls set it to "auto", the checkpoint's own dtype.  ``streaming`` keeps one decoder
layer on the device at a time (``backends/hf/layer_offload.py``); ``noise`` adds the noise of the
noise floor (``backends/layers/noise.py``).

Quantized checkpoints run as Transformers runs them; most are decompressed to the dtype.
``quantization_config`` in ``engine`` quantizes while loading, or changes how a quantized checkpoint
is loaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ..base import Capabilities, Layer, ModelFacts, PlannedModel, Storage, Window
from ..checkpoint.checkpoint_config import ROPE, CheckpointConfig, rope
from ..checkpoint.folder import HuggingFaceFolder
from ..common.engine_options import check_names, parse_options
from ..common.errors import InputError, ModelError
from ..common.message_text import and_more, dtype_name, one_line
from ..common.packages import check_installed, installed_versions
from ..layers.groups import WITHOUT_CACHE, group_layers
from ..layers.noise import OPTIONS, Noise, NoiseOptions, provenance_of, seed_of
from ..logits_engine import PIECE_ELEMENTS, LogitsEngine
from ..reference.head import Head
from . import long_windows, rotary
from .layer_offload import Streamer, decoder_layers
from .verify import check_weights

if TYPE_CHECKING:
    import torch

DTYPES = {
    "transformers": "float16",
    "transformers_auto": "float16",
    "transformers_auto_bf16": "bfloat16",
    "transformers_mm": "float16",
}
"""load_fn -> default dtype."""
DEVICE_MAP_AUTO = {"transformers_auto", "transformers_auto_bf16"}
GIVEN_TO_ATTENTION = re.compile(r"\b(?:softcap|s_aux)=self\.(\w+)")
"""Arguments of attention that torch's sdpa does not accept, and the attribute of a layer that holds
each one."""
WEIGHT_SCALE = re.compile(r"\.(weight_scale\w*|scales|qzeros)$")
BF16_ONLY = re.compile("nvfp4|mxfp4|mxfp8")
"""Formats that compressed-tensors 0.17 always decompresses to bfloat16."""
PACKAGES = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto-round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",),
    "eetq": ("kernels",),
    "fbgemm_fp8": ("fbgemm-gpu",),
    "fp_quant": ("fp_quant",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("flute-kernel", "fast_hadamard_transform"),
    "nvfp4": ("kernels",),
    "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",),
    "sinq": ("sinq",),
    "spqr": ("spqr_quant",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
"""quant_method -> distributions that Transformers needs to load it."""
OURS = {"streaming", "streaming_windows", "quantization_config", *OPTIONS}
"""Options that are not passed unchanged to Transformers."""


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
    """A folder whose model gets the dtype of its load_fn, and may be quantized while loading."""

    def facts(self) -> ModelFacts:
        found = super().facts()
        return (
            found
            if "dtype" in self.planned.options
            else replace(found, dtype=DTYPES[self.planned.load_fn])
        )

    def storage(self) -> Storage:
        on_load = (self.planned.options.get("quantization_config") or {}).get("quant_method")
        if on_load and not self.config.quantization:
            return Storage(
                note=f"quantized by {on_load} while loading; the checkpoint does not show the stored size"
            )
        return super().storage()


class TransformersEngine(LogitsEngine):
    """A causal language model of Transformers."""

    capabilities = Capabilities(
        load_fns=tuple(DTYPES),
        fwd_fn="transformers",
        packages=("transformers",),
        install="pip install 'transformers>=5.5' accelerate 'compressed-tensors>=0.15' greenlet",
        summary="any checkpoint Transformers runs, logits on GPU or CPU",
        noise=True,
        arithmetic={"dtype": None, "attn_implementation": None, "experts_implementation": None},
        one_line={
            load_fn: {"dtype": "auto"}
            for load_fn in ("transformers", "transformers_auto", "transformers_mm")
        },
    )
    files = TransformersFolder
    options_type = TransformersOptions

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.checkpoint = TransformersFolder(model)
        self.streamer: Streamer | None = None
        self.noise: Noise | None = None
        # has a base model, and a forward that can compute only some logits (long_windows.py)
        self.two_parts = False

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        options = parse_options(TransformersOptions, model.options)
        seed_of(model.options)
        check_installed("accelerate", cls.capabilities.install)
        found = TransformersFolder(model)
        stored = {} if found.is_remote else found.config.quantization
        check_packages("engine.quantization_config", options.quantization_config or {})
        check_packages("model_dir", stored)
        groups = stored.get("config_groups") or {}
        dtype = options.dtype or DTYPES[model.load_fn]
        if dtype == "auto" and not found.is_remote:
            dtype = found.config.dtype or dtype
        formats = f"{stored.get('format')} {' '.join(str(group.get('format')) for group in groups.values())}"
        if dtype in ("float16", "float32") and (unpacked := BF16_ONLY.search(formats)):
            raise InputError(
                f"engine.dtype: Transformers decompresses {unpacked[0]} to bfloat16 and cannot run it in {dtype}; "
                'use load_fn transformers_auto_bf16 or "dtype": "bfloat16"'
            )
        if options.streaming:
            check_streaming(options, stored)
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
        is_multimodal = self.planned.load_fn == "transformers_mm"
        loader = getattr(
            transformers, f"AutoModelFor{'ImageTextToText' if is_multimodal else 'CausalLM'}"
        )
        cuda, auto = torch.cuda.is_available(), self.planned.load_fn in DEVICE_MAP_AUTO
        device = torch.device("cuda:0" if cuda else "cpu")
        arguments: dict[str, Any] = {
            "dtype": DTYPES[self.planned.load_fn],
            "use_safetensors": True,
            "device_map": "cpu"
            if self.options.streaming
            else "auto"
            if auto and cuda
            else str(device),
            **self.options.model_dump(exclude_none=True, exclude=OURS),
        }
        if self.options.quantization_config:
            arguments["quantization_config"] = transformers_config(self.options.quantization_config)
        if stored and not AutoHfQuantizer.supports_quant_method(stored):
            raise ModelError(
                f"{folder}: Transformers does not run quant_method {stored.get('quant_method')!r}"
            )
        try:
            self.model, found = loader.from_pretrained(
                folder, output_loading_info=True, **arguments
            )
        except (
            Exception
        ) as error:  # any error of Transformers, accelerate or a quantizer fails this model
            reason = conversion_error(error) or one_line(error)
            raise ModelError(f"Transformers could not load {folder}: {reason}") from error
        check_complete(folder, found, on_load=bool(self.options.quantization_config) and not stored)
        if ignored := ignored_by_attention(self.model):
            if asked := self.options.attn_implementation:
                raise ModelError(
                    f"{folder}: engine.attn_implementation: {asked} ignores its {ignored}; use eager"
                )
            self.model.set_attn_implementation("eager")
        check_resident(folder, self.model, stored)
        self.model.eval()
        rotary.start_from_original_factors(self.model)
        if not self.options.streaming:  # streaming would read every layer again
            check_causal(folder, self.model)
        if stored:
            check_weights(self.checkpoint.headers, self.model)
        takes = inspect.signature(self.model.forward).parameters
        self.two_parts = "logits_to_keep" in takes and self.model.base_model is not self.model
        if (seed := seed_of(self.planned.options)) is not None:
            self.noise = Noise(
                dict(enumerate(dict.fromkeys(decoder_layers(self.model, "noise")))), seed
            )
        if self.options.streaming:
            self.streamer = Streamer(
                self.model, self._forward, device, self.options.streaming_windows
            )

    def prepare(self, windows: Sequence[Window]) -> None:
        if self.streamer is not None:
            self.streamer.prepare(windows)

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        import torch

        made: Iterator[torch.Tensor] = torch.inference_mode()(self._pieces)(
            window
        )  # only while a piece is computed
        return made

    def _pieces(self, window: Window) -> Iterator[torch.Tensor]:
        yield from (
            self._forward(window) if self.streamer is None else self.streamer.forwarded(window)
        )
        if self.noise is not None and (missed := self.noise.missed()):
            raise ModelError(missed)

    def _tokens(self, window: Window) -> torch.Tensor:
        """Return the tokens [1, L] on the device."""
        import torch

        return torch.from_numpy(window.token_ids).long().unsqueeze(0).to(self.model.device)

    def _forward(self, window: Window) -> Iterator[torch.Tensor]:
        """Run the layers now; the iterator runs the head for each piece."""
        import torch

        token_ids = self._tokens(window)
        if self.noise is not None:
            self.noise.begin(token_ids[0], torch.arange(len(window.token_ids)))
        rows = max(PIECE_ELEMENTS // self.model.config.get_text_config().vocab_size, 1)
        if not self.two_parts or len(window.token_ids) <= rows:
            return iter([self.model(token_ids, use_cache=False).logits[0]])
        return long_windows.pieces(self.model, token_ids, rows)

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None, Head] | str:
        """Return the output embedding, with soft cap and scale from the config; ``states`` are kept
        from now on.
        """
        import torch

        module = self.model.get_output_embeddings()
        if not isinstance(module, torch.nn.Linear) or type(module.weight) is not torch.nn.Parameter:
            return f"its head is {'missing' if module is None else 'a ' + type(module).__name__}"
        if module.weight.is_meta:
            return "its head is not resident"
        if self.head_inputs is None:
            self.head_inputs = torch.empty(0)
            module.register_forward_pre_hook(lambda _, given: setattr(self, "head_inputs", given[0][0]))
        stated = self.model.config.get_text_config().to_dict()
        # MPT's logit_scale may be a word; zeros do not count.
        numbers = {
            key: float(value)
            for key, value in stated.items()
            if isinstance(value, int | float) and value
        }
        head = Head(
            module.weight.shape[0],
            dtype_name(module.weight.dtype),
            numbers.get("final_logit_softcapping"),
            numbers.get("logit_scale", 1.0) / numbers.get("logits_scaling", 1.0),
        )
        return module.weight.detach(), None if module.bias is None else module.bias.detach(), head

    def layers(self) -> tuple[Layer, ...]:
        from . import transformers_layers as transformers_layers

        asked = self.checkpoint.config.quantization or self.options.quantization_config or {}
        return group_layers(transformers_layers.layers(self.model, asked, self.checkpoint.folder))

    def dtype_notes(self) -> list[str]:
        """Return a note if the model ran in another dtype than its config states, and lost digits
        or range.
        """
        stated = self.checkpoint.config.dtype
        ran = dtype_name(self.model.dtype)
        if stated in (None, ran) or ran == "float32":
            return []
        chosen = (
            "engine.dtype says" if self.options.dtype else f"load_fn {self.planned.load_fn} does"
        )
        if self.checkpoint.config.quantization:
            return [f"its config says {stated}, and it ran in {ran}, as {chosen}"]
        return [f"stored in {stated}, and ran in {ran}, as {chosen}"]

    def provenance(self) -> dict[str, Any]:
        floor = provenance_of(seed_of(self.planned.options))
        notes = [*self.dtype_notes(), *floor.get("notes", ())]
        return {
            "model_class": type(self.model).__name__,
            "dtype": dtype_name(self.model.dtype),
            "device": str(next(self.model.parameters()).device),
            "attention": self.model.config._attn_implementation,
            "attn_implementation": self.model.config._attn_implementation,
            "batch": "one window at a time",
            ROPE: rope(CheckpointConfig(self.model.config.to_dict()), self.planned.max_tokens),
            **WITHOUT_CACHE,
            **({} if self.streamer is None else {"streamed_windows": self.streamer.group}),
            **floor,
            **({"notes": notes} if notes else {}),
            "options": self.options.model_dump(exclude_none=True),
        }

    def close(self) -> None:
        if self.streamer is not None:
            self.streamer.close()
        self.model = self.head_inputs = self.noise = self.streamer = None


def check_streaming(options: TransformersOptions, stored: dict[str, Any]) -> None:
    """InputError if ``streaming`` is incompatible with the other options, the checkpoint or the
    installed packages.
    """
    for name in ("device_map", "max_memory", "offload_folder", "quantization_config"):
        if getattr(options, name) is not None:
            raise InputError(
                f"engine.streaming: cannot be combined with {name}; remove one of them"
            )
    if stored:
        raise InputError(
            f"engine.streaming: streams unquantized checkpoints only, this one is quantized with "
            f"{stored.get('quant_method')}"
        )
    if importlib.util.find_spec("greenlet") is None:
        raise InputError("engine.streaming: needs greenlet: pip install greenlet")


def check_packages(where: str, config: dict[str, Any]) -> None:
    """InputError with the pip command if a quantization needs packages that are not installed."""
    needed = PACKAGES.get(str(config.get("quant_method")), ())
    if missing := [package for package in needed if package not in installed_versions(needed)]:
        raise InputError(
            f"{where}: quantized with {config['quant_method']}, which needs {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )


def ignored_by_attention(model: Any) -> str:
    """Return arguments of a model's attention that torch's sdpa ignores, such as a soft cap; "" if
    there are none.

    Transformers chooses sdpa for Gemma 2 nevertheless.
    """
    if model.config._attn_implementation != "sdpa":
        return ""
    for module in {type(each): each for each in model.modules()}.values():
        with suppress(OSError, TypeError):  # a class without source
            given = GIVEN_TO_ATTENTION.findall(inspect.getsource(type(module).forward))
            if found := next(
                (name for name in given if getattr(module, name, None) is not None), ""
            ):
                return str(found)
    return ""


def check_causal(folder: Path, model: Any) -> None:
    """ModelError if a token changes the logits before it, as in encoders, which see the tokens that
    they would predict.

    One forward pass runs two texts of eight tokens that differ only in a token in the middle.  If
    attention works in both directions, the log-probabilities before that token change on average
    about as much as those after it.  If attention is causal, the change before the token is 0, or a
    rounding of kernels that mix tokens, such as experts'.
    """
    import torch

    first = model.config.get_text_config().vocab_size // 4
    texts = torch.arange(first, first + 8, device=model.device).repeat(2, 1)
    texts[1, 4] = first - 1
    with torch.inference_mode():
        logprobs = model(texts, use_cache=False).logits.float().log_softmax(-1)
    change = (logprobs[0] - logprobs[1]).nan_to_num(0.0).abs().mean(-1)
    before, behind = float(change[:4].mean()), float(change[5:].mean())
    if before > max(behind / 2, 1e-6):
        raise ModelError(
            f"{folder}: {type(model).__name__} lets tokens see what follows (another token changes the "
            f"log-probabilities before it by {before:.2g} nats, and those after it by {behind:.2g}); nothing to score"
        )


def check_complete(folder: Path, found: Mapping[str, Any], *, on_load: bool) -> None:
    """ModelError for weights that Transformers initialized at random or loaded without scales, with
    only a warning.

    ``found``: loading info of ``from_pretrained``; ``on_load``: Transformers quantized the model
    while loading, so that the checkpoint needs no scales.
    """
    for name in sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]):
        if on_load and WEIGHT_SCALE.search(name):
            continue
        raise ModelError(f"{folder}: Transformers found no {name} that fits, and made one up")
    for name in sorted(filter(WEIGHT_SCALE.search, found["unexpected_keys"])):
        raise ModelError(
            f"{folder}: Transformers left {name} out; it does not run this model's quantization"
        )


def conversion_error(error: Exception) -> str:
    """Return why Transformers could not convert stored tensors; "" for another error.

    Its error only points to a report, which it logs as a warning.  The report's entries are in a
    variable of the function that raised the error.
    """
    trace = error.__traceback__
    while trace is not None:
        entries = getattr(trace.tb_frame.f_locals.get("loading_info"), "conversion_errors", None)
        if entries:
            name, entry = next(iter(entries.items()))
            reason = (
                entry.rpartition("\nError")[0] or entry
            )  # a traceback, and then which operation it was
            return f"{name} could not be converted: {one_line(reason.strip().splitlines()[-1])}{and_more([*entries])}"
        trace = trace.tb_next
    return ""


def check_resident(folder: Path, model: Any, stored: Mapping[str, Any]) -> None:
    """ModelError for a quantized model with weights on disk: Transformers computes it wrong
    (unquantized: right).
    """
    on_disk = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if stored and on_disk:
        raise ModelError(
            f"{folder}: {on_disk} was left on disk for want of memory, and Transformers computes wrong with quantized "
            "weights there; give engine.max_memory or another device_map"
        )


def transformers_config(given: dict[str, Any]) -> Any:
    """Return Transformers' object for a ``quantization_config``; InputError for a key that it does
    not have.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        config = AutoQuantizationConfig.from_dict(dict(given))
    except Exception as error:  # each method's class raises its own errors
        raise InputError(f"engine.quantization_config: {one_line(error)}") from error
    known = {*inspect.signature(type(config).__init__).parameters, "quant_method"}
    prefix = "quantization_config."
    check_names(
        (prefix + name for name in given), (prefix + name for name in known), type(config).__name__
    )
    return config
