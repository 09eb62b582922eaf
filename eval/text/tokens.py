"""Text -> tokens, and the bytes that each token stands for; kept in the cache under all that they depend on.

A text is tokenized as a whole, with BOS where the tokenizer adds it.  Two methods (``eval/text/cutting.py``) differ:

- ``llamacpp``: one newline at the end of the text is dropped, special tokens that are written in it are
  plain text, and each chunk's first token is replaced by the token that the tokenizer puts before a text, if any;
- ``lm_eval``: documents are tokenized by themselves, and a document that begins with the prefix token's text is
  tokenized without special tokens, as lm-eval does, so that BOS does not stand there twice.  With ``detokenize`` each
  document is rewritten first (``eval/text/detokenizers.py``); bytes and words are counted in the original.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends import hub
from backends.common import json_files, storage
from backends.common.errors import InputError
from backends.common.messages import one_line
from backends.common.packages import builds
from eval.common.cache import Cache
from eval.common.progress import Progress
from eval.specs import reading
from eval.specs.methods import Method
from eval.specs.types import DataSpec
from eval.text import corpus, detokenizers, hub_datasets, task_files, vocabulary
from eval.text.cutting import Ids

TOKENS_VERSION = 6
"""Version of the tokens; a change of what is tokenized or kept raises it.

1: token ids and the chat prefix.
2: every line end of a text file is read as a newline: with Windows line ends a window's PPL was 15.02 for 15.20.
3: the digest of the vocabulary, since tokenizers are compared by content.
4: the methods of other tools: documents, the token before them, and the bytes of every token.
5: ``llamacpp`` reads the line ends of a plain file as they stand; texts may be detokenized.
6: the chat prefix of a template that prints today's date has a fixed one.
"""
CHAT_VERSION = 2
"""Version of the tokens of conversations; a change of what is rendered or scored raises it."""
TOKENIZING = (
    "transformers", "tokenizers", "datasets", "pyarrow", "jinja2", "sentencepiece", "tiktoken", "mistral-common",
)  # fmt: skip
"""Distributions that may take part in reading and tokenizing a text."""
SAMPLE = 1 << 16
"""Characters tokenized to estimate how long the whole text takes (1 % of a 6 MB text)."""
COLUMNS = ("question", "scored", "right", "chars")
"""The arrays of ``Requests``."""
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

    question: NDArray[np.int32]
    scored: NDArray[np.int32]
    right: NDArray[np.bool_]
    chars: NDArray[np.int32]
    task: str
    num_fewshot: int


@dataclass(frozen=True)
class Tokens:
    """A tokenized text: ``ids`` and the chat ``prefix`` are int32 [n]; ``top_id`` is the tokenizer's largest plain id.

    ``vocabulary`` is the digest of what the plain ids stand for, and in conversations the special ones they hold
    (``eval/text/vocabulary.py``).  ``lead``: the token
    that the method puts before a document or in place of a window's first.  ``ends`` int64 [D]: text index after each
    document.  ``sizes`` int32 [n]: UTF-8 bytes of the tokenized text that end with a token (0 for a BOS); None if
    the tokenizer gives no offsets.  ``n_bytes`` and ``n_words``: of all documents, before any detokenizing.  ``chat``
    and ``requests``: None unless the documents are conversations, or requests.
    """

    ids: NDArray[np.int32]
    prefix: NDArray[np.int32]
    top_id: int
    vocabulary: str
    lead: int | None = None
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: NDArray[np.int32] | None = None
    n_bytes: int = 0
    n_words: int = 0
    chat: Chat | None = None
    requests: Requests | None = None


def identity(spec: DataSpec, folder: Path) -> dict[str, Any]:
    """Everything that the tokens depend on, as JSON types."""
    # A default.jinja among the additional templates is the chat template where the folder has no other.
    patterns = [*hub.TOKENIZER_FILES, "additional_chat_templates/*.jinja"]
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + json_files.read_bytes(file) + b"\0")
    return {
        "version": TOKENS_VERSION,
        "method": spec.method,
        "detokenize": spec.detokenize,
        "text": task_files.identity(spec) if spec.is_answers else corpus.identity(spec),
        "tokenizer": digest.hexdigest(),
        "chat_template": spec.chat_template,
        **({"chat": chat_identity(spec)} if spec.is_chat else {}),
        "trust_remote_code": spec.trust_remote_code,
        "versions": builds(TOKENIZING),
    }


def chat_identity(spec: DataSpec) -> dict[str, Any]:
    """What the tokens of conversations depend on beside the text and the tokenizer's files, as JSON types."""
    return {
        "roles": sorted(set(spec.score_roles)),
        "turns": spec.score_turns,
        "variables": spec.chat_template_kwargs,
        "version": CHAT_VERSION,
    }


def make(spec: Mapping[str, Any], tokenizer: str, file: str, progress: Progress) -> None:
    """Read the text of a packed ``spec``, tokenize it and write the tokens into ``file``; InputError with the reason.

    ``tokenizer``: its folder.  Imports Transformers and ``datasets``, and so is called apart
    (``eval/common/processes.py``).
    """
    found = reading.unpacked(spec)
    hub_datasets.fetch(found, progress)
    save(Path(file), tokenize(texts_of(found, progress), Path(tokenizer), found, progress))


def texts_of(spec: DataSpec, progress: Progress) -> list[str]:
    """The texts that are tokenized one by one: lm-eval's documents, or a single text."""
    if spec.method == "lm_eval":
        return corpus.load_documents(spec, progress)
    text = corpus.load_text(spec, progress)
    return [text.removesuffix("\n") if spec.method == "llamacpp" else text]


def tokenize(texts: Sequence[str], folder: Path, spec: DataSpec, progress: Progress) -> Tokens:
    """Tokenize each text at once, and the chat prefix if the spec wants one."""
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    lead = lead_of(tokenizer, spec.method)
    sample = max(texts, key=len)[:SAMPLE]
    began = time.perf_counter()
    tokenizer(sample)
    expected = (time.perf_counter() - began) * sum(map(len, texts)) / max(len(sample), 1)
    ids, sizes = [], []
    with progress.phase(f"tokenizing {corpus.display_name(spec)}", unit="tokens", expected=expected) as phase:
        for original in texts:
            text = detokenizers.DETOKENIZERS[spec.detokenize](original) if spec.detokenize else original
            found = encode(tokenizer, text, spec.method, lead)
            ids.append(np.asarray(found["input_ids"], dtype=np.int32))
            sizes.append(byte_sizes(text, found["offset_mapping"]) if "offset_mapping" in found else None)
            phase.advance(len(ids[-1]))
    prefix = chat_prefix(tokenizer) if spec.chat_template else []
    ordinary = vocabulary.plain_tokens(tokenizer)
    known = [each for each in sizes if each is not None]
    return Tokens(
        np.concatenate(ids), np.asarray(prefix, dtype=np.int32), max(ordinary), vocabulary.digest(ordinary), lead,
        np.cumsum([len(each) for each in ids]), np.concatenate(known) if known else None,
        sum(len(text.encode()) for text in texts), sum(n_words(text) for text in texts),
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
    found = tokenizer(text, **options)
    if method == "llamacpp":
        check_plain(tokenizer, text, found["input_ids"][lead is not None :])
    return found


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


def load(cache: Cache, key: str) -> Tokens | None:
    """Tokens from the cache; None if they are not there, or damaged and so to be made again."""
    try:
        arrays = storage.read_arrays(cache.path("tokens", key, ".npz"))
    except (InputError, OSError, ValueError):
        return None
    lead, n_bytes, words = map(int, arrays["numbers"])
    sizes = arrays["sizes"]
    return Tokens(
        arrays["ids"], arrays["prefix"], int(arrays["top_id"]), str(arrays["vocabulary"]),
        None if lead < 0 else lead, arrays["ends"], sizes if sizes.size else None, n_bytes, words,
        Chat(arrays["scored"], *json.loads(str(arrays["chat"]))) if "chat" in arrays else None,
        Requests(*(arrays[each] for each in COLUMNS), *json.loads(str(arrays["task"])))
        if "task" in arrays else None,
    )  # fmt: skip


def save(file: Path, tokens: Tokens) -> None:
    """Tokens into a file for ``load``."""
    numbers = np.array([-1 if tokens.lead is None else tokens.lead, tokens.n_bytes, tokens.n_words], np.int64)
    more: dict[str, Any] = {}
    if tokens.chat is not None:
        notes = json.dumps([tokens.chat.told_by, tokens.chat.across, tokens.chat.template])
        more = {"scored": tokens.chat.scored, "chat": notes}
    if tokens.requests is not None:
        more = {each: getattr(tokens.requests, each) for each in COLUMNS}
        more["task"] = json.dumps([tokens.requests.task, tokens.requests.num_fewshot])
    storage.write_arrays(
        file, ids=tokens.ids, prefix=tokens.prefix, top_id=np.int64(tokens.top_id), vocabulary=tokens.vocabulary,
        numbers=numbers, ends=tokens.ends, sizes=np.zeros(0, np.int32) if tokens.sizes is None else tokens.sizes,
        **more,
    )  # fmt: skip
