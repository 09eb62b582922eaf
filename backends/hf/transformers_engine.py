"""Hugging Face Transformers, one window at a time.

A GGUF file is dequantized while it loads (``gguf_file.py``).

The four load functions are those of ExLlamaV3's compare_q.
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
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ..base import (
    Capabilities,
    Engine,
    Layer,
    ModelFacts,
    ModuleDifference,
    PlannedModel,
    QuantizedModule,
    Storage,
    Trial,
    TrialScore,
    Window,
)
from ..checkpoint.built_model import import_transformers
from ..checkpoint.checkpoint_config import ROPE, CheckpointConfig, rope
from ..checkpoint.folder import HuggingFaceFolder
from ..common.engine_options import check_names, parse_options
from ..common.errors import InputError, ModelError
from ..common.message_text import and_more, dtype_name, one_line
from ..common.packages import check_installed, installed_versions
from ..layers.groups import WITHOUT_CACHE, group_layers
from ..layers.module_outputs import ModuleHooks, OutputComparer, OutputWriter, Visitor
from ..layers.noise import OPTIONS, Noise, NoiseOptions, layer_list, provenance_of, seed_of
from ..layers.schemes import declared
from ..logits_engine import PIECE_ELEMENTS, LogitsEngine
from ..reference.head import Head
from ..sampling import SampledToken
from . import gguf_file, long_windows, rotary, sampling
from .layer_offload import Streamer, decoder_layers
from .verify import check_weights

if TYPE_CHECKING:
    import torch

    from ..reference.head import RecomputableHead
    from .model_pair import ModelPair

DEFAULT_DTYPES = {
    "transformers": "float16",
    "transformers_auto": "float16",
    "transformers_auto_bf16": "bfloat16",
    "transformers_mm": "float16",
}
"""load_fn -> default dtype."""
DEVICE_MAP_AUTO = {"transformers_auto", "transformers_auto_bf16"}
SPECIAL_ARGUMENTS = re.compile(r"\b(?:softcap|s_aux)=self\.(\w+)")
"""Arguments of attention that torch's sdpa does not accept, and a layer's attribute for each."""
SCALE_ENDING = re.compile(r"\.(weight_scale\w*|scales|qzeros)$")
BF16_ONLY = re.compile("nvfp4|mxfp4|mxfp8")
"""Formats that compressed-tensors 0.17 always decompresses to bfloat16."""
PACKAGES_OF_METHOD = {
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
OPTIONS_NOT_PASSED = {"streaming", "streaming_windows", "quantization_config", *OPTIONS}
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
        facts = super().facts()
        if "dtype" in self.planned.options:
            return facts
        return replace(facts, dtype=DEFAULT_DTYPES[self.planned.load_fn])

    def storage(self) -> Storage:
        on_load = self.planned.options.get("quantization_config") or {}
        method = on_load.get("quant_method")
        if method and not self.config.quantization:
            return Storage(
                note=f"quantized by {method} while loading; the checkpoint does not show the "
                "stored size"
            )
        return super().storage()


class TransformersGguf(gguf_file.GgufFile):
    """A GGUF file whose dequantized weights get the dtype of its load_fn."""

    def facts(self) -> ModelFacts:
        default = DEFAULT_DTYPES[self.planned.load_fn]
        dtype = gguf_file.dtype_of(self.planned.options.get("dtype", default))
        return replace(super().facts(), dtype=dtype)


class TransformersEngine(LogitsEngine):
    """A causal language model of Transformers."""

    capabilities = Capabilities(
        load_fns=tuple(DEFAULT_DTYPES),
        fwd_fn="transformers",
        packages=("transformers",),
        install="pip install 'transformers>=5.5' accelerate 'compressed-tensors>=0.15' greenlet",
        summary="any checkpoint Transformers runs, logits on GPU or CPU",
        noise=True,
        samples=True,
        restores=True,
        outputs=True,
        reads_if_named=(gguf_file.SUFFIX,),
        arithmetic={"dtype": None, "attn_implementation": None, "experts_implementation": None},
        one_line={
            "transformers": {"dtype": "auto"},
            "transformers_auto": {"dtype": "auto"},
            "transformers_mm": {"dtype": "auto"},
        },
    )
    files = TransformersFolder
    options_type = TransformersOptions

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.checkpoint = self.files_of(model)
        self.streamer: Streamer | None = None
        self.noise: Noise | None = None
        # It has a base model, and a forward that can compute only some logits (long_windows.py).
        self.has_split_forward = False

    @classmethod
    def files_of(cls, model: PlannedModel) -> TransformersFolder | TransformersGguf:
        if gguf_file.is_gguf_file(model):
            return TransformersGguf(model)
        return TransformersFolder(model)

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        options = parse_options(TransformersOptions, model.options)
        seed_of(model.options)
        check_installed("accelerate", cls.capabilities.install)
        if gguf_file.is_gguf_file(model):
            gguf_file.check(model)
        files = cls.files_of(model)
        stored: dict[str, Any] = {}
        if not files.is_remote:
            stored = files.config.quantization
        check_packages("engine.quantization_config", options.quantization_config or {})
        check_packages("model_dir", stored)
        dtype = options.dtype or DEFAULT_DTYPES[model.load_fn]
        if dtype == "auto" and not files.is_remote:
            dtype = files.config.dtype or dtype
        check_dtype(dtype, stored)
        if options.streaming:
            check_streaming(options, stored)
            if model.samples:
                raise InputError(
                    "engine.streaming: cannot sample text, because it would read every layer for "
                    "each token; leave it out"
                )
        elif options.streaming_windows:
            raise InputError('engine.streaming_windows: needs "streaming": true')

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        if {"device_map", "max_memory"} & model.options.keys():
            return 0
        if model.load_fn in DEVICE_MAP_AUTO:
            return None
        return 1

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        import_transformers()
        from transformers.quantizers import auto  # noqa: F401

    def load(self) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder = self.checkpoint.folder
        stored = self.checkpoint.config.quantization
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda:0")
        if isinstance(self.checkpoint, gguf_file.GgufFile):
            # Again: a file of the hub was not there before.
            gguf_file.check_content(self.checkpoint.model)
        self._load_weights(folder, stored, self._arguments(device))
        if isinstance(self.checkpoint, gguf_file.GgufFile):
            gguf_file.check_loaded(self.checkpoint.headers, self.model)
        self._choose_attention(folder)
        check_resident(folder, self.model, stored)
        self.model.eval()
        rotary.start_from_original_factors(self.model)
        # Streaming would read every layer again.
        if not self.options.streaming:
            check_causal(folder, self.model)
        if stored:
            check_weights(self.checkpoint.headers, self.model)
        takes = inspect.signature(self.model.forward).parameters
        has_base = self.model.base_model is not self.model
        self.has_split_forward = "logits_to_keep" in takes and has_base
        seed = seed_of(self.planned.options)
        if seed is not None:
            layers = dict.fromkeys(decoder_layers(self.model, "noise"))
            self.noise = Noise(dict(enumerate(layers)), seed)
        if self.options.streaming:
            group = self.options.streaming_windows
            self.streamer = Streamer(self.model, self._forward, device, group)

    def _arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of ``from_pretrained``; the ``engine`` object overrides defaults."""
        load_fn = self.planned.load_fn
        device_map = str(device)
        if self.options.streaming:
            device_map = "cpu"
        elif load_fn in DEVICE_MAP_AUTO and device.type == "cuda":
            device_map = "auto"
        arguments: dict[str, Any] = {
            "dtype": DEFAULT_DTYPES[load_fn],
            "use_safetensors": True,
            "device_map": device_map,
            **self.options.model_dump(exclude_none=True, exclude=OPTIONS_NOT_PASSED),
        }
        if self.options.quantization_config:
            arguments["quantization_config"] = transformers_config(self.options.quantization_config)
        if isinstance(self.checkpoint, gguf_file.GgufFile):
            return gguf_file.loading_arguments(self.checkpoint.folder, arguments)
        return arguments

    def _load_weights(
        self, folder: Path, stored: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        """Load the model; ModelError if Transformers does not find all its weights.

        ``stored``: the quantization of the checkpoint.
        """
        import transformers
        from transformers.quantizers.auto import AutoHfQuantizer

        loader: Any = transformers.AutoModelForCausalLM
        if self.planned.load_fn == "transformers_mm":
            loader = transformers.AutoModelForImageTextToText
        if stored and not AutoHfQuantizer.supports_quant_method(stored):
            raise ModelError(
                f"{folder}: Transformers does not run quant_method {stored.get('quant_method')!r}"
            )
        if isinstance(self.checkpoint, gguf_file.GgufFile):
            place = folder.parent
        else:
            place = folder
        try:
            self.model, loading_info = loader.from_pretrained(
                place, output_loading_info=True, **arguments
            )
        # Any error of Transformers, accelerate or a quantizer fails this model.
        except Exception as error:
            reason = conversion_error(error) or one_line(error)
            raise ModelError(f"Transformers could not load {folder}: {reason}") from error
        on_load = bool(self.options.quantization_config) and not stored
        check_complete(folder, loading_info, on_load=on_load)

    def _choose_attention(self, folder: Path) -> None:
        """Compute attention eagerly if torch's sdpa would ignore one of its arguments.

        ModelError if the spec has chosen the implementation.
        """
        ignored = ignored_by_attention(self.model)
        if not ignored:
            return
        implementation = self.options.attn_implementation
        if implementation:
            raise ModelError(
                f"{folder}: engine.attn_implementation: {implementation} ignores its {ignored}; "
                "use eager"
            )
        self.model.set_attn_implementation("eager")

    def prepare(self, windows: Sequence[Window]) -> None:
        if self.streamer is not None:
            self.streamer.prepare(windows)

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        import torch

        # Inference mode while a piece is computed, but not in the caller's code between two pieces.
        pieces: Iterator[torch.Tensor] = torch.inference_mode()(self._pieces)(window)
        return pieces

    def _pieces(self, window: Window) -> Iterator[torch.Tensor]:
        if self.streamer is None:
            yield from self._forward(window)
        else:
            yield from self.streamer.forwarded(window)
        if self.noise is not None:
            missed = self.noise.missed()
            if missed:
                raise ModelError(missed)

    def sample(
        self, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int
    ) -> Iterator[SampledToken]:
        import torch

        sample = torch.inference_mode()(sampling.sampled_tokens)
        tokens: Iterator[SampledToken] = sample(self.model, prompts, n_tokens, seed)
        return tokens

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
        if self.has_split_forward and len(window.token_ids) > rows:
            return long_windows.pieces(self.model, token_ids, rows)
        return iter([self.model(token_ids, use_cache=False).logits[0]])

    def head(self) -> RecomputableHead | str:
        """Return the output embedding, with soft cap and scale from the config.

        From now on, the head's inputs are kept in ``head_inputs``.
        """
        import torch

        module = self.model.get_output_embeddings()
        if module is None:
            return "its head is missing"
        if not isinstance(module, torch.nn.Linear) or type(module.weight) is not torch.nn.Parameter:
            return f"its head is a {type(module).__name__}"
        if module.weight.is_meta:
            return "its head is not resident"
        if self.head_inputs is None:
            # Not None: the hook is registered once.
            self.head_inputs = torch.empty(0)
            module.register_forward_pre_hook(self._keep_head_inputs)
        numbers = {}
        for key, value in self.model.config.get_text_config().to_dict().items():
            # MPT's logit_scale may be a word; zeros do not count.
            if isinstance(value, int | float) and value:
                numbers[key] = float(value)
        head = Head(
            module.weight.shape[0],
            dtype_name(module.weight.dtype),
            numbers.get("final_logit_softcapping"),
            numbers.get("logit_scale", 1.0) / numbers.get("logits_scaling", 1.0),
        )
        bias = None
        if module.bias is not None:
            bias = module.bias.detach()
        return module.weight.detach(), bias, head

    def _keep_head_inputs(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self.head_inputs = inputs[0][0]

    def exchangeable(self, reference: Engine) -> tuple[QuantizedModule, ...]:
        # It imports torch, which the driver does not.
        from . import exchangeable

        other = other_engine(reference)
        if self.options.quantization_config and not self.checkpoint.config.quantization:
            raise InputError(
                f"{self.planned.label}: engine.quantization_config: a model that is quantized "
                "while loading has no stored sizes; give a quantized checkpoint"
            )
        checkpoints = (self.checkpoint.headers, other.checkpoint.headers)
        return exchangeable.exchangeable(self._pair(other), *checkpoints)

    def trials(
        self, reference: Engine, windows: Sequence[Window], trials: Sequence[Trial]
    ) -> Iterator[TrialScore]:
        from .exchange import Exchange

        exchange = Exchange(self._pair(other_engine(reference)), trials)
        for window in windows:
            yield from exchange.scores(window)

    def _pair(self, reference: TransformersEngine) -> ModelPair:
        """Return this loaded model and its reference; InputError if an option forbids trials."""
        from .model_pair import ModelPair

        for engine in (self, reference):
            for option in ("streaming", "noise"):
                if getattr(engine.options, option):
                    raise InputError(
                        f"{engine.planned.label}: engine.{option}: cannot be combined with trials "
                        "that exchange modules; remove it"
                    )
        return ModelPair(self, reference)

    def record_outputs(self, window: Window, file: Path) -> None:
        writer = OutputWriter(file)
        self._show_outputs(window, writer)
        writer.close()

    def compare_outputs(self, window: Window, file: Path) -> list[ModuleDifference]:
        with closing(OutputComparer(file)) as comparer:
            self._show_outputs(window, comparer)
            return comparer.differences()

    def _show_outputs(self, window: Window, visitor: Visitor) -> None:
        """Run a window, and pass what its modules take and return to a visitor."""
        import torch

        decoder = self.model.get_decoder()
        count = self.model.config.get_text_config().num_hidden_layers
        layers = layer_list(decoder, count, type(self.model).__name__)
        length = len(window.token_ids)
        hooks = ModuleHooks(decoder, layers, visitor, length)
        try:
            self.prepare([window])
            hooks.begin(torch.from_numpy(window.token_ids), torch.arange(length))
            hooks.show_logits(self.pieces(window), length)
        finally:
            hooks.remove()

    def layers(self) -> tuple[Layer, ...]:
        # It imports torch, which the driver does not.
        from . import transformers_layers

        headers = self.checkpoint.headers
        quantization = headers.config.quantization or self.options.quantization_config or {}
        if isinstance(headers, gguf_file.GgufCheckpoint):
            schemes = headers.schemes
            is_quantized = True
        else:
            schemes = declared(quantization)
            is_quantized = bool(quantization)
        quantized: set[str] = set()
        if is_quantized:
            quantized = transformers_layers.quantized_modules(headers)
        return group_layers(transformers_layers.layers(self.model, schemes, quantized))

    def dtype_notes(self) -> list[str]:
        """Return a note if the model lost digits or range in another dtype than its config's."""
        if isinstance(self.checkpoint, gguf_file.GgufFile):
            return [gguf_file.NOTE]
        stored = self.checkpoint.config.dtype
        ran = dtype_name(self.model.dtype)
        if stored in (None, ran) or ran == "float32":
            return []
        reason = f"load_fn {self.planned.load_fn} does"
        if self.options.dtype:
            reason = "engine.dtype says"
        if self.checkpoint.config.quantization:
            return [f"its config says {stored}, and it ran in {ran}, as {reason}"]
        return [f"stored in {stored}, and ran in {ran}, as {reason}"]

    def provenance(self) -> dict[str, Any]:
        floor = provenance_of(seed_of(self.planned.options))
        notes = [*self.dtype_notes(), *floor.get("notes", ())]
        # The results file has the keys in this order.  "attention" is a column of the table, and
        # "attn_implementation" is the name of Transformers' option.
        facts: dict[str, Any] = {
            "model_class": type(self.model).__name__,
            "dtype": dtype_name(self.model.dtype),
            "device": str(next(self.model.parameters()).device),
            "attention": self.model.config._attn_implementation,
            "attn_implementation": self.model.config._attn_implementation,
            "batch": "one window at a time",
            ROPE: rope(CheckpointConfig(self.model.config.to_dict()), self.planned.max_tokens),
            **WITHOUT_CACHE,
        }
        if self.streamer is not None:
            facts["streamed_windows"] = self.streamer.group
        facts.update(floor)
        if notes:
            facts["notes"] = notes
        facts["options"] = self.options.model_dump(exclude_none=True)
        return facts

    def close(self) -> None:
        if self.streamer is not None:
            self.streamer.close()
        self.model = None
        self.head_inputs = None
        self.noise = None
        self.streamer = None


def other_engine(engine: Engine) -> TransformersEngine:
    """Return an engine that is one of Transformers; InputError if it is another one."""
    if not isinstance(engine, TransformersEngine):
        raise InputError(
            f"{engine.planned.label}: load_fn: modules can be exchanged between two models in "
            "Transformers"
        )
    return engine


def check_dtype(dtype: str, stored: Mapping[str, Any]) -> None:
    """InputError if Transformers cannot run a quantized checkpoint in a dtype."""
    formats = [str(stored.get("format"))]
    for group in (stored.get("config_groups") or {}).values():
        formats.append(str(group.get("format")))
    bf16_only = BF16_ONLY.search(" ".join(formats))
    if bf16_only and dtype in ("float16", "float32"):
        raise InputError(
            f"engine.dtype: Transformers decompresses {bf16_only[0]} to bfloat16 and cannot run "
            f'it in {dtype}; use load_fn transformers_auto_bf16 or "dtype": "bfloat16"'
        )


def check_streaming(options: TransformersOptions, stored: dict[str, Any]) -> None:
    """InputError if ``streaming`` is incompatible with other options, checkpoint or packages."""
    for name in ("device_map", "max_memory", "offload_folder", "quantization_config"):
        if getattr(options, name) is not None:
            raise InputError(
                f"engine.streaming: cannot be combined with {name}; remove one of them"
            )
    if stored:
        raise InputError(
            "engine.streaming: streams unquantized checkpoints only, this one is quantized with "
            f"{stored.get('quant_method')}"
        )
    if importlib.util.find_spec("greenlet") is None:
        raise InputError("engine.streaming: needs greenlet: pip install greenlet")


def check_packages(where: str, config: dict[str, Any]) -> None:
    """InputError with the pip command if a quantization needs packages that are not installed."""
    needed = PACKAGES_OF_METHOD.get(str(config.get("quant_method")), ())
    installed = installed_versions(needed)
    missing = [package for package in needed if package not in installed]
    if missing:
        raise InputError(
            f"{where}: quantized with {config['quant_method']}, which needs "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}"
        )


def ignored_by_attention(model: Any) -> str:
    """Return an argument of a model's attention that torch's sdpa ignores, such as a soft cap.

    "" if there is none.  Transformers chooses sdpa for Gemma 2 nevertheless.
    """
    if model.config._attn_implementation != "sdpa":
        return ""
    # One module of each class: all have the same source.
    module_of_class = {type(module): module for module in model.modules()}
    for module in module_of_class.values():
        with suppress(OSError, TypeError):  # a class without source
            source = inspect.getsource(type(module).forward)
            for name in SPECIAL_ARGUMENTS.findall(source):
                if getattr(module, name, None) is not None:
                    return str(name)
    return ""


def check_causal(folder: Path, model: Any) -> None:
    """ModelError if a token changes the logits before it.

    Encoders do so: they see the tokens that they would predict.  One forward pass runs two texts of
    eight tokens that differ only in a token in the middle.  If attention works in both directions,
    the log-probabilities before that token change on average about as much as those after it.  If
    attention is causal, the change before the token is 0, or a rounding of kernels that mix tokens,
    such as experts'.
    """
    import torch

    # The ids are consecutive, and begin after the first quarter of the vocabulary.
    first = model.config.get_text_config().vocab_size // 4
    texts = torch.arange(first, first + 8, device=model.device).repeat(2, 1)
    texts[1, 4] = first - 1
    with torch.inference_mode():
        logprobs = model(texts, use_cache=False).logits.float().log_softmax(-1)
    # NaN counts as 0: it is the difference of two log-probabilities of -inf.
    change = (logprobs[0] - logprobs[1]).nan_to_num(0.0).abs().mean(-1)
    change_before = float(change[:4].mean())
    change_after = float(change[5:].mean())
    if change_before > max(change_after / 2, 1e-6):
        raise ModelError(
            f"{folder}: {type(model).__name__} lets tokens see what follows (another token changes "
            f"the log-probabilities before it by {change_before:.2g} nats, and those after it by "
            f"{change_after:.2g}); nothing to score"
        )


def check_complete(folder: Path, loading_info: Mapping[str, Any], *, on_load: bool) -> None:
    """ModelError if Transformers initialized weights itself, or left out stored scales.

    Transformers only logs a warning in these cases.  ``loading_info``: of ``from_pretrained``.
    ``on_load``: Transformers quantized the model while loading, so that the checkpoint needs no
    scales.
    """
    initialized = list(loading_info["missing_keys"])
    initialized += [key for key, *_ in loading_info["mismatched_keys"]]
    for name in sorted(initialized):
        if on_load and SCALE_ENDING.search(name):
            continue
        raise ModelError(f"{folder}: Transformers found no {name} that fits, and made one up")
    for name in sorted(loading_info["unexpected_keys"]):
        if SCALE_ENDING.search(name):
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
            # A traceback, and then which operation it was.
            traceback_text = entry.rpartition("\nError")[0] or entry
            reason = one_line(traceback_text.strip().splitlines()[-1])
            return f"{name} could not be converted: {reason}{and_more([*entries])}"
        trace = trace.tb_next
    return ""


def check_resident(folder: Path, model: Any, stored: Mapping[str, Any]) -> None:
    """ModelError for a quantized model with weights on disk.

    Transformers computes it wrong, and an unquantized one right.
    """
    on_disk = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if stored and on_disk:
        raise ModelError(
            f"{folder}: {on_disk} was left on disk for want of memory, and Transformers computes "
            "wrong with quantized weights there; give engine.max_memory or another device_map"
        )


def transformers_config(keys: dict[str, Any]) -> Any:
    """Return Transformers' object for a ``quantization_config``; InputError for a wrong key."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        config = AutoQuantizationConfig.from_dict(dict(keys))
    except Exception as error:  # each method's class raises its own errors
        raise InputError(f"engine.quantization_config: {one_line(error)}") from error
    parameters = {*inspect.signature(type(config).__init__).parameters, "quant_method"}
    # Names as in the spec, for the message.
    key_names = [f"quantization_config.{name}" for name in keys]
    parameter_names = [f"quantization_config.{name}" for name in parameters]
    check_names(key_names, parameter_names, type(config).__name__)
    return config
