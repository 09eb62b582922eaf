"""Tensors that a model needs and its files lack, or that the files have and the model does not need; NVFP4 scales.

``compare`` has Transformers build the model from its config on torch's meta device, which takes no memory, and rename
the stored tensors by its own rules of loading (it stacks experts that are stored one by one).  The driver imports
neither, so this part runs in a separate process.

vLLM fuses layers that share an input into one matrix with one global scale: it takes the largest of their scales (for
experts that of ``gate_proj``) and only logs a warning.  A checkpoint with unequal global scales is refused.  Unequal
scales of the activations are not refused: fused layers have the same input, so each of the ranges is as good as
another.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from compare_q.backends.checkpoint import formats
from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.checkpoint.files import Tensor
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.formats import Parts, is_quantized, main_part, values
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.backends.layers.names import fused_layers, module_and_part
from compare_q.backends.layers.schemes import args_text, objects_in, part

LARGEST = 1 << 16
"""Elements of a small tensor (scales, biases) whose values are read."""
BESIDE = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|[kvq]_scale|output_scale|\w+\.(weight|bias)_(quantizer|format)\S*)$"
)
"""Names of tensors that are not weights: engines read them, or compute them again."""
PACKED = re.compile(rf"(?<=\.)({'|'.join(formats.FORMATS)})$")
KNOWN_PARTS = formats.NOT_BITS.union(*(bits.split() for _, bits in formats.FORMATS.values()))
STORED = {"weight_global_scale": "input_global_scale", "weight_scale_2": "input_scale"}
"""Name of the weights' global scale -> name of the activations', in compressed-tensors and in ModelOpt."""
FUSED, SHARED = "vLLM fuses them into one matrix with one scale", "quantize with a shared scale"
TOLERANCE = 1e-5
"""Relative difference up to which scales count as equal, as in vLLM's own check of experts.

A shared scale is stored several times as the same number.  Unequal scales come from the largest weights of two
matrices, which differ by at least 4e-3 in bf16.
"""


@dataclass(frozen=True)
class Contents:
    """Differences between the tensors in a model's files and the tensors that its config describes."""

    missing: Sequence[str] = ()  # names of the model's tensors that no file has
    left_over: Sequence[str] = ()  # modules that the model does not have
    biases: Sequence[str] = ()  # modules whose stored bias the model does not have
    shapes: Sequence[tuple[str, Sequence[int], Sequence[int], str]] = ()  # (module, stored, wanted shape, dtype)
    unchecked: str = ""  # what was not compared and why; Transformers may not know the architecture


class Stored(NamedTuple):
    """A tensor and its module.  If ``packed``, its shape is not the shape of the weights."""

    module: str
    packed: bool
    tensor: Tensor


def compare_all(folders: Sequence[str]) -> list[dict[str, Any]]:
    """The fields of each folder's ``Contents``, from one process: importing Transformers takes three seconds."""
    return [asdict(compare(Path(folder))) for folder in folders]


def compare(folder: Path) -> Contents:
    """Compare the tensors in a folder's headers with those of the model that its config describes; InputError."""
    checkpoint = Checkpoint(folder)
    stored = stored_tensors(checkpoint)
    try:
        model = built(checkpoint)
        renamed = new_names(model, list(stored))
    except Exception as error:  # Transformers' classes raise anything on a config that they do not expect
        return Contents(unchecked=one_line(error, 160))
    return differences(model, stored, renamed)


def differences(model: Any, stored: Mapping[str, Stored], renamed: Mapping[str, str]) -> Contents:
    """Compare ``stored_tensors`` with a built model; ``renamed``: stored name -> the model's own name."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    counted = Counter(renamed.values())
    loaded = {stored[name].module for name, target in renamed.items() if target in wanted}
    left, biases, shapes, unknown = dict[str, str](), [], [], dict[str, str]()
    for name, (module, packed, tensor) in stored.items():
        target = renamed[name]
        if target not in wanted:
            if BESIDE.search(name) or any(pattern.search(name) for pattern in ignored):
                continue
            owner, kind = module_and_part(target)
            if not name.endswith("bias") or module not in loaded:
                left[module] = owner
                unknown |= {} if kind in KNOWN_PARTS else {owner: name}
            elif tensor.dtype not in formats.NUMBERS or tensor.numel > LARGEST or values(tensor).any():
                biases.append(module)  # AutoGPTQ stores a bias of zeros for every layer, which changes nothing
        elif counted[target] == 1 and not packed and tensor.numel != math.prod(wanted[target]):
            shapes.append((module, list(tensor.shape), list(wanted[target]), tensor.dtype))
    absent = {name: module_and_part(name)[0] for name in wanted if name not in counted and name not in tied}
    unread = {owner: name for owner, name in unknown.items() if owner in absent.values()}
    missing = [name for name, owner in absent.items() if owner not in unread]
    left_over = sorted(module for module, owner in left.items() if owner not in unread)
    reason = f"{next(iter(unread.values()))}: in a format that is not known{and_more([*unread])}" if unread else ""
    return Contents(missing + short_of_experts(counted, wanted), left_over, biases, shapes, reason)


def short_of_experts(parts: Mapping[str, int], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Stacked tensors of experts that have fewer parts in the files than the same tensor of another layer."""
    counts = {name: count for name, count in parts.items() if len(wanted.get(name, ())) == 3}
    kinds: dict[str, list[str]] = {}
    for name in counts:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [name for names in kinds.values() for name in names if counts[name] < max(map(counts.__getitem__, names))]


def stored_tensors(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Name that an unquantized checkpoint would have -> the tensor that is stored for it."""
    weights: dict[str, Stored] = {}
    for name, tensor in checkpoint.tensors.items():
        module, kind = module_and_part(name)
        parts = checkpoint.modules[module]
        if kind == main_part(parts):
            packed = kind != "weight" or not (tensor.dtype in formats.FLOATS or tensor.dtype.startswith("F8_E"))
            weights[PACKED.sub("weight", name).removesuffix("_blocks")] = Stored(module, packed, tensor)
        elif kind == "bias" or not is_quantized(parts):
            weights[name] = Stored(module, False, tensor)
    return weights


def built(checkpoint: Checkpoint) -> Any:
    """The model of a config on the meta device, with the class that the config names."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    for one in filter(None, (config, getattr(config, "text_config", None))):
        if getattr(one, "quantization_config", None) is not None:
            del one.quantization_config
    named = next(iter(config.architectures or ()), "")
    own = getattr(transformers, named, None)
    with torch.device("meta"):
        if own is not None and hasattr(own, "_from_config"):
            model = own._from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
    return model


def new_names(model: Any, names: list[str]) -> dict[str, str]:
    """Name in the checkpoint -> name in the model, by Transformers' own rules of loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    wanted = model.state_dict()
    # A name of the model's own is loaded as it is, although a rule may match: DeepSeek-V4's make model.kv_norm of
    # model.norm, which Transformers 5.19 itself saves and loads.
    return {
        name: name if name in wanted
        else rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)[0]
        for name in names
    }  # fmt: skip


def nvfp4_layers(folder: Path) -> dict[str, Parts]:
    """Module path -> parts of a checkpoint's NVFP4 layers; InputError.  No header is read if it is not quantized."""
    checkpoint = Checkpoint(folder)
    modules = checkpoint.modules if checkpoint.config.quantization else {}
    scaled = {path: parts for path, parts in modules.items() if not parts.keys().isdisjoint(STORED)}
    return {path: parts for path, parts in scaled.items() if (main := main_part(parts)) and parts[main].dtype == "U8"}


def check_scales(folder: Path, layers: Mapping[str, Parts]) -> None:
    """InputError for the first layers whose scales vLLM would misread, with the number of other such layers."""
    missing = [path for path, parts in layers.items() if parts.keys().isdisjoint(STORED.values())]
    groups = objects_in(CheckpointConfig.read(folder).quantization.get("config_groups")) if missing else []
    nvfp4 = [group for group in groups if args_text(part(group, "weights")).startswith("nvfp4")]
    if nvfp4 and all(args_text(part(group, "input_activations")).startswith("nvfp4") for group in nvfp4):
        raise InputError(
            f"model_dir: {missing[0]}: no input_global_scale for its NVFP4 activations{and_more(missing)}, and vLLM "
            "would take uninitialized memory for it; calibrate the checkpoint, or quantize it weight-only"
        )
    if fused := list(unequal(layers).values()):
        raise InputError(f"model_dir: {fused[0]}{and_more(fused)}, and {FUSED}; {SHARED}")


def unequal(layers: Mapping[str, Parts]) -> dict[str, str]:
    """First layer of those that engines fuse into one matrix and whose global scales differ -> text with all of them.

    Stacked experts are left out: each has its own scale.
    """
    found, numbers, named = dict[str, str](), dict[str, float](), dict[str, str]()
    for path, parts in layers.items():
        for name in STORED.keys() & parts.keys():
            if parts[name].numel == 1 and parts[name].dtype in formats.NUMBERS:
                numbers[path], named[path] = float(values(parts[name]).reshape(-1)[0]), name
    for paths in fused_layers(numbers):
        own = [numbers[path] for path in paths]
        if not max(own) - min(own) <= TOLERANCE * max(own):
            *names, last = (path.rpartition(".")[2] for path in paths)
            scales = f"unequal {named[paths[0]]} ({', '.join(f'{number:,.7g}' for number in own)})"
            found[paths[0]] = f"{paths[0].rpartition('.')[0]}: {', '.join(names)} and {last} have {scales}"
    return found


def and_more(things: Sequence[Any]) -> str:
    """`` (and 3 more like it)`` for four things; "" for one."""
    return f" (and {len(things) - 1} more like it)" if len(things) > 1 else ""
