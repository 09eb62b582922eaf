"""Compare the tokenizer rules of a GGUF file and its reference: merges, pre-tokenizer, BOS, prefix.

compare_q gives models token ids, so that its scores do not depend on these rules.  A server of the
file depends on them: with other rules, the server gives the model other tokens.

A header states only the name of a pre-tokenizer.  If llama.cpp is installed, it tokenizes sample
texts, and the tokens are compared.  The samples are normalized (NFKC), because llama.cpp does not
normalize text.  Without this, correct conversions of models that normalize text would differ.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..common.message_text import amount, printable

ORDINARY_SAMPLES = (
    "Hello world, it's 12345.67 at IT'S 3rd place (sic)!",
    "two  spaces and a tab\there,\n\n\tand some after   ",
    "def f(x_1: int) -> str:\n    return f'{x_1!r}'  # ok\r\n",
)
"""Contractions, digits, white space, code: correct conversions tokenize these samples equally."""
SCRIPTS = (
    "Größe, naïve café, cafe\u0301, ﬁne, Ａｂｃ１２, x², ½",
    "Быстрая лиса; Γειά σου; שלום עולם; مرحبا بالعالم ١٢٣",
    "हिन्दी में; สวัสดีชาวโลก; Tiếng Việt",
    "汉字和「かな」カタカナ、한국어 문장。",
    "👩‍👩‍👧 🇩🇪 🙂; zero\u200bwidth, no\u00a0break",
)
"""Unicode's normal forms and many scripts.

Libraries differ in the classes of characters that they know.
"""
LEADING_SPACES = ("\u2581", "\u0120")
"""The character of a leading space in tokens, in SentencePiece's and in byte-level vocabularies."""
SPACED = chr(ord(" ") + 256)
"""The character that llama.cpp's converter writes for a space inside a part of a merge."""
MADE = "sample_tokens"
"""Key in a row's provenance: the samples as tokenized by the engine's own tokenizer."""
CLASSES_WITH_BOS = ("Llama", "CodeLlama", "Gemma", "Cohere")
"""Beginnings of names of Transformers' classes that may add BOS.

They do so even if config and tokenizer.json do not request it.
"""
SERVED = "a server of this file gives the model other tokens"


@dataclass(frozen=True)
class Rules:
    """The rules of a tokenizer; a field is None or empty if it is not known."""

    merges: Sequence[str] = ()  # of BPE, in order: the two parts with a space between them
    adds_bos: frozenset[bool] = frozenset()  # as the files state it; two values if they disagree
    prefixes: bool | None = None  # a space is added before the text
    pre: str | None = None  # name of the pre-tokenizer in a header; "" if the header states no name
    ids: Mapping[str, str] = field(default_factory=dict)
    """Digest of a sample -> digest of its ids without BOS."""


class Fault(NamedTuple):
    """A difference between two tokenizers; ``is_sure``: some text surely becomes other tokens."""

    what: str
    is_sure: bool = True


def samples() -> list[str]:
    """Return the texts whose tokens are compared."""
    return [unicodedata.normalize("NFKC", text) for text in (*ORDINARY_SAMPLES, *SCRIPTS)]


def digest(value: Any) -> str:
    """Return a short digest of a text or of ids."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def digests(ids: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return digest of a sample -> digest of its ids.

    ``ids``: one list per sample of ``samples``, or empty.
    """
    by_sample = {}
    for text, text_ids in zip(samples(), ids, strict=False):
        by_sample[digest(text)] = digest(list(text_ids))
    return by_sample


def of_tokenizer(tokenizer: Any, config: Mapping[str, Any]) -> Rules:
    """Return the rules of a tokenizer of the library ``tokenizers``.

    ``config``: its tokenizer_config.json.
    """
    model = json.loads(tokenizer.to_str())["model"]
    merges = []
    for pair in model.get("merges") or ():
        merges.append(pair if isinstance(pair, str) else joined(pair))
    bare = tokenizer.encode("a", add_special_tokens=False)
    with_special = tokenizer.encode("a")
    adds_bos = {with_special.ids[: len(bare.ids)] != bare.ids}
    if isinstance(config.get("add_bos_token"), bool):
        adds_bos.add(config["add_bos_token"])
    elif str(config.get("tokenizer_class")).startswith(CLASSES_WITH_BOS):
        # Not known: the class decides, not the file.
        adds_bos = {True, False}
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in samples()]
    prefixes = bool(bare.tokens) and bare.tokens[0].startswith(LEADING_SPACES)
    return Rules(merges, frozenset(adds_bos), prefixes, None, digests(ids))


def joined(pair: Sequence[str]) -> str:
    """Return the two parts of a merge as llama.cpp's converter writes them."""
    return " ".join(part.replace(" ", SPACED) for part in pair)


def of_header(
    fields: Mapping[str, Any], merges: Sequence[str], engine_tokens: Mapping[str, Any] | None
) -> Rules:
    """Return the rules in the fields of a header.

    ``engine_tokens``: the ``samples`` as llama.cpp tokenizes them with the file's vocabulary
    (digests of ``ids``, and ``adds_bos``); None if unknown.
    """
    stated_bos = fields.get("tokenizer.ggml.add_bos_token")
    ids: Mapping[str, str] = {}
    if engine_tokens is not None:
        stated_bos = engine_tokens["adds_bos"]
        ids = engine_tokens["ids"]
    adds_bos = frozenset[bool]()
    if isinstance(stated_bos, bool):
        adds_bos = frozenset({stated_bos})
    prefixes = fields.get("tokenizer.ggml.add_space_prefix")
    if prefixes is None and fields.get("tokenizer.ggml.model") == "llama":
        prefixes = True  # llama.cpp's default for SentencePiece
    if not isinstance(prefixes, bool):
        prefixes = None
    pre = str(fields.get("tokenizer.ggml.pre") or "")
    return Rules(merges, adds_bos, prefixes, pre, ids)


def faults(mine: Rules, reference: Rules) -> Iterator[Fault]:
    """Yield the differences between the rules of a model and its reference, if one is a GGUF."""
    compared = bool(mine.ids.keys() & reference.ids.keys())
    fault = fault_of_tokens(mine, reference, compared=compared)
    if fault is not None:
        yield fault
    if mine.adds_bos and reference.adds_bos and mine.adds_bos.isdisjoint(reference.adds_bos):
        adds = "adds"
        does = "does not"
        if True not in mine.adds_bos:
            adds = "does not add"
            does = "does"
        yield Fault(f"it {adds} a BOS token before the text, and the reference {does}")
    states_prefixes = mine.prefixes is not None and reference.prefixes is not None
    if not compared and states_prefixes and mine.prefixes != reference.prefixes:
        adds = "adds"
        does = "does not"
        if not mine.prefixes:
            adds = "does not add"
            does = "does"
        yield Fault(f"it {adds} a space before the text, and the reference {does}")


def fault_of_tokens(mine: Rules, reference: Rules, *, compared: bool) -> Fault | None:
    """Return why text becomes other tokens, or may; None if nothing shows that.

    Merges that surely differ are the most precise reason.  ``compared``: the tokens of some samples
    are known of both; then they decide, and not what may differ.
    """
    merges_fault = fault_of_merges(mine, reference)
    if merges_fault is not None and (merges_fault.is_sure or not compared):
        return merges_fault
    text = cut_differently(mine, reference)
    if text is not None:
        is_ordinary = text in [unicodedata.normalize("NFKC", sample) for sample in ORDINARY_SAMPLES]
        pre = ""
        if mine.pre is not None:
            pre = f"its pre-tokenizer is {pre_in_words(mine.pre)}, and "
        return Fault(
            f"{pre}it cuts text into other tokens than the reference, such as {text!r}",
            is_ordinary,
        )
    states_pre = mine.pre is not None and reference.pre is not None
    if not compared and states_pre and mine.pre != reference.pre:
        names = f"{pre_in_words(mine.pre)}, and the reference's is {pre_in_words(reference.pre)}"
        return Fault(f"its pre-tokenizer is {names}")
    return None


def pre_in_words(name: str | None) -> str:
    """Return the name of a pre-tokenizer for messages."""
    if not name:
        return "not named"
    return repr(printable(name))


def cut_differently(mine: Rules, reference: Rules) -> str | None:
    """Return the first sample that becomes other tokens; None if none does, or if unknown."""
    for text in samples():
        key = digest(text)
        if key in mine.ids and key in reference.ids and mine.ids[key] != reference.ids[key]:
            return text
    return None


def fault_of_merges(mine: Rules, reference: Rules) -> Fault | None:
    """Return how merges differ; None if they do not differ, or if a model does not state merges.

    If a vocabulary does not come with merges (tiktoken's), converters write one merge for each
    token, or every merge that makes a token.  Both ways tokenize equally.  Merges surely differ
    only if they make different tokens.
    """
    ours = list(mine.merges)
    theirs = list(reference.merges)
    if not ours or not theirs or ours == theirs:
        return None
    our_tokens = {merged(merge) for merge in ours}
    their_tokens = {merged(merge) for merge in theirs}
    for merge in theirs:
        if merged(merge) not in our_tokens:
            count = amount(len(their_tokens - our_tokens), "merge")
            return Fault(f"it lacks {count} of the reference, such as {printable(merge)!r}")
    for merge in ours:
        if merged(merge) not in their_tokens:
            count = amount(len(our_tokens - their_tokens), "merge")
            return Fault(f"it has {count} that the reference lacks, such as {printable(merge)!r}")
    return Fault(
        "its merges are in another order than the reference's, or of other parts", is_sure=False
    )


def merged(merge: str) -> str:
    """Return the token that a merge makes."""
    return merge.replace(" ", "", 1)
