"""Notes on a row whose files compute another function than the reference's, or other tokens.

The row keeps its numbers, which are those that the engine serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from ...backends.checkpoint import model_function, token_rules
from ...backends.checkpoint.folder import HuggingFaceFolder
from ...backends.checkpoint.gguf import GgufFiles, is_gguf, read_model
from ...backends.checkpoint.token_rules import MADE, Rules
from ...backends.checkpoint.tokenizers import of_folder, of_gguf
from ...backends.common.errors import CompareQError
from ...backends.layers import groups
from ...backends.layers.schemes import UNKNOWN
from ..common.processes import run_in_subprocess
from ..results import ModelResult
from .run_model import RunModel

ENOUGH_BITS = 8.0
MOST_OF_EIGHT_BITS = 0.3
"""A KLD in nats that eight bits per weight do not cost: the measured ones are below 0.1."""
FEW_BITS = re.compile(r"[a-z]*[1-7](?!\d)")
"""Beginning of the name of a weight format with fewer than eight bits.

Matches int4, nvfp4 and q6_k, but not int8 or bfloat16.
"""
PLAIN_CACHES = groups.UNQUANTIZED_FORMATS | {"f16", "f32", "bf16", "auto", ""}
"""Number formats of unquantized KV caches."""


def notes(
    row: ModelResult, model: RunModel, reference: RunModel | None, tokenizer: Path
) -> Iterator[str]:
    """Yield the notes on a finished row.

    Nothing about files that are not on this machine, or cannot be read.  ``tokenizer``: the folder
    of the tokenizer that made the run's tokens.
    """
    path = path_of(model)
    note = ""
    if reference is not None and not model.is_reference:
        note = config_note(model, reference)
    if not note and not changes_config(model):
        note = eight_bit_note(row)
    if note:
        yield note
    if path is not None and is_gguf(path):
        with suppress(CompareQError, OSError):
            yield from tokenizer_notes(path, tokenizer, row)


def config_note(model: RunModel, reference: RunModel) -> str:
    """Return a note if a model's config differs from the reference's.

    "" if it does not, and if a file is not on this machine or cannot be read.
    """
    path = path_of(model)
    if path is None:
        return ""
    try:
        return function_note(path, path_of(reference))
    except (CompareQError, OSError):
        return ""


def path_of(model: RunModel) -> Path | None:
    """Return the folder or GGUF file of a model.

    None if it is not on this machine, or if options change the config.
    """
    files = model.files
    if not isinstance(files, HuggingFaceFolder | GgufFiles) or changes_config(model):
        return None
    planned = files.cached()
    if planned is None:
        return None
    return Path(planned.model_dir)


def changes_config(model: RunModel) -> bool:
    """Return True if options of the engine change the model's config, and so what it computes."""
    files = model.files
    return isinstance(files, HuggingFaceFolder) and bool(files.other_config)


def function_note(path: Path, reference: Path | None) -> str:
    """Return a note on values of the config that differ from the reference's; empty if none do."""
    if reference is None or path == reference or not model_function.may_differ(path, reference):
        return ""
    full_configs = {}
    for folder in (path, reference):
        if not is_gguf(folder):
            config = (folder / "config.json").read_bytes()
            full_configs[folder] = config_with_defaults(folder, config)
    differences = model_function.differences(path, reference, full_configs)
    if not differences:
        return ""
    return model_function.sentence(path, differences)


@cache
def config_with_defaults(folder: Path, config: bytes) -> model_function.Facts:
    """Return the values of a config with Transformers' defaults.

    ``config``: its content, so that a changed config is read again.
    """
    (facts,) = run_in_subprocess(
        model_function.filled, f"reading the config of {folder}", folders=[str(folder)]
    )
    return dict(facts)


def eight_bit_note(row: ModelResult) -> str:
    """Return a note if a row with eight or more bits per weight loses more than these can cost."""
    # A NaN is not above the limit.
    if row.kld is None or row.noise_floor or not row.kld > MOST_OF_EIGHT_BITS:
        return ""
    if row.bpw_layer is None or row.bpw_layer < ENOUGH_BITS:
        return ""
    for layer in row.layers:
        # Only the mean is high, because other layers have more bits.
        if FEW_BITS.match(layer.weights.lower()):
            return ""
    causes = "wrongly converted, or another model"
    activations = (
        {layer.activations for layer in row.layers} - groups.UNQUANTIZED_FORMATS - {UNKNOWN}
    )
    caches = {cache.stored for cache in row.kv_caches} - PLAIN_CACHES
    if activations or caches:
        causes += ", or the loss of its activations or KV cache"
    kld = f"{row.kld:.2g}"
    if row.has_bound:
        kld = f"at least {kld}"
    return (
        f"a KLD of {kld} at {row.bpw_layer:.3g} bits per weight is more than 8 bits can "
        f"cost: {causes}"
    )


def tokenizer_notes(path: Path, tokenizer: Path, row: ModelResult) -> Iterator[str]:
    """Yield a note on each rule of a GGUF's tokenizer that makes other tokens than the run's."""
    engine_tokens = row.provenance.get(MADE)
    # The record of an earlier version lacks them.
    if not isinstance(engine_tokens, dict):
        engine_tokens = None
    gguf_tokenizer = of_gguf(read_model(path), engine_tokens)
    for fault in token_rules.faults(gguf_tokenizer.rules, rules_of(tokenizer)):
        if fault.is_sure:
            yield f"{fault.what}: {token_rules.SERVED}"


@cache
def rules_of(tokenizer: Path) -> Rules:
    """Return the rules of the run's tokenizer."""
    return of_folder(tokenizer).rules
