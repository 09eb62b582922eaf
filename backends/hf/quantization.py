"""Quantized models in Transformers: which packages they need, and failures that Transformers would only warn of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.options import check_names
from compare_q.backends.common.packages import installed_versions

KEY = "quantization_config"
WEIGHT_SCALE = re.compile(r"\.(weight_scale\w*|scales|qzeros)$")
BF16_ONLY = re.compile("nvfp4|mxfp4|mxfp8")
"""Formats of compressed-tensors 0.17 that it always decompresses to bfloat16."""
PACKAGES = {
    "aqlm": ("aqlm",), "auto-round": ("auto-round",), "awq": ("gptqmodel",), "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",), "eetq": ("kernels",), "fbgemm_fp8": ("fbgemm-gpu",),
    "fp_quant": ("fp_quant",), "gptq": ("optimum", "gptqmodel"), "higgs": ("flute-kernel", "fast_hadamard_transform"),
    "nvfp4": ("kernels",), "quanto": ("optimum-quanto",), "quark": ("amd-quark",), "sinq": ("sinq",),
    "spqr": ("spqr_quant",), "torchao": ("torchao",), "vptq": ("vptq",),
}  # fmt: skip
"""quant_method -> distributions without which Transformers does not load it."""


def check_packages(where: str, config: dict[str, Any]) -> None:
    """InputError with the install line, if a quantization needs packages that are not installed."""
    needed = PACKAGES.get(str(config.get("quant_method")), ())
    if missing := [package for package in needed if package not in installed_versions(needed)]:
        raise InputError(
            f"{where}: quantized with {config['quant_method']}, which needs {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )


def check_dtype(dtype: str, stored: Mapping[str, Any]) -> None:
    """InputError if a checkpoint's format cannot run in the model's dtype."""
    groups = stored.get("config_groups") or {}
    formats = f"{stored.get('format')} {' '.join(str(group.get('format')) for group in groups.values())}"
    if dtype in ("float16", "float32") and (found := BF16_ONLY.search(formats)):
        raise InputError(
            f"engine.dtype: Transformers decompresses {found[0]} to bfloat16 and cannot run it in {dtype}; "
            'use load_fn transformers_auto_bf16 or "dtype": "bfloat16"'
        )


def check_complete(folder: Path, found: Mapping[str, Any], *, on_load: bool) -> None:
    """ModelError for weights that Transformers made up, or loaded without their scales, and only warned of.

    ``found``: the loading info of ``from_pretrained``; ``on_load``: Transformers quantized the model while loading, so
    that scales which the checkpoint lacks are not missing.
    """
    for name in sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]):
        if on_load and WEIGHT_SCALE.search(name):
            continue
        raise ModelError(f"{folder}: Transformers found no {name} that fits, and made one up")
    for name in sorted(filter(WEIGHT_SCALE.search, found["unexpected_keys"])):
        raise ModelError(f"{folder}: Transformers left {name} out; it does not run this model's quantization")


def check_resident(folder: Path, model: Any, stored: Mapping[str, Any]) -> None:
    """ModelError for a quantized model with weights on disk, for which Transformers computes with other numbers.

    An FP8 SmolLM2 with 2 of its 30 layers on disk scored 20.46 nats a token in place of 11.86; a bf16 model is scored
    correctly.
    """
    on_disk = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if stored and on_disk:
        raise ModelError(
            f"{folder}: {on_disk} was left on disk for want of memory, and Transformers computes wrong with quantized "
            "weights there; give engine.max_memory or another device_map"
        )


def transformers_config(given: dict[str, Any]) -> Any:
    """Transformers' config object for a ``quantization_config``; InputError for a key that Transformers lacks."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    try:
        config = AutoQuantizationConfig.from_dict(dict(given))
    except Exception as error:  # each method's class checks its values in its own way
        raise InputError(f"engine.quantization_config: {one_line(error)}") from error
    known = [*inspect.signature(type(config).__init__).parameters, "quant_method"]
    check_names((f"{KEY}.{name}" for name in given), (f"{KEY}.{name}" for name in known), type(config).__name__)
    return config
