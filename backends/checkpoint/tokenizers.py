"""Read a model's tokenizer, special tokens and chat template, which the doctor compares with the
reference's.

Libraries write the rules of one tokenizer in different ways.  Therefore the tokens of ``SAMPLES``
are compared, not the rules.  A special token is read as text (tokenizer_config.json) and as ids
(config.json and generation_config.json), because engines begin and end answers with these ids.
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
from .gguf import TOKENS, GgufModel
from .token_rules import ORDINARY, SCRIPTS, Rules, of_header, of_tokenizer

FILE, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")
IDS = ("bos_token_id", "eos_token_id")
SAMPLES = (*ORDINARY, *SCRIPTS)
"""Contractions, digits, white space, code, Unicode's normal forms, many scripts.

No sample begins with a space: Transformers 5 saves Llama 2 with rules that differ only for such
texts.
"""
TEMPLATE = "chat_template.jinja"
PIECES, PIECE = 32, 4096
"""``follow_file`` compares about ``PIECES`` pieces of the texts, each of ``PIECE`` characters."""


@dataclass(frozen=True)
class Tokens:
    """A model's tokens; a field is None or empty if the files do not have it."""

    where: str  # the file, for messages
    vocabulary: Mapping[int, str] = field(default_factory=dict)  # id -> token
    merges: Sequence[Any] = ()  # of BPE
    special: Mapping[str, Any] = field(default_factory=dict)  # special tokens as text and ids
    template: str | None = None  # the chat template
    encoded: Sequence[Sequence[int]] = ()  # ids of each of ``SAMPLES``
    rules: Rules = field(default_factory=Rules)  # compared with those of GGUF files


def of_folder(folder: Path) -> Tokens:
    """The tokens of a Hugging Face folder; InputError for a damaged file."""
    checkpoint = Checkpoint(folder)
    config = checkpoint.json(CONFIG)
    stated = {name: config[name] for name in SPECIAL if config.get(name) is not None}
    # A special token may be an object that contains the text.
    special = {
        name: token.get("content") if isinstance(token, Mapping) else token
        for name, token in stated.items()
    }
    for name in ("config.json", GENERATION):
        ids = checkpoint.json(name)
        special |= {f"{name}: {key}": ids[key] for key in IDS if ids.get(key) is not None}
    template = config.get("chat_template")
    if exists(folder / TEMPLATE):
        template = read_bytes(folder / TEMPLATE).decode(errors="replace")
    elif isinstance(template, list):  # several, by name
        template = json.dumps(template, sort_keys=True)
    found = Tokens(FILE, special=special, template=stripped(template))
    if not exists(folder / FILE):
        return found
    tokenizer = of_file(folder)
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    merges = json.loads(tokenizer.to_str())["model"].get("merges") or ()
    encoded = [tokenizer.encode(text).ids for text in SAMPLES]
    return replace(
        found,
        vocabulary=vocabulary,
        merges=merges,
        encoded=encoded,
        rules=of_tokenizer(tokenizer, config),
    )


def of_file(folder: Path) -> Any:
    """Return the tokenizer of tokenizer.json as the library ``tokenizers`` reads it; InputError if
    it cannot.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # the library raises no narrower class
        raise InputError(f"{FILE}: tokenizers cannot read it: {one_line(error, 160)}") from None
    tokenizer.no_truncation()  # calibration leaves its truncation length in the file
    tokenizer.no_padding()
    return tokenizer


def stripped(template: Any) -> str | None:
    """A chat template without white space around it; None if it is not a text."""
    return template.strip() if isinstance(template, str) else None


def of_gguf(model: GgufModel, made: Mapping[str, Any] | None = None) -> Tokens:
    """The tokens of a GGUF model: special ones, and ordinary ones if its strings are those of a
    tokenizer.json.

    ``made``: what llama.cpp makes of the samples of ``token_rules``; None if it is not installed.
    """
    tokens, special = model.field(TOKENS, list) or [], {}
    for key in IDS:
        number = model.field(f"tokenizer.ggml.{key}", int)
        if number is not None and number < len(tokens):
            special[key.removesuffix("_id")] = tokens[number].decode(errors="replace")
    template = stripped(model.fields.get("tokenizer.chat_template"))
    rules = of_header(model.fields, model.merges(), made)
    return Tokens(
        "tokenizer.ggml", model.vocabulary(), special=special, template=template, rules=rules
    )


def follow_file(tokenizer: Any, folder: Path, texts: Sequence[str]) -> tuple[str, ...]:
    """Give a tokenizer of Transformers the rules of its tokenizer.json if its own rules make
    different tokens of texts.

    Transformers chooses a class by the configs, and some classes replace rules of the file.  For
    example, Llama's class with a byte-level file loses all spaces.  Special tokens, BOS and the
    chat template stay as loaded.  Only pieces of the texts are compared, without leading spaces,
    because classes treat a leading space differently on purpose.  Returns notes if the tokens
    differ, and if decoding the tokens does not restore the text.
    """
    some = [text for text in texts if text.strip()]
    some = some[:: len(some) // PIECES + 1]
    step = sum(map(len, some)) // PIECES + 1
    pieces = [
        text[at : at + PIECE].strip()
        for text in some
        for at in range(0, len(text), max(step, PIECE))
    ]
    notes, file, own = list[str](), None, [list[int]() for _ in pieces]
    with suppress(
        Exception
    ):  # the class cannot read this vocabulary; tokenizers raises no narrower class
        own = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    if tokenizer.is_fast and exists(folder / FILE):
        file = of_file(folder)
        file.add_tokens(list(tokenizer.added_tokens_decoder.values()))
        filed = [file.encode(piece, add_special_tokens=False).ids for piece in pieces]
        if filed != own:
            for part in ("normalizer", "pre_tokenizer", "model", "decoder"):
                setattr(tokenizer.backend_tokenizer, part, getattr(file, part))
            counts = [sum(map(len, each)) for each in (own, filed)]
            notes.append(
                f"tokens are those of {FILE}: Transformers' {type(tokenizer).__name__} reads it differently, "
                f"{counts[0]:,} tokens instead of {counts[1]:,} in a sample; software that loads the "
                "tokenizer by its class gives the model other tokens"
            )
            own = filed
    changes = file.normalizer.normalize_str if file is not None and file.normalizer else str
    if any(
        loses_text(tokenizer, ids, changes(piece)) for ids, piece in zip(own, pieces, strict=True)
    ):
        notes.append(
            "the tokenizer's tokens do not give the text back: it loses spaces or characters"
        )
    return tuple(notes)


def class_notes(folder: Path) -> tuple[str, ...]:
    """Return the notes of ``follow_file`` on ``SAMPLES``; empty if Transformers does not load the
    tokenizer.
    """
    from transformers import AutoTokenizer

    with suppress(Exception):  # Transformers and its classes raise their own errors
        return follow_file(
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False), folder, SAMPLES
        )
    return ()


def loses_text(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    """Return True if decoded tokens lack spaces or characters of a normalized text; False if it has
    unknown tokens.
    """
    if tokenizer.unk_token_id in ids or (
        tokenizer.is_fast and tokenizer.backend_tokenizer.decoder is None
    ):
        return False
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    before, after = words_in(text), words_in(decoded)
    return "".join(before) != "".join(after) or len(after) < len(before)


def words_in(text: str) -> list[str]:
    """Return the words of a text without what normal forms change: case, compatible and invisible
    characters.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().replace("\u2581", " ")
    return "".join(
        each for each in plain if each.isspace() or unicodedata.category(each)[0] != "C"
    ).split()
