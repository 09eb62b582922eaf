"""Tokenize a text, and count the bytes of each token.

A text is tokenized as a whole, with BOS if the tokenizer adds it; for method ``lm_eval`` each
document separately.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.checkpoint.tokenizers import follow_file
from ...backends.common.errors import InputError
from ...backends.common.message_text import duration_in_words, one_line
from ...backends.common.process import time_limit
from ..common.progress import Progress
from ..specs.spec_types import DataSpec, Method
from . import corpus, vocabulary

TOKENS_VERSION = 8
"""Version of the tokens.  Raise it when a text is tokenized differently or something else is
stored."""
RENDER_S = 60.0
"""Maximum seconds for a chat template to render a conversation; normal templates take milliseconds.
"""
MILLION = 1_000_000
SECONDS_PER_MILLION = 100.0
"""Maximum seconds to tokenize a million characters, in addition to ``RENDER_S``; tokenizers in Rust
take 1 s, in Python 10 s."""
LONG_TEXT = 4_000_000
"""For a text with at least this number of characters, the time is estimated by its first million,
because a text is tokenized in one step, which shows no progress."""
Ids = NDArray[np.int32]
TODAY = datetime(2024, 7, 26)
"""The date for chat templates, the default of Llama 3.1's; with today's date the tokens would
change every day."""
PREFIX_MESSAGES = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "Say something."},
]
"""The chat before each window with ``chat_template``; upstream's compare_q has the same."""


@dataclass(frozen=True)
class Chat:
    """Facts about tokens that are conversations, one per document.

    Attributes:
        roles: [n], index of each scored token's role in ``role_names``; -1: not scored.
        role_names: the roles whose tokens are scored, in alphabetical order.
        turn_method: how scored tokens were found: "generation mask" or "rendered prefixes".
        tokens_beyond_turns: number of tokens that extend beyond a scored part; they count as
            scored.
        template: SHA-256 of the chat templates.
    """

    roles: NDArray[np.int8]
    role_names: tuple[str, ...]
    turn_method: str
    tokens_beyond_turns: int
    template: str

    @property
    def scored(self) -> NDArray[np.bool_]:
        """True for scored tokens, bool [n]."""
        return np.asarray(self.roles >= 0)


@dataclass(frozen=True)
class Tokens:
    """A tokenized text.

    Attributes:
        ids: [n].
        prefix: the chat prefix.
        top_id: the tokenizer's largest id of a plain token.
        vocabulary: digest of the tokenizer's plain tokens (``eval/text/vocabulary.py``), the same
            for every text.
        leading_token: the token that the method puts before a document, or instead of a window's
            first one.
        ends: [D], index after each document.
        sizes: [n], UTF-8 bytes of each token (0 for BOS); None without offsets from the tokenizer.
        n_bytes: of all documents, before detokenizing.
        n_words: of all documents, before detokenizing.
        chat: None for a text without conversations.
        special: ids of special tokens, in order.
        notes: footnotes for the table.
        source: the version of a remote text (``hub_datasets.version``); empty for a local text, or
            if unknown.
        read: the date and time at which the text was read.
        sampler_logprobs: [n], log-probability of each sampled token in the model that sampled it,
            in nats; NaN for tokens of prompts.  None for a text that is not sampled.
    """

    ids: Ids
    prefix: Ids
    top_id: int
    vocabulary: str
    leading_token: int | None = None
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: Ids | None = None
    n_bytes: int = 0
    n_words: int = 0
    chat: Chat | None = None
    special: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    notes: tuple[str, ...] = ()
    source: str = ""
    read: str = ""
    sampler_logprobs: NDArray[np.float32] | None = None


def tokens_of_documents(
    tokenizer: Any, documents: Sequence[Ids], prefix: Sequence[int] = (), **facts: Any
) -> Tokens:
    """Return documents of token ids as ``Tokens``; ``facts``: its other fields."""
    ids = np.concatenate(documents)
    plain = vocabulary.plain_tokens(tokenizer)
    return Tokens(
        ids,
        np.asarray(prefix, np.int32),
        max(plain),
        vocabulary.digest(plain),
        special=np.asarray(vocabulary.special_ids(tokenizer), np.int32),
        ends=np.cumsum([len(document) for document in documents]),
        **facts,
    )


def tokenize(
    texts: Sequence[str],
    folder: Path,
    spec: DataSpec,
    progress: Progress,
    render_s: float = RENDER_S,
) -> Tokens:
    """Tokenize each text as a whole, and the chat prefix if the spec has one.

    ``render_s``: maximum seconds for the chat template, and for a short text.
    """
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    with tokenizing_limit(spec, texts, render_s):
        notes = follow_file(tokenizer, folder, texts)
    leading_token = leading_token_of(tokenizer, spec.method)
    ids = []
    sizes = []
    title = f"tokenizing {corpus.display_name(spec)}"
    with progress.phase(title, unit="tokens") as phase:
        for original in texts:
            text = original
            if spec.detokenize:
                text = detokenized(original)
            with tokenizing_limit(spec, [text], render_s):
                if len(text) >= LONG_TEXT:
                    phase.say(f"{title}: {expected_time(tokenizer, text)}")
                encoded = encode(tokenizer, text, spec.method, leading_token)
            ids.append(np.asarray(encoded["input_ids"], np.int32))
            if "offset_mapping" in encoded:
                sizes.append(byte_sizes(text, encoded["offset_mapping"]))
            phase.advance(len(ids[-1]))
    prefix: list[int] = []
    if spec.chat_template:
        prefix = chat_prefix(tokenizer, render_s)
    all_sizes = None
    if sizes:
        all_sizes = np.concatenate(sizes)
    return tokens_of_documents(
        tokenizer,
        ids,
        prefix,
        leading_token=leading_token,
        sizes=all_sizes,
        notes=notes,
        # Like lm-eval, of the texts before they are detokenized.
        n_bytes=sum(len(text.encode()) for text in texts),
        n_words=sum(count_words(text) for text in texts),
    )


def tokenizing_limit(
    spec: DataSpec, texts: Sequence[str], least_s: float
) -> AbstractContextManager[None]:
    """Return a block in which the texts must be tokenized, or else InputError.

    Short texts have ``least_s`` seconds.
    """
    n_characters = sum(len(text) for text in texts)
    seconds = least_s + SECONDS_PER_MILLION * n_characters / MILLION
    return time_limit(f"tokenizer_dir: tokenizing {corpus.display_name(spec)}", seconds)


def expected_time(tokenizer: Any, text: str) -> str:
    """Return the size of a long text, and the time that tokenizing it takes.

    The time is extrapolated from the text's first characters.
    """
    began = time.perf_counter()
    tokenizer(text[:MILLION])
    millions = len(text) / MILLION
    seconds = (time.perf_counter() - began) * millions
    duration = duration_in_words(seconds)
    return f"{millions:,.1f} million characters, about {duration}, by the time of the first million"


def leading_token_of(tokenizer: Any, method: Method) -> int | None:
    """Return the token before a document or instead of a chunk's first token.

    InputError if the tokenizer lacks one.
    """
    if method == "lm_eval":
        return prefix_token(tokenizer)
    if method != "llamacpp":
        return None
    # The config's add_bos_token is not used, because many tokenizers ignore it.
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    if with_special == plain:
        return None
    if with_special[1:] != plain:
        raise InputError(
            "tokenizer_dir: adds more than BOS to a text, which method "
            '"llamacpp" cannot reproduce: '
            f"{tokenizer.convert_ids_to_tokens(with_special)} for 'a'"
        )
    return int(with_special[0])


def prefix_token(tokenizer: Any) -> int:
    """Return lm-eval's prefix token: BOS, or EOS without one; InputError if there is neither."""
    token = tokenizer.bos_token_id
    if token is None:
        token = tokenizer.eos_token_id
    if token is None:
        why = 'method "lm_eval" begins documents with one of them'
        raise InputError(f"tokenizer_dir: the tokenizer has no BOS and no EOS; {why}")
    return int(token)


def encode(tokenizer: Any, text: str, method: Method, leading_token: int | None) -> Any:
    """Return ``input_ids`` of a text, and ``offset_mapping`` where the tokenizer gives one.

    ``lm_eval`` adds no special tokens to a document that begins with the text of the prefix token,
    to avoid two BOS.  ``llamacpp`` reads special tokens in the text as plain text; InputError if
    this tokenizer does not.
    """
    options: dict[str, Any] = {}
    if tokenizer.is_fast:
        options["return_offsets_mapping"] = True
    if method == "lm_eval" and text.startswith(tokenizer.decode(leading_token)):
        options["add_special_tokens"] = False
    if method != "llamacpp":
        return tokenizer(text, **options)
    encoded = tokenizer(text, split_special_tokens=True, **options)
    # Some tokenizers ignore ``split_special_tokens``; only their result shows it.
    first = 0
    if leading_token is not None:
        first = 1  # the tokenizer's own BOS
    ids_in_text = set(encoded["input_ids"][first:])
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special and number in ids_in_text and token.content in text:
            raise InputError(
                f"dataset: its text holds {token.content!r}, which llama-perplexity reads as plain "
                'text and this tokenizer does not; use another method than "llamacpp"'
            )
    return encoded


def byte_sizes(text: str, offsets: Sequence[tuple[int, int]]) -> Ids:
    """Return the UTF-8 bytes of ``text`` for each token, int32 [n], from the tokens' offsets.

    Offsets are in characters.  Bytes are counted from the end of the previous token.  Text without
    a token counts with the next token, or with the last one.  A character that is split over
    several tokens counts with the first.  Added special tokens have 0 bytes.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    bytes_before = np.concatenate(([0], np.cumsum(widths)))
    last_characters = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
    # Offsets may go back: an added special token is at (0, 0).
    ends = bytes_before[np.maximum.accumulate(last_characters)]
    ends[-1:] = bytes_before[-1]
    return np.diff(ends, prepend=0).astype(np.int32)


def count_words(text: str) -> int:
    """Return the number of words as lm-eval counts them: ``len(re.split(r"\\s+", text))``."""
    return 1 + sum(1 for _ in re.finditer(r"\s+", text))


def chat_prefix(tokenizer: Any, render_s: float) -> list[int]:
    """Return the token ids of ``PREFIX_MESSAGES``.

    InputError if the tokenizer has no template, or if the template refuses the messages.
    """
    try:
        with time_limit("it", render_s):
            encoded = tokenizer.apply_chat_template(
                PREFIX_MESSAGES,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                strftime_now=TODAY.strftime,
            )
    except Exception as error:  # no template, or the template's own raise_exception
        raise InputError(
            f"chat_template: the tokenizer cannot apply it: {one_line(error)}"
        ) from None
    return list(encoded["input_ids"])


def detokenized(page: str) -> str:
    """Return a page of WikiText as lm-eval's task ``wikitext`` scores it.

    WikiText has spaces around punctuation (``8 @,@ 600 , he said``).  The task removes most of
    these spaces, but counts words and bytes of the unchanged page.  This function repeats lm-eval
    0.4.13's detokenizer, including its mistakes: both return the same string for all 62 pages of
    WikiText-2's test split (``benchmarks/against_lm_eval.py``).
    """
    # The order of the steps matters: each sees the spaces that the ones before it have left.
    text = page.replace("s '", "s'")
    # lm-eval's mistake: meant for years ('99), it only rewrites "/' 9/".
    text = re.sub("/' [0-9]/", "/'[0-9]/", text)
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
