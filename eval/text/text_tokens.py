"""Tokenize a text, and count the bytes of each token; tokens are kept in the cache.

A text is tokenized as a whole, with BOS if the tokenizer adds it; for method ``lm_eval`` each
document separately.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.checkpoint.tokenizers import follow_file
from ...backends.common import json_files, storage
from ...backends.common.errors import InputError
from ...backends.common.message_text import duration_in_words, one_line
from ...backends.common.process import time_limit
from ...backends.reference import pack_files
from ..common.cache import Cache
from ..common.progress import Progress
from ..specs.spec_types import DataSpec, Method
from . import corpus, vocabulary

TOKENS_VERSION = 8
"""Version of the tokens.  Raise it when a text is tokenized differently or something else is
stored."""
RENDER_S = 60.0
"""Maximum seconds for a chat template to render a conversation; normal templates take milliseconds.
"""
SECONDS_A_MILLION = 100.0
"""Maximum seconds to tokenize a million characters, in addition to ``RENDER_S``; tokenizers in Rust
take 1 s, in Python 10 s."""
LONG = 4_000_000
"""For a text with at least this number of characters, the time is estimated by its first million,
because a text is tokenized in one step, which shows no progress."""
MILLION = 1_000_000
Ids = NDArray[np.int32]
TODAY = datetime(2024, 7, 26)
"""The date for chat templates, the default of Llama 3.1's; with today's date the tokens would
change every day."""
CHAT = [{"role": "system", "content": ""}, {"role": "user", "content": "Say something."}]


@dataclass(frozen=True)
class Chat:
    """Facts about tokens that are conversations, one per document."""

    roles: NDArray[
        np.int8
    ]  # [n], index of each scored token's role in ``role_names``; -1: not scored
    role_names: tuple[str, ...]  # the roles whose tokens are scored, in alphabetical order
    found_by: str  # how scored tokens were found: "generation mask" or "rendered prefixes"
    across: int  # number of tokens that extend beyond a scored part; they count as scored
    template: str  # SHA-256 of the chat templates

    @property
    def scored(self) -> NDArray[np.bool_]:
        """True for scored tokens, bool [n]."""
        return np.asarray(self.roles >= 0)


@dataclass(frozen=True)
class Tokens:
    """A tokenized text."""

    ids: Ids  # [n]
    prefix: Ids  # the chat prefix
    top_id: int  # the tokenizer's largest id of a plain token
    # digest of the tokenizer's plain tokens (``eval/text/vocabulary.py``); the same for every text
    vocabulary: str
    lead: int | None = (
        None  # the token that the method puts before a document, or instead of a window's first one
    )
    ends: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [D], index after each document
    sizes: Ids | None = (
        None  # [n], UTF-8 bytes of each token (0 for BOS); None without offsets from the tokenizer
    )
    n_bytes: int = 0  # of all documents, before detokenizing; also n_words
    n_words: int = 0
    chat: Chat | None = None  # of conversations
    special: Ids = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # ids of special tokens, in order
    notes: tuple[str, ...] = ()  # footnotes for the table
    # the version of a remote text (``hub_datasets.version``); empty for a local text, or if unknown
    source: str = ""
    read: str = ""  # the date and time at which the text was read


def tokens_of(
    tokenizer: Any, documents: Sequence[Ids], prefix: Sequence[int] = (), **known: Any
) -> Tokens:
    """Return documents of token ids as ``Tokens``."""
    ids = np.concatenate(documents)
    plain = vocabulary.plain_tokens(tokenizer)
    return Tokens(
        ids,
        np.asarray(prefix, np.int32),
        max(plain),
        vocabulary.digest(plain),
        special=np.asarray(vocabulary.special_ids(tokenizer), np.int32),
        ends=np.cumsum([len(document) for document in documents]),
        **known,
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
    lead = lead_of(tokenizer, spec.method)
    ids, sizes = [], []
    title = f"tokenizing {corpus.display_name(spec)}"
    with progress.phase(title, unit="tokens") as phase:
        for original in texts:
            text = detokenized(original) if spec.detokenize else original
            with tokenizing_limit(spec, [text], render_s):
                if len(text) >= LONG:
                    phase.say(f"{title}: {expected_time(tokenizer, text)}")
                encoded = encode(tokenizer, text, spec.method, lead)
            ids.append(np.asarray(encoded["input_ids"], np.int32))
            if "offset_mapping" in encoded:
                sizes.append(byte_sizes(text, encoded["offset_mapping"]))
            phase.advance(len(ids[-1]))
    return tokens_of(
        tokenizer,
        ids,
        chat_prefix(tokenizer, render_s) if spec.chat_template else (),
        lead=lead,
        sizes=np.concatenate(sizes) if sizes else None,
        notes=notes,
        n_bytes=sum(len(text.encode()) for text in texts),
        n_words=sum(map(n_words, texts)),
    )


def tokenizing_limit(
    spec: DataSpec, texts: Sequence[str], least_s: float
) -> AbstractContextManager[None]:
    """Return a block in which the texts must be tokenized, or else InputError; short texts have
    ``least_s`` seconds.
    """
    seconds = least_s + SECONDS_A_MILLION * sum(map(len, texts)) / MILLION
    return time_limit(f"tokenizer_dir: tokenizing {corpus.display_name(spec)}", seconds)


def expected_time(tokenizer: Any, text: str) -> str:
    """Return the size of a long text, and the time that tokenizing it takes, by that of its first
    characters.
    """
    began = time.perf_counter()
    tokenizer(text[:MILLION])
    millions = len(text) / MILLION
    seconds = (time.perf_counter() - began) * millions
    return f"{millions:,.1f} million characters, about {duration_in_words(seconds)}, by the time of the first million"


def lead_of(tokenizer: Any, method: Method) -> int | None:
    """Return the token before a document or instead of a chunk's first token; InputError if the
    tokenizer lacks one.
    """
    if method == "lm_eval":
        return prefix_token(tokenizer)
    if method != "llamacpp":
        return None
    # The config's add_bos_token is not used, because many tokenizers ignore it.
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    if whole != bare and whole[1:] != bare:
        raise InputError(
            'tokenizer_dir: adds more than BOS to a text, which method "llamacpp" cannot reproduce: '
            f"{tokenizer.convert_ids_to_tokens(whole)} for 'a'"
        )
    return None if whole == bare else int(whole[0])


def prefix_token(tokenizer: Any) -> int:
    """Return lm-eval's prefix token: BOS, or EOS without one; InputError if there is neither."""
    found = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if found is None:
        why = 'method "lm_eval" begins documents with one of them'
        raise InputError(f"tokenizer_dir: the tokenizer has no BOS and no EOS; {why}")
    return int(found)


def encode(tokenizer: Any, text: str, method: Method, lead: int | None) -> Any:
    """Return ``input_ids`` of a text, and ``offset_mapping`` where the tokenizer gives one.

    ``lm_eval`` adds no special tokens to a document that begins with the text of the prefix token,
    to avoid two BOS.  ``llamacpp`` reads special tokens in the text as plain text; InputError if
    this tokenizer does not.
    """
    options: dict[str, Any] = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    if method == "lm_eval" and text.startswith(tokenizer.decode(lead)):
        options["add_special_tokens"] = False
    if method != "llamacpp":
        return tokenizer(text, **options)
    encoded = tokenizer(text, split_special_tokens=True, **options)
    present = set(encoded["input_ids"][lead is not None :])
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special and number in present and token.content in text:
            raise InputError(
                f"dataset: its text holds {token.content!r}, which llama-perplexity reads as plain text and this "
                'tokenizer does not; use another method than "llamacpp"'
            )
    return encoded


def byte_sizes(text: str, offsets: Sequence[tuple[int, int]]) -> Ids:
    """Return the UTF-8 bytes of ``text`` for each token, int32 [n], from the tokens' offsets in
    characters.

    Bytes are counted from the end of the previous token.  Text without a token counts with the next
    token, or with the last one.  A character that is split over several tokens counts with the
    first.  Added special tokens have 0 bytes.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    before = np.concatenate(([0], np.cumsum(widths)))
    last = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
    ends = before[np.maximum.accumulate(last)]
    ends[-1:] = before[-1]
    return np.diff(ends, prepend=0).astype(np.int32)


def n_words(text: str) -> int:
    """Return the number of words as lm-eval counts them: ``len(re.split(r"\\s+", text))``."""
    return 1 + sum(1 for _ in re.finditer(r"\s+", text))


def chat_prefix(tokenizer: Any, render_s: float) -> list[int]:
    """Return the token ids of upstream's fixed chat; InputError if the tokenizer has no template or
    refuses it.
    """
    try:
        with time_limit("it", render_s):
            encoded = tokenizer.apply_chat_template(
                CHAT,
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
    """Return a page of WikiText as lm-eval's task ``wikitext`` scores it; the order of the steps
    matters.

    WikiText has spaces around punctuation (``8 @,@ 600 , he said``).  The task removes most of
    these spaces, but counts words and bytes of the unchanged page.  This function repeats lm-eval
    0.4.13's detokenizer, including its mistakes: both return the same string for all 62 pages of
    WikiText-2's test split (``benchmarks/against_lm_eval.py``).
    """
    text = page.replace("s '", "s'")
    text = re.sub(
        "/' [0-9]/", "/'[0-9]/", text
    )  # lm-eval's mistake: meant for years ('99), it only rewrites "/' 9/"
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


def load(cache: Cache, key: str) -> Tokens | None:
    """Read tokens from the cache; None if they are missing, damaged or stored under another key."""
    try:
        arrays = storage.read_arrays(cache.path("tokens", key, ".npz"))
    except (InputError, OSError, ValueError):
        return None
    return of_arrays(arrays, key)


def of_pack(folder: Path) -> Tokens:
    """Return the tokens of a reference pack; InputError if they are damaged, or of an older
    compare_q.
    """
    arrays, texts = pack_files.arrays_of(folder / pack_files.TOKENS)
    if "facts" in texts and "special" not in arrays:
        raise InputError(
            f"{folder / pack_files.TOKENS}: written by an older compare_q, without special tokens and roles; "
            "record the pack again with compare-q pack, in another folder"
        )
    try:
        check_arrays(arrays)
        found = of_arrays({**arrays, **texts}, pack_files.TOKENS)
        if found is not None:
            check_facts(found)
    except RecursionError:
        raise InputError(f"{folder / pack_files.TOKENS}: damaged: {json_files.TOO_DEEP}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{folder / pack_files.TOKENS}: damaged: {one_line(error)}") from None
    if found is None:
        raise InputError(f"{folder / pack_files.TOKENS}: holds no tokens of this compare_q")
    return found


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """ValueError unless the arrays of a pack's tokens have their types and shapes, and fit each
    other.
    """
    names = ["ids", "prefix", "sizes", "special", "ends", "numbers"]
    if "roles" in arrays:
        names.append("roles")
    for name in names:
        pack_files.check_array(arrays, name, "i", 1)
    if "top_id" not in arrays or arrays["top_id"].dtype.kind != "i" or arrays["top_id"].size != 1:
        raise ValueError("top_id is not an integer")
    ids = arrays["ids"]
    if ids.min(initial=0) < 0 or arrays["prefix"].min(initial=0) < 0:
        raise ValueError("a token has a negative id")
    if len(arrays["sizes"]) not in (0, len(ids)):
        raise ValueError("the sizes do not fit the tokens")
    ends = arrays["ends"]
    if (np.diff(ends) < 0).any() or ends.min(initial=0) < 0 or ends.max(initial=0) > len(ids):
        raise ValueError("the documents do not fit the tokens")


def check_facts(tokens: Tokens) -> None:
    """ValueError unless the texts of a pack's tokens have their types."""
    texts = [tokens.source, tokens.read, *tokens.notes]
    chat = tokens.chat
    if chat is not None:
        texts += [chat.found_by, chat.template, *chat.role_names]
        if type(chat.across) is not int:
            raise ValueError("the number of tokens beyond scored parts is not an integer")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a fact that is a text has another type")


def write_pack(folder: Path, tokens: Tokens) -> None:
    """Write the tokens into a reference pack; strings are metadata of the file."""
    from safetensors.numpy import save_file

    found = arrays_of(tokens, pack_files.TOKENS)
    texts = {name: value for name, value in found.items() if isinstance(value, str)}
    arrays = {
        name: np.asarray(value, order="C") for name, value in found.items() if name not in texts
    }
    save_file(arrays, folder / pack_files.TOKENS, texts)


def of_arrays(arrays: Mapping[str, Any], key: str) -> Tokens | None:
    """Return the tokens from the arrays of ``arrays_of``; None if they are stored under another
    key.
    """
    stored_key, notes, *origin = json.loads(str(arrays["facts"])) if "facts" in arrays else ("", ())
    if stored_key != key:
        return None
    (lead, n_bytes, words), sizes, chat = map(int, arrays["numbers"]), arrays["sizes"], None
    if "chat" in arrays:
        found_by, across, template, role_names = json.loads(str(arrays["chat"]))
        roles = arrays["roles"]
        if len(roles) != len(arrays["ids"]) or roles.max(initial=-1) >= len(role_names):
            raise ValueError("the roles do not fit the tokens")
        chat = Chat(roles, tuple(role_names), found_by, across, template)
    return Tokens(
        arrays["ids"],
        arrays["prefix"],
        arrays["top_id"].item(),
        str(arrays["vocabulary"]),
        None if lead < 0 else lead,
        arrays["ends"],
        sizes if sizes.size else None,
        n_bytes,
        words,
        chat,
        arrays["special"],
        tuple(notes),
        *origin,
    )


def save(file: Path, tokens: Tokens, key: str) -> None:
    """Write tokens into a file that ``load`` reads under this key; InputError if it cannot be
    written.
    """
    with storage.keeping("the tokens", file.parent):
        storage.write_arrays(file, **arrays_of(tokens, key))


def arrays_of(tokens: Tokens, key: str) -> dict[str, Any]:
    """Return arrays and strings that ``of_arrays`` turns into the tokens again."""
    more: dict[str, Any] = {"facts": json.dumps([key, tokens.notes, tokens.source, tokens.read])}
    if (chat := tokens.chat) is not None:
        facts = [chat.found_by, chat.across, chat.template, chat.role_names]
        more |= {"roles": chat.roles, "chat": json.dumps(facts)}
    return {
        "ids": tokens.ids,
        "prefix": tokens.prefix,
        "top_id": np.int64(tokens.top_id),
        "vocabulary": tokens.vocabulary,
        "numbers": np.array(
            [-1 if tokens.lead is None else tokens.lead, tokens.n_bytes, tokens.n_words], np.int64
        ),
        "ends": tokens.ends,
        "sizes": np.zeros(0, np.int32) if tokens.sizes is None else tokens.sizes,
        "special": tokens.special,
        **more,
    }
