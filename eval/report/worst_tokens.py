"""The tokens of a text on which each model lost most, with the text around them.

They are chosen from the cached scores of single tokens, one model at a time, and stored in
results.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line
from ..common import processes
from ..common.cache import Cache
from ..common.terminal import say
from ..results import ModelResult, RunResult, WorstToken
from ..run import token_scores
from ..run.token_scores import StoredScores
from ..text import vocabulary
from ..text.eval_data import EvalData

Piece = tuple[list[int], int, int]
"""Token ids, and the numbers of the tokens at which ``token`` and ``after`` begin."""
COUNT = 20
"""Worst tokens of each model."""
BEFORE, AFTER = 24, 4
"""Tokens shown before and after each."""


def with_worst_tokens(results: RunResult, data: EvalData, cache: Cache) -> RunResult:
    """Return the results with the worst tokens of every row that has scores in the cache.

    If the tokens cannot be decoded, the rows stay unchanged, and the reason is printed on standard
    error.
    """
    return results.updated(models=rows_with_tokens(results.models, data, cache))


def rows_with_tokens(
    models: Sequence[ModelResult], data: EvalData, cache: Cache
) -> tuple[ModelResult, ...]:
    """Return these rows with their worst tokens; see ``with_worst_tokens``."""
    chosen: list[list[WorstToken]] = []
    pieces: list[Piece] = []
    for model in models:
        stored = None if model.error else token_scores.of_row(cache, model.scores_key, data)
        worst = [] if stored is None else worst_tokens(stored, data)
        chosen.append(worst)
        for token in worst:
            begin = max(token.position - BEFORE, 0)
            ids = data.windows[token.window].token_ids[begin : token.position + 1 + AFTER].tolist()
            pieces.append((ids, token.position - begin, token.position - begin + 1))
    if not pieces:
        return tuple(models)
    try:
        texts = iter(decoded(data, pieces))
    except InputError as error:
        say(f"no worst tokens: {error}", console=Console(stderr=True))
        return tuple(models)
    rows = []
    for model, worst in zip(models, chosen, strict=True):
        rows.append(
            model.updated(worst_tokens=tuple(token.updated(**next(texts)) for token in worst))
        )
    return tuple(rows)


def worst_tokens(stored: StoredScores, data: EvalData) -> list[WorstToken]:
    """Return the tokens with the largest KLD, or loss without a reference, largest first, without
    their texts.

    Where windows overlap, a token counts once, with its largest value.
    """
    damage = stored.columns.get("kld", -stored.columns["logprob"]).astype(np.float64)
    damage = np.where(np.isfinite(damage), damage, 0.0)
    places = data.text_index(stored.window, stored.position)
    found: dict[int, WorstToken] = {}
    for entry in np.argsort(-damage, kind="stable"):
        if len(found) == COUNT or damage[entry] <= 0:
            break
        names = ("kld", "logprob", "ref_logprob")
        kld, logprob, ref_logprob = (rounded(stored.columns.get(name), entry) for name in names)
        token = WorstToken(
            window=int(stored.window[entry]),
            position=int(stored.position[entry]),
            kld=kld,
            logprob=logprob,
            ref_logprob=ref_logprob,
        )
        found.setdefault(int(places[entry]), token)
    return list(found.values())


def rounded(values: NDArray[Any] | None, entry: int) -> float | None:
    """Return one number with four significant digits; None if it is missing or not finite."""
    return (
        None if values is None or not np.isfinite(values[entry]) else float(f"{values[entry]:.4g}")
    )


def decoded(data: EvalData, pieces: Sequence[Piece]) -> list[dict[str, str]]:
    """Return the text of each piece by the text's tokenizer, as ``split`` does.

    A tokenizer.json is read in this process.  Without one, Transformers decodes in a subprocess,
    since importing it takes seconds.  Raises InputError if the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    file = data.tokenizer / vocabulary.FILE
    if not file.is_file():
        trust = any(text.spec.trust_remote_code for text in data.texts)
        found: list[dict[str, str]] = processes.run_in_subprocess(
            split_by_transformers,
            "decoding tokens",
            folder=str(data.tokenizer),
            trust_remote_code=trust,
            pieces=pieces,
        )
        return found
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{file}: no usable tokenizer: {one_line(error)}") from None
    return split(partial(tokenizer.decode, skip_special_tokens=False), pieces)


def split_by_transformers(
    folder: str, trust_remote_code: bool, pieces: Sequence[Piece]
) -> list[dict[str, str]]:
    """Return the text of each piece by Transformers' tokenizer of a folder."""
    loaded = vocabulary.load_tokenizer(Path(folder), trust_remote_code=trust_remote_code)
    return split(
        partial(loaded.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        pieces,
    )


def split(text_of: Callable[[list[int]], str], pieces: Sequence[Piece]) -> list[dict[str, str]]:
    """Return the text of each piece in three parts, cut at two of its tokens.

    A character that several tokens make up belongs to the last of them.
    """
    found = []
    for ids, begin, end in pieces:
        whole = text_of(ids)
        # U+FFFD marks an incomplete character
        first, second = (
            len(text_of(ids[:cut]).rstrip("\N{REPLACEMENT CHARACTER}")) for cut in (begin, end)
        )
        second = len(whole) if end == len(ids) else max(first, second)
        found.append(
            {"before": whole[:first], "token": whole[first:second], "after": whole[second:]}
        )
    return found
