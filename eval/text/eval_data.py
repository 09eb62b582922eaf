"""The windows of a run: one list, of all its texts.

Each text keeps its own method, lengths and number of windows.  A text is a name on its windows:
everything that scores them, keeps the scores or compares them knows only the list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import Window
from ...backends.common.errors import InputError
from . import windows_in_words
from .text_windows import TextWindows


@dataclass(frozen=True)
class EvalData:
    """The windows of a run, numbered from 0, with the texts that they were cut from."""

    texts: tuple[TextWindows, ...]
    windows: tuple[Window, ...]

    @classmethod
    def joined(cls, texts: Sequence[TextWindows]) -> EvalData:
        """Return the windows of all texts, one text after the other.

        InputError if their tokenizers differ.
        """
        for text in texts:
            if text.vocabulary != texts[0].vocabulary:
                raise InputError(
                    f"{text.name}: tokenizer_dir: its tokenizer is not the one of {texts[0].name}; "
                    "give all texts the tokenizer of the models"
                )
        windows: list[Window] = []
        for text in texts:
            for window in text.windows:
                windows.append(replace(window, index=len(windows)))
        return cls(tuple(texts), tuple(windows))

    def part(self, number: int) -> EvalData:
        """Return the windows of one of the texts, numbered from 0."""
        text = self.texts[number]
        windows: list[Window] = []
        for window, text_number in zip(self.windows, self.text_of, strict=True):
            if text_number == number:
                windows.append(replace(window, index=len(windows)))
        return EvalData((text,), tuple(windows))

    @cached_property
    def digests(self) -> frozenset[str]:
        """The digests of all windows; equal windows have one digest."""
        return frozenset(window.digest for window in self.windows)

    @cached_property
    def distinct(self) -> tuple[Window, ...]:
        """The windows that are scored: the first one of each digest."""
        by_digest: dict[str, Window] = {}
        for window in self.windows:
            by_digest.setdefault(window.digest, window)
        return tuple(by_digest.values())

    @cached_property
    def text_of(self) -> NDArray[np.int32]:
        """The number of each window's text [W]."""
        counts = [len(text.windows) for text in self.texts]
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """``starts[window] + position`` [W]: index of a token in all texts, one after the other."""
        starts = []
        n_tokens_before = 0
        for text in self.texts:
            starts += [n_tokens_before + start for start in text.starts]
            n_tokens_before += text.n_tokens
        return np.asarray(starts, np.int64)

    def text_index(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
        """Return each token's index in all texts, int64 [N], from its window and position [N]."""
        return np.asarray(self.starts[window] + position)

    def begins(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the index of the first token of each entry's conversation [N].

        In a plain text it is the index of the token itself.  None if no text is conversations.
        """
        if all(text.documents is None for text in self.texts):
            return None
        begins = self.text_index(window, position)
        n_tokens_before = 0
        first_window = 0
        for text in self.texts:
            end_window = first_window + len(text.windows)
            if text.documents is not None:
                is_inside = (window >= first_window) & (window < end_window)
                begin_of_window = np.asarray(text.documents.begins, np.int64)
                number_in_text = window[is_inside] - first_window
                begins[is_inside] = n_tokens_before + begin_of_window[number_in_text]
            n_tokens_before += text.n_tokens
            first_window = end_window
        return begins

    @cached_property
    def sampler_logprobs(self) -> NDArray[np.float32] | None:
        """Log-probability of each scored token [N] in the model that sampled it, in nats.

        NaN for tokens that are not sampled; None if no text is.
        """
        return joined_logprobs(
            (window.sampler_logprobs, window.n_scored) for window in self.windows
        )

    @cached_property
    def recorded_logprobs(self) -> NDArray[np.float32] | None:
        """Log-probability of each scored token [N] that rollouts have recorded, in nats.

        NaN for tokens of other texts; None without rollouts.
        """
        return joined_logprobs((text.recorded_logprobs, text.n_scored) for text in self.texts)

    @property
    def n_scored(self) -> int:
        """Number of scored tokens in all windows.

        If windows overlap or are equal, a token counts each time.
        """
        return sum(window.n_scored for window in self.windows)

    @property
    def length(self) -> int:
        """Number of tokens in the longest window, including the chat prefix."""
        return max(text.length for text in self.texts)

    @property
    def top_id(self) -> int:
        """The largest id of the tokenizer and of the tokens."""
        return max(text.top_id for text in self.texts)

    @property
    def vocabulary(self) -> str:
        """Identifies the tokenizer by content."""
        return self.texts[0].vocabulary

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.texts[0].tokenizer

    @cached_property
    def ids_in_chats(self) -> frozenset[int]:
        """Token ids in windows of conversations, whose special tokens the model must share."""
        return frozenset().union(*(text.ids_in_chats for text in self.texts))

    @cached_property
    def digest(self) -> str:
        """Identifies the windows of all texts by content; with one text, it is the text's."""
        if len(self.texts) == 1:
            return self.texts[0].digest
        return hashlib.sha256(" ".join(text.digest for text in self.texts).encode()).hexdigest()

    @property
    def text_size(self) -> tuple[int, float] | None:
        """UTF-8 bytes and words of the scored tokens of all texts; None if one is not known."""
        n_bytes = 0
        n_words = 0.0
        for text in self.texts:
            if text.text_size is None:
                return None
            n_bytes += text.text_size[0]
            n_words += text.text_size[1]
        return n_bytes, n_words

    @property
    def subtitle(self) -> str:
        """The line below a plot's title: one part for each text."""
        return "; ".join(windows_in_words.subtitle(text) for text in self.texts)

    def as_json(self) -> dict[str, Any]:
        """Return the data of a run for results.json: facts about each text, and about all."""
        n_bytes, n_words = self.text_size or (None, None)
        texts = []
        for text in self.texts:
            texts.append({"name": text.name, **windows_in_words.data_json(text)})
        return {
            "texts": texts,
            "windows": len(self.windows),
            "window_length": self.length,
            "scored_tokens": self.n_scored,
            "bytes": n_bytes,
            "words": n_words,
            "windows_sha256": self.digest,
            "vocabulary_sha256": self.vocabulary,
        }


def joined_logprobs(
    parts: Iterable[tuple[NDArray[np.float32] | None, int]],
) -> NDArray[np.float32] | None:
    """Join the log-probabilities of parts, each given with its number of tokens.

    NaN for the tokens of a part that is None; None if all parts are.
    """
    logprobs = []
    has_some = False
    for part, n_tokens in parts:
        if part is None:
            logprobs.append(np.full(n_tokens, np.nan, np.float32))
        else:
            logprobs.append(part)
            has_some = True
    if not has_some:
        return None
    return np.concatenate(logprobs)
