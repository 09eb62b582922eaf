"""The tokens of a text on which each model lost most, with the text around them.

They are chosen from the cached scores of single tokens, one model at a time, and stored in
results.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ...backends.checkpoint.tokenizers import TOKENIZER_FILE
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line
from ..common import processes
from ..common.cache import Cache
from ..common.terminal import say
from ..results import ModelResult, RunResult, WorstSequence, WorstToken
from ..run import stored_scores
from ..run.stored_scores import StoredScores
from ..text import vocabulary
from ..text.eval_data import EvalData

COUNT = 20
"""Worst tokens of each model."""
CANDIDATES_OF_TOKEN = 64
"""Entries that are sorted for each worst token: windows overlap, and a token counts once."""
TOKENS_BEFORE = 24
TOKENS_AFTER = 4
"""Tokens shown before and after each."""


class TokenContext(NamedTuple):
    """Token ids around a token; its text is that from id number ``begin`` to before ``end``."""

    ids: list[int]
    begin: int
    end: int


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
    tokens_of_models = []
    contexts: list[TokenContext] = []
    for model in models:
        tokens: list[WorstToken] = []
        if not model.error:
            stored = stored_scores.scores_of_row(cache, model.scores_key, data)
            if stored is not None:
                tokens = worst_tokens(stored, data)
        tokens_of_models.append(tokens)
        contexts += [context_of(token, data) for token in tokens]
    if not contexts:
        return tuple(models)
    # The tokens of all models together: without a tokenizer.json, decoding starts a process.
    try:
        texts = iter(decoded(data, contexts))
    except InputError as error:
        say(f"no worst tokens: {error}", console=Console(stderr=True))
        return tuple(models)
    rows = []
    for model, tokens in zip(models, tokens_of_models, strict=True):
        tokens_with_text = tuple(token.updated(**next(texts)) for token in tokens)
        rows.append(model.updated(worst_tokens=tokens_with_text))
    return tuple(rows)


def context_of(token: WorstToken | WorstSequence, data: EvalData) -> TokenContext:
    """Return the id of a token, or of the worst token of a sequence, with the ids around it."""
    first = max(token.position - TOKENS_BEFORE, 0)
    window = data.windows[token.window]
    ids = window.token_ids[first : token.position + 1 + TOKENS_AFTER].tolist()
    begin = token.position - first
    return TokenContext(ids, begin, begin + 1)


def worst_tokens(stored: StoredScores, data: EvalData) -> list[WorstToken]:
    """Return the tokens with the largest KLD, or loss without a reference, without their texts.

    An estimated KLD counts as none: it says nothing about a single token.
    The largest comes first.  Where windows overlap, a token counts once, with its largest value.
    Tokens without a finite value are left out; the row has their number (``non_finite``,
    ``kld_non_finite``).
    """
    columns = stored.columns
    klds = columns.get("kld")
    if stored.kld_kind == "estimate":
        klds = None
    if klds is not None:
        damage = klds.astype(np.float64)
    else:
        damage = -columns["logprob"].astype(np.float64)
    # A damage of 0 leaves a token out.
    damage = np.where(np.isfinite(damage), damage, 0.0)
    text_index = data.text_index(stored.window, stored.position)
    worst_by_text_index: dict[int, WorstToken] = {}
    for entry in largest_first(damage):
        if len(worst_by_text_index) == COUNT or damage[entry] <= 0:
            break
        token = WorstToken(
            window=int(stored.window[entry]),
            position=int(stored.position[entry]),
            kld=rounded(klds, entry),
            logprob=rounded(columns.get("logprob"), entry),
            ref_logprob=rounded(columns.get("ref_logprob"), entry),
        )
        worst_by_text_index.setdefault(int(text_index[entry]), token)
    return list(worst_by_text_index.values())


def largest_first(values: NDArray[np.float64]) -> Iterator[int]:
    """Yield the indices of the largest numbers first; of equal numbers, the smallest index."""
    n_likely = CANDIDATES_OF_TOKEN * COUNT
    groups = [np.arange(len(values))]
    if len(values) > n_likely:
        # To sort all numbers of a long text takes a tenth of a second.
        smallest = np.partition(values, -n_likely)[-n_likely]
        groups = [np.flatnonzero(values > smallest), np.flatnonzero(values <= smallest)]
    for indices in groups:
        order = np.argsort(-values[indices], kind="stable")
        yield from indices[order].tolist()


def rounded(values: NDArray[Any] | None, entry: int) -> float | None:
    """Return one number with four significant digits; None if it is missing or not finite."""
    if values is None or not np.isfinite(values[entry]):
        return None
    return float(f"{values[entry]:.4g}")


def decoded(data: EvalData, contexts: Sequence[TokenContext]) -> list[dict[str, str]]:
    """Return the text of each context by the text's tokenizer, as ``split`` does.

    A tokenizer.json is read in this process.  Without one, Transformers decodes in a subprocess,
    since importing it takes seconds.  Raises InputError if the tokenizer cannot be read.
    """
    from tokenizers import Tokenizer

    file = data.tokenizer / TOKENIZER_FILE
    if not file.is_file():
        texts: list[dict[str, str]] = processes.run_in_subprocess(
            split_by_transformers,
            "decoding tokens",
            folder=str(data.tokenizer),
            trust_remote_code=any(text.spec.trust_remote_code for text in data.texts),
            contexts=contexts,
        )
        return texts
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{file}: no usable tokenizer: {one_line(error)}") from None
    return split(partial(tokenizer.decode, skip_special_tokens=False), contexts)


def split_by_transformers(
    folder: str, trust_remote_code: bool, contexts: Sequence[TokenContext]
) -> list[dict[str, str]]:
    """Return the text of each context by Transformers' tokenizer of a folder."""
    tokenizer = vocabulary.load_tokenizer(Path(folder), trust_remote_code=trust_remote_code)
    decode = partial(
        tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return split(decode, contexts)


def split(
    text_of: Callable[[list[int]], str], contexts: Sequence[TokenContext]
) -> list[dict[str, str]]:
    """Return the text of each context in three parts: before, of and after its token.

    A character that several tokens make up belongs to the last of them.
    """
    texts = []
    for ids, begin, end in contexts:
        text = text_of(ids)
        # Lengths of the decoded beginnings, because a part of a character has no text alone.
        token_begin = complete_length(text_of(ids[:begin]))
        token_end = complete_length(text_of(ids[:end]))
        if end == len(ids):
            token_end = len(text)
        else:
            token_end = max(token_begin, token_end)
        texts.append(
            {
                "before": text[:token_begin],
                "token": text[token_begin:token_end],
                "after": text[token_end:],
            }
        )
    return texts


def complete_length(text: str) -> int:
    """Return the length of a text without an incomplete character at its end (U+FFFD)."""
    return len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
