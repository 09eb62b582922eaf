"""Lists, shares and ratios in words."""

from __future__ import annotations

import pytest

from compare_q.eval.table.wording import (
    first_words_and_count,
    joined_words,
    ratio_in_words,
    share_in_words,
    texts_of,
    with_text_name,
)
from tests.support.made import QUANT, run_of
from tests.support.several_texts import three


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("a", "a"),
        ("ab", "a and b"),
        # The fourth of four words is named, so that no list ends in "1 more".
        ("abcd", "a, b, c and d"),
        ("abcde", "a, b, c and 2 more"),
        ("abcdefghijkl", "a, b, c and 9 more"),
    ],
)
def test_lists(words: str, text: str) -> None:
    assert first_words_and_count(list(words)) == text


def test_a_joined_list_has_all_words() -> None:
    assert joined_words(list("abcde")) == "a, b, c, d and e"


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100.0 %"), (0.99999, "over 99.9 %"), (0.5, "50.0 %")]
)
def test_shares(share: float, text: str) -> None:
    assert share_in_words(share) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        # With two digits, 1.04 would be 1.
        (1.04, "1.04"),
        (4.11, "4.1"),
        (173.0, "170"),
        (1234.0, "1,200"),
    ],
)
def test_ratios(ratio: float, text: str) -> None:
    assert ratio_in_words(ratio) == text


def test_one_and_several_texts() -> None:
    run = run_of(QUANT)
    assert (texts_of(run), with_text_name(run, "c4", "a note")) == ("text", "a note")
    assert (texts_of(three()), with_text_name(three(), "c4", "a note")) == ("texts", "c4: a note")
