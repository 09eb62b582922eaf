"""Notes on a row whose files compute another function than the reference's, or make other tokens of
a text.

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
"""Beginning of the name of a weight format with fewer than eight bits: int4, nvfp4, q6_k, but not
int8 or bfloat16."""
PLAIN_CACHES = groups.PLAIN | {"f16", "f32", "bf16", "auto", ""}


def notes(
    row: ModelResult, model: RunModel, reference: RunModel | None, tokenizer: Path
) -> Iterator[str]:
    """Yield the notes on a finished row; nothing about files that are not on this machine, or
    cannot be read.

    ``tokenizer``: the folder of the tokenizer that made the run's tokens.
    """
    path = path_of(model)
    note = ""
    if path is not None and reference is not None and not model.is_reference:
        with suppress(CompareQError, OSError):
            note = of_function(path, path_of(reference))
    if not note and not changes_config(model):
        note = of_eight_bits(row)
    if note:
        yield note
    if path is not None and is_gguf(path):
        with suppress(CompareQError, OSError):
            yield from of_tokens(path, tokenizer, row)


def path_of(model: RunModel) -> Path | None:
    """Return the folder or GGUF file of a model; None if it is not here, or if options change the
    config.
    """
    files = model.files
    if not isinstance(files, HuggingFaceFolder | GgufFiles) or changes_config(model):
        return None
    here = files.cached()
    return None if here is None else Path(here.model_dir)


def changes_config(model: RunModel) -> bool:
    """Return True if options of the engine change the model's config, and so what it computes."""
    files = model.files
    return isinstance(files, HuggingFaceFolder) and bool(files.other_config)


def of_function(path: Path, reference: Path | None) -> str:
    """Return a note on values of the config that differ from the reference's; empty if there are
    none.
    """
    if reference is None or path == reference or not model_function.may_differ(path, reference):
        return ""
    folders = [each for each in (path, reference) if not is_gguf(each)]
    known = {folder: filled(folder, (folder / "config.json").read_bytes()) for folder in folders}
    found = model_function.differences(path, reference, known)
    return model_function.sentence(path, found) if found else ""


@cache
def filled(folder: Path, config: bytes) -> model_function.Facts:
    """Return the values of a config with Transformers' defaults; ``config``: its content, so that
    changes are read.
    """
    (facts,) = run_in_subprocess(
        model_function.filled, f"reading the config of {folder}", folders=[str(folder)]
    )
    return dict(facts)


def of_eight_bits(row: ModelResult) -> str:
    """Return a note if a row with eight or more bits per weight loses more than these bits can
    cost.
    """
    if row.kld is None or row.noise_floor or not row.kld > MOST_OF_EIGHT_BITS:
        return ""
    if row.bpw_layer is None or row.bpw_layer < ENOUGH_BITS:
        return ""
    if any(
        FEW_BITS.match(layer.weights.lower()) for layer in row.layers
    ):  # other layers have more bits
        return ""
    causes = "wrongly converted, or another model"
    formats = {layer.activations for layer in row.layers} - groups.PLAIN - {UNKNOWN}
    caches = {cache.stored for cache in row.kv_caches} - PLAIN_CACHES
    if formats or caches:
        causes += ", or the loss of its activations or KV cache"
    return f"a KLD of {row.kld:.2g} at {row.bpw_layer:.3g} bits per weight is more than 8 bits can cost: {causes}"


def of_tokens(path: Path, tokenizer: Path, row: ModelResult) -> Iterator[str]:
    """Yield a note on each rule that gives a GGUF's tokenizer different tokens than the run's
    tokenizer.
    """
    made = row.provenance.get(MADE)
    mine = of_gguf(read_model(path), made if isinstance(made, dict) else None)
    for fault in token_rules.faults(mine.rules, rules_of(tokenizer)):
        if fault.is_sure:
            yield f"{fault.what}: {token_rules.SERVED}"


@cache
def rules_of(tokenizer: Path) -> Rules:
    """Return the rules of the run's tokenizer."""
    return of_folder(tokenizer).rules
