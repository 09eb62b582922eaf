"""The windows of a run: one list, of all its texts.

Each text keeps its own method, lengths and number of windows.  A text is a name on its windows:
everything that scores them, keeps the scores or compares them knows only the list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.base import Window
from ...backends.common.errors import InputError
from . import text_windows as text_windows
from .text_windows import TextWindows


@dataclass(frozen=True)
class EvalData:
    """The windows of a run, numbered from 0, with the texts that they were cut from."""

    texts: tuple[TextWindows, ...]
    windows: tuple[Window, ...]

    @classmethod
    def joined(cls, texts: Sequence[TextWindows]) -> EvalData:
        """Return the windows of all texts, one text after the other; InputError if their tokenizers
        differ.
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
        chosen = [
            window for window, of in zip(self.windows, self.text_of, strict=True) if of == number
        ]
        return EvalData(
            (text,), tuple(replace(window, index=index) for index, window in enumerate(chosen))
        )

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
        before = 0
        for text in self.texts:
            starts += [before + start for start in text.starts]
            before += text.n_tokens
        return np.asarray(starts, np.int64)

    def text_index(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
        """Return the index in all texts of each token, int64 [N], from its window and position [N]."""
        return np.asarray(self.starts[window] + position)

    def begins(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the index of the first token of each entry's conversation [N]; of the token itself
        in a plain text.

        None if no text is conversations.
        """
        if all(text.documents is None for text in self.texts):
            return None
        begins = self.text_index(window, position)
        before = 0
        first = 0
        for text in self.texts:
            last = first + len(text.windows)
            if text.documents is not None:
                inside = (window >= first) & (window < last)
                of_window = np.asarray(text.documents.begins, np.int64)
                begins[inside] = before + of_window[window[inside] - first]
            before += text.n_tokens
            first = last
        return begins

    @property
    def n_scored(self) -> int:
        """Number of scored tokens in all windows.  If windows overlap or are equal, a token counts
        each time.
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
    def seen(self) -> frozenset[int]:
        """Token ids in windows of conversations, whose special tokens the model must share; empty
        without any.
        """
        return frozenset().union(*(text.seen for text in self.texts))

    @cached_property
    def digest(self) -> str:
        """Identifies the windows of all texts by content; with one text, it is the text's."""
        if len(self.texts) == 1:
            return self.texts[0].digest
        return hashlib.sha256(" ".join(text.digest for text in self.texts).encode()).hexdigest()

    @property
    def text_size(self) -> tuple[int, float] | None:
        """UTF-8 bytes and words of the scored tokens of all texts; None if one of them is not
        known.
        """
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
        return "; ".join(text_windows.subtitle(text) for text in self.texts)

    def as_json(self) -> dict[str, Any]:
        """Return the data of a run for results.json: facts about each text, and about all windows."""
        n_bytes, n_words = self.text_size or (None, None)
        texts = [{"name": text.name, **text_windows.data_json(text)} for text in self.texts]
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
