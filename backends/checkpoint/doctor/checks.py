"""What is wrong with a checkpoint: the findings, and those from headers, names and small tensors.

Scales, ends, left-over files, dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from compare_q.backends.checkpoint.contents import LARGEST, Contents, numbers_text, unequal
from compare_q.backends.checkpoint.files import Tensor, read_headers, strays
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.formats import FLOATS, NUMBERS, Parts, main_part, values
from compare_q.backends.common.errors import InputError
from compare_q.backends.layers.names import NUMBER
from compare_q.backends.layers.schemes import declared, objects_in, part

Severity = Literal["wrong", "warning", "note"]
"""``wrong``: a number or an answer would be wrong; ``warning``: it may be; ``note``: good to know."""
INPUT_SCALES = frozenset({"input_scale", "input_global_scale", "activation_scale"})
KV_SCALES = ("k_scale", "v_scale", "output_scale")
CALIBRATE = "calibrate with text that reaches it, or with every expert active, and quantize again"
NO_SCALES = "calibrate the KV cache, or serve with the KV cache in 16 bits"
IGNORED = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
"""Where configs list the layers that are not quantized: compressed-tensors, fp8 and bitsandbytes, ModelOpt, ..."""
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt"}
KEPT_IN_FLOAT32 = ("gate", "router", "A_log")
"""Routers and states of Mamba, which are kept in float32 on purpose."""


@dataclass(frozen=True)
class Finding:
    """One finding.

    ``where``: a file, and the first tensor or layer that it is about; ``what``: what is wrong there; ``cure``: what to
    do; ``more``: how many others are like it.
    """

    severity: Severity
    where: str
    what: str
    cure: str
    more: int = 0

    def __str__(self) -> str:
        others = f" (and {self.more:,} more like it)" if self.more else ""
        return f"{self.severity}: {self.where}: {self.what}{others}; {self.cure}"


def one_finding(severity: Severity, where: Iterable[str], what: str, cure: str) -> list[Finding]:
    """One finding for all places that have the same fault, which names the first; none where there is no place."""
    places = list(where)
    return [Finding(severity, places[0], what, cure, len(places) - 1)] if places else []


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Every finding that a Hugging Face folder alone gives rise to."""
    for look in (fused_scales, input_scales, kv_scales, quantized_unawares, strays_and_pickles, index, dtypes):
        yield from look(checkpoint)


def contents(checkpoint: Checkpoint, found: Contents) -> Iterator[Finding]:
    """Findings from ``contents.compare``: tensors that are missing or left over, and other shapes."""
    yield from one_finding(
        "wrong", [f"{checkpoint.files[0].name}: {name}" for name in sorted(found.missing)],
        "missing, although the config asks for it: engines refuse, or make numbers up",
        "download the files again, or save the model with the class that its config names",
    )  # fmt: skip
    shapes: dict[str, list[str]] = {}
    for module, stored, wanted, dtype in sorted(found.shapes):
        what = f"has the shape {stored} ({dtype}), and the config asks for {wanted}"
        shapes.setdefault(what, []).append(checkpoint.where_module(module))
    for what, where in shapes.items():
        yield from one_finding("wrong", where, what, "give the config.json that belongs to these files")
    left_over = {
        "left over: the model that the config describes has no such layer, and nobody will load it": found.left_over,
        "its bias is left over: the model that the config describes has none there, and nobody will add it":
        found.biases,
    }  # fmt: skip
    for what, modules in left_over.items():
        cure = "give the config.json that belongs to these files, or save the model without it"
        yield from one_finding("warning", map(checkpoint.where_module, sorted(modules)), what, cure)


def fused_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Layers that engines fuse into one matrix with one global scale, and whose global scales differ."""
    groups = unequal(checkpoint.quantized)
    places = [
        f"{checkpoint.where_module(paths[0]).rpartition('.')[0]}: "
        + ", ".join(path.rpartition(".")[2] for path in paths)
        for paths in groups
    ]
    first = next(map(numbers_text, groups.values()), "")
    yield from one_finding(
        "wrong", places, f"unequal global scales ({first}) of layers that vLLM fuses into one matrix with one scale",
        "quantize with one scale for the layers that share an input",
    )  # fmt: skip


def input_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of the activations that are missing, zero, or no numbers."""
    scale_names = {module: input_scale_of(parts) for module, parts in checkpoint.quantized.items()}
    asked = asks_for_input_scales(checkpoint.config.quantization)
    # A mixture of schemes: layers of one kind of which only some have a scale were meant to have one, unless the config
    # says of each what it takes (ModelOpt's MIXED_PRECISION).
    stated = declared(checkpoint.config.quantization)
    schemes = {module: stated.of(module) for module in checkpoint.quantized}
    weight_only = {module for module, scheme in schemes.items() if scheme is not None and not scheme.activations}
    kinds = {kind(module, checkpoint.modules[module]) for module, name in scale_names.items() if name}
    missing = [
        module
        for module, name in scale_names.items()
        if not name and module not in weight_only and (asked or kind(module, checkpoint.modules[module]) in kinds)
    ]
    yield from one_finding(
        "wrong", map(checkpoint.where_module, missing),
        "no scale of its activations (input_scale), for which engines take uninitialized memory or 1", CALIBRATE,
    )  # fmt: skip
    named = {f"{module}.{name}": checkpoint.modules[module][name] for module, name in scale_names.items() if name}
    for fault, places in faulty(named).items():
        yield from one_finding("wrong", places, f"the scale of its activations is {fault}", CALIBRATE)


def kv_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of an fp8 KV cache that are missing, 1 throughout, or no numbers."""
    scales = {
        f"{module}.{name}": tensor
        for module, parts in checkpoint.modules.items()
        for name, tensor in parts.items()
        if name in KV_SCALES and tensor.numel <= LARGEST
    }
    bad = faulty(scales)
    for fault, places in bad.items():
        yield from one_finding("wrong", places, f"the scale of the KV cache is {fault}", "calibrate the KV cache again")
    if scales and not bad and all((values(tensor) == 1).all() for tensor in scales.values()):
        clamped = str(checkpoint.config.quantization.get("quant_method")).lower().startswith("modelopt")
        why = "and ModelOpt writes no smaller one" if clamped else "which no calibration gives: keys beyond 448 are cut"
        yield Finding(
            "note" if clamped else "warning", checkpoint.where(next(iter(scales))),
            f"every scale of the fp8 KV cache is 1.0, {why}", NO_SCALES, len(scales) - 1,
        )  # fmt: skip
    if not scales and asks_for_kv_scales(checkpoint.config.quantization):
        yield Finding(
            "warning", "config.json: quantization_config",
            "asks for a calibrated fp8 KV cache, but no k_scale and v_scale are stored, and engines take 1.0",
            NO_SCALES,
        )  # fmt: skip


def quantized_unawares(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A head or an embedding that is quantized, and layers that are although the config says that they are not."""
    places = (checkpoint.config.quantization, part(checkpoint.config.quantization, "quantization"))
    lists = [place.get(key) for place in places for key in IGNORED]
    patterns = [name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)]
    against = [module for module in checkpoint.quantized if is_ignored(module, patterns)]
    yield from one_finding(
        "wrong", map(checkpoint.where_module, against),
        "stored quantized, and the config says that it is not: engines refuse, or read its bytes as other numbers",
        "take it out of the config's list of ignored layers, or store it unquantized",
    )  # fmt: skip
    for module in checkpoint.quantized:
        stored = checkpoint.described(module)
        tied = " and the head, which is the same matrix" if checkpoint.is_tied else ""
        what = {
            "head": f"the head is quantized ({stored}), which costs more than a layer: it makes every logit",
            "embedding": f"the embedding{tied}: quantized ({stored}); many engines read embeddings in 16 bits only",
        }.get("" if module in against else checkpoint.role(module))
        if what:
            yield Finding("warning", checkpoint.where_module(module), what, "mind it where models are compared")


def strays_and_pickles(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files of weights that nobody will load, or that an engine loads in place of the others."""
    delete = "delete the file, unless an engine is to load it in place of the others"
    for file in strays(checkpoint.folder):
        try:
            names = set(read_headers([file]))
        except InputError as error:
            yield Finding("warning", file.name, f"is beside the model's files and cannot be read: {error}", delete)
            continue
        again = len(names & checkpoint.tensors.keys())
        what = f"holds {len(names):,} tensors, {again:,} of them also in the model's files"
        what += ": an engine that reads every file loads other weights" if again else ": nobody will load them"
        yield Finding("warning", file.name, what, delete)
    pickles = [file.name for pattern in PICKLES for file in sorted(checkpoint.folder.glob(pattern))]
    yield from one_finding(
        "note", [name for name in pickles if name not in NOT_WEIGHTS],
        "pickled weights beside safetensors: nobody will load them", "delete the file",
    )  # fmt: skip


def index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Where the index and the headers of the files disagree."""
    weight_map = checkpoint.json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        return
    yield from one_finding(
        "warning", [checkpoint.where(name) for name in checkpoint.tensors if name not in weight_map],
        "is in the file and not in the index: some engines load it and some do not",
        "make the index again, or save the model without it",
    )  # fmt: skip
    absent = [f"{INDEX}: {name}" for name in weight_map if name not in checkpoint.tensors]
    yield from one_finding("wrong", absent, "is in the index and in none of its files", "download the model again")


def dtypes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Unquantized matrices in another dtype than the config's, and matrices of integers without scales."""
    stated = (checkpoint.config.dtype or "").removeprefix("torch.")
    others: dict[str, list[str]] = {}
    bare: list[str] = []
    for module, parts in checkpoint.matrices.items():
        main = main_part(parts)
        assert main is not None
        dtype = parts[main].dtype
        if dtype in FLOATS:
            if stated not in ("", FLOATS[dtype]) and module.rpartition(".")[2] not in KEPT_IN_FLOAT32:
                others.setdefault(FLOATS[dtype], []).append(f"{parts[main].file.name}: {module}")
        elif len(parts.keys() - {"bias"}) == 1:
            bare.append(f"{parts[main].file.name}: {module} ({dtype})")
    for name, places in others.items():
        what = f"stored in {name}, and the config says {stated}: engines round it, or compute in another dtype"
        cure = "save the model in one dtype, and let its config.json say which"
        yield from one_finding("warning", places, what, cure)
    yield from one_finding(
        "wrong", bare, "no float, and no scale beside it: engines take its bytes as numbers, or refuse",
        "quantize again; the scales are missing",
    )  # fmt: skip


def input_scale_of(parts: Parts) -> str:
    """The name of a module's scale of its activations; "" if it has none."""
    return next((name for name in INPUT_SCALES if name in parts and parts[name].numel <= LARGEST), "")


def kind(module: str, parts: Parts) -> tuple[str, ...]:
    """A module's path without its numbers, and what it stores beside scales of activations: one scheme has one kind."""
    return (NUMBER.sub("*", module), *sorted(f"{name} {parts[name].dtype}" for name in parts.keys() - INPUT_SCALES))


def faulty(scales: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """What is wrong with scales -> the places of those with that fault; ``scales``: by the names of their tensors."""
    bad: dict[str, list[str]] = {}
    for name, tensor in scales.items():
        numbers = values(tensor) if tensor.dtype in NUMBERS else np.empty(0, np.float32)
        faults = {
            f"of a dtype that is not known ({tensor.dtype})": tensor.dtype not in NUMBERS,
            "NaN": np.isnan(numbers).any(), "infinite": np.isinf(numbers).any(),
            "negative": (numbers < 0).any(), "zero": (numbers == 0).any(),
        }  # fmt: skip
        if fault := next((fault for fault, is_there in faults.items() if is_there), ""):
            bad.setdefault(fault, []).append(f"{tensor.file.name}: {name}")
    return bad


def asks_for_input_scales(quantization: Mapping[str, Any]) -> bool:
    """Whether a config asks for a stored scale of the activations in every quantized layer."""
    if quantization.get("quant_method") == "fp8":
        return quantization.get("activation_scheme") == "static"
    algorithm = (part(quantization, "quantization") or quantization).get("quant_algo")
    if str(algorithm).upper() in ("NVFP4", "NVFP4_AWQ", "FP8"):
        return True
    groups = objects_in(quantization.get("config_groups"))
    return bool(groups) and all(is_static(group.get("input_activations")) for group in groups)


def asks_for_kv_scales(quantization: Mapping[str, Any]) -> bool:
    """Whether a config asks for stored scales of the KV cache."""
    algorithm = (part(quantization, "quantization") or quantization).get("kv_cache_quant_algo")
    return is_static(quantization.get("kv_cache_scheme")) or str(algorithm).upper() == "FP8"


def is_static(arguments: Any) -> bool:
    """Whether compressed-tensors' ``QuantizationArgs``, as JSON, describe a scale that is stored.

    ``"dynamic": "local"`` is NVFP4's: the scales of groups are computed, the global one is stored.
    """
    if not isinstance(arguments, Mapping):
        return False
    return arguments.get("dynamic") in (None, False) or (
        arguments.get("dynamic") == "local" and arguments.get("strategy") == "tensor_group"
    )


def is_ignored(module: str, patterns: list[str]) -> bool:
    """Whether a pattern names a module: whole, as a regular expression after ``re:``, or with ``*``."""
    for pattern in patterns:
        with suppress(re.error):
            if re.match(pattern[3:], module) if pattern.startswith("re:") else fnmatchcase(module, pattern):
                return True
    return False
