"""Find missing and left-over tensors of a model, and NVFP4 scales that vLLM would misread.

``check`` and the doctor call ``compare`` before a model loads, because engines fill missing tensors
with uninitialized memory.  Transformers builds the model from its config on torch's meta device,
which takes no memory.  It also renames the stored tensors by its own rules of loading (it stacks
experts that are stored one by one).  The driver does not import torch or Transformers, so this part
runs in a separate process.

Modules of quantizers are not built.  Parts of quantized matrices (scales, ...) count as missing if
the readers of ``formats`` need them, the config promises them, or modules of the same scheme have
them.

vLLM fuses layers that share an input into one matrix with one global scale: it takes the largest of
their scales (for experts the scale of ``gate_proj``) and only logs a warning.  A checkpoint with
unequal global scales is refused.  Unequal scales of the activations are accepted: fused layers have
the same input, so all of these ranges are equally good.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base import ModelFiles
from ..common.errors import InputError, ModelError
from ..common.message_text import and_more, one_line
from ..layers.module_names import IN_LAYER, NUMBER, fused_layers, is_outside, module_and_part
from ..layers.schemes import args_text, asks_for_input_scales, declared, kv_cache, objects_in, part
from . import formats, largest_weights, stored_sizes, zeros
from .checkpoint_config import CheckpointConfig
from .folder import Checkpoint, HuggingFaceFolder
from .formats import (
    FORMATS,
    INPUT_SCALES,
    KV_SCALES,
    NOT_BITS,
    Parts,
    is_quantized,
    layout_of,
    main_part,
    values,
)
from .model_function import filled_facts
from .safetensors_files import Tensor
from .tokenizers import class_notes

LARGEST = 1 << 16
"""Elements of a small tensor (scales, biases) whose values are read."""
BESIDE = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|[kvq]_scale|output_scale|\w+\.(weight|bias)_(quantizer|format)\S*)$"
)
"""Names of tensors that are not weights; engines read these tensors or compute them again."""
PACKED = re.compile(rf"(?<=\.)({'|'.join(formats.FORMATS)})$")
KNOWN_PARTS = formats.NOT_BITS.union(*(bits.split() for _, bits in formats.FORMATS.values()))
STORED = {"weight_global_scale": "input_global_scale", "weight_scale_2": "input_scale"}
"""Global scale of weights -> global scale of activations: their names in compressed-tensors and in
ModelOpt."""
FUSED, SHARED = "vLLM fuses them into one matrix with one scale", "quantize with a shared scale"
TOLERANCE = 1e-5
"""Largest relative difference between scales that count as equal, as in vLLM's own check of
experts.

A shared scale is stored several times as the same number.  Unequal scales come from the largest
weights of two matrices, which differ by at least 4e-3 in bf16.
"""


@dataclass(frozen=True)
class Contents:
    """Differences between the tensors in a model's files and the tensors that its config describes."""

    missing: Sequence[
        str
    ] = ()  # names of the model's tensors that no file has, and of parts of quantized modules
    lost: Sequence[
        str
    ] = ()  # left-over matrices of decoder layers; heads that differ from a tied embedding
    left_over: Sequence[
        str
    ] = ()  # other modules that the model does not have; this may be intended
    biases: Sequence[str] = ()  # modules whose stored bias the model does not have
    shapes: Sequence[
        tuple[str, Sequence[int], Sequence[int], str]
    ] = ()  # (module, stored, wanted shape, dtype)
    unchecked: str = ""  # what was not compared and why; Transformers may not know the architecture
    function: Mapping[str, Any] = field(
        default_factory=dict
    )  # values of the config with Transformers' defaults
    tokens: Sequence[
        str
    ] = ()  # how the tokens that Transformers makes differ from those of tokenizer.json


class Stored(NamedTuple):
    """A tensor, its module, and the number of weights that it encodes, 0 if that is not known."""

    module: str
    weights: int
    tensor: Tensor


def compare_all(folders: Sequence[str]) -> list[dict[str, Any]]:
    """The fields of each folder's ``Contents``, from one process: importing Transformers takes
    three seconds.
    """
    found = []
    for folder in map(Path, folders):
        more = {"tokens": class_notes(folder), "function": filled_facts(folder)}
        found.append(asdict(compare(Checkpoint(folder))) | more)
    return found


def checked(files: ModelFiles) -> list[str]:
    """Return notes on the weights of a local model; ModelError if its numbers would be wrong;
    InputError.
    """
    notes = list[str]()
    if isinstance(files, HuggingFaceFolder):
        found, where = compare(files.headers), files.folder
        check_stored_numbers(files, {module for module, *_ in found.shapes})
        missing = [name for name in found.missing if not is_outside(name)]
        if missing and not files.other_config:
            raise ModelError(
                f"{where}: no {missing[0]}{and_more(missing)}, which the model of its config has"
            )
        if found.lost and not files.other_config:
            what = "is stored, and the model of its config has no place for it"
            raise ModelError(f"{where}: {found.lost[0]}{and_more(found.lost)} {what}")
        sized = [each for each in found.shapes if not is_outside(each[0])]
        if (
            sized and not files.other_config
        ):  # vLLM takes the first rows of a matrix that is too large
            module, shape, wanted, dtype = sized[0]
            what = f"has the shape {list(shape)} ({dtype}), but its config requires {list(wanted)}"
            raise ModelError(f"{where}: {module}{and_more(sized)} {what}")
        if reason := files.other_config or found.unchecked:
            notes.append(f"weights unchecked: {reason}")
        if found.missing and not missing:
            notes.append(
                f"no {found.missing[0]}{and_more(found.missing)}, which text does not need"
            )
        if beside := [*found.left_over, *(f"{module}.bias" for module in found.biases)]:
            what = "are stored and not loaded, as the model of the config has no place for them; the first is"
            notes.append(f"{len(beside):,} modules or biases {what} {beside[0]}")
    of_zeros = zeros.find(files.placed())
    if wrong := [each for each in of_zeros if each.wrong]:
        raise ModelError(
            f"{wrong[0].file}: {wrong[0].name}: {wrong[0]}{and_more(wrong)}; download the file again"
        )
    return notes + [f"{each.name}: {each}{and_more(of_zeros)}" for each in of_zeros[:1]]


def check_stored_numbers(files: HuggingFaceFolder, misshapen: set[str]) -> None:
    """ModelError if stored shapes contradict the config, or if scales allow weights that no model
    has.

    ``misshapen``: modules whose weights do not have the size that the config requires; that error
    is more precise.
    """
    faults, fix = list(largest_weights.impossible(files.headers)), largest_weights.CAUSE
    sizes = [] if files.other_config else list(stored_sizes.contradictions(files.headers))
    sizes = [fault for fault in sizes if module_and_part(fault.tensor)[0] not in misshapen]
    if sizes:
        faults, fix = sizes, stored_sizes.REQUANTIZE
    if faults:
        raise ModelError(
            f"{files.folder}: {faults[0].tensor}: {faults[0].what}{and_more(faults)}; {fix}"
        )


def compare(checkpoint: Checkpoint) -> Contents:
    """Compare the tensors in a folder's headers with those of the model that its config describes;
    InputError.
    """
    stored, lacking = stored_tensors(checkpoint), lacking_parts(checkpoint)
    try:
        model = built(checkpoint)
        renamed = new_names(model, list(stored))
    except (
        Exception
    ) as error:  # Transformers' classes raise anything on a config that they do not expect
        return Contents(lacking, unchecked=one_line(error, 160))
    found = differences(model, stored, renamed, split(model, renamed))
    return replace(
        found,
        missing=[*lacking, *found.missing],
        lost=[*found.lost, *untied(model, stored, renamed)],
    )


def lacking_parts(checkpoint: Checkpoint) -> list[str]:
    """Names of parts that quantized modules lack according to their format, the config, or the
    parts of their peers.

    Peers have the same scheme.  A module needs the parts that half of the modules have whose names
    differ from its name in numbers only, and the parts that all other modules have.
    """
    quantization, missing, unreadable = (
        checkpoint.config.quantization,
        list[str](),
        dict[str, str](),
    )
    stated, asked = declared(quantization), asks_for_input_scales(quantization)
    promised, some = promises(quantization)
    aside = {"bias", *some} if kv_cache(quantization) else {"bias", *some, *KV_SCALES}
    peers: dict[Any, dict[str, list[str]]] = {}
    for module, parts in checkpoint.modules.items():
        main, scheme = main_part(parts) or "", stated.of(module)
        if module in checkpoint.quantized:
            if not layout_of(parts, checkpoint.config).words and (
                scheme or not parts.keys() - {main, *NOT_BITS}
            ):
                words = scheme.weights if scheme else f"{parts[main].dtype} weights"
                unreadable[module] = (
                    f"{module}: scales of its {words}, next to {', '.join(sorted(parts))}"
                )
            bits = FORMATS[main][1].split()
            missing += [
                f"{module}.{name}" for name in bits if name in promised and name not in parts
            ]
            if (
                main != "qweight"
                and scheme
                and scheme.zero_points
                and "weight_zero_point" not in parts
            ):
                missing.append(f"{module}.weight_zero_point")
            if asked and INPUT_SCALES.isdisjoint(parts) and (not scheme or scheme.activations):
                missing.append(f"{module}.input_scale")
        elif not (parts.keys() & KV_SCALES - aside or (main and parts.keys() - {main, *aside})):
            continue
        key = (main, parts[main].dtype, scheme) if main else ()
        peers.setdefault(key, {}).setdefault(NUMBER.sub("*", module), []).append(module)
    coded = {kind: key[0] for key, kinds in peers.items() if key for kind in kinds}
    missing += [
        f"{module}.{code}"
        for module in sorted(checkpoint.modules.keys() - checkpoint.matrices.keys())
        if (code := coded.get(NUMBER.sub("*", module)))
    ]
    for kinds in peers.values():
        counts = {
            kind: Counter(name for module in found for name in checkpoint.modules[module])
            for kind, found in kinds.items()
        }
        for kind, found in kinds.items():
            others = [set(own) for other, own in counts.items() if other != kind]
            needed = {
                name for name, count in counts[kind].items() if 2 * count >= len(found)
            } - aside
            needed |= set.intersection(*others) - aside if len(others) > 1 else set()
            for module in found:
                missing += [
                    f"{module}.{name}"
                    for name in sorted(needed - checkpoint.modules[module].keys())
                ]
    named = {module_and_part(name)[0] for name in missing}
    return list(
        dict.fromkeys(
            [*missing, *(what for module, what in unreadable.items() if module not in named)]
        )
    )


def promises(quantization: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """(names for all layers, for some) of further parts (zero points, orders of inputs) that a
    config promises.
    """
    weights = [part(group, "weights") for group in objects_in(quantization.get("config_groups"))]
    told = {
        "weight_zero_point": [args.get("symmetric") is False for args in weights],
        "weight_g_idx": [args.get("actorder") in ("group", "dynamic") for args in weights],
        "qzeros": [quantization.get("sym") is False or quantization.get("zero_point") is True],
        "g_idx": [quantization.get("desc_act") is True],
    }
    of_all = {name for name, of_groups in told.items() if of_groups and all(of_groups)}
    return of_all, {name for name, of_groups in told.items() if any(of_groups)} - of_all


def differences(
    model: Any, stored: Mapping[str, Stored], renamed: Mapping[str, str], parts: set[str]
) -> Contents:
    """Compare ``stored_tensors`` with a built model.

    ``renamed``: stored name -> the model's own name; ``parts``: names of tensors that are stored as
    one.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = [
        re.compile(pattern)
        for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    ignored = [
        re.compile(pattern)
        for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    counted = Counter(renamed.values())
    loaded = {stored[name].module for name, target in renamed.items() if target in wanted}
    left, biases, shapes, unknown, matrices = dict[str, str](), [], [], dict[str, str](), set[str]()
    for name, (module, weights, tensor) in stored.items():
        target = renamed[name]
        if target not in wanted:
            if BESIDE.search(name) or any(pattern.search(name) for pattern in ignored):
                continue
            owner, kind = module_and_part(target)
            if not name.endswith("bias") or module not in loaded:
                left[module] = owner
                unknown |= {} if kind in KNOWN_PARTS else {owner: name}
                matrices |= {module} if kind == "weight" and len(tensor.shape) > 1 else set()
            elif (
                tensor.dtype not in formats.NUMBERS
                or tensor.numel > LARGEST
                or values(tensor).any()
            ):
                biases.append(
                    module
                )  # AutoGPTQ stores a bias of zeros for every layer; it changes nothing
        elif (
            counted[target] == 1
            and target not in parts
            and weights not in (0, math.prod(wanted[target]))
        ):
            shapes.append((module, list(tensor.shape), list(wanted[target]), tensor.dtype))
    given = {*counted, *tied(model), *parts}
    absent = {
        name: module_and_part(name)[0]
        for name in wanted
        if name not in given and not any(pattern.search(name) for pattern in optional)
    }
    unread = {owner: name for owner, name in unknown.items() if owner in absent.values()}
    missing = [name for name, owner in absent.items() if owner not in unread]
    left_over = sorted(module for module, owner in left.items() if owner not in unread)
    reason = (
        f"{next(iter(unread.values()))}: in a format that is not known{and_more([*unread])}"
        if unread
        else ""
    )
    kinds, whole = (
        {NUMBER.sub("*", module) for module in loaded},
        {layer_of(module) for module in loaded},
    )
    drafts = {layer_of(module) for module in left if NUMBER.sub("*", module) not in kinds} - whole
    lost = [
        module
        for module in left_over
        if module in matrices and not is_outside(module) and layer_of(module) not in drafts | {""}
    ]
    left_over = [module for module in left_over if module not in lost]
    return Contents(
        missing + short_of_experts(counted, wanted), lost, left_over, biases, shapes, reason
    )


def layer_of(module: str) -> str:
    """The name of the decoder layer that holds a module: ``model.layers.3.``; empty if none does."""
    found = IN_LAYER.search(f"{module}.")
    return f"{module}."[: found.end()] if found else ""


def tied(model: Any) -> Mapping[str, str]:
    """Name of a tensor that the config ties to another tensor -> name of the other tensor."""
    found = getattr(model, "all_tied_weights_keys", None)  # 5.0 has only the class's names
    return dict(found if found is not None else getattr(model, "_tied_weights_keys", None) or {})


def untied(model: Any, stored: Mapping[str, Stored], renamed: Mapping[str, str]) -> list[str]:
    """Stored heads that differ from the embedding although the config ties them; engines differ in
    which they use.
    """
    places = {target: stored[name].tensor for name, target in renamed.items()}
    pairs = [(places.get(name), places.get(other), name) for name, other in tied(model).items()]
    alike = [
        (one, other, name)
        for one, other, name in pairs
        if one and other and one[1:3] == other[1:3] and one.dtype in formats.NUMBERS
    ]
    step = slice(None, None, 64)
    return [
        name
        for one, other, name in alike
        if not np.array_equal(formats.stored(one)[step], formats.stored(other)[step])
    ]


def short_of_experts(parts: Mapping[str, int], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Stacked tensors of experts that have fewer parts in the files than the same tensor of another
    layer.
    """
    counts = {name: count for name, count in parts.items() if len(wanted.get(name, ())) == 3}
    kinds: dict[str, list[str]] = {}
    for name in counts:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [
        name
        for names in kinds.values()
        for name in names
        if counts[name] < max(map(counts.__getitem__, names))
    ]


def stored_tensors(checkpoint: Checkpoint, of: Collection[str] | None = None) -> dict[str, Stored]:
    """Name that an unquantized checkpoint would have -> the tensor stored for it; ``of``: only
    these modules.
    """
    weights: dict[str, Stored] = {}
    for name, tensor in checkpoint.tensors.items():
        module, kind = module_and_part(name)
        if of is not None and module not in of:
            continue
        parts = checkpoint.modules[module]
        if kind == main_part(parts):
            encoded = layout_of(parts, checkpoint.config, checkpoint.role(module)).weights
            known = encoded if isinstance(encoded, int) else 0
            weights[PACKED.sub("weight", name).removesuffix("_blocks")] = Stored(
                module, known, tensor
            )
        elif kind == "bias" or not is_quantized(parts):
            weights[name] = Stored(module, tensor.numel, tensor)
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
    # A name that the model has is loaded unchanged, although a rule may match: DeepSeek-V4's rules
    # turn model.norm
    # into model.kv_norm, but Transformers 5.19 itself saves and loads model.norm.
    return {
        name: name
        if name in wanted
        else rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)[0]
        for name in names
    }


def split(model: Any, renamed: Mapping[str, str]) -> set[str]:
    """The model's names of tensors that Transformers cuts out of one stored tensor, as HRM's
    gate_proj and up_proj.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = [
        list[str](getattr(rule, "target_patterns", ()))
        for rule in get_model_conversion_mapping(model)
    ]
    return {
        target.replace(targets[0], other)
        for targets in rules
        if len(targets) > 1
        for name, target in renamed.items()
        if name != target and targets[0] in target
        for other in targets
    }


def nvfp4_layers(folder: Path) -> dict[str, Parts]:
    """Module path -> parts of a checkpoint's NVFP4 layers; InputError.  No header is read if it is
    not quantized.
    """
    checkpoint = Checkpoint(folder)
    modules = checkpoint.modules if checkpoint.config.quantization else {}
    scaled = {path: parts for path, parts in modules.items() if not parts.keys().isdisjoint(STORED)}
    return {
        path: parts
        for path, parts in scaled.items()
        if (main := main_part(parts)) and parts[main].dtype == "U8"
    }


def check_scales(folder: Path, layers: Mapping[str, Parts]) -> None:
    """InputError for the first layers whose scales vLLM would misread, with the number of other
    such layers.
    """
    missing = [path for path, parts in layers.items() if parts.keys().isdisjoint(STORED.values())]
    groups = (
        objects_in(CheckpointConfig.read(folder).quantization.get("config_groups"))
        if missing
        else []
    )
    nvfp4 = [group for group in groups if args_text(part(group, "weights")).startswith("nvfp4")]
    if nvfp4 and all(
        args_text(part(group, "input_activations")).startswith("nvfp4") for group in nvfp4
    ):
        raise InputError(
            f"model_dir: {missing[0]}: no input_global_scale for its NVFP4 activations{and_more(missing)}, and vLLM "
            "would take uninitialized memory for it; calibrate the checkpoint, or quantize it weight-only"
        )
    if fused := list(unequal(layers).values()):
        raise InputError(f"model_dir: {fused[0]}{and_more(fused)}, and {FUSED}; {SHARED}")


def unequal(layers: Mapping[str, Parts]) -> dict[str, str]:
    """First layer of each fused group whose global scales differ -> text with all scales of the
    group.

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
            found[paths[0]] = (
                f"{paths[0].rpartition('.')[0]}: {', '.join(names)} and {last} have {scales}"
            )
    return found
