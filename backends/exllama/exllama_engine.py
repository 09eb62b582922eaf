"""ExLlamaV3 (1.6): EXL3 and unquantized models on NVIDIA GPUs, one window at a time in prefill.

The model fills one GPU after the other, unless ``device``, ``reserve_per_device`` or
``use_per_device`` is set.  A window is one ``Model.forward`` without a KV cache (``attn_mode``
"flash_attn_nc").  Despite that name, flash-attn is not needed: exllamav3 tries its Triton kernels,
xformers and torch in this order.  The provenance names what ran.

Unquantized weights (also bf16 ones), activations and logits are float16.  EXL3 products of more
than 144 rows, as in most windows, reconstruct the weights in float16 and multiply with these.  The
head is padded to a multiple of 128 entries.  In the padding a quantized head has noise; logits are
cut to the config's vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from ..base import Capabilities, Layer, PlannedModel, Window
from ..checkpoint import safetensors_files as checkpoint
from ..checkpoint.built_model import import_transformers
from ..checkpoint.checkpoint_config import ROPE, CheckpointConfig, has_longrope, rope
from ..checkpoint.folder import HuggingFaceFolder
from ..checkpoint.formats import FORMATS
from ..common import machine
from ..common.engine_options import EngineOptions
from ..common.errors import InputError, ModelError
from ..common.json_files import expanded
from ..common.message_text import dtype_name, one_line
from ..common.packages import torch_related_builds
from ..hub import local_folder
from ..layers import groups
from ..layers.module_names import by_module
from ..logits_engine import LogitsEngine
from ..reference.head import Head

if TYPE_CHECKING:
    import torch

    from ..reference.head import RecomputableHead

PACKAGE = "exllamav3"
"""The package; its name is also the load_fn."""
QUANT_METHOD = "exl3"
"""The only quantization method that the package runs unchanged.

exllamav3 would convert fp8 and mxfp4 to float16, and modelopt's NVFP4 to garbage.
"""
OUTPUT_FACTOR = 4
"""Memory that the split over GPUs leaves free, in sizes of a window's float16 logits.

These are the logits, and 2.5 times as much to process them.
"""
NOT_GPUS = {"max_seq_len"}
"""Options that do not select GPUs."""
ATTENTION_NOTES = ("fn", "fn_qc")
"""Keys of a module's ``dispatch_cache`` for the function that computed its attention.

The second one is for a quantized cache.
"""
SPLITS = {"device", "reserve_per_device", "use_per_device"}
EXL3_PARTS = set(FORMATS["trellis"][1].split())


class ExLlamaV3Options(EngineOptions):
    """The ``engine`` object: arguments of ``Model.load``, in GiB.

    ``max_seq_len`` selects longrope factors.
    """

    max_seq_len: int | None = Field(None, gt=0)
    device: str | None = Field(None, pattern=r"^cuda:\d+$")
    reserve_per_device: float | list[float] | None = None
    use_per_device: float | list[float] | None = None

    @model_validator(mode="after")
    def _one_way_to_split(self) -> ExLlamaV3Options:
        splits = []
        for name in self.model_fields_set & SPLITS:
            if getattr(self, name) is not None:
                splits.append(name)
        if len(splits) > 1:
            raise ValueError(f"{' and '.join(sorted(splits))} exclude each other")
        return self


class ExLlamaV3Engine(LogitsEngine):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=(PACKAGE,),
        fwd_fn=PACKAGE,
        quant_method=QUANT_METHOD,
        packages=(PACKAGE,),
        install=(
            "pip install 'exllamav3>=1.6' (compiles at its first import, with nvcc; "
            "compiled wheels: https://github.com/turboderp-org/exllamav3/releases)"
        ),
        summary="EXL3 and unquantized models, logits on NVIDIA GPUs",
        override_tensors=True,
    )
    files = HuggingFaceFolder
    options_type = ExLlamaV3Options

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.dtype = ""

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        longest = cls(model).options.max_seq_len
        if longest is not None and longest < model.max_tokens:
            raise InputError(
                f"engine.max_seq_len: {longest} is too short for windows of {model.max_tokens} "
                "tokens"
            )
        check_folder(expanded(model.model_dir), model)
        check_overrides(model)

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        if model.options.keys() - NOT_GPUS:
            return 0
        return None

    @classmethod
    def versions(cls) -> dict[str, str]:
        return torch_related_builds(PACKAGE) | machine.variables(("EXL3_",))

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        import_transformers()
        importlib.import_module(PACKAGE)

    def load(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ModelError(f"{PACKAGE} needs an NVIDIA GPU; torch sees none")
        folder = local_folder(self.planned.model_dir)
        try:
            self._load(folder)
        # Any error of the compiler, the loader or CUDA fails this model.
        except Exception as error:
            raise ModelError(f"{PACKAGE} could not load {folder}: {one_line(error)}") from error

    def _load(self, folder: Path) -> None:
        """Load the model; may raise any error."""
        from exllamav3 import Config, Model

        config = Config.from_directory(str(folder))
        for file in self.planned.override_tensors:
            config.stc.add_tensor_files(str(file), warn_if_override=False)
            # Older versions of exllamav3 expect a folder.
            if str(file) not in config.stc.tensor_files:
                raise ValueError(
                    f"this version does not take {file} as override tensors; "
                    f"{self.capabilities.install}"
                )
        if self.options.max_seq_len is not None:
            config.override_dynamic_seq_len(self.options.max_seq_len)
        self.model = Model.from_config(config)
        tokens = self.planned.max_tokens
        self.model.load(
            max_chunk_size=tokens,
            max_output_size=tokens,
            max_output_factor=OUTPUT_FACTOR,
            **self.options.model_dump(exclude_none=True, exclude=NOT_GPUS),
        )
        self._forget_kernels()

    def prepare(self, windows: Sequence[Window]) -> None:
        self._forget_kernels()

    def _forget_kernels(self) -> None:
        """Forget which kernels ran: scoring may run different kernels from loading."""
        for module in self.model:
            for name in ATTENTION_NOTES:
                getattr(module, "dispatch_cache", {}).pop(name, None)
            if type(getattr(module, "inner", None)).__name__ == "LinearEXL3":
                module.inner._fused_reconstruct = None

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        # At once: exllamav3 computes all logits of a forward pass.
        logits = self.model.forward(token_ids_of(window), {"attn_mode": "flash_attn_nc"})
        yield self.without_padding(logits)[0]

    def without_padding(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [B, n, V] without padding, and note their dtype."""
        self.dtype = dtype_name(logits.dtype)
        return logits[..., : self.model.config.vocab_size]

    def head(self) -> RecomputableHead | str:
        """Return the head if it is not quantized; ``states`` are kept from now on."""
        import torch

        module = self.model.modules[self.model.logit_layer_idx]
        kernel = type(module.inner).__name__
        if module.pre_scale != 1.0:
            return "its logits are scaled before the soft cap"
        if kernel != "LinearFP16":
            return f"its head is a {kernel}"
        if self.head_inputs is None:
            self.head_inputs = torch.empty(0)
            self._keep_head_inputs(module)
        size = self.model.config.vocab_size
        # Without the padding of inputs and outputs.
        weight = module.inner.weight[: module.in_features_unpadded, :size].T
        bias = module.inner.bias
        if bias is not None:
            bias = bias[:size]
        head = Head(size, dtype_name(weight.dtype), module.softcap or None, module.post_scale)
        return weight, bias, head

    def _keep_head_inputs(self, module: Any) -> None:
        """Wrap the head's forward: exllamav3's modules have no hooks."""
        forward = module.forward

        # ``x`` as in exllamav3, which may pass it by name.
        def forward_with_states(x: torch.Tensor, *rest: Any, **keys: Any) -> torch.Tensor:
            self.head_inputs = x[0]
            logits: torch.Tensor = forward(x, *rest, **keys)
            return logits

        module.forward = forward_with_states

    def layers(self) -> tuple[Layer, ...]:
        return groups.group_layers(layer_of(module) for module in self._linears())

    def _linears(self) -> list[Any]:
        """Return the model's Linear modules with weights."""
        linears = []
        for module in self.model:
            if type(module).__name__ == "Linear" and module.inner is not None:
                linears.append(module)
        return linears

    def provenance(self) -> dict[str, Any]:
        config = CheckpointConfig.read(local_folder(self.planned.model_dir))
        context = self.options.max_seq_len or self.planned.max_tokens
        devices = {str(module.device) for module in self._linears()}
        attention: set[str] = set()
        for module in self.model:
            attention |= attention_of(module)
        return {
            "dtype": self.dtype,
            "batch": "one window at a time",
            ROPE: rope(config, context),
            **groups.WITHOUT_CACHE,
            "options": self.options.model_dump(exclude_none=True),
            "model_class": type(self.model).__name__,
            "devices": sorted(devices),
            "attention": sorted(attention),
            "override_tensors": [str(file) for file in self.planned.override_tensors],
        }

    def close(self) -> None:
        model = self.model
        self.model = None
        self.head_inputs = None
        if model is not None:
            model.unload()
            model.config.stc.close()


def token_ids_of(window: Window) -> torch.Tensor:
    """Return the tokens of a window, int64 [1, L], in CPU memory."""
    import torch

    return torch.from_numpy(window.token_ids).long()[None]


def attention_of(module: Any) -> set[str]:
    """Return what computed a module's attention: the chosen functions, and graphs that have run."""
    # Graphs of plain attention.  Only some record in ``slot_widths`` whether they have run.
    graphs = []
    for graph in getattr(module, "bc_attn", {}).values():
        if graph and getattr(graph, "slot_widths", True):
            graphs.append(graph)
    # Latent attention stores its graphs with the functions.
    entries = getattr(module, "dispatch_cache", {})
    for entry in entries.values():
        if entry and not callable(entry):
            graphs.append(entry)
    names = {type(graph).__name__ for graph in graphs}
    for name in ATTENTION_NOTES:
        if name in entries:
            names.add(entries[name].__name__)
    return names


def layer_of(module: Any) -> Layer:
    """Return how a Linear of exllamav3 ran."""
    inner = module.inner
    kernel = type(inner).__name__
    if kernel != "LinearEXL3":
        return Layer(module.key, dtype_name(inner.weight.dtype), "float16", kernel)
    # The first call of reconstruct_hgemm sets the attribute.
    if getattr(inner, "_fused_reconstruct", None) is not None:
        kernel += ".reconstruct_hgemm"
    else:
        kernel += ".exl3_gemm"  # or gemv, mgemm, in graphs
    return Layer(module.key, f"exl3 {inner.K:.1f} bpw", "float16", kernel)


def check_folder(folder: Path, model: PlannedModel) -> None:
    """InputError for a local folder that exllamav3 would load incorrectly.

    The reasons are safetensors files that are not the model's, a quantization that exllamav3 does
    not read, and rope factors that depend on a missing ``max_seq_len``.
    """
    if not folder.is_dir():
        return
    config = CheckpointConfig.read(folder)
    method = config.quantization.get("quant_method")
    for file in checkpoint.strays(folder):
        # Mistral's repositories have the same weights twice.  This second copy is not refused.
        is_copy = file.name.startswith("consolidated")
        if file not in model.override_tensors and not is_copy:
            raise InputError(
                f"model_dir: {file}: {PACKAGE} would load it as well; move it out of the folder"
            )
    if method not in (None, QUANT_METHOD):
        raise InputError(
            f"model_dir: {PACKAGE} does not read {method} models; it reads {QUANT_METHOD}"
        )
    if model.options.get("max_seq_len") is None and has_longrope(config.raw):
        raise InputError(
            "engine.max_seq_len: missing; this model's longrope factors depend on it in "
            f"{PACKAGE}, so set it to what you serve with"
        )


def check_overrides(model: PlannedModel) -> None:
    """InputError if the engine would mix override tensors with the tensors that they replace.

    For a module with both EXL3 tensors and a weight, exllamav3 uses the EXL3 tensors, from
    whichever file.
    """
    for file in model.override_tensors:
        if file.suffix != ".safetensors":
            raise InputError(f"model_dir: override tensors {file}: must be a .safetensors file")
    folder = Path(model.model_dir)
    # The driver reports missing files, for every engine.
    if not all(file.is_file() for file in model.override_tensors) or not folder.is_dir():
        return
    stored = by_module(checkpoint.read_headers(checkpoint.weight_files(folder)))
    overrides = by_module(checkpoint.read_headers(model.override_tensors))
    for module, parts in overrides.items():
        if module not in stored:
            raise InputError(
                f"model_dir: override tensors hold {module}, which the model does not have"
            )
        mixed = stored[module].keys() & EXL3_PARTS - parts.keys()
        if mixed and parts.keys() & {"weight", *EXL3_PARTS}:
            raise InputError(
                f"model_dir: override tensors replace {module}, but not its "
                f"{', '.join(sorted(mixed))}"
            )
