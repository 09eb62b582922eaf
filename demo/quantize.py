"""Write round-to-nearest checkpoints with the library ``compressed_tensors``.

No error compensation: the plainest quantization there is, so that the demo's numbers are easy to
reproduce and plausibly worse than bf16.  Real quantizers (llm-compressor, AutoRound, ...) do
better.  Only NVFP4 with quantized activations is calibrated: its checkpoint holds the largest
activation of each layer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, AutoTokenizer

from compare_q.backends.common import machine
from compare_q.backends.layers.module_names import FUSED_LAYERS

FP8_MAX = 448.0
FP4_MAX = 6.0
TEXT = Path(__file__).resolve().parents[1] / "eval" / "spec" / "opticks.txt"
CALIBRATION = (4, 1024)
"""Number of windows, and tokens of each.  With more windows, SmolLM2's perplexity with rounded
inputs only changes at random: 25.8, 25.9 and 25.3 with 1, 4 and 16 windows, 26.1 with the peaks of
the measured text itself."""


def fused_with(name: str) -> list[str]:
    """Return the names of the layers that are fused with layer ``name``, itself included."""
    parent, _, leaf = name.rpartition(".")
    for group in FUSED_LAYERS:
        if leaf in group:
            return [f"{parent}.{member}" for member in group]
    return [name]


def share_global_scale(layers: Mapping[str, Any], name: str) -> torch.Tensor:
    """Set the layer's ``weight_global_scale`` to one that all layers fused with it can use.

    ``layers``: by name, with every layer that this one is fused with.  Returns the scale.
    Engines keep one global scale for a fused matrix: vLLM takes the largest and warns, and a
    checkpoint with unequal ones scored PPL 16,584 instead of 20.6.
    """
    peak = max(layers[member].weight.abs().max().float() for member in fused_with(name))
    scale: torch.Tensor = layers[name].weight_global_scale.data
    return scale.fill_(FP8_MAX * FP4_MAX / peak).float()


def round_to_nearest(layer: Any, args: QuantizationArgs, global_scale: torch.Tensor | None) -> None:
    """Set ``weight_scale`` and ``weight_zero_point`` of one layer from the extremes of its weights.

    ``layer.weight`` is [out, in]; scales are [out, in / group_size], [out / rows, in / columns] for
    blocks, or [out, 1] per channel.
    """
    weight = layer.weight.data.float()
    rows, columns = args.block_structure or (1, args.group_size or weight.shape[1])
    if weight.shape[0] % rows or weight.shape[1] % columns:
        raise ValueError(
            f"{tuple(weight.shape)} weights do not divide into blocks of {rows} x {columns}"
        )
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    low = blocks.amin((1, 3))
    high = blocks.amax((1, 3))
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    layer.weight_scale.data = scale.to(layer.weight_scale.dtype)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero_point.to(layer.weight_zero_point.dtype)


def set_scales(
    layers: Mapping[str, Any],
    peaks: Mapping[str, float] | None = None,
    unquantized: Mapping[str, Any] | None = None,
) -> None:
    """Set the scales of these layers.

    Args:
        layers: by name.
        peaks: the largest input of each layer, if the checkpoint holds one global scale of inputs.
        unquantized: the layers without scales that one of ``layers`` may be fused with.  The scales
            are then as if all were quantized.
    """
    with_fused = {**(unquantized or {}), **layers}
    for name, layer in layers.items():
        global_scale = None
        if hasattr(layer, "weight_global_scale"):
            global_scale = share_global_scale(with_fused, name)
        round_to_nearest(layer, layer.quantization_scheme.weights, global_scale)
        if peaks:
            layer.input_global_scale.data.fill_(FP8_MAX * FP4_MAX / peaks[name])


def calibration_windows(source: Path, context: int) -> torch.Tensor:
    """Return token ids, int64 [windows, tokens]; windows are cut to the model's ``context``.

    They are from the end of the demo's text, since the demo measures its beginning.
    """
    windows, longest = CALIBRATION
    length = min(longest, context)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return torch.tensor(tokens[-windows * length :]).reshape(windows, length)


def calibration_dtype() -> torch.dtype:
    """Return bf16, or float32 on a CPU that emulates bf16, where it takes a quarter of the time."""
    if machine.emulates_bf16() and not torch.cuda.is_available():
        return torch.float32
    return torch.bfloat16


def input_peaks(model: Any, windows: torch.Tensor) -> dict[str, float]:
    """Return name -> largest absolute input of every linear layer over the windows [N, L].

    Fused layers have one input, and therefore one peak.
    """
    peaks: dict[str, float] = {}

    def update(name: str, inputs: torch.Tensor) -> None:
        peaks[name] = max(peaks.get(name, 0.0), inputs.abs().max().item())

    watch_inputs(model, windows, update)
    return peaks


def watch_inputs(
    model: Any, windows: torch.Tensor, on_input: Callable[[str, torch.Tensor], None]
) -> None:
    """Call ``on_input`` with each linear layer's name and input [1, L, in].

    There is one forward pass for each window of [N, L].  The head sees only the last position.
    """

    def hook_of(name: str) -> Any:
        def hook(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            on_input(name, arguments[0])

        return hook

    hooks = []
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            hooks.append(layer.register_forward_pre_hook(hook_of(name)))
    with torch.inference_mode():
        for window in windows.to(model.device):
            model(window[None], use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer's files from one model folder to another."""
    for file in [*source.glob("*token*"), *source.glob("chat_template*")]:
        shutil.copy(file, out)


def quantize(
    source: Path,
    preset: str,
    out: Path,
    *,
    group_size: int | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Quantize every linear layer of ``source`` except the head, and write ``out``.

    ``preset`` is a scheme name of compressed-tensors (``W4A16``, ``W8A16``, ``W8A8``,
    ``FP8_DYNAMIC``, ``FP8_BLOCK``, ``NVFP4A16``, ``NVFP4``, ``MXFP4A16``); ``group_size`` replaces
    the preset's where it has one.  ``ignore``: names of further layers that are not quantized, or
    patterns of them that begin with ``re:``, as a recipe of ``compare-q where`` lists them.

    A GPU is used if available.  ValueError for a preset with static input scales, which are not
    calibrated here.
    """
    transformers.utils.logging.disable_progress_bar()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size and scheme.weights.group_size:
        scheme.weights.group_size = group_size
    dynamic: bool | str = True
    if scheme.input_activations:
        dynamic = scheme.input_activations.dynamic
    if dynamic is False:
        raise ValueError(
            f"{preset}: its input scales are static, and demo/quantize.py calibrates none"
        )
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device)
    peaks = {}
    # "local": dynamic scales of groups, under a global scale.
    if dynamic is not True:
        windows = calibration_windows(source, model.config.max_position_embeddings)
        calibrated = model
        dtype = calibration_dtype()
        if dtype != model.dtype:
            calibrated = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        peaks = input_peaks(calibrated, windows)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head", *ignore],
        quantization_status=QuantizationStatus.CALIBRATION,
    )
    apply_quantization_config(model, config)
    layers = {}
    unquantized = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "quantization_scheme"):
            layers[name] = layer
        elif isinstance(layer, torch.nn.Linear):
            unquantized[name] = layer
    set_scales(layers, peaks, unquantized)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    copy_tokenizer(source, out)
