"""Compare a model's tokenizer, special tokens and chat template with the reference's.

Libraries write the rules of one tokenizer in different ways.  Both tokenizers encode ``SAMPLES``, and only different
tokens count.  A special token is compared as text (tokenizer_config.json) and by the ids of config.json and
generation_config.json, with which an engine begins and ends answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.findings import Finding
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.gguf import TOKENS, GgufModel
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.json_files import exists, read_bytes
from compare_q.backends.common.messages import one_line

FILE, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")
IDS = ("bos_token_id", "eos_token_id")
PADDING = ("pad_token", "unk_token")
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
COPY = "copy the reference's tokenizer files into the model's folder"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Tokens:
    """A model's tokens; None or empty if its files do not have them.

    ``where``: the file, for messages; ``vocabulary``: id -> token; ``merges``: of BPE; ``special``: special tokens as
    text and ids; ``template``: the chat template; ``encoded``: ids of each of ``SAMPLES``.
    """

    where: str
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    merges: Sequence[Any] = ()
    special: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    encoded: Sequence[Sequence[int]] = ()


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
    tokens, special = model.fields.get(TOKENS) or [], {}
    for key in IDS:
        number = model.fields.get(f"tokenizer.ggml.{key}")
        if isinstance(number, int) and number < len(tokens):
            special[key.removesuffix("_id")] = tokens[number].decode(errors="replace")
    template = stripped(model.fields.get("tokenizer.chat_template"))
    return Tokens("tokenizer.ggml", model.vocabulary(), special=special, template=template)


def differences(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Differences of a model's tokens from its reference's.  What only one of them has is not a difference."""
    if reference.vocabulary and not mine.vocabulary and mine.where == FILE:
        yield Finding("warning", FILE, "missing, and the reference has one", COPY)
    ours, theirs = mine.vocabulary, reference.vocabulary
    differing = [number for number in sorted(ours.keys() & theirs.keys()) if ours[number] != theirs[number]]
    if differing:
        what = f"token {differing[0]} is {ours[differing[0]]!r}, and the reference's is {theirs[differing[0]]!r}"
        yield Finding("wrong", mine.where, what, COPY, len(differing) - 1)
    if other_merges := bool(mine.merges and reference.merges and mine.merges != reference.merges):
        yield Finding("wrong", mine.where, "its merges are not the reference's: text becomes other tokens", COPY)
    samples = zip(SAMPLES, mine.encoded, reference.encoded, strict=False)  # GGUF has none
    cut = next((text for text, one, other in samples if one != other), None)
    if cut is not None and not differing and not other_merges:
        yield Finding("wrong", mine.where, f"its rules cut text into other tokens, such as {cut!r}", COPY)
    for name in sorted(mine.special.keys() & reference.special.keys()):
        if as_set(mine.special[name]) != as_set(reference.special[name]):
            where = name.partition(": ")[0] if ": " in name else CONFIG if mine.where == FILE else mine.where
            both = f"{mine.special[name]!r}, and the reference's {reference.special[name]!r}"
            pads = name in PADDING  # no scored text has padding
            why = "matters to padding and to unknown text only" if pads else "answers begin or end differently"
            yield Finding("note" if pads else "wrong", where, f"{name.rpartition(': ')[2]} is {both}: {why}", COPY)
    where = "chat template" if mine.where == FILE else f"{mine.where}.chat_template"
    if reference.template is not None and mine.template is None:
        yield Finding("wrong", where, "no chat template, and the reference has one: chats get another prompt", COPY)
    elif reference.template is not None and mine.template != reference.template:
        what = "not the reference's chat template: chats get another prompt than the reference does"
        yield Finding("warning", where, what, f"{COPY}, or compare with both under one template")


def as_set(stated: Any) -> Any:
    """Ids as a set, since their order means nothing and one id may have no list; anything else as it is."""
    ids = stated if isinstance(stated, list) else [stated]
    return set(ids) if all(type(token) is int for token in ids) else stated
