"""Tensors that a model needs and its files lack, or that the files have and the model does not need.

Transformers builds the model from its config on torch's meta device, where no memory is taken, and says how the names
in checkpoints become its own (experts are stored one by one and loaded into one tensor).  This runs in a process of its
own, since the driver imports neither.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.doctor.checks import LARGEST, Finding, one_finding
from compare_q.backends.checkpoint.files import Tensor
from compare_q.backends.checkpoint.formats import FLOATS, FORMATS, NUMBERS, is_quantized, main_part, values
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.layers.names import module_and_part

BESIDE = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|[kvq]_scale|output_scale|\w+\.(weight|bias)_(quantizer|format)\S*)$"
)
"""Tensors beside the weights that engines read or that are computed again."""
PACKED = re.compile(rf"(?<=\.)({'|'.join(FORMATS)})$")
REDO = "download the files again, or save the model with the class that its config names"
WITHOUT = "give the config.json that belongs to these files, or save the model without it"
LEFT_OVER = {
    "left_over": "left over: the model that the config describes has no such layer, and nobody will load it",
    "biases": "its bias is left over: the model that the config describes has none there, and nobody will add it",
}


class Stored(NamedTuple):
    """A tensor and its module; ``packed``: its shape is not the weights'."""

    module: str
    packed: bool
    tensor: Tensor


def check(checkpoint: Checkpoint, differences: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings from what ``compared`` said."""
    yield from one_finding(
        "wrong", [f"{checkpoint.files[0].name}: {name}" for name in sorted(differences["missing"])],
        "missing, although the config asks for it: engines refuse, or make numbers up", REDO,
    )  # fmt: skip
    shapes: dict[str, list[str]] = {}
    for name, stored, wanted, dtype in sorted(differences["shapes"]):
        what = f"has the shape {stored} ({dtype}), and the config asks for {wanted}"
        shapes.setdefault(what, []).append(checkpoint.where_module(name))
    for what, where in shapes.items():
        yield from one_finding("wrong", where, what, "give the config.json that belongs to these files")
    for kind, what in LEFT_OVER.items():
        yield from one_finding("warning", map(checkpoint.where_module, sorted(differences[kind])), what, WITHOUT)


def all_compared(folders: Sequence[str]) -> list[dict[str, Any]]:
    """``compared`` of each folder, in one process: Transformers takes three seconds to import."""
    return [compared(folder) for folder in folders]


def compared(folder: str) -> dict[str, Any]:
    """What is "missing" and "left_over" (names), whose "biases" the model has not, and which "shapes" differ.

    A shape is (layer, stored, wanted, dtype).  Or {"unchecked": why}, where Transformers is not installed or cannot
    build the model.
    """
    if not installed_versions(("transformers",)):
        return {"unchecked": "Transformers is not installed"}
    checkpoint = Checkpoint(Path(folder))
    stored = stored_weights(checkpoint)
    try:
        model = built(checkpoint)
        renamed = new_names(model, list(stored))
    except InputError:
        raise
    except Exception as error:  # whatever a config makes of Transformers' classes
        return {"unchecked": one_line(error, 160)}
    return against(model, stored, renamed)


def against(model: Any, stored: Mapping[str, Stored], renamed: Mapping[str, str]) -> dict[str, Any]:
    """``stored``: what ``stored_weights`` says; ``renamed``: name -> the model's own name of it."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    unasked = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    counted = Counter(renamed.values())
    missing = [name for name in wanted if name not in counted and name not in tied]
    loaded = {stored[name].module for name, target in renamed.items() if target in wanted}
    left, biases, shapes, parts = set[str](), [], [], Counter[str]()
    for name, (module, packed, tensor) in stored.items():
        target = renamed[name]
        if target not in wanted:
            if BESIDE.search(name) or any(pattern.search(name) for pattern in unasked):
                continue
            if not name.endswith("bias") or module not in loaded:
                left.add(module)
            elif tensor.dtype not in NUMBERS or tensor.numel > LARGEST or values(tensor).any():
                biases.append(module)  # AutoGPTQ stores one of zeros for every layer, which adds nothing
        elif counted[target] == 1 and not packed and tensor.numel != math.prod(wanted[target]):
            shapes.append((module, list(tensor.shape), list(wanted[target]), tensor.dtype))
        parts[target] += 1
    missing += short_of_experts(parts, wanted)
    return {"missing": missing, "left_over": sorted(left), "biases": biases, "shapes": shapes}


def short_of_experts(parts: Mapping[str, int], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors of all experts of a layer for which other numbers of experts are stored than for most layers."""
    counts = {name: count for name, count in parts.items() if len(wanted.get(name, ())) == 3}
    kinds: dict[str, list[str]] = {}
    for name in counts:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [
        name for names in kinds.values() for name in names if counts[name] < max(counts[other] for other in names)
    ]  # fmt: skip


def stored_weights(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Name that an unquantized checkpoint would have -> what is stored for it."""
    weights: dict[str, Stored] = {}
    for name, tensor in checkpoint.tensors.items():
        module, part = module_and_part(name)
        parts = checkpoint.modules[module]
        if part == main_part(parts):
            packed = part != "weight" or not (tensor.dtype in FLOATS or tensor.dtype.startswith("F8_E"))
            weights[PACKED.sub("weight", name).removesuffix("_blocks")] = Stored(module, packed, tensor)
        elif part == "bias" or not is_quantized(parts):
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
