"""The doctor: describe a checkpoint and find its faults from headers, configs and small tensors.
No engine.
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
from ..hub_files import INDEX
from ..layers.module_names import NUMBER, is_left_by_quantizer, module_and_part
from ..layers.schemes import (
    asks_for_input_scales,
    declared,
    ignored_names,
    is_ignored,
    is_static,
    kv_cache,
    part,
)
from . import largest_weights, model_function, stored_sizes, zeros
from .contents import LARGEST, Contents
from .folder import Checkpoint, storage_of
from .formats import FLOATS, INPUT_SCALES, KV_SCALES, NUMBERS, main_part, values
from .gguf import BLOCK, GgufModel, is_gguf, read_model
from .nvfp4_scales import FUSED, SHARED, unequal
from .safetensors_files import Tensor, read_headers, strays
from .stored_sizes import Fault
from .token_rules import SERVED, faults
from .tokenizers import CONFIG, FILE, SAMPLES, Tokens, of_folder, of_gguf
from .zeros import Zeros

Severity = Literal["wrong", "warning", "note"]
"""``wrong``: a number or an answer would be wrong; ``warning``: it may be; ``note``: good to know.
"""
SHOWN = 8
"""Largest number of names of layer groups in one line."""
CALIBRATION = ("dataset", "nsamples", "seqlen", "iters", "sym", "desc_act", "damp_percent", "algo")
"""Keys of quantization configs that describe the calibration (GPTQ, AWQ, auto-round)."""
CALIBRATE = "calibrate with text that reaches it, or with every expert active, and quantize again"
NO_SCALES = "calibrate the KV cache, or serve with the KV cache in 16 bits"
COPY = "copy the reference's tokenizer files into the model's folder"
RULES_DIFFER = "give tokenizer_config.json a tokenizer_class that reads the file as it is, PreTrainedTokenizerFast"
PADDING = ("pad_token", "unk_token")
CONVERT = "convert the model again, with a current converter"
NO_TOKENIZER = "no engine that is installed here makes tokens with the file's own tokenizer"
OTHER_CONFIG = "give the config.json that belongs to these files"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt"}
KEPT_IN_FLOAT32 = ("gate", "router", "A_log")
"""Routers and states of Mamba, which are kept in float32 on purpose."""


class Finding(NamedTuple):
    """A fault: file and first tensor or layer with it, what it is, how to fix it, and the number of
    similar faults.
    """

    severity: Severity
    where: str
    what: str
    fix: str
    more: int = 0

    def __str__(self) -> str:
        others = f" (and {self.more:,} more like it)" if self.more else ""
        return f"{self.severity}: {self.where}: {self.what}{others}; {self.fix}"


def one_finding(severity: Severity, where: Iterable[str], what: str, fix: str) -> list[Finding]:
    """Return one finding for all places with the same fault, naming the first place; empty without
    places.
    """
    places = list(where)
    return [Finding(severity, places[0], what, fix, len(places) - 1)] if places else []


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
    """Return everything that headers, configs and small tensors show about a folder or GGUF model;
    InputError.

    ``reference``: the model whose tokens it should have, and whose function it should compute.
    ``contents``, ``reference_contents``: of the two folders, None if nothing was compared.
    ``engine_tokens``: what the engine's own tokenizer makes of samples (``token_rules.of_header``),
    None if that is not known.  ``watch``: gets the numbers of bytes searched for zeros; None: only samples
    of the weights are searched.
    """
    findings, unchecked = list[Finding](), []
    if is_gguf(path):
        model = read_model(path)
        placed = model.placed()
        facts, findings = (
            tuple(gguf_facts(model)),
            [*low_gguf_head(model), *uneven_gguf_blocks(model)],
        )
    else:
        checkpoint = Checkpoint(path)
        placed = checkpoint.placed()
        facts, findings = (
            tuple(folder_facts(checkpoint)),
            [one for check in CHECKS for one in check(checkpoint)],
        )
        if contents is not None:
            findings += differing_tensors(checkpoint, contents)
            findings += [Finding("warning", FILE, note, RULES_DIFFER) for note in contents.tokens]
            unchecked += (
                [f"tensors against the config: {contents.unchecked}"] if contents.unchecked else []
            )
    findings += of_zeros(zeros.find(placed, whole=watch is not None, watch=watch or SILENT))
    if reference is not None:
        try:
            mine = of_gguf(read_model(path), engine_tokens) if is_gguf(path) else of_folder(path)
            theirs = of_gguf(read_model(reference)) if is_gguf(reference) else of_folder(reference)
            findings += differing_tokens(mine, theirs)
        except InputError as error:
            unchecked.append(f"tokens: {error}")
        if is_gguf(path) and engine_tokens is None:
            unchecked.append(f"pre-tokenizer: {NO_TOKENIZER}")
        try:
            findings += differing_function(path, reference, contents, reference_contents)
        except InputError as error:
            unchecked.append(f"the config against the reference's: {error}")
    findings.sort(key=lambda finding: get_args(Severity).index(finding.severity))
    return Report(facts, tuple(findings), tuple(unchecked))


# Facts.


def folder_facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """(title, text) of a Hugging Face folder."""
    quantization, matrices = checkpoint.config.quantization, []
    stated = declared(quantization)
    for module in checkpoint.matrices:
        role: str = checkpoint.role(module)
        scheme = (
            stated.of(module) if module in checkpoint.quantized and role in ("layer", "") else None
        )
        taken = f", activations {scheme.activations}" if scheme and scheme.activations else ""
        role = (
            "embedding and head" if role in ("head", "embedding") and checkpoint.is_tied else role
        )
        matrices.append((role, checkpoint.described(module) + taken, module))
    yield from file_facts(checkpoint.files, "safetensors", storage_of(checkpoint.folder), matrices)
    if quantization:
        nested = part(quantization, "quantization")
        form = (
            quantization.get("format")
            or quantization.get("quant_algo")
            or nested.get("quant_algo")
            or ""
        )
        yield (
            "config",
            shortened(
                printable(f"{checkpoint.config.quant_method or 'quantization'} {form}".strip()), 80
            ),
        )
    scheme_text = kv_cache(quantization)
    yield (
        "KV cache",
        f"{scheme_text}, as the config requires" if scheme_text else "in the model's dtype",
    )
    if quantization:
        made = part(quantization, "producer") or part(quantization, "meta")
        known = [f"{key} {made[key]}" for key in ("name", "version", "quantizer") if key in made]
        known += [
            f"{key} {quantization[key]}"
            for key in CALIBRATION
            if quantization.get(key) not in (None, "", {}, [])
        ]
        known += (
            ["recipe.yaml has llm-compressor's recipe"]
            if exists(checkpoint.folder / "recipe.yaml")
            else []
        )
        yield "calibration", shortened(printable("; ".join(known)), 160) or "the files do not say"


def gguf_facts(model: GgufModel) -> Iterator[tuple[str, str]]:
    """(title, text) of a GGUF model."""
    matrices = [
        (role, tensor.type_name, tensor.name.removesuffix(".weight"))
        for tensor in model.tensors
        if (role := model.role(tensor)) and len(tensor.shape) > 1
    ]
    yield from file_facts(model.files, "GGUF", model.storage(), matrices)
    matrix = model.fields.get("quantize.imatrix.dataset") or model.fields.get(
        "quantize.imatrix.file"
    )
    yield (
        "calibration",
        f"importance matrix from {printable(matrix)}"
        if matrix
        else "no importance matrix is named",
    )


def file_facts(
    files: Sequence[Path], kind: str, storage: Storage, matrices: Iterable[tuple[str, str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield files, size, layers, embedding and head; ``matrices``: (role, stored form, name).

    One line per stored form: ``210 matrices in int4 g32: model.layers.*.mlp.down_proj,
    ...mlp.up_proj``.  Names after the first leave out the leading steps that they share with the
    first name.
    """
    size = bytes_in_words(sum(file.stat().st_size for file in files))
    yield "files", f"{size} in {len(files)} {kind} file{'' if len(files) == 1 else 's'}"
    if storage.bpw_layer is None:
        yield "size", f"n/a: {storage.note}"
    else:
        head, together = f"head {storage.bpw_head:.2f} bpw", f"together {storage.vram_gib:.2f} GiB"
        yield "size", f"layers {storage.bpw_layer:.2f} bpw, {head}, {together}"
    groups: dict[str, Counter[str]] = {}
    ends = []
    for role, stored, name in matrices:
        if role in ("layer", ""):
            groups.setdefault(stored, Counter())[NUMBER.sub("*", name)] += 1
        else:
            ends.append((role, f"{stored}: {name}"))
    for stored, counts in groups.items():
        first, *others = list(counts)[:SHOWN]
        begin = ".".join(first.split(".")[:3]) + "."
        others = [
            f"...{name.removeprefix(begin)}" if name.startswith(begin) else name for name in others
        ]
        more = f" and {len(counts) - SHOWN} more kinds" if len(counts) > SHOWN else ""
        count = "1 matrix" if counts.total() == 1 else f"{counts.total():,} matrices"
        yield "layers", f"{count} in {stored}: {', '.join([first, *others])}{more}"
    yield from ends


# Checks.

MOST_BLOCKS = 2_000
"""Above every model's number of blocks; comparing the blocks takes time that grows with the square
of their number."""


def low_gguf_head(model: GgufModel) -> Iterator[Finding]:
    """A head below 6 bits per weight: llama.cpp's own mixtures keep it at 6 bits or more."""
    bpw = model.storage().bpw_head
    if bpw is not None and bpw < 6:
        tensor = next(tensor for tensor in model.tensors if model.role(tensor) == model.head)
        what = f"the head is quantized to {bpw:.2f} bits per weight ({tensor.type_name}), and it computes every logit"
        where = f"{model.files[0].name}: {tensor.name}"
        yield Finding("warning", where, what, "quantize it with a head in q6_K or q8_0")


def uneven_gguf_blocks(model: GgufModel) -> Iterator[Finding]:
    """Find blocks beyond the header's count, counted blocks that are absent, and a block that alone
    lacks a tensor.
    """
    again = "download the file again, or convert the model again"
    counted = model.field("{}.block_count", int) or 0
    if counted > min(len(model.tensors), MOST_BLOCKS):  # a damaged header may count billions
        what = f"counts {counted:,} blocks, and the file has {amount(len(model.tensors), 'tensor')}"
        yield Finding("wrong", f"{model.files[0].name}: block_count", what, again)
        return
    blocks: dict[int, set[str]] = {number: set() for number in range(counted)}
    for tensor in model.tensors:
        if block := BLOCK.match(tensor.name):
            blocks.setdefault(int(block[1]), set()).add(tensor.name[block.end() :])
    if len(blocks) > MOST_BLOCKS:
        yield Finding(
            "wrong", model.files[0].name, f"stores tensors of {len(blocks):,} blocks", again
        )
        return
    sets = Counter(map(frozenset, blocks.values()))
    lacking = []
    for number, names in blocks.items():
        like = [each for each, count in sets.items() if count > 1 and names < each]
        if sets[frozenset(names)] == 1 and like:
            lacking.append(f"{model.files[0].name}: blk.{number}.{min(min(like, key=len) - names)}")
    yield from one_finding("wrong", lacking, "missing, although the other blocks have it", again)
    beyond = [f"{model.files[0].name}: blk.{number}" for number in blocks if number >= counted]
    yield from one_finding(
        "wrong", beyond, f"stored, and the header counts {counted} blocks", again
    )


def of_zeros(found: Sequence[Zeros]) -> Iterator[Finding]:
    """Matrices and scales with rows of zeros."""
    wrong, meant = (
        [f"{each.file.name}: {each.name}: {each}" for each in found if each.wrong == which]
        for which in (True, False)
    )
    again = "download the files again, or quantize again"
    yield from one_finding(
        "wrong", wrong, "no weights, but a hole in the file, or a failed quantization", again
    )
    yield from one_finding(
        "note", meant, "padded or pruned, or never trained", "none, if that is meant"
    )


def differing_tensors(checkpoint: Checkpoint, found: Contents) -> Iterator[Finding]:
    """Tensors that are missing or left over, or whose shape differs from the config."""
    yield from one_finding(
        "wrong",
        [
            f"{checkpoint.files[0].name}: {name}"
            for name in sorted(found.missing)
            if name.rpartition(".")[2] not in INPUT_SCALES
        ],
        "missing, although the config requires it: engines refuse, or use arbitrary numbers",
        "download the files again, or save the model with the class that its config names",
    )
    shapes: dict[str, list[str]] = {}
    for module, stored, wanted, dtype in sorted(found.shapes):
        what = f"has the shape {stored} ({dtype}), and the config asks for {wanted}"
        shapes.setdefault(what, []).append(checkpoint.where(module))
    for what, where in shapes.items():
        yield from one_finding("wrong", where, what, OTHER_CONFIG)
    layer, bias = "left over: the model that the config describes has", "its bias is "
    lost: Severity = "wrong"
    for severity, modules, what in (
        (lost, found.lost, f"{layer} no place for it"),
        ("warning", found.left_over, f"{layer} no such layer"),
        ("warning", found.biases, f"{bias}{layer} none there"),
    ):
        places = map(checkpoint.where, sorted(modules))
        yield from one_finding(
            severity, places, what, f"{OTHER_CONFIG}, or save the model without it"
        )


def differing_tokens(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Differences between a model's tokens and its reference's; an entry that only one model has
    does not count.
    """
    if reference.vocabulary and not mine.vocabulary and mine.where == FILE:
        yield Finding("warning", FILE, "missing, and the reference has one", COPY)
    ours, theirs = mine.vocabulary, reference.vocabulary
    differing = [
        number for number in sorted(ours.keys() & theirs.keys()) if ours[number] != theirs[number]
    ]
    if differing:
        what = f"token {differing[0]} is {ours[differing[0]]!r}, and the reference's is {theirs[differing[0]]!r}"
        yield Finding("wrong", mine.where, what, COPY, len(differing) - 1)
    if other_merges := bool(mine.merges and reference.merges and mine.merges != reference.merges):
        yield Finding(
            "wrong",
            mine.where,
            "its merges are not the reference's: text becomes other tokens",
            COPY,
        )
    samples = zip(SAMPLES, mine.encoded, reference.encoded, strict=False)  # GGUF files lack them
    cut = next((text for text, one, other in samples if one != other), None)
    if cut is not None and not differing and not other_merges:
        yield Finding(
            "wrong", mine.where, f"its rules cut text into other tokens, such as {cut!r}", COPY
        )
    if (
        mine.where != FILE or reference.where != FILE
    ):  # files of folders are compared by their tokens, above
        for fault in faults(mine.rules, reference.rules):
            severity: Severity = "wrong" if fault.is_sure else "warning"
            yield Finding(severity, mine.where, f"{fault.what}: {SERVED}", CONVERT)
    own = CONFIG if mine.where == FILE else mine.where
    for name in sorted(mine.special.keys() & reference.special.keys()):
        if as_set(mine.special[name]) != as_set(reference.special[name]):
            where = name.partition(": ")[0] if ": " in name else own
            both = f"{mine.special[name]!r}, and the reference's {reference.special[name]!r}"
            pads = name in PADDING  # no scored text has padding
            why = (
                "matters to padding and to unknown text only"
                if pads
                else "answers begin or end differently"
            )
            yield Finding(
                "note" if pads else "wrong",
                where,
                f"{name.rpartition(': ')[2]} is {both}: {why}",
                COPY,
            )
    where = "chat template" if mine.where == FILE else f"{mine.where}.chat_template"
    if reference.template is not None and mine.template is None:
        yield Finding(
            "wrong",
            where,
            "no chat template, and the reference has one: chats get another prompt",
            COPY,
        )
    elif reference.template is not None and mine.template != reference.template:
        what = "not the reference's chat template: chats get another prompt than the reference does"
        yield Finding("warning", where, what, f"{COPY}, or compare with both under one template")


def differing_function(
    path: Path, reference: Path, contents: Contents | None, reference_contents: Contents | None
) -> Iterator[Finding]:
    """Values of config or header that differ from the reference's and that a quantization never
    changes.
    """
    known = {}
    for folder, compared in ((path, contents), (reference, reference_contents)):
        if not is_gguf(folder):
            if compared is None:
                return
            known[folder] = compared.function
    found = model_function.differences(path, reference, known)
    if found:
        where = read_model(path).files[0].name if is_gguf(path) else "config.json"
        what = f"{model_function.sentence(path, found)}: it computes another function than the model that was quantized"
        yield Finding("wrong", where, what, f"give it the reference's values, or {CONVERT}")


def as_set(stated: Any) -> Any:
    """Return ids as a set: their order means nothing, and a single id may be without a list; other
    values unchanged.
    """
    ids = stated if isinstance(stated, list) else [stated]
    return set(ids) if all(type(token) is int for token in ids) else stated


def fused_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Layers that engines fuse into one matrix with one global scale, and whose global scales
    differ.
    """
    fused = unequal(checkpoint.quantized)
    places = [
        f"{checkpoint.where(path).partition(': ')[0]}: {text}" for path, text in fused.items()
    ]
    yield from one_finding("wrong", places, FUSED, SHARED)


def input_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of activations that are missing, zero, negative, infinite or NaN.

    In a mixture of schemes, a layer without a scale is wrong if other layers of its kind have one,
    unless the config states for each layer what it takes (ModelOpt's MIXED_PRECISION).
    """
    scales: dict[str, Tensor] = {}
    kinds, without = set(), []
    stated = declared(checkpoint.config.quantization)
    for module, parts in checkpoint.quantized.items():
        own = {
            f"{module}.{name}": parts[name]
            for name in sorted(INPUT_SCALES & parts.keys())
            if parts[name].numel <= LARGEST
        }
        scales |= own
        kind = (
            NUMBER.sub("*", module),
            *sorted(f"{name} {parts[name].dtype}" for name in parts.keys() - INPUT_SCALES),
        )
        if own:
            kinds.add(kind)
        elif (scheme := stated.of(module)) is None or scheme.activations:
            without.append((module, kind))
    asked = asks_for_input_scales(checkpoint.config.quantization)
    yield from one_finding(
        "wrong",
        [checkpoint.where(module) for module, kind in without if asked or kind in kinds],
        "no scale of its activations (input_scale); engines then use uninitialized memory or 1",
        CALIBRATE,
    )
    for fault, places in faulty(scales).items():
        yield from one_finding(
            "wrong", places, f"the scale of its activations is {fault}", CALIBRATE
        )


def kv_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales of an fp8 KV cache that are missing, all 1, or invalid."""
    scales = {
        f"{module}.{name}": tensor
        for module, parts in checkpoint.modules.items()
        for name, tensor in parts.items()
        if name in KV_SCALES and tensor.numel <= LARGEST
    }
    bad, quantization = faulty(scales), checkpoint.config.quantization
    for fault, places in bad.items():
        yield from one_finding(
            "wrong", places, f"the scale of the KV cache is {fault}", "calibrate the KV cache again"
        )
    if scales and not bad and all((values(tensor) == 1).all() for tensor in scales.values()):
        clamped = str(quantization.get("quant_method")).lower().startswith("modelopt")
        why = (
            "and ModelOpt writes no smaller one"
            if clamped
            else "which no calibration gives: keys beyond 448 are cut"
        )
        yield Finding(
            "note" if clamped else "warning",
            checkpoint.where(next(iter(scales))),
            f"every scale of the fp8 KV cache is 1.0, {why}",
            NO_SCALES,
            len(scales) - 1,
        )
    algorithm = (part(quantization, "quantization") or quantization).get("kv_cache_quant_algo")
    if not scales and (
        is_static(quantization.get("kv_cache_scheme")) or str(algorithm).upper() == "FP8"
    ):
        what = "states a calibrated fp8 KV cache, but no k_scale and v_scale are stored, and engines use 1.0"
        yield Finding("warning", "config.json: quantization_config", what, NO_SCALES)


def unexpected_quantization(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Find a quantized head or embedding, and quantized layers that the config lists as not
    quantized.
    """
    patterns = ignored_names(checkpoint.config.quantization)
    against = [module for module in checkpoint.quantized if is_ignored(module, patterns)]
    yield from one_finding(
        "wrong",
        map(checkpoint.where, against),
        "stored quantized, and the config says that it is not: engines refuse, or read its bytes as other numbers",
        "take it out of the config's list of ignored layers, or store it unquantized",
    )
    tied = " and the head, which is the same matrix" if checkpoint.is_tied else ""
    for module in sorted(checkpoint.quantized.keys() - against):
        stored = checkpoint.described(module)
        what = {
            "head": f"the head is quantized ({stored}), which costs more than a layer: it makes every logit",
            "embedding": f"the embedding{tied}: quantized ({stored}); many engines read embeddings in 16 bits only",
        }.get(checkpoint.role(module))
        if what:
            yield Finding(
                "warning", checkpoint.where(module), what, "consider it when you compare models"
            )


def contradicted_sizes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Stored shapes that contradict the sizes in the config."""
    yield from of_faults(
        checkpoint, stored_sizes.contradictions(checkpoint), stored_sizes.REQUANTIZE
    )


def impossible_scales(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales that allow weights which no model has."""
    yield from of_faults(checkpoint, largest_weights.impossible(checkpoint), largest_weights.CAUSE)


def of_faults(checkpoint: Checkpoint, faults: Iterable[Fault], fix: str) -> Iterator[Finding]:
    """Yield one finding for each kind of fault, with the text of the first."""
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    for first, *others in kinds.values():
        yield Finding("wrong", checkpoint.where(first.tensor), first.what, fix, len(others))


def left_by_quantizers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Numbers that a quantizer used while it worked (ModelOpt's ``weight_quantizer._scale``)."""
    places = [
        checkpoint.where(name)
        for name in checkpoint.tensors
        if is_left_by_quantizer(module_and_part(name)[0])
    ]
    what = "left over from the quantizer: no engine reads it next to the layer's own scales"
    yield from one_finding(
        "warning", places, what, "export the model again, without the quantizer's state"
    )


def strays_and_pickles(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files of weights that no engine loads, or that an engine loads instead of the others."""
    for file in strays(checkpoint.folder):
        try:
            names = set(read_headers([file]))
        except InputError as error:
            what = f"is next to the model's files and cannot be read: {error}"
        else:
            again = len(names & checkpoint.tensors.keys())
            what = f"holds {len(names):,} tensors, {again:,} of them also in the model's files"
            what += (
                ": an engine that reads every file loads other weights"
                if again
                else ": no engine loads them"
            )
        delete = "delete the file, unless an engine is to load it instead of the others"
        yield Finding("warning", file.name, what, delete)
    pickles = [file.name for pattern in PICKLES for file in sorted(checkpoint.folder.glob(pattern))]
    yield from one_finding(
        "note",
        [name for name in pickles if name not in NOT_WEIGHTS],
        "pickled weights next to safetensors: no engine loads them",
        "delete the file",
    )


def index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Differences between the index and the headers of the files."""
    weight_map = checkpoint.json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        return
    yield from one_finding(
        "warning",
        [checkpoint.where(name) for name in checkpoint.tensors if name not in weight_map],
        "is in the file and not in the index: some engines load it and some do not",
        "make the index again, or save the model without it",
    )
    absent = [f"{INDEX}: {name}" for name in weight_map if name not in checkpoint.tensors]
    yield from one_finding(
        "wrong", absent, "is in the index and in none of its files", "download the model again"
    )


def dtypes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Unquantized matrices in another dtype than the config's, and matrices of integers without
    scales.
    """
    stated = (checkpoint.config.dtype or "").removeprefix("torch.")
    others, bare = dict[str, list[str]](), []
    for module, parts in checkpoint.matrices.items():
        dtype, where = parts[main_part(parts) or ""].dtype, checkpoint.where(module)
        if dtype in FLOATS:
            if (
                stated not in ("", FLOATS[dtype])
                and module.rpartition(".")[2] not in KEPT_IN_FLOAT32
            ):
                others.setdefault(FLOATS[dtype], []).append(where)
        elif len(parts.keys() - {"bias"}) == 1:
            bare.append(f"{where} ({dtype})")
    for name, places in others.items():
        what = f"stored in {name}, and the config says {stated}: engines round it, or compute in another dtype"
        fix = "save the model in one dtype, and state this dtype in its config.json"
        yield from one_finding("warning", places, what, fix)
    yield from one_finding(
        "wrong",
        bare,
        "in a quantized type, without a scale: engines read the bytes as numbers, or refuse",
        "quantize again; the scales are missing",
    )


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
    """Fault -> places of the scales with this fault; ``scales``: by the names of their tensors."""
    bad: dict[str, list[str]] = {}
    for name, tensor in scales.items():
        numbers = values(tensor) if tensor.dtype in NUMBERS else np.empty(0, np.float32)
        faults = {
            f"of a dtype that is not known ({tensor.dtype})": tensor.dtype not in NUMBERS,
            "NaN": np.isnan(numbers).any(),
            "infinite": np.isinf(numbers).any(),
            "negative": (numbers < 0).any(),
            "zero": (numbers == 0).any(),
        }
        if fault := next((fault for fault, has_it in faults.items() if has_it), ""):
            bad.setdefault(fault, []).append(f"{tensor.file.name}: {name}")
    return bad
