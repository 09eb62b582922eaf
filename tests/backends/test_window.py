"""The digest of a window, by which its scores are found."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from compare_q.backends.base import Window

IDS = np.array([5, 6, 7, 8, 9], np.int32)


def sha256(facts: str, ids: list[int]) -> str:
    """Return the digest by its definition: facts as text, and the tokens in four bytes each."""
    tokens = b"".join(token.to_bytes(4, "little") for token in ids)
    return hashlib.sha256(facts.encode() + tokens).hexdigest()[:32]


def test_digests_by_hand() -> None:
    assert Window.scored_from(0, IDS).digest == sha256("1 ", [5, 6, 7, 8, 9])
    assert Window(0, IDS, ((1, 2), (4, 5))).digest == sha256("1,2,4,5 ", [5, 6, 7, 8, 9])
    assert Window(0, IDS, ((2, 4),)).digest == sha256("2,4 ", [5, 6, 7, 8, 9])
    assert replace(Window.scored_from(0, IDS), is_single=True).digest == sha256(
        "1 alone ", [5, 6, 7, 8, 9]
    )


def test_a_digest_depends_on_tokens_and_scored_positions_and_not_on_the_index() -> None:
    window = Window.scored_from(0, IDS)
    assert replace(window, index=7).digest == window.digest
    assert replace(window, token_ids=IDS.astype(">i4")).digest == window.digest
    windows = [
        window,
        Window.scored_from(0, IDS, 2),
        Window.scored_from(0, IDS[:-1]),
        Window.scored_from(0, IDS[::-1]),
        Window(0, IDS, ((1, 4),)),
        replace(window, is_single=True),
    ]
    digests = {window.digest for window in windows}
    assert len(digests) == len(windows)
