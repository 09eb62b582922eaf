"""Cut a tokenized text into windows by one of five methods.

Four are named after the tool whose windows they repeat.

- ``exllamav3`` (its compare_q): windows of ``eval_len`` tokens start at ``range(0, n_tokens -
  eval_len, eval_stride)``, so that a window that would end exactly at the last token is left out.
  Every position except the first (after the warm-up) is scored.  If windows overlap, a token is
  scored each time.
- ``llamacpp`` (llama-perplexity): ``n_tokens // eval_len`` adjacent chunks.  If the tokenizer adds
  BOS, BOS replaces the first token of each chunk.  Positions ``eval_len // 2 + 1`` to ``eval_len -
  1`` are scored, 255 of 512.  As with llama-perplexity's ``-f``, one newline at the end of the text
  is dropped.  Special tokens in the text are read as plain text.
- ``lm_eval`` (lm-eval 0.4.13's loglikelihood_rolling with ``max_length`` = ``eval_len``): each row
  of a data set is a document, tokenized separately, after a prefix token (BOS, or EOS without one)
  that is not scored.  Every token of a document is scored once, including a BOS added by the
  tokenizer, ``eval_len`` tokens per window.  The last window has as much context as fits.  A window
  here includes its last target, one token more than lm-eval's input.
- ``gptq`` (the evaluation of GPTQ's repository, which QuIP#, AWQ, FlatQuant and most papers on
  quantization took over): ``n_tokens // eval_len`` adjacent windows.  Every position except the
  first is scored, ``eval_len - 1`` per window, so that the mean of the windows' means is the mean
  over all tokens.  Rows of a data set are joined including blank rows (``eval/text/corpus.py``).
  If the tokenizer adds BOS, it is in the first window only.
- ``once``: windows start every ``eval_stride`` tokens (half of ``eval_len``), and each scores the
  tokens that earlier windows have not scored.  Every token except the text's first is therefore
  scored once.  After the first window, a scored token has at least ``eval_len - eval_stride``
  tokens before it.  The last window is full and ends at the last token.

Conversations (``chat``) are not cut from one text: each is a window, if it is not too long.
Sampled texts (``sampled``) and rollouts are windows already.

Chat prefixes and ``max_rows`` are applied in ``eval/text/text_windows.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...backends.base import Spans
from ..specs.spec_types import DataSpec, Long, Method
from .text_tokens import Ids, Tokens


class Cut(NamedTuple):
    """A window: text index of its token 0, its tokens int32 [L], and its scored positions.

    ``start + position`` is the text index of a scored token; ``start`` is -1 if a prefix token
    precedes the text.
    """

    start: int
    token_ids: Ids
    spans: Spans

    @property
    def n_scored(self) -> int:
        """Number of scored tokens."""
        return sum(end - begin for begin, end in self.spans)


def scored_from(start: int, token_ids: Ids, first: int) -> Cut:
    """Return a window in which every position from ``first`` on is scored."""
    return Cut(start, token_ids, ((first, len(token_ids)),))


def exllamav3(ids: Ids, eval_len: int, eval_stride: int, warmup: int = 0) -> list[Cut]:
    """Windows of ``eval_len`` of a text int32 [n]; the module's docstring explains each method."""
    starts = range(0, len(ids) - eval_len, eval_stride)
    return [scored_from(start, ids[start : start + eval_len], warmup + 1) for start in starts]


def llamacpp(ids: Ids, eval_len: int, bos: int | None) -> list[Cut]:
    """Chunks of ``eval_len``; ``bos`` replaces the first token of each chunk, None leaves it."""
    cuts = []
    for start in range(0, len(ids) - eval_len + 1, eval_len):
        chunk = ids[start : start + eval_len].copy()  # the text keeps its token
        if bos is not None:
            chunk[0] = bos
        cuts.append(scored_from(start, chunk, eval_len // 2 + 1))
    return cuts


def gptq(ids: Ids, eval_len: int) -> list[Cut]:
    """Windows of ``eval_len`` that follow one another; tokens after the last one are dropped."""
    starts = range(0, len(ids) - eval_len + 1, eval_len)
    return [scored_from(start, ids[start : start + eval_len], 1) for start in starts]


def lm_eval(ids: Ids, ends: NDArray[np.int64], eval_len: int, prefix: int) -> list[Cut]:
    """Windows of up to ``eval_len`` + 1 tokens of documents.

    ``ends`` int64 [D]: text index after each document.
    """
    cuts = []
    begin = 0
    for end in ends.tolist():
        document = np.concatenate((np.array([prefix], np.int32), ids[begin:end]))
        for cut in score_each_token_once(document, eval_len + 1, eval_len):
            # The prefix token is before the document, at ``begin - 1``.
            cuts.append(cut._replace(start=begin - 1 + cut.start))
        begin = end
    return cuts


def score_each_token_once(ids: Ids, eval_len: int, eval_stride: int) -> list[Cut]:
    """Windows of ``eval_len``, or one window of a shorter text.

    There is none for a text without a second token.
    """
    cuts = []
    done = min(eval_len, len(ids))
    if done > 1:
        cuts.append(scored_from(0, ids[:done], 1))
    while done < len(ids):
        end = min(done + eval_stride, len(ids))
        # Also the last window is full: it begins earlier, and scores fewer tokens.
        start = end - eval_len
        cuts.append(scored_from(start, ids[start:end], done - start))
        done = end
    return cuts


def chat(
    ids: Ids, scored: NDArray[np.bool_], ends: NDArray[np.int64], eval_len: int, long: Long
) -> tuple[list[Cut], int, int]:
    """Cut conversations into windows, and count those that are long or not scored.

    Returns (windows, number of long conversations, number of conversations without a scored token
    in a window).  Conversations end before the text indices ``ends`` int64 [D]; ``scored`` bool
    [n]: True for scored tokens.  A long conversation has more than ``eval_len`` tokens.  Values of
    ``long``:

    - ``truncate``: a long conversation loses its end;
    - ``skip``: a long conversation is left out;
    - ``split``: the windows of a long conversation begin every ``eval_len`` - 1 tokens, each with
      the last token of the window before it.  Every scored token counts once, and its context is
      limited to its window.

    A window without a scored token is left out.  The first token of a window cannot be scored: it
    has no context.
    """
    cuts: list[Cut] = []
    n_long = 0
    n_unscored = 0
    begin = 0
    for end in ends.tolist():
        is_long = end - begin > eval_len
        if is_long:
            n_long += 1
        if is_long and long == "skip":
            begin = end
            continue
        starts: Sequence[int] = [begin]
        if is_long and long == "split":
            starts = range(begin, end - 1, eval_len - 1)
        n_cuts_before = len(cuts)
        for start in starts:
            piece = slice(start, min(start + eval_len, end))
            spans = ranges(scored[piece])
            if spans:
                cuts.append(Cut(start, ids[piece], spans))
        if len(cuts) == n_cuts_before:
            n_unscored += 1
        begin = end
    return cuts, n_long, n_unscored


def sampled(
    ids: Ids, is_sampled: NDArray[np.bool_], ends: NDArray[np.int64], eval_len: int
) -> list[Cut]:
    """Return each document of sampled text as a window of its first ``eval_len`` tokens.

    Documents end before the text indices ``ends`` int64 [D]; ``is_sampled`` bool [n]: True for the
    scored tokens.  A document without a sampled token in its window is left out.
    """
    cuts = []
    begin = 0
    for end in ends.tolist():
        piece = slice(begin, min(begin + eval_len, end))
        spans = ranges(is_sampled[piece])
        if spans:
            cuts.append(Cut(begin, ids[piece], spans))
        begin = end
    return cuts


def ranges(scored: NDArray[np.bool_]) -> Spans:
    """Return the ranges of a window's scored positions, without the first position."""
    padded = np.concatenate(([False], scored[1:], [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded)) + 1
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spread(cuts: list[Cut]) -> list[Cut]:
    """Return the windows in an order in which the first ones are spread over the text.

    The first 16 of 160 are every tenth.  Window number N * v(k) is the k-th one; v is van der
    Corput's sequence in base 2 (0, 1/2, 1/4, 3/4, 1/8, ...).  Thus the first 2^m windows are a
    systematic sample of the text, and a longer run adds to a shorter one's windows.
    """
    if len(cuts) <= 1:
        return cuts
    n_bits = (len(cuts) - 1).bit_length()
    places = []
    for turn in range(1 << n_bits):
        reversed_bits = f"{turn:0{n_bits}b}"[::-1]
        places.append(int(reversed_bits, 2) * len(cuts) >> n_bits)
    # If N is not a power of two, some places come twice.
    return [cuts[place] for place in dict.fromkeys(places)]


def last_positions(spans: Spans, every: int, last: int) -> Spans:
    """Return the scored positions among the ``last`` of each ``every`` positions of a window."""
    positions = []
    for stretch_end in range(every, spans[-1][1] + 1, every):
        for span_begin, span_end in spans:
            begin = max(span_begin, stretch_end - last)
            end = min(span_end, stretch_end)
            if begin < end:
                positions.append((begin, end))
    return tuple(positions)


def by_method(text: Tokens, spec: DataSpec) -> list[Cut]:
    """All windows of a tokenized text by the spec's method, in the order of its ``sample``.

    The chat prefix is not included.
    """
    ids = text.ids
    length = spec.eval_len
    if spec.method == "llamacpp":
        cuts = llamacpp(ids, length, text.leading_token)
    elif spec.method == "lm_eval":
        assert text.leading_token is not None
        cuts = lm_eval(ids, text.ends, length, text.leading_token)
    elif spec.method == "gptq":
        cuts = gptq(ids, length)
    elif spec.method == "once":
        cuts = score_each_token_once(ids, length, spec.stride)
    else:
        cuts = exllamav3(ids, length, spec.stride, spec.warmup_tokens)
    if spec.score_every is not None and spec.score_last is not None:
        cuts = [
            cut._replace(spans=last_positions(cut.spans, spec.score_every, spec.score_last))
            for cut in cuts
        ]
    if spec.sample == "spread":
        return spread(cuts)
    return cuts


def least_tokens(method: Method, eval_len: int) -> int:
    """Return the number of tokens of the shortest text that has a window."""
    return {
        "exllamav3": eval_len + 1,
        "llamacpp": eval_len,
        "lm_eval": 1,
        "gptq": eval_len,
        "once": 2,
    }[method]
