"""Whether sampled tokens follow a distribution: chi-square tests, and exact distributions."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compare_q.backends.base import SampledToken
from compare_q.backends.sampling import Continuations

GENERATION_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.2,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.2,
    "repetition_penalty": 3.0,
    "eos_token_id": list(range(0, 320, 2)),
    "suppress_tokens": list(range(1, 320, 3)),
    "begin_suppress_tokens": list(range(0, 320, 3)),
    "max_new_tokens": 3,
}
"""A generation_config.json each of whose entries would change the samples."""
CELLS = 16


def with_generation_defaults(model: Path, folder: Path) -> Path:
    """Return a copy of a model whose own defaults would change every sample."""
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_DEFAULTS))
    return folder


def collected(tokens: Iterable[SampledToken], n_prompts: int, n_tokens: int) -> Continuations:
    """Return the checked tokens of all prompts."""
    continuations = Continuations(n_prompts, n_tokens)
    for token in tokens:
        continuations.add(token)
    continuations.check()
    return continuations


def exact_logprobs(
    model: Any, prompts: list[list[int]], continuations: Continuations
) -> NDArray[np.float64]:
    """Return the log-probabilities [N, V] in which each sampled token was drawn.

    By one forward pass of a Transformers model over each window; the softmax is in float64.
    """
    rows = []
    for prompt, token_ids in zip(prompts, continuations.token_ids, strict=True):
        window = torch.tensor([[*prompt, *token_ids]])
        with torch.inference_mode():
            logits = model(window).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.double().log_softmax(-1).numpy())
    return np.concatenate(rows)


def chi_square_of_ranks(
    logprobs: NDArray[np.float64], token_ids: NDArray[np.int64], seed: int = 7
) -> float:
    """Return chi-square of draws [N] from distributions [N, V], with ``CELLS`` - 1 degrees.

    A draw's place in the cumulative distribution, tokens in order of their probability, is uniform
    between 0 and 1, if a random part of its own probability is added.
    """
    order = np.argsort(-logprobs, axis=1)
    p = np.take_along_axis(np.exp(logprobs), order, 1)
    rank = (order == token_ids[:, None]).argmax(1)
    rows = np.arange(len(rank))
    own = p[rows, rank]
    before = np.cumsum(p, axis=1)[rows, rank] - own
    places = before + np.random.default_rng(seed).random(len(rank)) * own
    observed, _ = np.histogram(places, CELLS, (0.0, 1.0))
    expected = len(rank) / CELLS
    return float(((observed - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """Return about the chi-square that one draw in 30,000 exceeds (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + 4 * math.sqrt(part)) ** 3)
