"""Describe the windows of a text: for titles, for ``check`` and for results.json."""

from __future__ import annotations

import json
from typing import Any

from ...backends.common.message_text import amount
from ..specs.spec_types import PROMPT_TOKENS, DataSpec
from . import corpus
from .text_windows import TextWindows


def subtitle(data: TextWindows) -> str:
    """The line below a plot's title, e.g. ``wikitext2, 141 × 2048 tokens``."""
    name = corpus.display_name(data.spec)
    if data.documents is not None:
        return f"{name}, {data.documents.title}"
    return ", ".join((name, number_and_length(data), *differences_from_usual(data)))


def number_and_length(data: TextWindows) -> str:
    """Return the number of windows and their length in words, for a plain text."""
    spec = data.spec
    count = spec.display_rows or len(data.windows)
    length = spec.display_eval_len or spec.eval_len - spec.warmup_tokens
    lengths = {len(window.token_ids) for window in data.windows}
    if len(lengths) <= 1:
        return f"{count} × {length} tokens"
    windows = f"{count} windows"
    if isinstance(count, int):
        windows = amount(count, "window")
    return f"{windows} of up to {length} tokens"


def differences_from_usual(data: TextWindows) -> list[str]:
    """Return what is scored differently than by default, in words."""
    spec = data.spec
    words = []
    if spec.is_sampled:
        words.append(f"{PROMPT_TOKENS} of them a prompt")
    if spec.is_rollouts:
        words.append(amount(data.n_scored, "sampled token"))
    if spec.warmup_tokens:
        words.append(f"{spec.warmup_tokens} tokens warm-up")
    if spec.score_every:
        words.append(f"of each {spec.score_every} the last {spec.score_last} scored")
    if spec.chat_template:
        words.append("formatted")
    if spec.method != "exllamav3":
        words.append(f"method {spec.method}")
    if data.is_spread:
        words.append(f"spread over the text's {data.available:,}")
    return words


def describe_windows(spec: DataSpec, data: TextWindows | None) -> str:
    """Return the line that ``check`` prints.

    ``data``: None if text or tokenizer are not downloaded yet.
    """
    how = f"method {spec.method}, windows of {spec.eval_len} every {spec.stride} tokens"
    source = "text"
    if spec.is_chat:
        how = f"conversations, windows of up to {spec.eval_len} tokens"
        source = "conversations"
    if spec.is_sampled:
        how = f"windows of {spec.eval_len} tokens after prompts of {PROMPT_TOKENS} of them"
    if spec.is_rollouts:
        how = f"rollouts, windows of up to {spec.eval_len} tokens"
        source = "file"
    title = f"{corpus.display_name(spec)}, {how}"
    if data is None and spec.is_sampled:
        return f"{title}; the reference samples them when the run begins"
    if data is None:
        return f"{title}; their number is known after {source} and tokenizer are downloaded"
    if data.documents is not None:
        return f"{title}: {data.documents.in_words}"
    windows = amount(len(data.windows), "window")
    if data.is_spread:
        windows += f" spread over the text's {data.available:,}"
    scored_tokens = amount(data.n_scored, "scored token")
    return f"{title}: {windows}, {scored_tokens}, of a text of {data.n_tokens:,} tokens"


def data_json(data: TextWindows) -> dict[str, Any]:
    """Return the facts about a text and its windows for results.json."""
    spec = data.spec
    n_bytes, n_words = data.text_size or (None, None)
    facts: dict[str, Any] = {
        "spec": json.loads(spec.model_dump_json(exclude_unset=True)),
        "spec_sha256": spec.digest(),
        "windows_sha256": data.digest,
        "vocabulary_sha256": data.vocabulary,
        "text_tokens": data.n_tokens,
        "method": spec.windows,
        "windows": len(data.windows),
    }
    if data.is_spread:
        facts["windows_of_the_text"] = data.available
    facts |= {
        "window_length": data.length,
        "scored_tokens": data.n_scored,
        "bytes": n_bytes,
        "words": n_words,
    }
    if data.text_note:
        facts["text_note"] = data.text_note
    if data.notes:
        facts["notes"] = data.notes
    if data.documents:
        facts["conversations"] = data.documents.facts
    return facts
