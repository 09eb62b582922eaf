"""The doctor: describe a checkpoint and find its faults from headers, configs and small tensors.

No engine runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..base import Storage
from ..common.errors import InputError
from ..common.json_files import exists
from ..common.message_text import amount, bytes_in_words, printable, shortened
from ..hub import SILENT, Watch
from ..hub_files import WEIGHTS_INDEX
from ..layers.module_names import is_left_by_quantizer, kind_of, module_and_part
from ..layers.schemes import (
    asks_for_input_scales,
    declared,
    ignored_names,
    is_ignored,
    is_static,
    kv_cache,
    modelopt_section,
    part,
)
from . import largest_weights, model_function, stored_sizes, zeros
from .contents import SMALL_TENSOR_ELEMENTS, Contents
from .folder import Checkpoint, storage_of
from .formats import FLOAT_DTYPES, INPUT_SCALES, KV_SCALES, NUMPY_TYPES, Parts, main_part, values
from .gguf import BLOCK_PREFIX, GgufModel, is_gguf, read_model
from .nvfp4_scales import FUSED_WITH_ONE_SCALE, SHARED_SCALE_ADVICE, unequal
from .safetensors_files import Tensor, read_headers, strays
from .stored_sizes import Fault
from .token_rules import SERVED, faults
from .tokenizers import CONFIG, TOKENIZER_FILE, TOKENIZER_SAMPLES, Tokens, of_folder, of_gguf
from .zeros import Zeros

Severity = Literal["wrong", "warning", "note"]
"""``wrong``: a number or an answer would be wrong; ``warning``: may be; ``note``: good to know."""
SHOWN = 8
"""Largest number of names of layer groups in one line."""
CALIBRATION = ("dataset", "nsamples", "seqlen", "iters", "sym", "desc_act", "damp_percent", "algo")
"""Keys of quantization configs that describe the calibration (GPTQ, AWQ, auto-round)."""
CALIBRATE = "calibrate with text that reaches it, or with every expert active, and quantize again"
NO_SCALES = "calibrate the KV cache, or serve with the KV cache in 16 bits"
COPY = "copy the reference's tokenizer files into the model's folder"
RULES_DIFFER = (
    "give tokenizer_config.json a tokenizer_class that reads the file as it is, "
    "PreTrainedTokenizerFast"
)
PADDING_TOKENS = ("pad_token", "unk_token")
CONVERT = "convert the model again, with a current converter"
NO_TOKENIZER = "no engine that is installed here makes tokens with the file's own tokenizer"
OTHER_CONFIG = "give the config.json that belongs to these files"
DOWNLOAD = "download the file again, or convert the model again"
PICKLED_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TRAINING_FILES = {"training_args.bin", "optimizer.pt", "scheduler.pt"}
KEPT_IN_FLOAT32 = ("gate", "router", "A_log")
"""Routers and states of Mamba, which are kept in float32 on purpose."""
MOST_COMPARED_BLOCKS = 2_000
"""Above every model's number of blocks.

Comparing the blocks takes time that grows with the square of their number.
"""


class Finding(NamedTuple):
    """A fault of a checkpoint, and how to fix it."""

    severity: Severity
    where: str  # the file, and the first tensor or layer with this fault
    what: str
    fix: str
    more: int = 0  # number of similar faults

    def __str__(self) -> str:
        others = ""
        if self.more:
            others = f" (and {self.more:,} more like it)"
        return f"{self.severity}: {self.where}: {self.what}{others}; {self.fix}"


def one_finding(severity: Severity, where: Iterable[str], what: str, fix: str) -> list[Finding]:
    """Return one finding for all places with the same fault; empty without places.

    It names the first place.
    """
    places = list(where)
    if not places:
        return []
    return [Finding(severity, places[0], what, fix, len(places) - 1)]


@dataclass(frozen=True)
class Report:
    """The doctor's report on one model."""

    facts: tuple[tuple[str, str], ...] = ()  # (title, text)
    findings: tuple[Finding, ...] = ()  # the worst first
    unchecked: tuple[str, ...] = ()  # what could not be checked, and why

    @property
    def is_wrong(self) -> bool:
        """True if a number or an answer would be wrong."""
        return any(finding.severity == "wrong" for finding in self.findings)


def examine(
    path: Path,
    reference: Path | None = None,
    contents: Contents | None = None,
    watch: Watch | None = None,
    *,
    reference_contents: Contents | None = None,
    engine_tokens: Mapping[str, Any] | None = None,
) -> Report:
    """Return all that headers, configs and small tensors show about a folder or GGUF model.

    InputError if the model cannot be read.  ``reference``: the model whose tokens it should have,
    and whose function it should compute.  ``contents``, ``reference_contents``: of the two folders,
    None if nothing was compared.  ``engine_tokens``: what the engine's own tokenizer makes of
    samples (``token_rules.of_header``), None if that is not known.  ``watch``: gets the numbers of
    bytes searched for zeros; None: only samples of the weights are searched.
    """
    findings: list[Finding] = []
    unchecked: list[str] = []
    if is_gguf(path):
        model = read_model(path)
        placed = model.placed()
        facts = tuple(gguf_facts(model))
        findings += low_gguf_head(model)
        findings += uneven_gguf_blocks(model)
    else:
        checkpoint = Checkpoint(path)
        placed = checkpoint.placed()
        facts = tuple(folder_facts(checkpoint))
        for check in CHECKS:
            findings += check(checkpoint)
        if contents is not None:
            findings += differing_tensors(checkpoint, contents)
            findings += [
                Finding("warning", TOKENIZER_FILE, note, RULES_DIFFER) for note in contents.tokens
            ]
            if contents.unchecked:
                unchecked.append(f"tensors against the config: {contents.unchecked}")
    findings += zero_findings(zeros.find(placed, whole=watch is not None, watch=watch or SILENT))
    if reference is not None:
        try:
            findings += differing_tokens(tokens_of(path, engine_tokens), tokens_of(reference))
        except InputError as error:
            unchecked.append(f"tokens: {error}")
        if is_gguf(path) and engine_tokens is None:
            unchecked.append(f"pre-tokenizer: {NO_TOKENIZER}")
        try:
            findings += differing_function(path, reference, contents, reference_contents)
        except InputError as error:
            unchecked.append(f"the config against the reference's: {error}")
    findings.sort(key=rank)
    return Report(facts, tuple(findings), tuple(unchecked))


def rank(finding: Finding) -> int:
    """Return the place of a finding's severity, 0 for the worst."""
    return get_args(Severity).index(finding.severity)


def tokens_of(path: Path, engine_tokens: Mapping[str, Any] | None = None) -> Tokens:
    """Return the tokens of a folder or a GGUF model; InputError."""
    if is_gguf(path):
        return of_gguf(read_model(path), engine_tokens)
    return of_folder(path)


# Facts.


def folder_facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of a Hugging Face folder."""
    quantization = checkpoint.config.quantization
    matrices = described_matrices(checkpoint)
    yield from file_facts(checkpoint.files, "safetensors", storage_of(checkpoint.folder), matrices)
    if quantization:
        yield "config", method_text(checkpoint)
    scheme_text = kv_cache(quantization)
    if scheme_text:
        yield "KV cache", f"{scheme_text}, as the config requires"
    else:
        yield "KV cache", "in the model's dtype"
    if quantization:
        yield "calibration", calibration_text(checkpoint)


def described_matrices(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    """Return (role, stored form, name) of each matrix of a folder."""
    schemes = declared(checkpoint.config.quantization)
    matrices = []
    for module in checkpoint.matrices:
        role: str = checkpoint.role(module)
        form = checkpoint.described(module)
        if module in checkpoint.quantized and role in ("layer", ""):
            scheme = schemes.of(module)
            if scheme is not None and scheme.activations:
                form = f"{form}, activations {scheme.activations}"
        if role in ("head", "embedding") and checkpoint.is_tied:
            role = "embedding and head"
        matrices.append((role, form, module))
    return matrices


def method_text(checkpoint: Checkpoint) -> str:
    """Return the quantization method and the format in a folder's config."""
    quantization = checkpoint.config.quantization
    method = checkpoint.config.quant_method or "quantization"
    nested = part(quantization, "quantization")
    forms = (
        quantization.get("format"),
        quantization.get("quant_algo"),
        nested.get("quant_algo"),
    )
    form = next((form for form in forms if form), "")
    return shortened(printable(f"{method} {form}".strip()), 80)


def calibration_text(checkpoint: Checkpoint) -> str:
    """Return what a folder's files say about the tool and the calibration."""
    quantization = checkpoint.config.quantization
    tool = part(quantization, "producer")
    if not tool:
        tool = part(quantization, "meta")
    texts = [f"{key} {tool[key]}" for key in ("name", "version", "quantizer") if key in tool]
    for key in CALIBRATION:
        value = quantization.get(key)
        # 0 and False are values, too.
        if value not in (None, "", {}, []):
            texts.append(f"{key} {value}")
    if exists(checkpoint.folder / "recipe.yaml"):
        texts.append("recipe.yaml has llm-compressor's recipe")
    text = shortened(printable("; ".join(texts)), 160)
    if not text:
        return "the files do not say"
    return text


def gguf_facts(model: GgufModel) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of a GGUF model."""
    matrices = []
    for tensor in model.tensors:
        role = model.role(tensor)
        if role and len(tensor.shape) > 1:
            matrices.append((role, tensor.type_name, tensor.name.removesuffix(".weight")))
    yield from file_facts(model.files, "GGUF", model.storage(), matrices)
    source = model.fields.get("quantize.imatrix.dataset")
    if not source:
        source = model.fields.get("quantize.imatrix.file")
    if source:
        yield "calibration", f"importance matrix from {printable(source)}"
    else:
        yield "calibration", "no importance matrix is named"


def file_facts(
    files: Sequence[Path], kind: str, storage: Storage, matrices: Iterable[tuple[str, str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield files, size, layers, embedding and head; ``matrices``: (role, stored form, name)."""
    size = bytes_in_words(sum(file.stat().st_size for file in files))
    noun = f"{kind} file"
    if len(files) != 1:
        noun = f"{noun}s"
    yield "files", f"{size} in {len(files)} {noun}"
    if storage.bpw_layer is None:
        yield "size", f"n/a: {storage.note}"
    else:
        layers = f"layers {storage.bpw_layer:.2f} bpw"
        head = f"head {storage.bpw_head:.2f} bpw"
        yield "size", f"{layers}, {head}, together {storage.vram_gib:.2f} GiB"
    names_by_form: dict[str, Counter[str]] = {}
    ends = []
    for role, form, name in matrices:
        if role in ("layer", ""):
            names_by_form.setdefault(form, Counter())[kind_of(name)] += 1
        else:
            ends.append((role, f"{form}: {name}"))
    for form, counts in names_by_form.items():
        yield "layers", layers_text(form, counts)
    yield from ends


def layers_text(form: str, counts: Counter[str]) -> str:
    """Return one line on the matrices of one stored form; ``counts``: by their names.

    ``210 matrices in int4 g32: model.layers.*.mlp.down_proj, ...mlp.up_proj``: names after the
    first leave out the leading steps that they share with the first name.
    """
    first, *others = list(counts)[:SHOWN]
    leading_steps = ".".join(first.split(".")[:3]) + "."
    names = [first]
    for name in others:
        if name.startswith(leading_steps):
            names.append(f"...{name.removeprefix(leading_steps)}")
        else:
            names.append(name)
    count = "1 matrix"
    if counts.total() != 1:
        count = f"{counts.total():,} matrices"
    more = ""
    if len(counts) > SHOWN:
        more = f" and {len(counts) - SHOWN} more kinds"
    return f"{count} in {form}: {', '.join(names)}{more}"


# Checks.


def low_gguf_head(model: GgufModel) -> Iterator[Finding]:
    """Find a head below 6 bits per weight: llama.cpp's own mixtures keep it at 6 bits or more."""
    bpw = model.storage().bpw_head
    if bpw is not None and bpw < 6:
        tensor = next(tensor for tensor in model.tensors if model.role(tensor) == model.head)
        what = (
            f"the head is quantized to {bpw:.2f} bits per weight ({tensor.type_name}), "
            "and it computes every logit"
        )
        where = f"{model.files[0].name}: {tensor.name}"
        yield Finding("warning", where, what, "quantize it with a head in q6_K or q8_0")


def uneven_gguf_blocks(model: GgufModel) -> Iterator[Finding]:
    """Find blocks that contradict the header's count, and blocks that alone lack a tensor."""
    file = model.files[0].name
    counted = model.field("{}.block_count", int) or 0
    # A damaged header may count billions.
    if counted > min(len(model.tensors), MOST_COMPARED_BLOCKS):
        what = f"counts {counted:,} blocks, and the file has {amount(len(model.tensors), 'tensor')}"
        yield Finding("wrong", f"{file}: block_count", what, DOWNLOAD)
        return
    blocks: dict[int, set[str]] = {number: set() for number in range(counted)}
    for tensor in model.tensors:
        block = BLOCK_PREFIX.match(tensor.name)
        if block is not None:
            blocks.setdefault(int(block[1]), set()).add(tensor.name[block.end() :])
    if len(blocks) > MOST_COMPARED_BLOCKS:
        what = f"stores tensors of {len(blocks):,} blocks"
        yield Finding("wrong", file, what, DOWNLOAD)
        return
    lacking = [f"{file}: blk.{number}.{name}" for number, name in lacking_in_blocks(blocks)]
    what = "missing, although the other blocks have it"
    yield from one_finding("wrong", lacking, what, DOWNLOAD)
    beyond = [f"{file}: blk.{number}" for number in blocks if number >= counted]
    what = f"stored, and the header counts {counted} blocks"
    yield from one_finding("wrong", beyond, what, DOWNLOAD)


def lacking_in_blocks(blocks: Mapping[int, set[str]]) -> Iterator[tuple[int, str]]:
    """Yield (number, first tensor that it lacks) of blocks with fewer tensors than two others.

    Blocks may alternate, and the first may be of another kind: a block lacks a tensor only if no
    other block has the same tensors, and several blocks have these and more.
    """
    counts = Counter(frozenset(names) for names in blocks.values())
    for number, names in blocks.items():
        if counts[frozenset(names)] > 1:
            continue
        larger = [others for others, count in counts.items() if count > 1 and names < others]
        if larger:
            yield number, min(min(larger, key=len) - names)


def zero_findings(runs: Sequence[Zeros]) -> Iterator[Finding]:
    """Find matrices and scales with rows of zeros."""
    damaged = []
    intended = []
    for run in runs:
        place = f"{run.file.name}: {run.name}: {run}"
        if run.wrong:
            damaged.append(place)
        else:
            intended.append(place)
    what = "no weights, but a hole in the file, or a failed quantization"
    fix = "download the files again, or quantize again"
    yield from one_finding("wrong", damaged, what, fix)
    what = "padded or pruned, or never trained"
    yield from one_finding("note", intended, what, "none, if that is meant")


def differing_tensors(checkpoint: Checkpoint, contents: Contents) -> Iterator[Finding]:
    """Find tensors that are missing or left over, or whose shape differs from the config."""
    missing = []
    for name in sorted(contents.missing):
        # The check of input scales reports these.
        if name.rpartition(".")[2] not in INPUT_SCALES:
            missing.append(f"{checkpoint.files[0].name}: {name}")
    yield from one_finding(
        "wrong",
        missing,
        "missing, although the config requires it: engines refuse, or use arbitrary numbers",
        "download the files again, or save the model with the class that its config names",
    )
    shapes: dict[str, list[str]] = {}
    for module, stored, required, dtype in sorted(contents.shapes):
        what = f"has the shape {stored} ({dtype}), and the config asks for {required}"
        shapes.setdefault(what, []).append(checkpoint.where(module))
    for what, places in shapes.items():
        yield from one_finding("wrong", places, what, OTHER_CONFIG)
    fix = f"{OTHER_CONFIG}, or save the model without it"
    lost = [checkpoint.where(module) for module in sorted(contents.lost)]
    what = "left over: the model that the config describes has no place for it"
    yield from one_finding("wrong", lost, what, fix)
    left_over = [checkpoint.where(module) for module in sorted(contents.left_over)]
    what = "left over: the model that the config describes has no such layer"
    yield from one_finding("warning", left_over, what, fix)
    biases = [checkpoint.where(module) for module in sorted(contents.biases)]
    what = "its bias is left over: the model that the config describes has none there"
    yield from one_finding("warning", biases, what, fix)


def differing_tokens(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Find differences between a model's tokens and its reference's.

    An entry that only one model has does not count.
    """
    if reference.vocabulary and not mine.vocabulary and mine.where == TOKENIZER_FILE:
        yield Finding("warning", TOKENIZER_FILE, "missing, and the reference has one", COPY)
    yield from differing_encoding(mine, reference)
    # The rules of two folders were compared by the tokens of samples, above.
    if mine.where != TOKENIZER_FILE or reference.where != TOKENIZER_FILE:
        for fault in faults(mine.rules, reference.rules):
            severity: Severity = "warning"
            if fault.is_sure:
                severity = "wrong"
            yield Finding(severity, mine.where, f"{fault.what}: {SERVED}", CONVERT)
    yield from differing_special_tokens(mine, reference)
    yield from differing_template(mine, reference)


def differing_encoding(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Find other tokens for the same id, other merges, and samples with other tokens."""
    ours = mine.vocabulary
    theirs = reference.vocabulary
    common_ids = sorted(ours.keys() & theirs.keys())
    differing = [number for number in common_ids if ours[number] != theirs[number]]
    if differing:
        first = differing[0]
        what = f"token {first} is {ours[first]!r}, and the reference's is {theirs[first]!r}"
        yield Finding("wrong", mine.where, what, COPY, len(differing) - 1)
    has_other_merges = False
    if mine.merges and reference.merges:
        has_other_merges = mine.merges != reference.merges
    if has_other_merges:
        what = "its merges are not the reference's: text becomes other tokens"
        yield Finding("wrong", mine.where, what, COPY)
    if differing or has_other_merges:
        return
    # GGUF files have no encoded samples.
    for text, our_ids, their_ids in zip(
        TOKENIZER_SAMPLES, mine.encoded, reference.encoded, strict=False
    ):
        if our_ids != their_ids:
            what = f"its rules cut text into other tokens, such as {text!r}"
            yield Finding("wrong", mine.where, what, COPY)
            return


def differing_special_tokens(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Find special tokens, as text or ids, that differ from the reference's."""
    for name in sorted(mine.special.keys() & reference.special.keys()):
        if as_set(mine.special[name]) == as_set(reference.special[name]):
            continue
        where, _, key = name.rpartition(": ")
        if not where:
            where = mine.where
            if mine.where == TOKENIZER_FILE:
                where = CONFIG
        severity: Severity = "wrong"
        consequence = "answers begin or end differently"
        # No scored text has padding.
        if name in PADDING_TOKENS:
            severity = "note"
            consequence = "matters to padding and to unknown text only"
        tokens = f"{mine.special[name]!r}, and the reference's {reference.special[name]!r}"
        yield Finding(severity, where, f"{key} is {tokens}: {consequence}", COPY)


def differing_template(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Find a chat template that is missing, or is not the reference's."""
    if reference.template is None or mine.template == reference.template:
        return
    where = f"{mine.where}.chat_template"
    if mine.where == TOKENIZER_FILE:
        where = "chat template"
    if mine.template is None:
        what = "no chat template, and the reference has one: chats get another prompt"
        yield Finding("wrong", where, what, COPY)
    else:
        what = "not the reference's chat template: chats get another prompt than the reference does"
        yield Finding("warning", where, what, f"{COPY}, or compare with both under one template")


def differing_function(
    path: Path, reference: Path, contents: Contents | None, reference_contents: Contents | None
) -> Iterator[Finding]:
    """Find values of config or header that differ from the reference's.

    Only values are compared that a quantization never changes.
    """
    functions = {}
    for folder, compared in ((path, contents), (reference, reference_contents)):
        if not is_gguf(folder):
            if compared is None:
                return
            functions[folder] = compared.function
    differences = model_function.differences(path, reference, functions)
    if not differences:
        return
    where = "config.json"
    if is_gguf(path):
        where = read_model(path).files[0].name
    sentence = model_function.sentence(path, differences)
    what = f"{sentence}: it computes another function than the model that was quantized"
    yield Finding("wrong", where, what, f"give it the reference's values, or {CONVERT}")


def as_set(value: Any) -> Any:
    """Return ids as a set: their order means nothing, and a single id may be without a list.

    Other values are returned unchanged.
    """
    ids = value
    if not isinstance(value, list):
        ids = [value]
    if any(type(token) is not int for token in ids):
        return value
    return set(ids)


def fused_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find layers with different global scales that engines fuse into a matrix with one scale."""
    places = []
    for path, text in unequal(checkpoint.quantized).items():
        file = checkpoint.where(path).partition(": ")[0]
        places.append(f"{file}: {text}")
    yield from one_finding("wrong", places, what=FUSED_WITH_ONE_SCALE, fix=SHARED_SCALE_ADVICE)


def input_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find scales of activations that are missing, zero, negative, infinite or NaN.

    In a mixture of schemes, a layer without a scale is wrong if other layers of its kind have one,
    unless the config states for each layer what it takes (ModelOpt's MIXED_PRECISION).
    """
    schemes = declared(checkpoint.config.quantization)
    scales: dict[str, Tensor] = {}
    kinds_with_scale = set()
    without_scale = []
    for module, parts in checkpoint.quantized.items():
        kind = kind_with_parts(module, parts)
        names = [name for name in sorted(INPUT_SCALES & parts.keys()) if is_small(parts[name])]
        for name in names:
            scales[f"{module}.{name}"] = parts[name]
        if names:
            kinds_with_scale.add(kind)
            continue
        scheme = schemes.of(module)
        if scheme is None or scheme.activations:
            without_scale.append((module, kind))
    is_required = asks_for_input_scales(checkpoint.config.quantization)
    missing = []
    for module, kind in without_scale:
        if is_required or kind in kinds_with_scale:
            missing.append(checkpoint.where(module))
    what = "no scale of its activations (input_scale); engines then use uninitialized memory or 1"
    yield from one_finding("wrong", missing, what, CALIBRATE)
    for fault, places in faulty(scales).items():
        what = f"the scale of its activations is {fault}"
        yield from one_finding("wrong", places, what, CALIBRATE)


def kind_with_parts(module: str, parts: Parts) -> tuple[str, ...]:
    """Return what modules of one kind and one scheme share, except scales of activations."""
    dtypes = [f"{name} {parts[name].dtype}" for name in parts.keys() - INPUT_SCALES]
    return (kind_of(module), *sorted(dtypes))


def is_small(tensor: Tensor) -> bool:
    """True if a tensor is small enough to read all its values."""
    return tensor.numel <= SMALL_TENSOR_ELEMENTS


def kv_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find scales of an fp8 KV cache that are missing, all 1, or invalid."""
    scales: dict[str, Tensor] = {}
    for module, parts in checkpoint.modules.items():
        for name, tensor in parts.items():
            if name in KV_SCALES and is_small(tensor):
                scales[f"{module}.{name}"] = tensor
    if not scales:
        yield from missing_kv_scales(checkpoint)
        return
    places_by_fault = faulty(scales)
    for fault, places in places_by_fault.items():
        what = f"the scale of the KV cache is {fault}"
        yield from one_finding("wrong", places, what, "calibrate the KV cache again")
    if not places_by_fault and all((values(tensor) == 1).all() for tensor in scales.values()):
        severity: Severity = "warning"
        cause = "which no calibration gives: keys beyond 448 are cut"
        method = str(checkpoint.config.quantization.get("quant_method")).lower()
        # ModelOpt stores 1 if the calibrated scale is smaller.
        if method.startswith("modelopt"):
            severity = "note"
            cause = "and ModelOpt writes no smaller one"
        places = [checkpoint.where(name) for name in scales]
        what = f"every scale of the fp8 KV cache is 1.0, {cause}"
        yield from one_finding(severity, places, what, NO_SCALES)


def missing_kv_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a config that states a calibrated fp8 KV cache; no scales are stored."""
    quantization = checkpoint.config.quantization
    algorithm = modelopt_section(quantization).get("kv_cache_quant_algo")
    if is_static(quantization.get("kv_cache_scheme")) or str(algorithm).upper() == "FP8":
        what = (
            "states a calibrated fp8 KV cache, but no k_scale and v_scale are stored, "
            "and engines use 1.0"
        )
        yield Finding("warning", "config.json: quantization_config", what, NO_SCALES)


def unexpected_quantization(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a quantized head or embedding, and quantized layers that the config excludes."""
    patterns = ignored_names(checkpoint.config.quantization)
    excluded = [module for module in checkpoint.quantized if is_ignored(module, patterns)]
    places = [checkpoint.where(module) for module in excluded]
    what = (
        "stored quantized, and the config says that it is not: engines refuse, "
        "or read its bytes as other numbers"
    )
    fix = "take it out of the config's list of ignored layers, or store it unquantized"
    yield from one_finding("wrong", places, what, fix)
    tied = ""
    if checkpoint.is_tied:
        tied = " and the head, which is the same matrix"
    for module in sorted(checkpoint.quantized.keys() - excluded):
        role = checkpoint.role(module)
        if role not in ("head", "embedding"):
            continue
        form = checkpoint.described(module)
        if role == "head":
            what = (
                f"the head is quantized ({form}), which costs more than a layer: "
                "it makes every logit"
            )
        else:
            what = (
                f"the embedding{tied}: quantized ({form}); "
                "many engines read embeddings in 16 bits only"
            )
        fix = "consider it when you compare models"
        yield Finding("warning", checkpoint.where(module), what, fix)


def contradicted_sizes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find stored shapes that contradict the sizes in the config."""
    contradictions = stored_sizes.contradictions(checkpoint)
    yield from fault_findings(checkpoint, contradictions, stored_sizes.REQUANTIZE)


def impossible_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find scales that allow weights which no model has."""
    impossible = largest_weights.impossible(checkpoint)
    yield from fault_findings(checkpoint, impossible, largest_weights.CAUSE)


def fault_findings(checkpoint: Checkpoint, faults: Iterable[Fault], fix: str) -> Iterator[Finding]:
    """Yield one finding for each kind of fault, with the text of the first."""
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    for first, *others in kinds.values():
        yield Finding("wrong", checkpoint.where(first.tensor), first.what, fix, len(others))


def left_by_quantizers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find numbers that a quantizer left: ModelOpt's ``weight_quantizer._scale``."""
    places = []
    for name in checkpoint.tensors:
        module = module_and_part(name)[0]
        if is_left_by_quantizer(module):
            places.append(checkpoint.where(name))
    what = "left over from the quantizer: no engine reads it next to the layer's own scales"
    fix = "export the model again, without the quantizer's state"
    yield from one_finding("warning", places, what, fix)


def strays_and_pickles(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find files of weights that no engine loads, or that one may load instead of the others."""
    for file in strays(checkpoint.folder):
        try:
            names = set(read_headers([file]))
        except InputError as error:
            what = f"is next to the model's files and cannot be read: {error}"
        else:
            n_again = len(names & checkpoint.tensors.keys())
            what = f"holds {len(names):,} tensors, {n_again:,} of them also in the model's files"
            if n_again:
                what = f"{what}: an engine that reads every file loads other weights"
            else:
                what = f"{what}: no engine loads them"
        delete = "delete the file, unless an engine is to load it instead of the others"
        yield Finding("warning", file.name, what, delete)
    pickles = []
    for pattern in PICKLED_FILES:
        for file in sorted(checkpoint.folder.glob(pattern)):
            if file.name not in TRAINING_FILES:
                pickles.append(file.name)
    what = "pickled weights next to safetensors: no engine loads them"
    yield from one_finding("note", pickles, what, "delete the file")


def index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find differences between the index and the headers of the files."""
    weight_map = checkpoint.json(WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        return
    unlisted = [checkpoint.where(name) for name in checkpoint.tensors if name not in weight_map]
    what = "is in the file and not in the index: some engines load it and some do not"
    fix = "make the index again, or save the model without it"
    yield from one_finding("warning", unlisted, what, fix)
    absent = [f"{WEIGHTS_INDEX}: {name}" for name in weight_map if name not in checkpoint.tensors]
    what = "is in the index and in none of its files"
    yield from one_finding("wrong", absent, what, "download the model again")


def dtypes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find unquantized matrices in another dtype than the config's, and integers without scales."""
    config_dtype = (checkpoint.config.dtype or "").removeprefix("torch.")
    places_by_dtype: dict[str, list[str]] = {}
    without_scale = []
    for module, parts in checkpoint.matrices.items():
        dtype = parts[main_part(parts) or ""].dtype
        where = checkpoint.where(module)
        if dtype in FLOAT_DTYPES:
            is_as_stated = config_dtype in ("", FLOAT_DTYPES[dtype])
            if not is_as_stated and module.rpartition(".")[2] not in KEPT_IN_FLOAT32:
                places_by_dtype.setdefault(FLOAT_DTYPES[dtype], []).append(where)
        elif len(parts.keys() - {"bias"}) == 1:
            without_scale.append(f"{where} ({dtype})")
    for name, places in places_by_dtype.items():
        what = (
            f"stored in {name}, and the config says {config_dtype}: "
            "engines round it, or compute in another dtype"
        )
        fix = "save the model in one dtype, and state this dtype in its config.json"
        yield from one_finding("warning", places, what, fix)
    what = "in a quantized type, without a scale: engines read the bytes as numbers, or refuse"
    fix = "quantize again; the scales are missing"
    yield from one_finding("wrong", without_scale, what, fix)


CHECKS = (
    contradicted_sizes,
    impossible_scales,
    fused_scales,
    input_scales,
    kv_scales,
    unexpected_quantization,
    left_by_quantizers,
    strays_and_pickles,
    index,
    dtypes,
)
"""The checks of a Hugging Face folder alone."""


def faulty(scales: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return fault -> places of the scales with this fault; ``scales``: by their tensors' names."""
    places_by_fault: dict[str, list[str]] = {}
    for name, tensor in scales.items():
        fault = fault_of(tensor)
        if fault:
            places_by_fault.setdefault(fault, []).append(f"{tensor.file.name}: {name}")
    return places_by_fault


def fault_of(scale: Tensor) -> str:
    """Return what is wrong with the values of a scale; "" if nothing is."""
    if scale.dtype not in NUMPY_TYPES:
        return f"of a dtype that is not known ({scale.dtype})"
    numbers = values(scale)
    if np.isnan(numbers).any():
        return "NaN"
    if np.isinf(numbers).any():
        return "infinite"
    if (numbers < 0).any():
        return "negative"
    if (numbers == 0).any():
        return "zero"
    return ""
