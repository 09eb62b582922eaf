"""Text -> tokens -> windows, exactly as exllamav3's compare_q cut them.

The text is tokenized once, as a whole, BOS as the tokenizer adds it.  Windows of ``eval_len`` tokens start every
``eval_stride`` tokens, at ``range(0, n_tokens - eval_len, eval_stride)``: a window that would end exactly at the last
token is left out, as upstream leaves it out.  Every position of every window is scored but the first, or the first
after the warm-up; overlaps are scored each time.  ``max_rows`` 0, null or absent: all rows.

With ``chat_template`` the tokenizer's template (an empty system message, a user who says "Say something.", the
generation prompt) stands before each window; its tokens and the window's first are not scored.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from backends import hub
from backends.base import InputError, Window, installed_versions
from backends.messages import one_line
from eval import corpus, vocabulary
from eval.progress import Progress
from eval.specs import DataSpec
from eval.store import Store

TOKENS_VERSION = 3
SAMPLE = 1 << 16
"""Characters tokenized to estimate how long the whole text takes (1 % of a 6 MB text)."""
CHAT = [{"role": "system", "content": ""}, {"role": "user", "content": "Say something."}]


@dataclass(frozen=True)
class Tokens:
    """A tokenized text: ``ids`` and the chat ``prefix`` are int32 [n]; ``top_id`` is the tokenizer's largest plain id.

    ``vocabulary`` is the digest of what the plain ids stand for (``eval/vocabulary.py``).
    """

    ids: NDArray[np.int32]
    prefix: NDArray[np.int32]
    top_id: int
    vocabulary: str


@dataclass(frozen=True)
class EvalData:
    """The windows of a run; ``digest`` identifies them by content, ``n_tokens`` is the whole text's.

    ``vocabulary`` identifies the tokenizer by content, ``tokenizer`` is its folder, which the data
    spec may have ``trusted`` to run code.
    """

    windows: tuple[Window, ...]
    n_tokens: int
    top_id: int
    digest: str
    vocabulary: str
    tokenizer: Path
    trusted: bool = False

    @property
    def length(self) -> int:
        """Tokens in a window, chat prefix included."""
        return len(self.windows[0].token_ids)


def starts(n_tokens: int, eval_len: int, eval_stride: int, max_rows: int | None) -> range:
    """First token of each window."""
    every = range(0, n_tokens - eval_len, eval_stride)
    return every[:max_rows] if max_rows else every


def cut(tokens: Tokens, spec: DataSpec, max_rows: int | None, tokenizer: Path) -> EvalData:
    """The windows of a tokenized text; InputError if it is too short for one."""
    n_tokens, length = len(tokens.ids), spec.eval_len
    begins = starts(n_tokens, length, spec.eval_stride, max_rows)
    if not begins:
        raise InputError(f"eval_len: the text has {n_tokens} tokens, one window takes {length + 1}; shorten eval_len")
    score_from = len(tokens.prefix) + spec.warmup_tokens + 1
    windows = tuple(
        Window(row, np.concatenate((tokens.prefix, tokens.ids[begin : begin + length])), score_from)
        for row, begin in enumerate(begins)
    )
    digest = hashlib.sha256(f"{score_from}".encode())
    for window in windows:
        digest.update(window.token_ids.tobytes())
    top_id = max(tokens.top_id, max(int(window.token_ids.max()) for window in windows))
    return EvalData(windows, n_tokens, top_id, digest.hexdigest(), tokens.vocabulary, tokenizer, spec.trust_remote_code)


def build(spec: DataSpec, max_rows: int | None, store: Store, progress: Progress, *, clear: bool = False) -> EvalData:
    """The windows of a data spec; the tokens come from the store if nothing they depend on has changed."""
    folder = hub.resolve(spec.locate(spec.tokenizer_dir), spec.tokenizer_revision, tokenizer_only=True)
    key = store.key("tokens", tokens_identity(spec, folder))
    if clear:
        store.clear("tokens", key)
    tokens = load_tokens(store, key)
    if tokens is None:
        text = corpus.load_text(spec, progress)
        tokens = tokenize(text, folder, spec, progress)
        save_tokens(store, key, tokens)
    return cut(tokens, spec, max_rows, folder)


def tokens_identity(spec: DataSpec, folder: Path) -> dict[str, Any]:
    """Everything that the tokens depend on, as JSON types."""
    files = sorted({file for pattern in hub.TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "version": TOKENS_VERSION,
        "text": corpus.identity(spec),
        "tokenizer": digest.hexdigest(),
        "chat_template": spec.chat_template,
        "trust_remote_code": spec.trust_remote_code,
        "versions": installed_versions(("transformers", "tokenizers", "datasets")),
    }


def tokenize(text: str, folder: Path, spec: DataSpec, progress: Progress) -> Tokens:
    """Tokenize the whole text at once, and the chat prefix if the spec wants one."""
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    began = time.perf_counter()
    tokenizer(text[:SAMPLE])
    expected = (time.perf_counter() - began) * len(text) / SAMPLE
    with progress.phase(f"tokenizing {corpus.display_name(spec)}", unit="tokens", expected=expected) as phase:
        ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int32)
        phase.advance(len(ids))
    prefix = chat_prefix(tokenizer) if spec.chat_template else []
    ordinary = vocabulary.ordinary(tokenizer)
    return Tokens(ids, np.asarray(prefix, dtype=np.int32), max(ordinary), vocabulary.digest(ordinary))


def chat_prefix(tokenizer: Any) -> list[int]:
    """Token ids of upstream's fixed chat; InputError if the tokenizer has no template or refuses it."""
    try:
        encoded = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:  # no template, or the template's own raise_exception
        raise InputError(f"chat_template: the tokenizer cannot apply it: {one_line(error)}") from None
    return list(encoded["input_ids"])


def load_tokens(store: Store, key: str) -> Tokens | None:
    """Tokens from the store; None if they are not there, or damaged and so to be made again."""
    try:
        with np.load(store.path("tokens", key, ".npz"), allow_pickle=False) as arrays:
            return Tokens(arrays["ids"], arrays["prefix"], int(arrays["top_id"]), str(arrays["vocabulary"]))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def save_tokens(store: Store, key: str, tokens: Tokens) -> None:
    """Tokens into the store."""
    with store.write("tokens", key, ".npz") as file, file.open("wb") as stream:
        np.savez(
            stream, ids=tokens.ids, prefix=tokens.prefix, top_id=np.int64(tokens.top_id), vocabulary=tokens.vocabulary
        )


def subtitle(spec: DataSpec, data: EvalData) -> str:
    """What a plot says below its title, e.g. ``wikitext2, 141 x 2048 tokens``."""
    rows = spec.display_rows or len(data.windows)
    length = spec.display_eval_len or spec.eval_len - spec.warmup_tokens
    parts = [f"{corpus.display_name(spec)}, {rows} × {length} tokens"]
    if spec.warmup_tokens:
        parts.append(f"{spec.warmup_tokens} tokens warm-up")
    if spec.chat_template:
        parts.append("formatted")
    return ", ".join(parts)


def describe_json(spec: DataSpec, data: EvalData) -> dict[str, Any]:
    """The data of a run for results.json."""
    return {
        "spec": json.loads(spec.model_dump_json(exclude_unset=True)),
        "spec_sha256": spec.digest(),
        "windows_sha256": data.digest,
        "vocabulary_sha256": data.vocabulary,
        "text_tokens": data.n_tokens,
        "rows": len(data.windows),
        "window_length": data.length,
        "scored_tokens": sum(window.n_scored for window in data.windows),
    }
