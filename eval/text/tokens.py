"""Text -> tokens, and the bytes that each token stands for; kept in the cache under all that they depend on.

A text is tokenized as a whole, with BOS where the tokenizer adds it.  Two methods (``eval/text/cutting.py``) differ:

- ``llamacpp``: one newline at the end of the text is dropped, special tokens that are written in it are
  plain text, and each chunk's first token is replaced by the token that the tokenizer puts before a text, if any;
- ``lm_eval``: documents are tokenized by themselves, and a document that begins with the prefix token's text is
  tokenized without special tokens, as lm-eval does, so that BOS does not stand there twice.  With ``detokenize`` each
  document is rewritten first (``detokenized``); bytes and words are counted in the original.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.backends.common import storage
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import one_line
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.types import DataSpec, Method
from compare_q.eval.text import corpus, vocabulary

TOKENS_VERSION = 6
"""Version of the tokens; a change of what is tokenized or kept raises it.

1: token ids and the chat prefix.
2: every line end of a text file is read as a newline: with Windows line ends a window's PPL was 15.02 for 15.20.
3: the digest of the vocabulary, since tokenizers are compared by content.
4: the methods of other tools: documents, the token before them, and the bytes of every token.
5: ``llamacpp`` reads the line ends of a plain file as they stand; texts may be detokenized.
6: the chat prefix of a template that prints today's date has a fixed one.
"""
COLUMNS = ("question", "scored", "right", "chars")
"""The arrays of ``Requests``."""
Ids = NDArray[np.int32]
TODAY = datetime(2024, 7, 26)
"""The date that templates are told, which Llama 3.1's has built in; today's would change the tokens every day."""
CHAT = [{"role": "system", "content": ""}, {"role": "user", "content": "Say something."}]


@dataclass(frozen=True)
class Chat:
    """What is known of tokens that are conversations, one a document.

    ``scored`` bool [n]: the tokens that are scored.  ``told_by``: how they were told, "generation mask" or
    "rendered prefixes".  ``across``: tokens that reach over an edge of a scored part, and count as scored.
    ``template``: SHA-256 of the chat templates.
    """

    scored: NDArray[np.bool_]
    told_by: str
    across: int
    template: str


@dataclass(frozen=True)
class Requests:
    """What is known of tokens that are requests of lm-eval, one a document, those of a question one after another.

    All [D]: ``question`` int32, from 0; ``scored`` int32, how many tokens at the end are the answer; ``right`` bool,
    whether the answer is right; ``chars`` int32, the characters by which ``acc_norm`` divides.  ``task`` is its name,
    ``num_fewshot`` how many examples stand before a question.
    """

    question: Ids
    scored: Ids
    right: NDArray[np.bool_]
    chars: Ids
    task: str
    num_fewshot: int

    def first(self, count: int) -> Requests:
        """The first ``count`` requests."""
        return replace(self, **{name: getattr(self, name)[:count] for name in COLUMNS})


@dataclass(frozen=True)
class Tokens:
    """A tokenized text: ``ids`` and the chat ``prefix`` are int32 [n]; ``top_id`` is the tokenizer's largest plain id.

    ``vocabulary`` is the digest of what the plain ids stand for, and in conversations the special ones they hold
    (``eval/text/vocabulary.py``).  ``lead``: the token that the method puts before a document or in place of a window's
    first.  ``ends`` int64 [D]: text index after each document.  ``sizes`` int32 [n]: UTF-8 bytes of the tokenized text
    that end with a token (0 for a BOS); None if the tokenizer gives no offsets.  ``n_bytes`` and ``n_words``: of all
    documents, before any detokenizing.  ``chat`` and ``requests``: None unless the documents are conversations, or
    requests.
    """

    ids: Ids
    prefix: Ids
    top_id: int
    vocabulary: str
    lead: int | None = None
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: Ids | None = None
    n_bytes: int = 0
    n_words: int = 0
    chat: Chat | None = None
    requests: Requests | None = None


def tokens_of(
    tokenizer: Any, documents: Sequence[Ids], prefix: Sequence[int] = (), *, with_special: bool = False, **known: Any
) -> Tokens:
    """Documents of token ids as ``Tokens``; ``with_special``: the vocabulary has the special tokens that they hold."""
    ids, plain = np.concatenate(documents), vocabulary.plain_tokens(tokenizer)
    shared = vocabulary.plain_tokens(tokenizer, ids.tolist()) if with_special else plain
    return Tokens(
        ids, np.asarray(prefix, np.int32), max(plain), vocabulary.digest(shared),
        ends=np.cumsum([len(document) for document in documents]), **known,
    )  # fmt: skip


def tokenize(texts: Sequence[str], folder: Path, spec: DataSpec, progress: Progress) -> Tokens:
    """Tokenize each text at once, and the chat prefix if the spec wants one."""
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    lead = lead_of(tokenizer, spec.method)
    ids, sizes = [], []
    with progress.phase(f"tokenizing {corpus.display_name(spec)}", unit="tokens") as phase:
        for original in texts:
            text = detokenized(original) if spec.detokenize else original
            encoded = encode(tokenizer, text, spec.method, lead)
            ids.append(np.asarray(encoded["input_ids"], np.int32))
            if "offset_mapping" in encoded:
                sizes.append(byte_sizes(text, encoded["offset_mapping"]))
            phase.advance(len(ids[-1]))
    return tokens_of(
        tokenizer, ids, chat_prefix(tokenizer) if spec.chat_template else (), lead=lead,
        sizes=np.concatenate(sizes) if sizes else None,
        n_bytes=sum(len(text.encode()) for text in texts), n_words=sum(map(n_words, texts)),
    )  # fmt: skip


def lead_of(tokenizer: Any, method: Method) -> int | None:
    """The token before a document or in place of a chunk's first token; InputError if the tokenizer has none."""
    if method == "lm_eval":
        lead: int | None = tokenizer.bos_token_id
        lead = tokenizer.eos_token_id if lead is None else lead
        if lead is None:
            raise InputError('tokenizer_dir: has neither BOS nor EOS, and method "lm_eval" begins documents with one')
        return lead
    if method != "llamacpp":
        return None
    # Not the config's add_bos_token, which many tokenizers ignore.
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    if whole == bare:
        return None
    if whole[1:] != bare:
        raise InputError(
            'tokenizer_dir: adds more than BOS to a text, which method "llamacpp" cannot reproduce: '
            f"{tokenizer.convert_ids_to_tokens(whole)} for 'a'"
        )
    return int(whole[0])


def encode(tokenizer: Any, text: str, method: Method, lead: int | None) -> Any:
    """``input_ids`` of a text, and ``offset_mapping`` where the tokenizer gives one."""
    options: dict[str, Any] = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    if method == "lm_eval" and text.startswith(tokenizer.decode(lead)):
        options["add_special_tokens"] = False
    if method == "llamacpp":
        options["split_special_tokens"] = True
    encoded = tokenizer(text, **options)
    if method == "llamacpp":
        check_plain(tokenizer, text, encoded["input_ids"][lead is not None :])
    return encoded


def check_plain(tokenizer: Any, text: str, ids: Sequence[int]) -> None:
    """InputError if a special token that is written in the text has become one token."""
    present = set(ids)
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special and number in present and token.content in text:
            raise InputError(
                f"dataset: its text holds {token.content!r}, which llama-perplexity reads as plain text and this "
                'tokenizer does not; use another method than "llamacpp"'
            )


def byte_sizes(text: str, offsets: Sequence[tuple[int, int]]) -> Ids:
    """UTF-8 bytes of ``text`` that end with each token, int32 [n], from the tokens' offsets in characters.

    Bytes are counted from the end of the previous token, so that text for which no token stands counts with the next
    token, or with the last; a character that is split over several tokens counts with the first, and a special token
    that was added has no bytes.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    before = np.concatenate(([0], np.cumsum(widths)))
    last = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
    ends = before[np.maximum.accumulate(last)]
    ends[-1:] = before[-1]
    return np.diff(ends, prepend=0).astype(np.int32)


def n_words(text: str) -> int:
    """Words as lm-eval counts them: ``len(re.split(r"\\s+", text))``."""
    return 1 + sum(1 for _ in re.finditer(r"\s+", text))


def chat_prefix(tokenizer: Any) -> list[int]:
    """Token ids of upstream's fixed chat; InputError if the tokenizer has no template or refuses it."""
    try:
        encoded = tokenizer.apply_chat_template(
            CHAT, add_generation_prompt=True, tokenize=True, return_dict=True, strftime_now=TODAY.strftime
        )
    except Exception as error:  # no template, or the template's own raise_exception
        raise InputError(f"chat_template: the tokenizer cannot apply it: {one_line(error)}") from None
    return list(encoded["input_ids"])


def detokenized(page: str) -> str:
    """A page of WikiText as lm-eval's task ``wikitext`` scores it; the order of the steps matters.

    WikiText comes tokenized: marks stand between spaces (``8 @,@ 600 , he said``).  The task undoes most of this before
    it scores a page, while it counts words and bytes of the unchanged page.  This does what lm-eval 0.4.13's
    detokenizer does, its slips included, since only the same text gives the same perplexity; on all 62 pages of
    WikiText-2's test split the two give the same string (``benchmarks/against_lm_eval.py``).
    """
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


def load(cache: Cache, key: str) -> Tokens | None:
    """Tokens from the cache; None if they are not there, or damaged and so to be made again."""
    try:
        arrays = storage.read_arrays(cache.path("tokens", key, ".npz"))
    except (InputError, OSError, ValueError):
        return None
    lead, n_bytes, words = map(int, arrays["numbers"])
    sizes, chat, requests = arrays["sizes"], None, None
    if "chat" in arrays:
        chat = Chat(arrays["scored"], *json.loads(str(arrays["chat"])))
    if "task" in arrays:
        requests = Requests(*(arrays[name] for name in COLUMNS), *json.loads(str(arrays["task"])))
    return Tokens(
        arrays["ids"], arrays["prefix"], int(arrays["top_id"]), str(arrays["vocabulary"]), None if lead < 0 else lead,
        arrays["ends"], sizes if sizes.size else None, n_bytes, words, chat, requests,
    )  # fmt: skip


def save(file: Path, tokens: Tokens) -> None:
    """Tokens into a file for ``load``."""
    more: dict[str, Any] = {}
    if (chat := tokens.chat) is not None:
        more = {"scored": chat.scored, "chat": json.dumps([chat.told_by, chat.across, chat.template])}
    if (requests := tokens.requests) is not None:
        more = {name: getattr(requests, name) for name in COLUMNS}
        more["task"] = json.dumps([requests.task, requests.num_fewshot])
    storage.write_arrays(
        file, ids=tokens.ids, prefix=tokens.prefix, top_id=np.int64(tokens.top_id), vocabulary=tokens.vocabulary,
        numbers=np.array([-1 if tokens.lead is None else tokens.lead, tokens.n_bytes, tokens.n_words], np.int64),
        ends=tokens.ends, sizes=np.zeros(0, np.int32) if tokens.sizes is None else tokens.sizes, **more,
    )  # fmt: skip
