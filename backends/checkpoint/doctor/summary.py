"""What a checkpoint is: schemes by groups of layers, bits, size, KV scheme, calibration.  Headers and configs only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from backends.base import Storage
from backends.checkpoint import stored_bits
from backends.checkpoint.doctor.ends import is_tied
from backends.checkpoint.doctor.matrices import described
from backends.checkpoint.doctor.subject import Checkpoint, is_quantized
from backends.checkpoint.gguf import GgufModel
from backends.common.json_files import exists
from backends.common.messages import bytes_in_words, printable, shortened
from backends.layers.names import NUMBER
from backends.layers.schemes import declared, kv_cache

SHOWN = 8
"""Names of groups of layers in one line."""
NOT_STATED = "the files do not say"
CALIBRATION = ("dataset", "nsamples", "seqlen", "iters", "sym", "desc_act", "damp_percent", "algo")
"""Keys of quantization configs that say how a checkpoint was made (GPTQ, AWQ, auto-round)."""
Facts = Iterator[tuple[str, str]]
"""Pairs of a title and what is known under it."""


def of_folder(checkpoint: Checkpoint) -> Facts:
    """What a Hugging Face folder is."""
    quantization = checkpoint.quantization
    yield "files", files_text([file.stat().st_size for file in checkpoint.files], "safetensors file")
    yield "size", size_text(stored_bits.storage_of(checkpoint.folder))
    groups: dict[str, Counter[str]] = {}
    asked = declared(quantization)
    for module, parts in checkpoint.matrices:
        if checkpoint.role(module) not in ("head", "embedding"):
            stored, scheme = described(parts, quantization), None
            if is_quantized(parts):
                scheme = asked.of(module)
            taken = f", activations {scheme.activations}" if scheme and scheme.activations else ""
            groups.setdefault(stored + taken, Counter())[NUMBER.sub("*", module)] += 1
    for stored, names in groups.items():
        yield "layers", group_text(stored, names)
    for name, parts in checkpoint.matrices:
        if (role := checkpoint.role(name)) in ("head", "embedding"):
            what = "embedding and head" if is_tied(checkpoint) else role
            yield what, f"{described(parts, quantization)}: {name}"
    method = quantization.get("quant_method")
    if quantization:
        yield "config", f"{method or 'quantization'}{format_text(quantization)}"
    yield "KV cache", kv_text(quantization)
    if quantization:
        yield "calibration", calibration_text(checkpoint)


def of_gguf(model: GgufModel) -> Facts:
    """What a GGUF model is."""
    yield "files", files_text([file.stat().st_size for file in model.files], "GGUF file")
    yield "size", size_text(model.storage())
    groups: dict[str, Counter[str]] = {}
    for tensor in model.tensors:
        if model.role(tensor) == "layer" and len(tensor.shape) > 1:
            name = NUMBER.sub("*", tensor.name.removesuffix(".weight"))
            groups.setdefault(tensor.type_name, Counter())[name] += 1
    for stored, names in groups.items():
        yield "layers", group_text(stored, names)
    for tensor in model.tensors:
        if model.role(tensor) in ("head", "embedding") and tensor.name.endswith(".weight"):
            yield model.role(tensor), f"{tensor.type_name}: {tensor.name.removesuffix('.weight')}"
    matrix = model.fields.get("quantize.imatrix.dataset") or model.fields.get("quantize.imatrix.file")
    yield "calibration", f"importance matrix from {printable(matrix)}" if matrix else "no importance matrix is named"


def files_text(sizes: Sequence[int], what: str) -> str:
    """``0.12 GB in 2 safetensors files``."""
    return f"{bytes_in_words(sum(sizes))} in {len(sizes)} {what}{'' if len(sizes) == 1 else 's'}"


def size_text(storage: Storage) -> str:
    """Bits per weight and GiB of what is computed with."""
    if storage.bpw_layer is None or storage.vram_gib is None:
        return f"n/a: {storage.note}"
    return f"layers {storage.bpw_layer:.2f} bpw, head {storage.bpw_head:.2f} bpw, together {storage.vram_gib:.2f} GiB"


def group_text(stored: str, names: Mapping[str, int]) -> str:
    """``210 x int4 g32: model.layers.*.mlp.down_proj, ...``."""
    shown = list(names)[:SHOWN]
    more = f" and {len(names) - SHOWN} more kinds" if len(names) > SHOWN else ""
    return f"{sum(names.values()):,} x {stored}: {', '.join(shorter(shown))}{more}"


def shorter(names: Sequence[str]) -> list[str]:
    """The names, of which all but the first leave out the first two steps that they have in common with it."""
    head = ".".join(names[0].split(".")[:3]) + "."
    return [names[0], *(f"...{name.removeprefix(head)}" if name.startswith(head) else name for name in names[1:])]


def format_text(quantization: Mapping[str, Any]) -> str:
    """The name of the format in a config, after its method."""
    nested = quantization.get("quantization")
    found = quantization.get("format") or quantization.get("quant_algo")
    if not found and isinstance(nested, Mapping):
        found = nested.get("quant_algo")
    return f" {shortened(printable(found), 60)}" if found else ""


def kv_text(quantization: Mapping[str, Any]) -> str:
    """The scheme of the KV cache that a config asks for."""
    found = kv_cache(quantization)
    return f"{found}, as the config asks" if found else "in the model's dtype"


def calibration_text(checkpoint: Checkpoint) -> str:
    """How the checkpoint was calibrated, as far as its files say so."""
    quantization = checkpoint.quantization
    made = quantization.get("producer") or quantization.get("meta") or {}
    said = [
        f"{key} {made[key]}" for key in ("name", "version", "quantizer") if isinstance(made, Mapping) and key in made
    ]
    said += [f"{key} {quantization[key]}" for key in CALIBRATION if quantization.get(key) not in (None, "", {}, [])]
    if exists(checkpoint.folder / "recipe.yaml"):
        said.append("recipe.yaml has llm-compressor's recipe")
    return shortened(printable("; ".join(said)), 160) or NOT_STATED
