"""lm-eval's page detokenizer, by strings written by hand; ``benchmarks/against_lm_eval.py`` compares whole texts."""

from __future__ import annotations

import pytest

from eval.text.detokenizers import wikitext


@pytest.mark.parametrize(
    ("page", "gold"),
    [
        ("8 @,@ 600 well @-@ known , 3 @.@ 5", "8,600 well-known, 3.5"),
        ("a : b ; c . d ! e ? f , g", "a: b; c. d! e? f, g"),
        ("the end .", "the end ."),  # nothing follows the full stop, so its space stays
        ("( a ) [ b ] { c }", "(a) [b] {c}"),
        ('he said " no " .', 'he said "no" .'),
        ("the ' 90s and ' 80s", "the '90s and' 80s"),  # a pair of quotes, as far as the expression can tell
        ("the dogs ' food", "the dogs' food"),
        ("the dogs ' food , Teddy 's", "the dogs'food, Teddy's"),  # likewise
        ("Teddy 's Story", "Teddy's Story"),
        (" = A = \n = = B = = \n = = = C = = = ", " = A =\n== B ==\n=== C === "),
        ("= = = = D = = = =", "==== D ===="),
        ("a \n b \n c", "a\nb\nc"),
        ("20 ° C , 5 N north", "20°C, 5 1 north"),  # lm-eval's slip: N stands for a number in PTB, not here
        ("/' 9/ and 99", "/'[0-9]/ and 99"),  # its slip with years
        ("", ""),
    ],
)
def test_wikitext(page: str, gold: str) -> None:
    assert wikitext(page) == gold
