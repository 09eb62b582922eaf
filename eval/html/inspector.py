"""What single tokens cost: passages of the text with every model's scores, and each model's most damaged tokens.

The excerpts are made from the cached token scores (``eval/run/token_scores.py``), one model at a time (1.2 million
tokens take 40 MB).  Numbers have three significant digits, since they are only looked at; a number that is not finite
is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.eval.common import processes
from compare_q.eval.common.cache import Cache
from compare_q.eval.results.run_result import Damaged, Inspection, Numbers, Passage, TextResult
from compare_q.eval.run import token_scores
from compare_q.eval.run.token_scores import StoredScores
from compare_q.eval.text import vocabulary
from compare_q.eval.text.windows import EvalData

PASSAGE, PASSAGES, STEP = 256, 4, 32
"""Tokens in a passage, how many there are, and tokens between the places where one may begin."""
CONTEXT = 32
"""Tokens before a token that counts for the choice of passages: with less, every model guesses."""
CHOSEN = "where models differ most in part {part} of {parts}"
WORST, BEFORE, AFTER = 30, 24, 4
"""Most damaged tokens of a model, and the tokens around each."""
SHARES = (0.5, 0.25, 0.1, 0.05, 0.01)
"""Of the tokens shown, which have at least the first, second, ... colour."""
NOISE = 0.99
"""Share of the noise floor's own tokens that have no colour."""
Piece = tuple[list[int], list[int]]
"""(ids of tokens to be decoded together, ends): their text is cut where the tokens before each of ``ends`` end."""


class Disagreement:
    """How far models differ at each scored token [N], from sums to which one model after the other is added."""

    def __init__(self, noise: NDArray[np.float64] | None) -> None:
        """``noise``: what the noise floor's row lost at each token; None without one."""
        self.noise = noise
        self.models = 0
        self.total: Any = 0.0
        self.squares: Any = 0.0

    def add(self, stored: StoredScores) -> None:
        """Add what a model lost beyond the noise floor, in units of its mean, by its logarithm.

        So neither a broken model nor one token of 10 nats chooses the passages, nor does a model at the noise floor.
        """
        noise = np.zeros(1) if self.noise is None else self.noise
        beyond = np.maximum(token_damage(stored) - noise, 0)
        unit = beyond.mean() + noise.mean()
        scaled = np.log1p(beyond / unit) if unit > 0 else beyond
        self.models += 1
        self.total = self.total + scaled
        self.squares = self.squares + scaled**2

    def deviation(self, compared: bool, size: int) -> NDArray[np.float64]:
        """The standard deviation over the models at each of ``size`` tokens; if they are ``compared``, or if there is
        one model, over these and the reference, which lost nothing."""
        rows = max(self.models + (compared or self.models == 1), 1)
        variance = np.broadcast_to(self.squares / rows - (self.total / rows) ** 2, size)
        return np.asarray(np.sqrt(np.maximum(variance, 0.0)), np.float64)


def inspect_tokens(text: TextResult, data: EvalData, cache: Cache) -> Inspection | None:
    """The inspection of a text; None if no model has stored scores.  InputError if the tokens cannot be decoded."""
    keys = [model.scores_key if not model.error else "" for model in text.models]
    worst: list[list[tuple[Damaged, Piece]] | None] = []
    floor = token_scores.of_row(cache, text.noise_floor.scores_key if text.noise_floor else "", data.windows)
    found = Disagreement(token_damage(floor) if floor else None)
    reference, order = None, None
    for model, key in zip(text.models, keys, strict=True):
        stored = token_scores.of_row(cache, key, data.windows)
        worst.append(None if stored is None else most_damaged(stored, data))
        if stored is None:
            continue
        if model.is_reference or reference is None:
            reference = stored.columns["logprob"] if model.is_reference else stored.columns.get("ref_logprob")
        if not (model.is_noise_floor or (model.is_reference and text.reference)):
            found.add(stored)
        order = stored.window, stored.position
    if order is None:
        return None
    window, position = order
    deviation = found.deviation(text.reference is not None, len(window))
    deviation[position < CONTEXT] = 0
    begins = choose_passages(deviation, data.text_index(window, position), window)
    spans = {part: passage_at(begin, window, position) for part, begin in begins.items()}
    columns = [columns_of(cache, key, data, list(spans.values())) for key in keys]
    passages = []
    for i, (part, span) in enumerate(spans.items()):
        logprob, kld = zip(*(each[i] if each else (None, None) for each in columns), strict=True)
        ref_logprob = None if reference is None else token_by_token(reference[span], position[span])
        chosen = CHOSEN.format(part=part + 1, parts=PASSAGES)
        first, at = int(window[span.start]), int(position[span.start])
        passage = Passage(first, at, (), ref_logprob, logprob, kld, chosen, data.starts[first] + at)
        passages.append((passage, piece_of(span, window, position, data)))
    return with_texts(passages, worst, data)


def with_texts(
    passages: Sequence[tuple[Passage, Piece]], worst: Sequence[Sequence[tuple[Damaged, Piece]] | None], data: EvalData
) -> Inspection:
    """The inspection with the texts of all its tokens, which are decoded at once, in a process of its own."""
    pieces = [piece for _, piece in chain(passages, *(each or () for each in worst))]
    found = processes.apart(
        texts_of, "decoding tokens for the report", tokenizer=str(data.tokenizer),
        trust_remote_code=data.spec.trust_remote_code, pieces=pieces,
    )  # fmt: skip
    texts = iter(found)
    shown = tuple(replace(passage, tokens=tuple(next(texts)[1:])) for passage, _ in passages)
    return Inspection(shown, tuple(None if each is None else tuple(told(each, texts)) for each in worst))


def told(damaged: Sequence[tuple[Damaged, Piece]], texts: Iterator[Sequence[str]]) -> Iterator[Damaged]:
    """Damaged tokens with their texts, which come next in ``texts``."""
    for each, _ in damaged:
        before, token, after = next(texts)
        yield replace(each, before=before, token=token, after=after)


def texts_of(tokenizer: str, trust_remote_code: bool, pieces: Sequence[Piece]) -> list[list[str]]:
    """The texts of pieces, by the tokenizer in a folder.  Imports Transformers."""
    loaded = vocabulary.load_tokenizer(Path(tokenizer), trust_remote_code=trust_remote_code)
    return [token_texts(loaded, ids, ends) for ids, ends in pieces]


def token_damage(stored: StoredScores) -> NDArray[np.float64]:
    """What each token [N] cost: its KLD, or its loss where there is no KLD; 0 for a value that is not finite."""
    found = stored.columns.get("kld", -stored.columns["logprob"])
    return np.where(np.isfinite(found), found, 0).astype(np.float64)


def choose_passages(deviation: NDArray[np.float64], index: NDArray[Any], window: NDArray[Any]) -> dict[int, int]:
    """Number of a part of the text -> first entry of the passage that begins there and in which models differ most.

    The text, of which ``index`` [N] is the place of each entry, has ``PASSAGES`` parts of one length, so that passages
    are spread over it; no text is in two of them.  Of equal passages the first is chosen.
    """
    starts = np.flatnonzero(np.diff(window, prepend=window[0] - 1))
    ends = np.append(starts[1:], len(window))
    begins = np.concatenate([np.arange(a, max(b - PASSAGE, a) + 1, STEP) for a, b in zip(starts, ends, strict=True)])
    sums = np.concatenate(([0.0], np.cumsum(deviation)))
    stops = np.minimum(begins + PASSAGE, ends[np.searchsorted(starts, begins, "right") - 1])
    found = np.round(sums[stops] - sums[begins], 6)  # what differs in the last bits only is equal
    ranked = begins[np.argsort(-found, kind="stable")]
    first, length = int(index.min()), int(np.ptp(index)) + 1
    chosen: dict[int, int] = {}
    for begin in ranked.tolist():
        part = (int(index[begin]) - first) * PASSAGES // length
        if part not in chosen and all(abs(int(index[begin] - index[other])) >= PASSAGE for other in chosen.values()):
            chosen[part] = begin
        if len(chosen) == PASSAGES:
            break
    return dict(sorted(chosen.items()))


def passage_at(begin: int, window: NDArray[Any], position: NDArray[Any]) -> slice:
    """The entries of ``PASSAGE`` tokens of a window from entry ``begin`` on, of which some may not be scored."""
    end = int(np.searchsorted(window, window[begin], "right"))
    return slice(begin, begin + int(np.searchsorted(position[begin:end], position[begin] + PASSAGE)))


def token_by_token(values: NDArray[Any], position: NDArray[Any]) -> Numbers:
    """A number for each token from the first to the last of ``position`` [n]; None for those that are not scored."""
    found = np.full(int(position[-1] - position[0]) + 1, np.nan)
    found[position - position[0]] = values
    return three_digits(found)


def columns_of(
    cache: Cache, key: str, data: EvalData, spans: Sequence[slice]
) -> list[tuple[Numbers, Numbers | None]] | None:
    """(logprob, kld) of a model in each span; None without scores."""
    stored = token_scores.of_row(cache, key, data.windows)
    if stored is None:
        return None
    kld, position = stored.columns.get("kld"), stored.position
    return [
        (
            token_by_token(stored.columns["logprob"][span], position[span]),
            None if kld is None else token_by_token(kld[span], position[span]),
        )
        for span in spans
    ]


def most_damaged(stored: StoredScores, data: EvalData) -> list[tuple[Damaged, Piece]]:
    """The tokens that cost a model most, each token of the text once though windows overlap; texts are still empty."""
    cost, index = token_damage(stored), data.text_index(stored.window, stored.position)
    found: dict[int, int] = {}
    for entry in np.argsort(-cost, kind="stable").tolist():
        if len(found) == WORST or cost[entry] <= 0:
            break
        found.setdefault(int(index[entry]), entry)
    return [damaged_token(entry, stored, data) for entry in found.values()]


def damaged_token(entry: int, stored: StoredScores, data: EvalData) -> tuple[Damaged, Piece]:
    """One token, and the piece that it and its surroundings in its window are."""
    window, position = int(stored.window[entry]), int(stored.position[entry])
    begin = max(position - BEFORE, 0)
    ids = data.windows[window].token_ids[begin : position + 1 + AFTER].tolist()
    ref_logprob, logprob, kld = (
        three_digits(stored.columns[name][entry : entry + 1])[0] if name in stored.columns else None
        for name in ("ref_logprob", "logprob", "kld")
    )
    ends = [position - begin, position - begin + 1, len(ids)]
    return Damaged(window, position, "", "", "", ref_logprob, logprob, kld), (ids, ends)


def piece_of(span: slice, window: NDArray[Any], position: NDArray[Any], data: EvalData) -> Piece:
    """The tokens of a span of entries, one text each; the token before the span is the first of them.

    Some tokenizers drop the space of the first token that they decode.
    """
    first, last = int(position[span.start]), int(position[span.stop - 1])
    ids = data.windows[int(window[span.start])].token_ids[first - 1 : last + 1].tolist()
    return ids, list(range(1, len(ids) + 1))


def token_texts(tokenizer: Any, ids: Sequence[int], ends: Sequence[int]) -> list[str]:
    """The text of tokens, cut where the tokens before each of ``ends`` end.

    A character that several tokens make up belongs to the last of these tokens.
    """
    found, before = [], 0
    for end in ends:
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        whole = text if end == len(ids) else text.rstrip("\ufffd")  # U+FFFD stands for an incomplete character
        found.append(whole[before:])
        before = max(before, len(whole))
    return found


def three_digits(values: NDArray[Any]) -> Numbers:
    """Numbers with three significant digits; None for a value that is not finite."""
    return tuple(float(f"{value:.3g}") if np.isfinite(value) else None for value in values.tolist())


def paints(inspection: Inspection, text: TextResult) -> list[dict[str, Any]]:
    """How an inspection's tokens are coloured for each model, by the name of the value that colours them.

    That is its KLD ("kld"), its loss above the reference's ("more"), or its loss ("loss").
    """
    floor = next((i for i, model in enumerate(text.models) if model is text.noise_floor), None)
    every = []
    for number in range(len(text.models)):
        shown = [passage for passage in inspection.passages if passage.logprob[number]]
        own: dict[str, Any] = {}
        for kind in ("kld", "more", "loss"):
            values = values_of(shown, number, kind)
            has_floor = kind != "loss" and floor not in (None, number)
            noise = values_of(shown, floor, kind) if has_floor and floor is not None else []
            if any(value is not None for value in values):
                own[kind] = colours_of(values, noise)
        every.append(own)
    return every


def values_of(passages: Sequence[Passage], number: int, kind: str) -> list[float | None]:
    """What each token of passages lost by a model, None where it is not known."""
    values: list[float | None] = []
    for passage in passages:
        nothing: Numbers = (None,) * len(passage.tokens)
        own, reference = passage.logprob[number] or nothing, passage.ref_logprob or nothing
        if kind == "kld":
            values += passage.kld[number] or nothing
        else:
            bases = reference if kind == "more" else (0.0,) * len(own)
            values += [None if a is None or b is None else b - a for a, b in zip(own, bases, strict=True)]
    return values


def colours_of(values: Sequence[float | None], floor: Sequence[float | None]) -> dict[str, Any]:
    """The colours of tokens, by their values above the noise floor's at the same tokens, where there is a ``floor``.

    ``steps``: from which size on a token has the first, second, ... colour (``SHARES``), None within the ``noise``,
    below which ``NOISE`` of the floor's own tokens are; ``tokens``: how many have a value.
    """
    above = any(value is not None for value in floor)
    base = floor if above else [0.0] * len(values)
    sizes = sorted(abs(a - b) for a, b in zip(values, base, strict=True) if a is not None and b is not None)
    noise = quantile(sorted(abs(value) for value in floor if value is not None), NOISE) if above else 0.0
    steps = [quantile(sizes, 1 - share) for share in SHARES] if sizes else []
    return {
        "steps": [step if step > noise else None for step in steps],
        "noise": noise, "above": above, "tokens": len(sizes),
    }  # fmt: skip


def quantile(ranked: Sequence[float], share: float) -> float:
    """The value that this share of the values, in order, is below."""
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]
