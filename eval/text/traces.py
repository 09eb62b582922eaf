"""A trace of ExLlamaV3's qbench -> tokens: answers that a model has sampled, behind what it saw.

The file is a JSON object.  Each of its ``rows`` has ``input_ids``, the rendered conversation up to the answer, and
``response_ids``, the answer, of which every token is scored.  ``vocab_size`` is one more than the tokenizer's largest
id.  Read in the source of ExLlamaV3, commit 4f8ad01, where qbench's prompts are sampled and where its data are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.common import json_files
from backends.common.errors import InputError
from backends.common.messages import printable
from eval.common.progress import Progress
from eval.specs import reading
from eval.specs.types import DataSpec
from eval.text import corpus, tokens, vocabulary
from eval.text.hub_datasets import row_limit
from eval.text.tokens import Chat, Tokens

LARGEST_TRACE = 2_000_000_000
"""Bytes; a token takes about seven."""
PADDING = 256
"""A tokenizer with padding up to a multiple of it is still the same."""
NOT_WITH_TRACES = ("score_roles", "score_turns", "chat_template_kwargs", "text_column")


def make(spec: Mapping[str, Any], tokenizer: str, file: str, progress: Progress) -> None:
    """Write the tokens of the trace of a packed ``spec`` into ``file``; InputError with the reason.

    ``tokenizer``: its folder.  Imports Transformers, and so is called apart.
    """
    found = reading.unpacked(spec)
    with progress.phase(f"reading {corpus.display_name(found)}", unit="rows"):
        tokens.save(Path(file), read(found, Path(tokenizer)))


def read(spec: DataSpec, folder: Path) -> Tokens:
    """The tokens of a trace; InputError that names row and key of what is malformed."""
    for key in NOT_WITH_TRACES:
        if key in spec.model_fields_set:
            raise InputError(f"{key}: a trace (.json) says itself which tokens are scored; leave it out")
    file = corpus.text_file(spec)
    name = f"path: {printable(file)}"
    trace = json_files.parsed(json_files.read_bytes(file, LARGEST_TRACE), name)
    rows = trace.get("rows") if isinstance(trace, dict) else None
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{name}: rows: must be a list of rows; .json is read as a trace of qbench_prompts.py")
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    size = 1 + max(tokenizer.get_vocab().values())
    told_by = origin(trace.get("vocab_size"), size, name)
    parts = [
        [token_ids(row, key, size, f"{name}: rows[{number}]") for key in ("input_ids", "response_ids")]
        for number, row in enumerate(rows[: row_limit(spec) or None])
    ]
    ids = np.concatenate([part for row in parts for part in row])
    scored = np.concatenate([np.full(len(part), is_answer) for row in parts for is_answer, part in enumerate(row)])
    top_id = max(vocabulary.plain_tokens(tokenizer))
    return Tokens(
        ids, np.zeros(0, np.int32), top_id, vocabulary.digest(vocabulary.plain_tokens(tokenizer, ids.tolist())),
        ends=np.cumsum([sum(map(len, row)) for row in parts]), chat=Chat(scored.astype(bool), told_by, 0, ""),
    )  # fmt: skip


def origin(given: Any, size: int, name: str) -> str:
    """What tells which tokens are scored; InputError unless a trace's ``vocab_size`` fits a tokenizer of ``size`` ids.

    A smaller one is said: a model's tokenizer may have got more tokens since, and the ids are checked.
    """
    if given is None:
        return "the trace"
    if type(given) is not int or not 0 < given <= -(-size // PADDING) * PADDING:
        found = f"{given:,}" if type(given) is int else "no number"
        wrong = f"is {found}, and the tokenizer has {size:,} ids"
        raise InputError(f"{name}: vocab_size: {wrong}; give the tokenizer that made the trace")
    return "the trace" if given >= size else f"the trace, of a tokenizer of {given:,} ids where this one has {size:,}"


def token_ids(row: Any, key: str, size: int, where: str) -> NDArray[np.int32]:
    """The tokens int32 [n] under a key of a row; InputError unless they are ids below ``size``."""
    found = row.get(key) if isinstance(row, dict) else None
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < size for each in found):
        raise InputError(f"{where}.{key}: must be a list of token ids below {size:,}, the size of the tokenizer")
    return np.asarray(found, np.int32)
