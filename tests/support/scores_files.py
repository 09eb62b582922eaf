"""Files of scores made by hand, and by distributions that are known over the whole vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compare_q.backends.base import Window
from compare_q.backends.reference import store
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.scores_file.format import Asked

Array = NDArray[np.float64]
HEADER = {"compare_q": "scores", "version": 1, "engine": "other", "engine_version": "1.2"}
IDENTITY = {"model": "known", "label": "known"}


def write(file: Path, lines: Iterable[Mapping[str, Any]], **header: Any) -> Path:
    """Write a file of scores from its lines; ``header``: more keys of the first line."""
    texts = [json.dumps({**HEADER, **header})]
    texts += [json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def line_of(
    window: Window,
    logprobs: Array,
    top: int = 0,
    asked: Asked | None = None,
    decimals: int | None = None,
) -> dict[str, Any]:
    """Return the line of a window from ln q [T, V]; ``top``: number of most probable tokens."""
    if decimals is not None:
        logprobs = logprobs.round(decimals)
    line: dict[str, Any] = {
        "window": window.digest,
        "logprob": gathered(logprobs, window.targets[:, None])[:, 0].tolist(),
    }
    if top:
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
        line |= {"top_ids": ids.tolist(), "top_logprobs": gathered(logprobs, ids).tolist()}
    if asked is not None:
        values = gathered(logprobs, np.array(asked.ids))
        line |= {"asked": asked.model_dump(), "asked_logprobs": values.tolist()}
    return line


def gathered(logprobs: Array, ids: NDArray[Any]) -> Array:
    """Return the log-probabilities [T, k] of ids [T, k]."""
    return np.take_along_axis(logprobs, ids, axis=1)


def random_logprobs(
    rows: int, vocab_size: int, *, seed: int, spread: float = 3.0, like: Array | None = None
) -> Array:
    """Return random ln q [rows, vocab_size], float64, of logits that are exact in float32.

    ``like``: logits to which the random ones are added.
    """
    logits = np.random.default_rng(seed).normal(0.0, spread, (rows, vocab_size))
    if like is not None:
        logits = logits + like
    return normalized(logits.astype(np.float32).astype(np.float64))


def normalized(logits: Array) -> Array:
    """Return the logarithm of the softmax [T, V]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float64)


def exact_kld(reference: Array, logprobs: Array) -> Array:
    """Return the KLD [T] over the whole vocabulary."""
    return np.asarray((np.exp(reference) * (reference - logprobs)).sum(axis=1), np.float64)


def store_of_logits(folder: Path, windows: Sequence[Window], logits: Sequence[Array]) -> Path:
    """Return a reference store of these logits [T, V] of each window, in float32."""
    folder.mkdir()
    store.begin(folder, IDENTITY)
    digests = {window.index: window.digest for window in windows}
    key = store.key_of(IDENTITY)
    recorder = Recorder(folder, key, digests, "logits", "a test")
    for window, values in zip(windows, logits, strict=True):
        recorder.write(window.index, torch.from_numpy(values).float())
    store.seal(folder, IDENTITY, list(digests.values()))
    return folder
