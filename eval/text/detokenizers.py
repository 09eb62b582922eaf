"""Rewriting a document before it is tokenized, where a protocol asks for it.

WikiText comes tokenized: marks stand between spaces (``8 @,@ 600 , he said``).  lm-eval's task ``wikitext`` undoes most
of this before it scores a page, while it counts words and bytes of the unchanged page.  ``wikitext`` below does what
lm-eval 0.4.13's detokenizer does, its slips included, since only the same text gives the same perplexity; on all 62
pages of WikiText-2's test split the two give the same string (``benchmarks/against_lm_eval.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from eval.specs.methods import Detokenizer


def wikitext(page: str) -> str:
    """A page of WikiText as lm-eval's task ``wikitext`` scores it; the order of the steps matters."""
    text = page.replace("s '", "s'")
    text = re.sub("/' [0-9]/", "/'[0-9]/", text)  # lm-eval's slip: meant for years ('99), it rewrites "/' 9/" alone
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for begin, end in ("()", "[]", "{}", '""', "''"):
        inner = rf"{re.escape(begin)}\s*([^{re.escape(end)}]*?)\s*{re.escape(end)}"
        text = re.sub(inner, rf"{begin}\1{end}", text)
    for level in (4, 3, 2):
        text = text.replace(" ".join("=" * level), "=" * level)
    for old, new in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return text


DETOKENIZERS: dict[Detokenizer, Callable[[str], str]] = {"wikitext": wikitext}
