"""One model, examined: what it is (schemes, bits, size, calibration), what is wrong with it, what was not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint.contents import Contents
from compare_q.backends.checkpoint.doctor import checks, tokenizers
from compare_q.backends.checkpoint.doctor.checks import Finding, Severity
from compare_q.backends.checkpoint.folder import Checkpoint, storage_of
from compare_q.backends.checkpoint.gguf import GgufModel, read_model
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, is_folder
from compare_q.backends.common.messages import bytes_in_words, printable, shortened
from compare_q.backends.layers.names import NUMBER
from compare_q.backends.layers.schemes import declared, kv_cache, part

SHOWN = 8
"""Names of groups of layers in one line."""
CALIBRATION = ("dataset", "nsamples", "seqlen", "iters", "sym", "desc_act", "damp_percent", "algo")
"""Keys of quantization configs that say how a checkpoint was made (GPTQ, AWQ, auto-round)."""


@dataclass(frozen=True)
class Examination:
    """What the doctor says of one model.

    ``facts``: pairs of a title and what is known under it; ``findings``: the worst first; ``unchecked``: what could not
    be checked, and why.
    """

    name: str
    facts: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether a number or an answer would be wrong."""
        return any(finding.severity == "wrong" for finding in self.findings)


@dataclass(frozen=True)
class Patient:
    """A model on this machine: a folder of safetensors, or a GGUF model."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, or a folder that holds nothing else."""
        if is_folder(self.path):
            return not any(self.path.glob("*.safetensors")) and any(self.path.glob("*.gguf"))
        return self.path.suffix.lower() == ".gguf"

    @property
    def gguf(self) -> GgufModel | None:
        """Its headers, if it is a GGUF model."""
        return read_model(self.path) if self.is_gguf else None

    @property
    def tokens(self) -> tokenizers.Tokens:
        """What it says of its tokens; InputError for what cannot be read."""
        return tokenizers.of_gguf(self.gguf) if self.gguf is not None else tokenizers.of_folder(self.path)


def examine(patient: Patient, reference: Patient | None = None, contents: Contents | None = None) -> Examination:
    """Everything that headers, configs and small tensors say of a model; InputError if it cannot be read.

    ``reference``: the model whose tokens it should have; ``contents``: of its folder, None if nothing was compared.
    """
    model = patient.gguf
    unchecked = []
    if model is not None:
        facts, findings = tuple(gguf_facts(model)), list(low_gguf_head(model))
    else:
        checkpoint = Checkpoint(patient.path)
        facts, findings = tuple(folder_facts(checkpoint)), list(checks.check(checkpoint))
        if contents is not None:
            findings += checks.contents(checkpoint, contents)
            unchecked += [f"tensors against the config: {contents.unchecked}"] if contents.unchecked else []
    if reference is not None:
        try:
            findings += tokenizers.check(patient.tokens, reference.tokens)
        except InputError as error:
            unchecked.append(f"tokens: {error}")
    findings.sort(key=lambda finding: get_args(Severity).index(finding.severity))
    return Examination(patient.name, facts, tuple(findings), tuple(unchecked))


def folder_facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """What a Hugging Face folder is."""
    quantization = checkpoint.config.quantization
    yield "files", files_text([file.stat().st_size for file in checkpoint.files], "safetensors file")
    yield "size", size_text(storage_of(checkpoint.folder))
    stated = declared(quantization)
    groups: dict[str, Counter[str]] = {}
    ends: list[tuple[str, str]] = []
    for module in checkpoint.matrices:
        role, stored = checkpoint.role(module), checkpoint.described(module)
        if role in ("head", "embedding"):
            ends.append(("embedding and head" if checkpoint.is_tied else role, f"{stored}: {module}"))
            continue
        scheme = stated.of(module) if module in checkpoint.quantized else None
        taken = f", activations {scheme.activations}" if scheme and scheme.activations else ""
        groups.setdefault(stored + taken, Counter())[NUMBER.sub("*", module)] += 1
    yield from layers_facts(groups)
    yield from ends
    if quantization:
        nested = part(quantization, "quantization")
        form = quantization.get("format") or quantization.get("quant_algo") or nested.get("quant_algo") or ""
        yield "config", shortened(printable(f"{checkpoint.config.quant_method or 'quantization'} {form}".strip()), 80)
    scheme_text = kv_cache(quantization)
    yield "KV cache", f"{scheme_text}, as the config asks" if scheme_text else "in the model's dtype"
    if quantization:
        yield "calibration", calibration_text(checkpoint)


def gguf_facts(model: GgufModel) -> Iterator[tuple[str, str]]:
    """What a GGUF model is."""
    yield "files", files_text([file.stat().st_size for file in model.files], "GGUF file")
    yield "size", size_text(model.storage())
    groups: dict[str, Counter[str]] = {}
    ends: list[tuple[str, str]] = []
    for tensor in model.tensors:
        role, name = model.role(tensor), tensor.name.removesuffix(".weight")
        if role == "layer" and len(tensor.shape) > 1:
            groups.setdefault(tensor.type_name, Counter())[NUMBER.sub("*", name)] += 1
        elif role in ("head", "embedding") and tensor.name.endswith(".weight"):
            ends.append((role, f"{tensor.type_name}: {name}"))
    yield from layers_facts(groups)
    yield from ends
    matrix = model.fields.get("quantize.imatrix.dataset") or model.fields.get("quantize.imatrix.file")
    yield "calibration", f"importance matrix from {printable(matrix)}" if matrix else "no importance matrix is named"


def low_gguf_head(model: GgufModel) -> Iterator[Finding]:
    """A head below 6 bits a weight: llama.cpp's own mixtures keep it at 6 bits or more."""
    bpw = model.storage().bpw_head
    if bpw is not None and bpw < 6:
        tensor = next(tensor for tensor in model.tensors if model.role(tensor) == model.head)
        what = f"the head is quantized to {bpw:.2f} bits a weight ({tensor.type_name}): it makes every logit"
        where = f"{model.files[0].name}: {tensor.name}"
        yield Finding("warning", where, what, "quantize it with a head in q6_K or q8_0")


def layers_facts(groups: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """``210 matrices in int4 g32: model.layers.*.mlp.down_proj``; ``groups``: what is stored -> name -> how often."""
    for stored, names in groups.items():
        more = f" and {len(names) - SHOWN} more kinds" if len(names) > SHOWN else ""
        matrices = "1 matrix" if (count := sum(names.values())) == 1 else f"{count:,} matrices"
        yield "layers", f"{matrices} in {stored}: {', '.join(shorter(list(names)[:SHOWN]))}{more}"


def shorter(names: Sequence[str]) -> list[str]:
    """The names, of which all but the first leave out the first two steps that they have in common with it."""
    head = ".".join(names[0].split(".")[:3]) + "."
    return [names[0], *(f"...{name.removeprefix(head)}" if name.startswith(head) else name for name in names[1:])]


def files_text(sizes: Sequence[int], what: str) -> str:
    """``0.12 GB in 2 safetensors files``."""
    return f"{bytes_in_words(sum(sizes))} in {len(sizes)} {what}{'' if len(sizes) == 1 else 's'}"


def size_text(storage: Storage) -> str:
    """Bits per weight and GiB of what is computed with."""
    if storage.bpw_layer is None or storage.vram_gib is None:
        return f"n/a: {storage.note}"
    return f"layers {storage.bpw_layer:.2f} bpw, head {storage.bpw_head:.2f} bpw, together {storage.vram_gib:.2f} GiB"


def calibration_text(checkpoint: Checkpoint) -> str:
    """How the checkpoint was calibrated, as far as its files say so."""
    quantization = checkpoint.config.quantization
    made = part(quantization, "producer") or part(quantization, "meta")
    said = [f"{key} {made[key]}" for key in ("name", "version", "quantizer") if key in made]
    said += [f"{key} {quantization[key]}" for key in CALIBRATION if quantization.get(key) not in (None, "", {}, [])]
    if exists(checkpoint.folder / "recipe.yaml"):
        said.append("recipe.yaml has llm-compressor's recipe")
    return shortened(printable("; ".join(said)), 160) or "the files do not say"
