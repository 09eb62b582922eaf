"""Build the windows of one text from a data spec.

With ``chat_template`` the tokenizer's template (an empty system message, a user who says "Say
something.", the generation prompt) precedes each window.  Its tokens and the first token of the
window are not scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import Spans, Window
from ...backends.common.errors import InputError
from ...backends.common.message_text import amount
from ...backends.reference import pack_files
from ...backends.window import span_numbers
from ..common.cache import Cache
from ..common.progress import Progress
from ..specs.spec_types import DataSpec
from . import corpus, cutting, stored_tokens, tokens_cache
from .text_tokens import RENDER_S, Chat, Tokens

LONG_IN_WORDS = {"truncate": "cut off there", "split": "split", "skip": "left out"}
"""``long`` -> how a conversation of more than ``eval_len`` tokens is treated."""


@dataclass(frozen=True)
class Documents:
    """Facts about a text that is conversations.

    Attributes:
        begins: text index of the first token of each window's conversation.
        title: for titles: ``12 conversations, 3,456 scored tokens of the assistant``.
        in_words: for ``check``.
        facts: for results.json.
    """

    begins: tuple[int, ...]
    title: str
    in_words: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class TextWindows:
    """The windows of one text of a run.

    Attributes:
        name: of the text in the run.
        windows: with their numbers in this text.
        n_tokens: of the whole text.
        top_id: the largest id of the tokenizer and of the tokens.
        digest: identifies the windows by content.
        text_digest: identifies all windows of the text; a run may use only the first ones.
        vocabulary: identifies the tokenizer by content.
        tokenizer: its folder.
        starts: ``starts[window] + position``: index of a token in the text, one document after the
            other.
        available: number of windows of the whole text.
        text_size: UTF-8 bytes and words of the scored tokens; None if unknown.
        text_note: why they are unknown.
        documents: None for a text without conversations.
        roles: [n_tokens], of each scored token: its place in ``role_names``; -1: none.
        special: ids of special tokens.
        notes: footnotes: the tokenizer, file or rows of the tokens.
        tokens_key: key of its tokens in the cache if they are sampled here, or empty.
        recorded_logprobs: of rollouts: log-probability of each scored token [n_scored], nats, as
            another program has recorded it; None for other texts.
    """

    name: str
    spec: DataSpec
    windows: tuple[Window, ...]
    n_tokens: int
    top_id: int
    digest: str
    text_digest: str
    vocabulary: str
    tokenizer: Path
    starts: tuple[int, ...]
    available: int
    text_size: tuple[int, float] | None
    text_note: str = ""
    documents: Documents | None = None
    roles: NDArray[np.int8] | None = None
    role_names: tuple[str, ...] = ()
    special: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    notes: tuple[str, ...] = ()
    tokens_key: str = ""
    recorded_logprobs: NDArray[np.float32] | None = None

    def text_index(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
        """Return the index in the whole tokenized text of each token, int64 [N].

        ``window``, ``position``: of the tokens [N].
        """
        return np.asarray(np.asarray(self.starts)[window] + position)

    def begins(self, window: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the text index of the first token of each window's conversation [N].

        None for a plain text.
        """
        if self.documents is None:
            return None
        begins = np.asarray(self.documents.begins, np.int64)
        return np.asarray(begins[window])

    @property
    def is_spread(self) -> bool:
        """True if the windows are a sample that is spread over the text."""
        return self.spec.sample == "spread" and len(self.windows) < self.available

    @cached_property
    def ids_in_chats(self) -> frozenset[int]:
        """Token ids in windows of conversations; empty for a plain text.

        The model must share the special tokens among them.
        """
        if not (self.spec.is_chat and self.windows):
            return frozenset()
        ids = np.concatenate([window.token_ids for window in self.windows])
        return frozenset(np.unique(ids).tolist())

    @property
    def length(self) -> int:
        """Number of tokens in the longest window, including the chat prefix."""
        return max(len(window.token_ids) for window in self.windows)

    @property
    def n_scored(self) -> int:
        """Number of scored tokens in all windows.  If windows overlap, a token counts each time."""
        return sum(window.n_scored for window in self.windows)


def build(
    spec: DataSpec,
    n_windows: int | None,
    cache: Cache,
    progress: Progress,
    *,
    name: str = "",
    clear: bool = False,
    render_s: float = RENDER_S,
) -> TextWindows:
    """Return the windows of a data spec.

    The tokens come from the cache if nothing they depend on has changed.  ``name``: of the text in
    the run.  ``n_windows``: the number of windows of this run, 0 for all; None: the spec's
    ``max_rows``.  ``render_s``: maximum seconds for the chat template, at most ``RENDER_S``.
    """
    if n_windows is None:
        n_windows = spec.max_rows
    if spec.pack is not None:
        pack = pack_files.resolve(spec.pack)
        tokens = stored_tokens.tokens_of_pack(pack)
        return cut(tokens, spec, n_windows, pack / pack_files.TOKENIZER, name)
    assert not spec.is_sampled, "eval/run/sampled_text.py builds it"
    tokenizer = tokens_cache.fetch_tokenizer(spec, progress)
    tokens = tokens_cache.make_or_load(
        spec, tokenizer, cache, progress, clear=clear, render_s=render_s
    )
    return cut(tokens, spec, n_windows, tokenizer, name)


def cut(
    text: Tokens, spec: DataSpec, max_rows: int | None, tokenizer: Path, name: str = ""
) -> TextWindows:
    """Cut a tokenized text into windows; InputError if the text is too short for one.

    ``max_rows``: the number of windows; 0 and None: all.  ``name``: of the text in the run.
    """
    roles = None
    role_names: tuple[str, ...] = ()
    if text.chat is not None:
        roles = text.chat.roles
        role_names = text.chat.role_names
    all_cuts, selected_cuts, documents = cuts_of(text, spec, max_rows or None)
    if not selected_cuts and spec.is_rollouts:
        raise InputError(
            f"eval_len: no sequence has a sampled token among its first {spec.eval_len}; give a "
            "larger eval_len"
        )
    if not selected_cuts:
        least = cutting.least_tokens(spec.method, spec.eval_len)
        raise InputError(
            f"eval_len: the text has {len(text.ids)} tokens, one window takes {least}; "
            "shorten eval_len"
        )
    windows = windows_of(selected_cuts, text)
    recorded_logprobs = None
    if spec.is_rollouts:
        windows, recorded_logprobs = without_recorded(windows)
    starts = tuple(window.start - len(text.prefix) for window in selected_cuts)
    top_id_of_windows = max(int(window.token_ids.max()) for window in windows)
    text_size, text_note = scored_size(text, selected_cuts)
    return TextWindows(
        name=name,
        spec=spec,
        windows=windows,
        n_tokens=len(text.ids),
        top_id=max(text.top_id, top_id_of_windows),
        digest=digest_of(windows, starts, spec.windows),
        text_digest=text_digest_of(text, all_cuts, spec.windows),
        vocabulary=text.vocabulary,
        tokenizer=tokenizer,
        starts=starts,
        available=len(all_cuts),
        text_size=text_size,
        text_note=text_note,
        documents=documents,
        roles=roles,
        role_names=role_names,
        special=text.special,
        notes=(*text.notes, *corpus.method_notes(spec)),
        recorded_logprobs=recorded_logprobs,
    )


def cuts_of(
    text: Tokens, spec: DataSpec, n_windows: int | None
) -> tuple[list[cutting.Cut], list[cutting.Cut], Documents | None]:
    """Return (all windows of a text, the first ``n_windows``, facts about its conversations)."""
    if text.sampler_logprobs is not None:
        is_sampled = ~np.isnan(text.sampler_logprobs)
        cuts = cutting.sampled(text.ids, is_sampled, text.ends, spec.eval_len)
        return cuts, cuts[:n_windows], None
    if text.chat is None:
        cuts = cutting.by_method(text, spec)
        return cuts, cuts[:n_windows], None
    cuts, n_long, n_unscored = cutting.chat(
        text.ids, text.chat.scored, text.ends, spec.eval_len, spec.long
    )
    selected_cuts = cuts[:n_windows]
    documents = documents_of(selected_cuts, text, text.chat, spec, n_long, n_unscored)
    return cuts, selected_cuts, documents


def windows_of(cuts: Sequence[cutting.Cut], text: Tokens) -> tuple[Window, ...]:
    """Return windows with the chat prefix before the tokens of each cut."""
    windows = []
    for index, (start, ids, spans) in enumerate(cuts):
        token_ids = np.concatenate((text.prefix, ids))
        window = Window(index, token_ids, shifted(spans, len(text.prefix)))
        if text.sampler_logprobs is not None:
            logprobs = text.sampler_logprobs[start + window.positions]
            window = replace(window, sampler_logprobs=logprobs)
        windows.append(window)
    return tuple(windows)


def without_recorded(
    windows: Sequence[Window],
) -> tuple[tuple[Window, ...], NDArray[np.float32]]:
    """Return (windows of rollouts without log-probabilities, those of all scored tokens [N]).

    What another program has recorded may be wrong, or of another distribution than the one that was
    sampled: no KLD is estimated from it.
    """
    recorded = []
    plain_windows = []
    for window in windows:
        assert window.sampler_logprobs is not None
        recorded.append(window.sampler_logprobs)
        plain_windows.append(replace(window, sampler_logprobs=None))
    return tuple(plain_windows), np.concatenate(recorded)


def documents_of(
    cuts: Sequence[cutting.Cut],
    text: Tokens,
    chat: Chat,
    spec: DataSpec,
    n_long: int,
    n_unscored: int,
) -> Documents:
    """Return facts about the windows of conversations in a run; InputError if there is none.

    ``n_long``, ``n_unscored``: of all conversations, as ``cutting.chat`` counts them.
    """
    n_conversations = len(text.ends)
    roles = ", ".join(spec.score_roles)
    if not cuts:
        longer = ""
        if n_long:
            longer = f", and {n_long:,} are longer than eval_len"
        raise InputError(
            f"score_roles: none of {n_conversations:,} conversations has a token of {roles} "
            f"in a window{longer}"
        )
    begins = begins_of(cuts, text.ends)
    n_scored = len(set(begins))
    facts = {
        "conversations": n_conversations,
        "scored": n_scored,
        "without_scored_tokens": n_unscored,
        "longer_than_eval_len": n_long,
        "turns_told_by": chat.turn_method,
        "tokens_across_edges": chat.tokens_beyond_turns,
        "chat_template_sha256": chat.template,
    }
    windows = amount(len(cuts), "window")
    scored_tokens = amount(sum(window.n_scored for window in cuts), "scored token")
    title = amount(n_scored, "conversation")
    if len(cuts) != n_scored:
        title += f" in {windows}"
    title += f", {scored_tokens} of {speakers_in_words(spec)}"
    conversations = amount(n_conversations, "conversation")
    in_words = (
        f"{n_scored:,} of {conversations} in {windows}, {scored_tokens} "
        f"({roles}; found by {chat.turn_method})"
    )
    if n_unscored:
        in_words += f"; {n_unscored:,} without a scored token left out"
    if n_long:
        in_words += f"; {n_long:,} longer ones {LONG_IN_WORDS[spec.long]}"
    return Documents(begins, title, in_words, facts)


def begins_of(cuts: Sequence[cutting.Cut], ends: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the text index of the first token of each window's conversation."""
    starts = [window.start for window in cuts]
    # A window's conversation is the first one that ends after the window's start.
    conversation_of_window = np.searchsorted(ends, starts, side="right")
    begin_of_conversation = np.concatenate(([0], ends))
    return tuple(begin_of_conversation[conversation_of_window].tolist())


def speakers_in_words(spec: DataSpec) -> str:
    """Return whose turns are scored: ``the assistant, last turn``."""
    speakers = " and ".join(f"the {role}" for role in spec.score_roles)
    if spec.score_turns == "last":
        return f"{speakers}, last turn"
    return speakers


def shifted(spans: Spans, by: int) -> Spans:
    """Return the spans with ``by`` added to every position."""
    return tuple((begin + by, end + by) for begin, end in spans)


def text_digest_of(text: Tokens, cuts: Sequence[cutting.Cut], method: str) -> str:
    """Return the SHA-256 of all windows of a text.

    It covers the text's tokens, and the start, length and spans of each window.
    """
    digest = hashlib.sha256(f"{method} {text.leading_token} {len(text.prefix)} ".encode())
    # Explicit types: the digest is the same on every machine.
    digest.update(np.ascontiguousarray(text.prefix, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(text.ids, dtype="<i4").tobytes())
    for window in cuts:
        length = len(window.token_ids)
        numbers = [window.start, length, *span_numbers(window.spans, length)]
        digest.update(np.asarray(numbers, dtype="<i8").tobytes())
    return digest.hexdigest()


def digest_of(windows: Sequence[Window], starts: Sequence[int], method: str) -> str:
    """Return the SHA-256 of the method and of the start, length, spans and tokens of each window.

    The lengths are needed: otherwise 4 windows of 128 tokens and 8 of 64 over the same text would
    be equal.
    """
    digest = hashlib.sha256(method.encode())
    for window, start in zip(windows, starts, strict=True):
        digest.update(f" {start} {len(window.token_ids)} {window.positions_text} ".encode())
        digest.update(window.token_ids.tobytes())
    return digest.hexdigest()


def scored_size(text: Tokens, cuts: Sequence[cutting.Cut]) -> tuple[tuple[int, float] | None, str]:
    """Return ((UTF-8 bytes, words) of the scored tokens or None, the reason if None).

    If windows overlap, a token counts each time.  Words, separated by white space as in lm-eval,
    are counted by the bytes' share of the text; for a whole text they are lm-eval's.  Both count
    the original text; a "detokenized" text was changed before it became tokens.
    """
    if text.sampler_logprobs is not None:
        return None, "bytes and words are not known: the tokens are sampled, not read from a text"
    if text.sizes is None:
        return (
            None,
            "bytes and words are not known: this tokenizer does not return the offsets of its "
            "tokens",
        )
    scored_bytes = 0
    for window in cuts:
        for begin, end in shifted(window.spans, window.start):
            scored_bytes += int(text.sizes[begin:end].sum())
    if not scored_bytes:
        return None, "bytes and words are not known: the scored tokens have no text"
    # Sizes of tokens are of the changed text, ``text.n_bytes`` is of the original.
    tokenized_bytes = int(text.sizes.sum())
    n_bytes = round(text.n_bytes * scored_bytes / tokenized_bytes)
    n_words = text.n_words * scored_bytes / tokenized_bytes
    return (n_bytes, n_words), ""
