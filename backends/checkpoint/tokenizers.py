"""Read a model's tokenizer, special tokens and chat template, which the doctor compares.

Libraries write the rules of one tokenizer in different ways.  Therefore the tokens of
``TOKENIZER_SAMPLES`` are compared, not the rules.  A special token is read as text
(tokenizer_config.json) and as ids (config.json and generation_config.json), because engines begin
and end answers with these ids.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from ..common.json_files import exists, read_bytes
from ..common.message_text import one_line
from .folder import Checkpoint
from .gguf import TOKENS_KEY, GgufModel
from .token_rules import ORDINARY_SAMPLES, SCRIPTS, Rules, of_header, of_tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "add_bos_token",
    "add_eos_token",
)
IDS = ("bos_token_id", "eos_token_id")
TOKENIZER_SAMPLES = (*ORDINARY_SAMPLES, *SCRIPTS)
"""Contractions, digits, white space, code, Unicode's normal forms, many scripts.

No sample begins with a space: Transformers 5 saves Llama 2 with rules that differ only for such
texts.
"""
TEMPLATE = "chat_template.jinja"
PIECES = 32
"""Approximate number of pieces of texts that ``follow_file`` compares."""
PIECE = 4096
"""Largest number of characters of a piece."""


@dataclass(frozen=True)
class Tokens:
    """A model's tokens; a field is None or empty if the files do not have it."""

    where: str  # the file, for messages
    vocabulary: Mapping[int, str] = field(default_factory=dict)  # id -> token
    merges: Sequence[Any] = ()  # of BPE
    special: Mapping[str, Any] = field(default_factory=dict)  # special tokens as text and ids
    template: str | None = None  # the chat template
    encoded: Sequence[Sequence[int]] = ()  # ids of each of ``TOKENIZER_SAMPLES``
    rules: Rules = field(default_factory=Rules)  # compared with those of GGUF files


def of_folder(folder: Path) -> Tokens:
    """Return the tokens of a Hugging Face folder; InputError for a damaged file."""
    checkpoint = Checkpoint(folder)
    config = checkpoint.json(CONFIG)
    special = special_tokens(checkpoint, config)
    template = config.get("chat_template")
    if exists(folder / TEMPLATE):
        template = read_bytes(folder / TEMPLATE).decode(errors="replace")
    elif isinstance(template, list):  # several, by name
        template = json.dumps(template, sort_keys=True)
    tokens = Tokens(TOKENIZER_FILE, special=special, template=stripped(template))
    if not exists(folder / TOKENIZER_FILE):
        return tokens
    tokenizer = of_file(folder)
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    merges = json.loads(tokenizer.to_str())["model"].get("merges") or ()
    encoded = [tokenizer.encode(text).ids for text in TOKENIZER_SAMPLES]
    return replace(
        tokens,
        vocabulary=vocabulary,
        merges=merges,
        encoded=encoded,
        rules=of_tokenizer(tokenizer, config),
    )


def special_tokens(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder's special tokens, as text and as ids; ``config``: tokenizer_config.json."""
    special = {}
    for name in SPECIAL_TOKEN_KEYS:
        token = config.get(name)
        if isinstance(token, Mapping):  # an object that contains the text
            special[name] = token.get("content")
        elif token is not None:
            special[name] = token
    for file in ("config.json", GENERATION_CONFIG):
        ids = checkpoint.json(file)
        for key in IDS:
            if ids.get(key) is not None:
                special[f"{file}: {key}"] = ids[key]
    return special


def of_file(folder: Path) -> Any:
    """Return the tokenizer of tokenizer.json as the library ``tokenizers`` reads it; InputError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises no narrower class
        raise InputError(
            f"{TOKENIZER_FILE}: tokenizers cannot read it: {one_line(error, 160)}"
        ) from None
    tokenizer.no_truncation()  # calibration leaves its truncation length in the file
    tokenizer.no_padding()
    return tokenizer


def stripped(template: Any) -> str | None:
    """Return a chat template without white space around it; None if it is not a text."""
    if not isinstance(template, str):
        return None
    return template.strip()


def of_gguf(model: GgufModel, engine_tokens: Mapping[str, Any] | None = None) -> Tokens:
    """Return the tokens of a GGUF model.

    Ordinary tokens are absent if its strings are not those of a tokenizer.json.  ``engine_tokens``:
    what llama.cpp makes of the samples of ``token_rules``; None if it is not installed.
    """
    strings = model.field(TOKENS_KEY, list) or []
    special = {}
    for key in IDS:
        number = model.field(f"tokenizer.ggml.{key}", int)
        if number is not None and number < len(strings):
            special[key.removesuffix("_id")] = strings[number].decode(errors="replace")
    template = stripped(model.fields.get("tokenizer.chat_template"))
    rules = of_header(model.fields, model.merges(), engine_tokens)
    return Tokens(
        "tokenizer.ggml", model.vocabulary(), special=special, template=template, rules=rules
    )


def follow_file(tokenizer: Any, folder: Path, texts: Sequence[str]) -> tuple[str, ...]:
    """Give a tokenizer of Transformers the rules of its file if its own make other tokens of texts.

    Transformers chooses a class by the configs, and some classes replace rules of the file.  For
    example, Llama's class with a byte-level file loses all spaces.  Special tokens, BOS and the
    chat template stay as loaded.  Only pieces of the texts are compared, without leading spaces,
    because classes treat a leading space differently on purpose.  Returns notes if the tokens
    differ, and if decoding the tokens does not restore the text.
    """
    pieces = pieces_of(texts)
    notes = []
    ids: list[list[int]] = [[] for _ in pieces]
    # The class may not be able to read this vocabulary; tokenizers raises no narrower class.
    with suppress(Exception):
        ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    normalizer = None
    if tokenizer.is_fast and exists(folder / TOKENIZER_FILE):
        file = of_file(folder)
        # Special tokens stay as loaded, also those that the file lacks.
        file.add_tokens(list(tokenizer.added_tokens_decoder.values()))
        file_ids = [file.encode(piece, add_special_tokens=False).ids for piece in pieces]
        if file_ids != ids:
            for part in ("normalizer", "pre_tokenizer", "model", "decoder"):
                setattr(tokenizer.backend_tokenizer, part, getattr(file, part))
            class_count = sum(map(len, ids))
            file_count = sum(map(len, file_ids))
            notes.append(
                f"tokens are those of {TOKENIZER_FILE}: Transformers' {type(tokenizer).__name__} "
                f"reads it differently, {class_count:,} tokens instead of {file_count:,} in a "
                "sample; software that loads the tokenizer by its class gives the model other "
                "tokens"
            )
            ids = file_ids
        normalizer = file.normalizer
    for piece, piece_ids in zip(pieces, ids, strict=True):
        text = piece
        if normalizer:
            text = normalizer.normalize_str(piece)
        if loses_text(tokenizer, piece_ids, text):
            notes.append(
                "the tokenizer's tokens do not give the text back: it loses spaces or characters"
            )
            break
    return tuple(notes)


def pieces_of(texts: Sequence[str]) -> list[str]:
    """Return about ``PIECES`` pieces of texts, spread over them, without white space around."""
    some = [text for text in texts if text.strip()]
    some = some[:: len(some) // PIECES + 1]
    step = sum(map(len, some)) // PIECES + 1
    pieces = []
    for text in some:
        for start in range(0, len(text), max(step, PIECE)):
            pieces.append(text[start : start + PIECE].strip())
    return pieces


def class_notes(folder: Path) -> tuple[str, ...]:
    """Return the notes of ``follow_file`` on ``TOKENIZER_SAMPLES``.

    There are none if the tokenizer does not load.
    """
    from transformers import AutoTokenizer

    # Transformers and its classes raise their own errors.
    with suppress(Exception):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return follow_file(tokenizer, folder, TOKENIZER_SAMPLES)
    return ()


def loses_text(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    """Return True if decoded tokens lack spaces or characters of a normalized text.

    False if there are unknown tokens, or if the tokenizer has no decoder.
    """
    if tokenizer.unk_token_id in ids:
        return False
    if tokenizer.is_fast and tokenizer.backend_tokenizer.decoder is None:
        return False
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    before = words_in(text)
    after = words_in(decoded)
    return "".join(before) != "".join(after) or len(after) < len(before)


def words_in(text: str) -> list[str]:
    """Return the words of a text in NFKC, without case and control characters.

    Tokenizers that normalize texts differently then give the same words.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().replace("\u2581", " ")
    visible = []
    for character in plain:
        if character.isspace() or not unicodedata.category(character).startswith("C"):
            visible.append(character)
    return "".join(visible).split()
