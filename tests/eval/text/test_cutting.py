"""Windows of each method against lists written by hand, and against what the tools themselves cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compare_q.eval.specs.types import Long
from compare_q.eval.text import cutting
from compare_q.eval.text.cutting import Cut

BOS = 90


def text(count: int) -> cutting.Ids:
    """Tokens 10, 11, ...: token i of the text is 10 + i."""
    return np.arange(10, 10 + count, dtype=np.int32)


def plain(cuts: list[Cut]) -> list[tuple[int, list[int], int]]:
    assert {cut.token_ids.dtype for cut in cuts} <= {np.dtype(np.int32)}
    assert all(len(cut.spans) == 1 and cut.spans[0][1] == len(cut.token_ids) for cut in cuts)
    return [(cut.start, cut.token_ids.tolist(), cut.spans[0][0]) for cut in cuts]


def scored(cuts: list[Cut]) -> list[int]:
    """Text indices of the scored entries, in order."""
    return [cut.start + position for cut in cuts for span in cut.spans for position in range(*span)]


@pytest.mark.parametrize(
    ("n_tokens", "eval_len", "stride", "gold"),
    [
        (10, 4, 2, [0, 2, 4]),  # 6 would end exactly at the last token: upstream leaves it out
        (11, 4, 2, [0, 2, 4, 6]),
        (10, 4, 3, [0, 3]),
        (8, 4, 4, [0]),
        (9, 4, 4, [0, 4]),
        (4, 4, 1, []),
        (5, 4, 1, [0]),
        # WikiText-2 at 2048/512 for a tokenizer that makes 289,076 tokens of it: ceil((289,076 - 2,048) / 512) = 561
        (289_076, 2048, 512, list(range(0, 561 * 512, 512))),
    ],
)
def test_exllamav3_starts(n_tokens: int, eval_len: int, stride: int, gold: list[int]) -> None:
    assert [cut.start for cut in cutting.exllamav3(text(n_tokens), eval_len, stride)] == gold


@pytest.mark.parametrize(
    ("method", "n_tokens", "eval_len", "bos", "gold"),
    [
        ("llamacpp", 11, 4, None, [(0, [10, 11, 12, 13], 3), (4, [14, 15, 16, 17], 3)]),
        ("llamacpp", 12, 4, None, [(0, [10, 11, 12, 13], 3), (4, [14, 15, 16, 17], 3), (8, [18, 19, 20, 21], 3)]),
        ("llamacpp", 11, 4, BOS, [(0, [90, 11, 12, 13], 3), (4, [90, 15, 16, 17], 3)]),
        # The first one is 5 / 2 = 2: positions 3 and 4 are scored.
        ("llamacpp", 11, 5, BOS, [(0, [90, 11, 12, 13, 14], 3), (5, [90, 16, 17, 18, 19], 3)]),
        ("llamacpp", 3, 3, None, [(0, [10, 11, 12], 2)]),
        ("llamacpp", 3, 4, None, []),
        # ``testenc[:, i * seqlen : (i + 1) * seqlen]`` for i below ``numel() // seqlen``, ``[:, 1:]`` of it scored.
        ("gptq", 11, 4, None, [(0, [10, 11, 12, 13], 1), (4, [14, 15, 16, 17], 1)]),
        ("gptq", 12, 4, None, [(0, [10, 11, 12, 13], 1), (4, [14, 15, 16, 17], 1), (8, [18, 19, 20, 21], 1)]),
        ("gptq", 4, 4, None, [(0, [10, 11, 12, 13], 1)]),
        ("gptq", 3, 4, None, []),
    ],
)  # fmt: skip
def test_windows_that_follow_one_another(method: str, n_tokens: int, eval_len: int, bos: int | None, gold: Any) -> None:
    ids = text(n_tokens)
    cuts = cutting.llamacpp(ids, eval_len, bos) if method == "llamacpp" else cutting.gptq(ids, eval_len)
    assert plain(cuts) == gold
    assert ids.tolist() == text(n_tokens).tolist()  # BOS goes into copies


# lm_eval.utils of lm-eval 0.4.13: make_disjoint_window of each of get_rolling_token_windows(tokens, 90, L, 1), as
# (context, continuation); what is fed is their sum without its last token.
LM_EVAL = {
    (0, 4): [],
    (1, 4): [([90], [10])],
    (3, 4): [([90], [10, 11, 12])],
    (4, 4): [([90], [10, 11, 12, 13])],
    (5, 4): [([90], [10, 11, 12, 13]), ([10, 11, 12, 13], [14])],
    (8, 4): [([90], [10, 11, 12, 13]), ([13], [14, 15, 16, 17])],
    (10, 4): [([90], [10, 11, 12, 13]), ([13], [14, 15, 16, 17]), ([15, 16, 17], [18, 19])],
    (7, 3): [([90], [10, 11, 12]), ([12], [13, 14, 15]), ([13, 14, 15], [16])],
    (5, 2): [([90], [10, 11]), ([11], [12, 13]), ([12, 13], [14])],
}


@pytest.mark.parametrize(("n_tokens", "eval_len"), LM_EVAL)
def test_lm_eval(n_tokens: int, eval_len: int) -> None:
    cuts = cutting.lm_eval(text(n_tokens), np.array([n_tokens]), eval_len, 90)
    firsts = [cut.spans[0][0] for cut in cuts]
    ids = [cut.token_ids.tolist() for cut in cuts]
    pairs = [(each[:first], each[first:]) for each, first in zip(ids, firsts, strict=True)]
    assert pairs == LM_EVAL[n_tokens, eval_len]
    assert scored(cuts) == list(range(n_tokens))


def test_lm_eval_documents_follow_one_another() -> None:
    """Of 5, 0 and 2 tokens; the prefix stands before each, at the index of the last token of the one before."""
    cuts = cutting.lm_eval(text(7), np.array([5, 5, 7]), 3, 90)
    gold = [(-1, [90, 10, 11, 12], 1), (1, [11, 12, 13, 14], 2), (4, [90, 15, 16], 1)]
    assert plain(cuts) == gold
    assert scored(cuts) == list(range(7))


@pytest.mark.parametrize(
    ("n_tokens", "eval_len", "stride", "gold"),
    [
        (8, 4, 2, [(0, [10, 11, 12, 13], 1), (2, [12, 13, 14, 15], 2), (4, [14, 15, 16, 17], 2)]),
        (7, 4, 2, [(0, [10, 11, 12, 13], 1), (2, [12, 13, 14, 15], 2), (3, [13, 14, 15, 16], 3)]),
        (8, 4, 3, [(0, [10, 11, 12, 13], 1), (3, [13, 14, 15, 16], 1), (4, [14, 15, 16, 17], 3)]),
        (5, 4, 1, [(0, [10, 11, 12, 13], 1), (1, [11, 12, 13, 14], 3)]),
        (4, 4, 2, [(0, [10, 11, 12, 13], 1)]),
        (3, 4, 2, [(0, [10, 11, 12], 1)]),  # shorter than a window: all the context there is
        (1, 4, 2, []),
        (0, 4, 2, []),
    ],
)
def test_once(n_tokens: int, eval_len: int, stride: int, gold: Any) -> None:
    cuts = cutting.once(text(n_tokens), eval_len, stride)
    assert plain(cuts) == gold
    assert scored(cuts) == list(range(1, n_tokens))


@pytest.mark.parametrize(
    ("long", "gold", "counts"),
    [
        ("truncate", [(0, [10, 11, 12], ((1, 3),)), (9, [19, 20], ((1, 2),))], (1, 2)),
        ("skip", [(0, [10, 11, 12], ((1, 3),)), (9, [19, 20], ((1, 2),))], (1, 1)),
        (
            "split",
            [
                (0, [10, 11, 12], ((1, 3),)),
                (5, [15, 16, 17], ((1, 2),)),
                (7, [17, 18], ((1, 2),)),
                (9, [19, 20], ((1, 2),)),
            ],
            (1, 1),
        ),
    ],
)
def test_conversations(long: Long, gold: Any, counts: tuple[int, int]) -> None:
    """Of 3, 6, 0 and 2 tokens, windows of 3; of the second the 4th token and the last are scored; one is empty."""
    scored = np.array([1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1], bool)
    found = cutting.chat(text(11), scored, np.array([3, 9, 9, 11]), 3, long)
    assert [(cut.start, cut.token_ids.tolist(), cut.spans) for cut in found[0]] == gold
    assert found[1:] == counts
