"""The file of a search in the cache: scores of trials, and facts about the two loaded models.

A line holds a score (``backends/worker/trial_scores.py``), or all ``Facts``.  The scores depend on
the identities of both models, whose hash names the file, and on modules and windows, whose digests
are in the lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ...backends.base import QuantizedModule
from ...backends.common import json_files, storage
from ..common.cache import SUFFIXES
from ..common.stored import Stored, Text
from ..run.model_identity import identity
from ..run.run_config import RunConfig
from ..run.run_model import RunModel
from .results import Module

SECTION = "trials"
"""Section of the cache that has the files."""
SUFFIX = SUFFIXES[SECTION]
TRIALS_VERSION = 2
"""Version of the scoring of trials.

Raise it when numbers or the stored data change, so that stored scores are not mixed.
"""


class Facts(Stored):
    """Facts that are known once both models are loaded.

    Attributes:
        label: of both models, for the list of the cache.
        activations: how the layers of the quantized model ran; empty until trials were scored.
        notes: of the worker on the quantized model.
    """

    label: Text
    modules: tuple[Module, ...]
    activations: tuple[Text, ...] = ()
    notes: tuple[Text, ...] = ()


def key_of(config: RunConfig, reference: RunModel, quantized: RunModel) -> str:
    """Return the key of the file of two models that are on this machine."""
    facts = {
        "version": TRIALS_VERSION,
        "reference": identity(config, reference),
        "quantized": identity(config, quantized),
    }
    return config.cache.key(SECTION, facts)


def facts_in(file: Path) -> Facts | None:
    """Return the last facts in a file; None if it has none, or does not exist."""
    if not json_files.is_file(file):
        return None
    for line in reversed(json_files.read_bytes(file).splitlines()):
        try:
            return Facts.model_validate_json(line)
        except ValidationError:
            continue
    return None


def write_facts(file: Path, facts: Facts) -> None:
    """Append the facts; InputError for a full disk.

    The line begins with a line end, because a killed worker may have left half a line.
    """
    line = f"\n{facts.model_dump_json()}\n"
    with storage.keeping("the scores of trials", file.parent), file.open("ab") as stream:
        stream.write(line.encode())


def modules_of(facts: Facts) -> Sequence[QuantizedModule]:
    """Return the modules of stored facts as an engine returns them."""
    return [QuantizedModule(**module.model_dump()) for module in facts.modules]
