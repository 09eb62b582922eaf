"""Text -> tokens -> windows, by one of the methods in ``eval/text/cutting.py``; exllamav3's compare_q is the default.

The text is tokenized once, as a whole, with BOS where the tokenizer adds it (``lm_eval``: each document by itself).
Without ``max_rows``, and with 0 or null, all windows count.

With ``chat_template`` the tokenizer's template (an empty system message, a user who says "Say something.", the
generation prompt) stands before each window; its tokens and the window's first are not scored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends import hub
from backends.base import Spans, Window, abbreviated
from backends.common.errors import InputError
from eval.common import processes
from eval.common.cache import Cache
from eval.common.progress import Progress
from eval.specs import methods, reading
from eval.specs.types import DataSpec
from eval.text import answers, chat_template, chat_windows, corpus, cutting, tokens, traces
from eval.text.answers import Answers
from eval.text.chat_windows import Conversations
from eval.text.tokens import Tokens


@dataclass(frozen=True)
class TextSize:
    """Bytes and words of the scored tokens of a run; where windows overlap, a token counts each time.

    ``n_bytes``: UTF-8 bytes, so that bits per byte = nats / ln 2 / ``n_bytes``.  ``n_words``: the same share of the
    text's words, which lm-eval separates by white space; for a whole text this is lm-eval's own count.  If the text was
    detokenized, both are counted in the original, as lm-eval's ``wikitext`` does.
    """

    n_bytes: int
    n_words: float


@dataclass(frozen=True)
class EvalData:
    """The windows of a run; ``digest`` identifies them by content, ``n_tokens`` counts the tokens of the whole text.

    ``series`` identifies all windows of the text, of which a run may take the first ones only.
    ``vocabulary`` identifies the tokenizer by content, ``tokenizer`` is its folder, which the data
    spec may have ``trusted`` to run code.  ``starts[window] + position`` is the index of a scored token in the whole
    tokenized text, documents following one another.  ``text_size`` None: unknown, ``text_note`` says why.
    """

    windows: tuple[Window, ...]
    n_tokens: int
    top_id: int
    digest: str
    series: str
    vocabulary: str
    tokenizer: Path
    trusted: bool
    starts: tuple[int, ...]
    method: methods.Windows
    text_size: TextSize | None
    text_note: str = ""
    conversations: Conversations | None = None
    answers: Answers | None = None

    def text_index(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
        """Index in the whole tokenized text of the tokens at ``position`` [N] of windows number ``window`` [N]."""
        return np.asarray(np.asarray(self.starts)[window] + position)

    def begins(self, window: NDArray[Any]) -> NDArray[np.int64] | None:
        """Index in the text of the first token of the conversations, or questions, of windows number ``window`` [N];
        None: a text."""
        whole = self.conversations or self.answers
        return None if whole is None else np.asarray(whole.begins, np.int64)[window]

    @cached_property
    def seen(self) -> frozenset[int]:
        """The ids in windows of conversations, of which special tokens must be the model's too; empty for a text."""
        ids = [window.token_ids for window in self.windows if self.conversations is not None]
        return frozenset(np.unique(np.concatenate(ids)).tolist()) if ids else frozenset()

    @property
    def length(self) -> int:
        """Tokens in the longest window, chat prefix included."""
        return max(len(window.token_ids) for window in self.windows)

    @property
    def n_scored(self) -> int:
        """Scored tokens of all windows; where windows overlap, a token counts each time."""
        return sum(window.n_scored for window in self.windows)


def cuts(text: Tokens, spec: DataSpec) -> list[cutting.Cut]:
    """All windows of a tokenized text by the spec's method, without the chat prefix."""
    ids, length = text.ids, spec.eval_len
    if spec.method == "llamacpp":
        return cutting.llamacpp(ids, length, text.lead)
    if spec.method == "lm_eval":
        assert text.lead is not None
        return cutting.lm_eval(ids, text.ends, length, text.lead)
    if spec.method == "gptq":
        return cutting.gptq(ids, length)
    if spec.method == "once":
        return cutting.once(ids, length, spec.stride)
    return cutting.exllamav3(ids, length, spec.stride, spec.warmup_tokens)


def cut(text: Tokens, spec: DataSpec, max_rows: int | None, tokenizer: Path) -> EvalData:
    """The windows of a tokenized text; InputError if it is too short for one."""
    n_tokens, before = len(text.ids), len(text.prefix)
    every, talks, asked = whole_cuts(text, spec, max_rows)
    found = every[: max_rows or None] if asked is None else every[: len(asked.question)]
    if not found:
        if talks is not None:
            raise InputError(talks.nothing_scored(spec))
        least = cutting.least_tokens(spec.method, spec.eval_len)
        raise InputError(f"eval_len: the text has {n_tokens} tokens, one window takes {least}; shorten eval_len")
    windows = tuple(
        Window(index, np.concatenate((text.prefix, each.token_ids)), shifted(each.spans, before))
        for index, each in enumerate(found)
    )
    starts = tuple(each.start - before for each in found)
    top_id = max(text.top_id, max(int(window.token_ids.max()) for window in windows))
    return EvalData(
        windows, n_tokens, top_id, digest_of(windows, starts, spec.windows), series_of(text, every, spec.windows),
        text.vocabulary, tokenizer, spec.trust_remote_code, starts, spec.windows, *scored_size(text, found),
        talks, asked,
    )  # fmt: skip


def whole_cuts(
    text: Tokens, spec: DataSpec, max_rows: int | None
) -> tuple[list[cutting.Cut], Conversations | None, Answers | None]:
    """(all windows, what is known of conversations, what is known of answers) of a tokenized text."""
    if text.chat is not None:
        return *chat_windows.cuts(text, text.chat, spec, max_rows), None
    if text.requests is not None:
        every, asked = answers.cuts(text, text.requests, spec, max_rows)
        return every, None, asked
    return cuts(text, spec), None, None


def shifted(spans: Spans, by: int) -> Spans:
    """The same positions behind so many more tokens."""
    return tuple((begin + by, end + by) for begin, end in spans)


def series_of(text: Tokens, every: Sequence[cutting.Cut], method: methods.Windows) -> str:
    """SHA-256 of all windows of a text, told by the text's tokens and by where each window lies in them."""
    digest = hashlib.sha256(f"{method} {text.lead} {len(text.prefix)} ".encode())
    digest.update(np.ascontiguousarray(text.prefix, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(text.ids, dtype="<i4").tobytes())
    for each in every:
        length = len(each.token_ids)
        digest.update(np.asarray([each.start, length, *abbreviated(each.spans, length)], dtype="<i8").tobytes())
    return digest.hexdigest()


def digest_of(windows: Sequence[Window], starts: Sequence[int], method: methods.Windows) -> str:
    """SHA-256 of the method and, for each window, of its start, its length, its ``spans`` and its tokens.

    Without the lengths, 4 windows of 128 and 8 of 64 that follow one another would be the same.
    """
    digest = hashlib.sha256(method.encode())
    for window, start in zip(windows, starts, strict=True):
        digest.update(f" {start} {len(window.token_ids)} {window.what_is_scored} ".encode())
        digest.update(window.token_ids.tobytes())
    return digest.hexdigest()


def scored_size(text: Tokens, found: Sequence[cutting.Cut]) -> tuple[TextSize | None, str]:
    """(bytes and words of the scored tokens as their share of the text, why they are not known or empty)."""
    if text.requests is not None:
        return None, "bytes and words are not counted in answers"
    if text.sizes is None and text.chat is not None:
        return None, "bytes and words are not known: the text came as tokens"
    if text.sizes is None:
        return None, "bytes and words are not known: a tokenizer in Python gives no offsets of its tokens"
    spans = [span for each in found for span in shifted(each.spans, each.start)]
    scored = sum(int(text.sizes[begin:end].sum()) for begin, end in spans)
    if not scored:
        return None, "bytes and words are not known: the scored tokens stand for none"
    read = int(text.sizes.sum())  # not the original's bytes where the text was detokenized
    return TextSize(round(text.n_bytes * scored / read), text.n_words * scored / read), ""


def build(spec: DataSpec, n_windows: int | None, cache: Cache, progress: Progress, *, clear: bool = False) -> EvalData:
    """The windows of a data spec; the tokens come from the cache if nothing they depend on has changed.

    ``n_windows``: how many windows this run asks for, 0 for all; None: the spec's ``max_rows``.
    """
    folder = tokenizer_folder(spec, progress)
    key = cache.key("tokens", tokens.identity(spec, folder))
    cache.use("tokens", key)
    if clear:
        cache.clear("tokens", key)
    found = tokens.load(cache, key)
    if found is None:
        with cache.write("tokens", key, ".npz") as file:
            what = f"tokenizing {corpus.display_name(spec)}"
            keys = {"spec": reading.packed(spec), "tokenizer": str(folder), "file": str(file)}
            processes.apart(reader_of(spec), what, progress, **keys)
        found = tokens.load(cache, key)
    if found is None:
        raise InputError(f"{cache.path('tokens', key, '.npz')}: vanished; is the disk full, or the cache not yours?")
    return cut(found, spec, spec.max_rows if n_windows is None else n_windows, folder)


def reader_of(spec: DataSpec) -> Callable[..., None]:
    """What makes the tokens of a data spec, in a process apart."""
    if spec.is_answers:
        return answers.make
    return traces.make if corpus.is_trace(spec) else chat_template.make if spec.is_chat else tokens.make


def are_stored(spec: DataSpec, cache: Cache) -> bool:
    """Whether the tokenized text is in the cache; the tokenizer must be on this machine."""
    folder = hub.resolve(spec.locate(spec.tokenizer_dir), spec.tokenizer_revision, tokenizer_only=True, download=False)
    return cache.path("tokens", cache.key("tokens", tokens.identity(spec, folder)), ".npz").is_file()


def tokenizer_folder(spec: DataSpec, progress: Progress) -> Path:
    """The tokenizer's folder, fetched from the hub if need be."""
    name = spec.locate(spec.tokenizer_dir)
    if not hub.is_hub_id(name):
        return hub.resolve(name, spec.tokenizer_revision, tokenizer_only=True)
    with progress.phase(f"fetching the tokenizer of {name}", unit="bytes") as phase:
        return hub.resolve(name, spec.tokenizer_revision, tokenizer_only=True, watch=phase)


def subtitle(spec: DataSpec, data: EvalData) -> str:
    """The line below a plot's title, e.g. ``wikitext2, 141 × 2048 tokens``."""
    if data.conversations is not None:
        return data.conversations.subtitle(spec, len(data.windows), data.n_scored)
    if data.answers is not None:
        return data.answers.subtitle(spec, len(data.windows))
    count = spec.display_rows or len(data.windows)
    length = spec.display_eval_len or spec.eval_len - spec.warmup_tokens
    mixed = len({len(window.token_ids) for window in data.windows}) > 1
    size = f"{count} windows of up to {length} tokens" if mixed else f"{count} × {length} tokens"
    parts = [f"{corpus.display_name(spec)}, {size}"]
    if spec.warmup_tokens:
        parts.append(f"{spec.warmup_tokens} tokens warm-up")
    if spec.chat_template:
        parts.append("formatted")
    if spec.method != "exllamav3":
        parts.append(f"method {spec.method}")
    return ", ".join(parts)


def data_json(spec: DataSpec, data: EvalData) -> dict[str, Any]:
    """The data of a run for results.json."""
    return {
        "spec": json.loads(spec.model_dump_json(exclude_unset=True)),
        "spec_sha256": spec.digest(),
        "windows_sha256": data.digest,
        "vocabulary_sha256": data.vocabulary,
        "text_tokens": data.n_tokens,
        "method": data.method,
        "windows": len(data.windows),
        "window_length": data.length,
        "scored_tokens": data.n_scored,
        "bytes": data.text_size and data.text_size.n_bytes,
        "words": data.text_size and data.text_size.n_words,
        **({"text_note": data.text_note} if data.text_note else {}),
        **({"conversations": data.conversations.as_json()} if data.conversations else {}),
        **({"answers": data.answers.as_json()} if data.answers else {}),
    }
