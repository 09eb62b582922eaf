"""Compare the tensors in a model's files with those that its config describes, before it loads.

Engines fill missing tensors with uninitialized memory, and ignore others without a warning.

Transformers builds the model from its config on torch's meta device, which takes no memory.  It
also renames the stored tensors by its own rules of loading (it stacks experts that are stored one
by one).  The driver does not import torch or Transformers, so this part runs in a separate process.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..base import ModelFiles
from ..common.errors import ModelError
from ..common.message_text import and_more, one_line
from ..layers.module_names import IN_LAYER, is_outside, kind_of, module_and_part
from . import formats, largest_weights, stored_sizes, zeros
from .built_model import meta_model, new_names, split_targets, tied
from .folder import Checkpoint, HuggingFaceFolder
from .lacking_parts import lacking_parts
from .model_function import filled_facts
from .safetensors_files import Tensor
from .stored_tensors import Stored, stored_tensors
from .tokenizers import class_notes

Shape = tuple[int, ...]

SMALL_TENSOR_ELEMENTS = 1 << 16
"""Elements of a small tensor (scales, biases) whose values are read."""
NOT_WEIGHTS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|masked_bias|[kvq]_scale|output_scale|"
    r"\w+\.(weight|bias)_(quantizer|format)\S*)$"
)
"""Names of tensors that are not weights; engines read these tensors or compute them again."""
KNOWN_PARTS = formats.NOT_BITS.union(*(bits.split() for _, bits in formats.FORMATS.values()))
ROW_STEP = 64
"""Step between the rows of a tied head and its embedding that are compared."""


@dataclass(frozen=True)
class Contents:
    """Differences between the tensors in a model's files and those that its config describes."""

    missing: Sequence[str] = ()
    """Names of the model's tensors that no file has, and of parts of quantized modules."""
    lost: Sequence[str] = ()
    """Left-over matrices of decoder layers, and heads that differ from a tied embedding."""
    left_over: Sequence[str] = ()
    """Other modules that the model does not have; this may be intended."""
    biases: Sequence[str] = ()
    """Modules whose stored bias the model does not have."""
    shapes: Sequence[tuple[str, Sequence[int], Sequence[int], str]] = ()
    """(module, stored shape, the model's shape, dtype) of tensors of other sizes."""
    unchecked: str = ""
    """The parts that were not compared, and why: Transformers may not know the architecture."""
    function: Mapping[str, Any] = field(default_factory=dict)
    """Values of the config with Transformers' defaults (``filled_facts``)."""
    tokens: Sequence[str] = ()
    """How the tokens that Transformers makes differ from those of tokenizer.json."""


def compare_all(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Return the fields of each folder's ``Contents``.

    One process compares all folders, since importing Transformers takes three seconds.
    """
    compared = []
    for folder in map(Path, folders):
        tokens = class_notes(folder)
        function = filled_facts(folder)
        contents = replace(compare(Checkpoint(folder)), tokens=tokens, function=function)
        compared.append(asdict(contents))
    return compared


# The check before a model loads.


def checked(files: ModelFiles) -> list[str]:
    """Return notes on the weights of a local model; ModelError if its numbers would be wrong.

    InputError for files that cannot be read.
    """
    notes: list[str] = []
    if isinstance(files, HuggingFaceFolder):
        contents = compare(files.headers)
        check_stored_numbers(files, {module for module, *_ in contents.shapes})
        if not files.other_config:
            check_tensors(files.folder, contents)
        notes += notes_on_tensors(contents, files.other_config)
    runs_of_zeros = zeros.find(files.placed())
    wrong = [run for run in runs_of_zeros if run.wrong]
    if wrong:
        first = wrong[0]
        raise ModelError(
            f"{first.file}: {first.name}: {first}{and_more(wrong)}; download the file again"
        )
    if runs_of_zeros:
        first = runs_of_zeros[0]
        notes.append(f"{first.name}: {first}{and_more(runs_of_zeros)}")
    return notes


def check_stored_numbers(files: HuggingFaceFolder, misshapen: Collection[str]) -> None:
    """ModelError if stored shapes contradict the config, or if scales allow impossible weights.

    ``misshapen``: modules whose weights do not have the size that the config requires; that error
    is more precise.
    """
    impossible = list(largest_weights.impossible(files.headers))
    contradictions = []
    if not files.other_config:
        for fault in stored_sizes.contradictions(files.headers):
            if module_and_part(fault.tensor)[0] not in misshapen:
                contradictions.append(fault)
    if contradictions:
        faults = contradictions
        fix = stored_sizes.REQUANTIZE
    else:
        faults = impossible
        fix = largest_weights.CAUSE
    if faults:
        first = faults[0]
        raise ModelError(f"{files.folder}: {first.tensor}: {first.what}{and_more(faults)}; {fix}")


def check_tensors(folder: Path, contents: Contents) -> None:
    """ModelError if tensors of the text model are missing, lost, or of another size."""
    missing = [name for name in contents.missing if not is_outside(name)]
    if missing:
        name = f"{missing[0]}{and_more(missing)}"
        raise ModelError(f"{folder}: no {name}, which the model of its config has")
    if contents.lost:
        name = f"{contents.lost[0]}{and_more(contents.lost)}"
        raise ModelError(
            f"{folder}: {name} is stored, and the model of its config has no place for it"
        )
    # vLLM takes the first rows of a matrix that is too large.
    misshapen = [fault for fault in contents.shapes if not is_outside(fault[0])]
    if misshapen:
        module, stored, expected, dtype = misshapen[0]
        raise ModelError(
            f"{folder}: {module}{and_more(misshapen)} has the shape {list(stored)} ({dtype}), "
            f"but its config requires {list(expected)}"
        )


def notes_on_tensors(contents: Contents, other_config: str) -> list[str]:
    """Return notes on differences that may be intended.

    ``other_config``: why the loaded model differs from the one in config.json; empty if it does
    not.
    """
    notes = []
    reason = other_config or contents.unchecked
    if reason:
        notes.append(f"weights unchecked: {reason}")
    missing = contents.missing
    if missing and all(is_outside(name) for name in missing):
        notes.append(f"no {missing[0]}{and_more(missing)}, which text does not need")
    not_loaded = [*contents.left_over]
    for module in contents.biases:
        not_loaded.append(f"{module}.bias")
    if not_loaded:
        notes.append(
            f"{len(not_loaded):,} modules or biases are stored and not loaded, as the model of "
            f"the config has no place for them; the first is {not_loaded[0]}"
        )
    return notes


# The comparison with a built model.


def compare(checkpoint: Checkpoint) -> Contents:
    """Compare the tensors in a folder's headers with those of the model of its config; InputError.

    ``tokens`` and ``function`` stay empty.
    """
    stored = stored_tensors(checkpoint)
    lacking = lacking_parts(checkpoint)
    # Transformers' classes raise anything on a config that they do not expect.
    try:
        model = meta_model(checkpoint)
        renamed = new_names(model, list(stored))
    except Exception as error:
        return Contents(lacking, unchecked=one_line(error, 160))
    contents = differences(model, stored, renamed, split_targets(model, renamed))
    return replace(
        contents,
        missing=[*lacking, *contents.missing],
        lost=[*contents.lost, *unequal_tied_heads(model, stored, renamed)],
    )


@dataclass
class Misfits:
    """Stored tensors without a place in the model."""

    owners: dict[str, str] = field(default_factory=dict)
    """Stored module -> the module that it would be in the model."""
    unknown_parts: dict[str, str] = field(default_factory=dict)
    """Module in the model -> a stored tensor of it that is part of no known format."""
    matrices: set[str] = field(default_factory=set)
    """Stored modules with a matrix."""
    biases: list[str] = field(default_factory=list)
    """Modules whose other tensors the model has."""


def differences(
    model: Any, stored: Mapping[str, Stored], renamed: Mapping[str, str], split_names: set[str]
) -> Contents:
    """Compare stored tensors with a built model.

    ``renamed``: stored name -> the model's name.  ``split_names``: the model's names of tensors
    that are stored as one (``split_targets``).
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # How many stored tensors make one of the model: for a stack of experts, one per expert.
    n_stored = Counter(renamed.values())
    loaded = {stored[name].module for name, target in renamed.items() if target in expected}
    misfits = misfits_of(model, stored, renamed, expected, loaded)
    absent = absent_tensors(model, expected, {*n_stored, *tied(model), *split_names})
    # A module that is absent, but stored in unknown parts, is in a format that is not known.
    unread = {}
    for owner, name in misfits.unknown_parts.items():
        if owner in absent.values():
            unread[owner] = name
    missing = [name for name, owner in absent.items() if owner not in unread]
    missing += stacks_lacking_experts(n_stored, expected)
    draft_layers = layers_of_other_kinds(misfits.owners, loaded)
    lost = []
    left_over = []
    for module in sorted(misfits.owners):
        if misfits.owners[module] in unread:
            continue
        layer = layer_of(module)
        is_of_the_model = layer != "" and layer not in draft_layers and not is_outside(module)
        if is_of_the_model and module in misfits.matrices:
            lost.append(module)
        else:
            left_over.append(module)
    unchecked = ""
    if unread:
        first = next(iter(unread.values()))
        unchecked = f"{first}: in a format that is not known{and_more(unread)}"
    shapes = other_shapes(stored, renamed, expected, n_stored, split_names)
    return Contents(missing, lost, left_over, misfits.biases, shapes, unchecked)


def misfits_of(
    model: Any,
    stored: Mapping[str, Stored],
    renamed: Mapping[str, str],
    expected: Mapping[str, Shape],
    loaded: Collection[str],
) -> Misfits:
    """Return the stored tensors without a place in the model, except those that may be ignored."""
    ignored = patterns_of(model, "_keys_to_ignore_on_load_unexpected")
    misfits = Misfits()
    for name, (module, _, tensor) in stored.items():
        target = renamed[name]
        if target in expected or NOT_WEIGHTS.search(name) or matches_any(ignored, name):
            continue
        if name.endswith("bias") and module in loaded:
            if not is_all_zero(tensor):  # AutoGPTQ stores a bias of zeros for every layer
                misfits.biases.append(module)
            continue
        owner, part_name = module_and_part(target)
        misfits.owners[module] = owner
        if part_name not in KNOWN_PARTS:
            misfits.unknown_parts[owner] = name
        if part_name == "weight" and len(tensor.shape) > 1:
            misfits.matrices.add(module)
    return misfits


def absent_tensors(model: Any, expected: Iterable[str], present: Collection[str]) -> dict[str, str]:
    """Return name -> module of the tensors that no file has, and that must not be missing."""
    optional = patterns_of(model, "_keys_to_ignore_on_load_missing")
    absent = {}
    for name in expected:
        if name not in present and not matches_any(optional, name):
            absent[name] = module_and_part(name)[0]
    return absent


def patterns_of(model: Any, attribute: str) -> list[re.Pattern[str]]:
    """Return the patterns of names in an attribute of Transformers' class, which may be None."""
    return [re.compile(pattern) for pattern in getattr(model, attribute, None) or ()]


def matches_any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def is_all_zero(tensor: Tensor) -> bool:
    """Return True if a small tensor is zeros; False for a large one and for an unknown dtype."""
    if tensor.dtype not in formats.NUMPY_TYPES or tensor.numel > SMALL_TENSOR_ELEMENTS:
        return False
    return not formats.values(tensor).any()


def layers_of_other_kinds(misfits: Iterable[str], loaded: Iterable[str]) -> set[str]:
    """Return the layers with misfits whose kind is not loaded at all: layers that draft tokens.

    ``misfits``, ``loaded``: names of modules.
    """
    loaded_kinds = set()
    loaded_layers = set()
    for module in loaded:
        loaded_kinds.add(kind_of(module))
        loaded_layers.add(layer_of(module))
    layers = set()
    for module in misfits:
        if kind_of(module) not in loaded_kinds:
            layers.add(layer_of(module))
    return layers - loaded_layers


def layer_of(module: str) -> str:
    """Return the name of the decoder layer of a module: ``model.layers.3.``; "" outside layers."""
    match = IN_LAYER.search(f"{module}.")
    if match is None:
        return ""
    return f"{module}."[: match.end()]


def other_shapes(
    stored: Mapping[str, Stored],
    renamed: Mapping[str, str],
    expected: Mapping[str, Shape],
    n_stored: Mapping[str, int],
    split_names: Collection[str],
) -> list[tuple[str, Sequence[int], Sequence[int], str]]:
    """Return (module, stored shape, the model's shape, dtype) of tensors of other sizes.

    Sizes are numbers of weights, since quantizers store a matrix in another shape.  Three kinds of
    stored tensors are skipped: several that make one tensor of the model (a stack of experts), one
    that makes several, and tensors whose number of weights is not known.

    ``renamed``: stored name -> the model's name.  ``n_stored``: the model's name -> how many stored
    tensors make its tensor.  ``split_names``: the model's names of tensors that are stored as one.
    """
    shapes: list[tuple[str, Sequence[int], Sequence[int], str]] = []
    for name, (module, weights, tensor) in stored.items():
        target = renamed[name]
        if target not in expected:
            continue
        is_whole = n_stored[target] == 1 and target not in split_names
        has_known_size = weights != 0  # see ``Stored``
        if is_whole and has_known_size and weights != math.prod(expected[target]):
            shapes.append((module, list(tensor.shape), list(expected[target]), tensor.dtype))
    return shapes


def unequal_tied_heads(
    model: Any, stored: Mapping[str, Stored], renamed: Mapping[str, str]
) -> list[str]:
    """Return stored heads that differ from the embedding although the config ties them.

    Engines differ in which of both they use.
    """
    tensors = {target: stored[name].tensor for name, target in renamed.items()}
    unequal = []
    for name, other_name in tied(model).items():
        if name not in tensors or other_name not in tensors:
            continue
        head = tensors[name]
        embedding = tensors[other_name]
        if head.dtype != embedding.dtype or head.shape != embedding.shape:
            continue
        if head.dtype not in formats.NUMPY_TYPES:
            continue
        head_rows = formats.stored(head)[::ROW_STEP]
        if not np.array_equal(head_rows, formats.stored(embedding)[::ROW_STEP]):
            unequal.append(name)
    return unequal


def stacks_lacking_experts(n_stored: Mapping[str, int], expected: Mapping[str, Shape]) -> list[str]:
    """Return stacks of experts with fewer stored experts than the same stack of another layer."""
    stacks: dict[str, list[str]] = {}
    for name in n_stored:
        if len(expected.get(name, ())) == 3:
            stacks.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    lacking = []
    for names in stacks.values():
        n_experts = max(n_stored[name] for name in names)
        for name in names:
            if n_stored[name] < n_experts:
                lacking.append(name)
    return lacking
