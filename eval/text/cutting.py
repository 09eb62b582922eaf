"""Cut a tokenized text into windows by one of five methods; four are named after the tool whose
windows they repeat.

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

Chat prefixes and ``max_rows`` are applied in ``eval/text/text_windows.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...backends.base import Spans
from ..specs.spec_types import DataSpec, Long, Method
from .text_tokens import Ids, Tokens


class Cut(NamedTuple):
    """A window: text index of its token 0, its tokens int32 [L], and which of its positions are
    scored.

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
    """Windows of ``eval_len`` of a text int32 [n]; the module's docstring explains this and the
    other methods.
    """
    starts = range(0, len(ids) - eval_len, eval_stride)
    return [scored_from(start, ids[start : start + eval_len], warmup + 1) for start in starts]


def llamacpp(ids: Ids, eval_len: int, bos: int | None) -> list[Cut]:
    """Chunks of ``eval_len``; ``bos`` replaces the first token of each chunk, None leaves it."""
    cuts = []
    for start in range(0, len(ids) - eval_len + 1, eval_len):
        chunk = ids[start : start + eval_len].copy()
        if bos is not None:
            chunk[0] = bos
        cuts.append(scored_from(start, chunk, eval_len // 2 + 1))
    return cuts


def gptq(ids: Ids, eval_len: int) -> list[Cut]:
    """Windows of ``eval_len`` that follow one another; the tokens after the last whole window are
    dropped.
    """
    starts = range(0, len(ids) - eval_len + 1, eval_len)
    return [scored_from(start, ids[start : start + eval_len], 1) for start in starts]


def lm_eval(ids: Ids, ends: NDArray[np.int64], eval_len: int, prefix: int) -> list[Cut]:
    """Windows of up to ``eval_len`` + 1 of documents that end before the text indices ``ends``
    int64 [D].
    """
    cuts, begin = [], 0
    for end in map(int, ends):
        document = np.concatenate((np.array([prefix], np.int32), ids[begin:end]))
        cuts += [
            cut._replace(start=begin - 1 + cut.start)
            for cut in once(document, eval_len + 1, eval_len)
        ]
        begin = end
    return cuts


def once(ids: Ids, eval_len: int, eval_stride: int) -> list[Cut]:
    """Windows of ``eval_len``, or one window of a shorter text; none for a text without a second
    token.
    """
    done = min(eval_len, len(ids))
    cuts = [scored_from(0, ids[:done], 1)] if done > 1 else []
    while done < len(ids):
        end = min(done + eval_stride, len(ids))
        cuts.append(scored_from(end - eval_len, ids[end - eval_len : end], done - end + eval_len))
        done = end
    return cuts


def chat(
    ids: Ids, scored: NDArray[np.bool_], ends: NDArray[np.int64], eval_len: int, long: Long
) -> tuple[list[Cut], int, int]:
    """Return (windows, number of long conversations, number of conversations without a scored token
    in a window).

    Conversations end before the text indices ``ends`` int64 [D]; ``scored`` bool [n]: True for
    scored tokens.  A long conversation has more than ``eval_len`` tokens.  Values of ``long``:

    - ``truncate``: a long conversation loses its end;
    - ``skip``: a long conversation is left out;
    - ``split``: the windows of a long conversation begin every ``eval_len`` - 1 tokens, each with
      the last token of the window before it.  Every scored token counts once, and its context is
      limited to its window.

    A window without a scored token is left out.  The first token of a window cannot be scored: it
    has no context.
    """
    cuts: list[Cut] = []
    too_long = unscored = begin = 0
    for end in map(int, ends):
        is_long = end - begin > eval_len
        too_long += is_long
        if not (is_long and long == "skip"):
            starts = range(begin, end - 1, eval_len - 1) if is_long and long == "split" else [begin]
            pieces = [slice(start, min(start + eval_len, end)) for start in starts]
            windows = [Cut(piece.start, ids[piece], ranges(scored[piece])) for piece in pieces]
            kept = [window for window in windows if window.spans]
            cuts += kept
            unscored += not kept
        begin = end
    return cuts, too_long, unscored


def ranges(scored: NDArray[np.bool_]) -> Spans:
    """Return the ranges of a window's scored positions, without the first position."""
    padded = np.concatenate(([False], scored[1:], [False])).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded)) + 1
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spread(cuts: list[Cut]) -> list[Cut]:
    """Return the windows in an order in which the first ones are spread over the text: 16 of 160
    are every tenth.

    Window number N * v(k) is the k-th one; v is van der Corput's sequence in base 2 (0, 1/2, 1/4,
    3/4, 1/8, ...).  Thus the first 2^m windows are a systematic sample of the text, and a longer
    run adds to a shorter one's windows.
    """
    bits = (len(cuts) - 1).bit_length()
    places = (int(f"{turn:0{bits}b}"[::-1], 2) * len(cuts) >> bits for turn in range(1 << bits))
    return [cuts[place] for place in dict.fromkeys(places)] if len(cuts) > 1 else cuts


def tails(spans: Spans, every: int, last: int) -> Spans:
    """Return the scored positions that are among the ``last`` of each ``every`` positions of a
    window.
    """
    ends = range(every, spans[-1][1] + 1, every)
    found = ((max(begin, end - last), min(stop, end)) for end in ends for begin, stop in spans)
    return tuple((begin, end) for begin, end in found if begin < end)


def by_method(text: Tokens, spec: DataSpec) -> list[Cut]:
    """All windows of a tokenized text by the spec's method, without the chat prefix, in the order
    of its ``sample``.
    """
    ids, length = text.ids, spec.eval_len
    if spec.method == "llamacpp":
        cuts = llamacpp(ids, length, text.lead)
    elif spec.method == "lm_eval":
        assert text.lead is not None
        cuts = lm_eval(ids, text.ends, length, text.lead)
    elif spec.method == "gptq":
        cuts = gptq(ids, length)
    elif spec.method == "once":
        cuts = once(ids, length, spec.stride)
    else:
        cuts = exllamav3(ids, length, spec.stride, spec.warmup_tokens)
    if spec.score_every is not None and spec.score_last is not None:
        cuts = [
            cut._replace(spans=tails(cut.spans, spec.score_every, spec.score_last)) for cut in cuts
        ]
    return spread(cuts) if spec.sample == "spread" else cuts


def least_tokens(method: Method, eval_len: int) -> int:
    """Return the number of tokens of the shortest text that has a window."""
    return {
        "exllamav3": eval_len + 1,
        "llamacpp": eval_len,
        "lm_eval": 1,
        "gptq": eval_len,
        "once": 2,
    }[method]
