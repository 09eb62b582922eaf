"""Read a model's tokenizer, special tokens and chat template, which the doctor compares with the reference's.

Libraries write the rules of one tokenizer in different ways, so that not rules are compared, but the tokens of
``SAMPLES``.  A special token is read as text (tokenizer_config.json) and as the ids of config.json and
generation_config.json, with which an engine begins and ends answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.gguf import TOKENS, GgufModel
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, read_bytes
from compare_q.backends.common.messages import one_line

FILE, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")
IDS = ("bos_token_id", "eos_token_id")
SAMPLES = (
    "Hello world, it's 12345.67 at IT'S 3rd place (sic)!",
    "two  spaces and a tab\there,\n\n\tand some after   ",
    "def f(x_1: int) -> str:\n    return f'{x_1!r}'  # ok\r\n",
    "Größe, naïve café, cafe\u0301, ﬁne, Ａｂｃ１２, x², ½",
    "Быстрая лиса; Γειά σου; שלום עולם; مرحبا بالعالم ١٢٣",
    "हिन्दी में; สวัสดีชาวโลก; Tiếng Việt",
    "汉字和「かな」カタカナ、한국어 문장。",
    "👩‍👩‍👧 🇩🇪 🙂; zero\u200bwidth, no\u00a0break",
)
"""Contractions, digits, white space, code, Unicode's normal forms, many scripts.

None begins with a space: Transformers 5 saves Llama 2 with rules that differ for such a text alone.
"""
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Tokens:
    """A model's tokens; None or empty if its files do not have them."""

    where: str  # the file, for messages
    vocabulary: Mapping[int, str] = field(default_factory=dict)  # id -> token
    merges: Sequence[Any] = ()  # of BPE
    special: Mapping[str, Any] = field(default_factory=dict)  # special tokens as text and ids
    template: str | None = None  # the chat template
    encoded: Sequence[Sequence[int]] = ()  # ids of each of ``SAMPLES``


def of_folder(folder: Path) -> Tokens:
    """The tokens of a Hugging Face folder; InputError for a damaged file."""
    checkpoint = Checkpoint(folder)
    config = checkpoint.json(CONFIG)
    stated = {name: config[name] for name in SPECIAL if config.get(name) is not None}
    # A special token may be an object that has its text.
    special = {name: token.get("content") if isinstance(token, Mapping) else token for name, token in stated.items()}
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
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / FILE))
    except Exception as error:  # it raises nothing narrower
        raise InputError(f"{FILE}: tokenizers cannot read it: {one_line(error, 160)}") from None
    tokenizer.no_truncation()  # calibration leaves its length in the file
    tokenizer.no_padding()
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    merges = json.loads(tokenizer.to_str())["model"].get("merges") or ()
    return replace(
        found, vocabulary=vocabulary, merges=merges, encoded=[tokenizer.encode(text).ids for text in SAMPLES]
    )


def stripped(template: Any) -> str | None:
    """A chat template without white space around it; None if it is no text."""
    return template.strip() if isinstance(template, str) else None


def of_gguf(model: GgufModel) -> Tokens:
    """The tokens of a GGUF model: special ones, and ordinary ones if its strings are those of a tokenizer.json."""
    tokens, special = model.field(TOKENS, list) or [], {}
    for key in IDS:
        number = model.field(f"tokenizer.ggml.{key}", int)
        if number is not None and number < len(tokens):
            special[key.removesuffix("_id")] = tokens[number].decode(errors="replace")
    template = stripped(model.fields.get("tokenizer.chat_template"))
    return Tokens("tokenizer.ggml", model.vocabulary(), special=special, template=template)
