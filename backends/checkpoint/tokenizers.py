"""Compare a model's tokenizer, special tokens and chat template with the reference's.

Libraries write the rules of one tokenizer in different ways.  If two tokenizers define their rules differently, both
encode ``SAMPLES``, and only different tokens count.  A special token is compared as text (tokenizer_config.json) and by
the ids of config.json and generation_config.json, with which an engine begins and ends answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_q.backends.checkpoint.findings import Finding
from compare_q.backends.checkpoint.folder import Checkpoint
from compare_q.backends.checkpoint.gguf import TOKENS, GgufModel
from compare_q.backends.common.json_files import exists, read_bytes
from compare_q.backends.common.messages import one_line
from compare_q.backends.layers.schemes import at, part

FILE, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")
IDS = ("bos_token_id", "eos_token_id")
PADDING = ("pad_token", "unk_token")
RULES = ("normalizer", "pre_tokenizer", "post_processor")
"""Keys of tokenizer.json that decide how text is cut."""
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

    ``where``: the file, for messages; ``vocabulary``: id -> token; ``merges``: of BPE; ``rules``: by the names of
    tokenizer.json; ``special``: special tokens as text and ids; ``template``: the chat template; ``file``: its
    tokenizer.json.
    """

    where: str
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    merges: Sequence[str] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)
    special: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    file: Path | None = None


def of_folder(folder: Path) -> Tokens:
    """The tokens of a Hugging Face folder; InputError for a damaged file."""
    checkpoint = Checkpoint(folder)
    tokenizer, config = checkpoint.json(FILE), checkpoint.json(CONFIG)
    model, added = part(tokenizer, "model"), objects(tokenizer.get("added_tokens"))
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        tokens = {number: token for token, number in vocabulary.items() if isinstance(number, int)}
    else:  # unigram: pairs of token and score
        pairs = enumerate(objects(vocabulary))
        tokens = {number: str(pair[0]) for number, pair in pairs if isinstance(pair, list) and pair}
    tokens |= {token["id"]: str(token.get("content")) for token in added if isinstance(at(token, "id"), int)}
    # Older files have "a b" instead of ["a", "b"].
    merges = [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in objects(model.get("merges"))]
    rules = {name: tokenizer.get(name) for name in RULES} if tokenizer else {}
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
    return Tokens(FILE, tokens, merges, rules, special, stripped(template), folder / FILE)


def objects(value: Any) -> list[Any]:
    """The value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


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
    if not differing and not other_merges:
        yield from differing_rules(mine, reference)
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


def differing_rules(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Rules that cut one of ``SAMPLES`` into other tokens than the reference's, or that cannot be tried."""
    names = [name for name in RULES if mine.rules.get(name) != reference.rules.get(name)]
    if not (names and mine.rules and reference.rules and mine.file and reference.file):
        return
    what = f"its {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not the reference's"
    try:
        ours, theirs = encoded(mine.file), encoded(reference.file)
    except Exception as error:  # tokenizers raises nothing narrower
        yield Finding("warning", mine.where, f"{what}, and they cannot be tried: {one_line(error, 160)}", COPY)
        return
    for text, one, other in zip(SAMPLES, ours, theirs, strict=True):
        if one != other:
            yield Finding("wrong", mine.where, f"{what}: text becomes other tokens, such as {text!r}", COPY)
            return


def encoded(file: Path) -> list[list[int]]:
    """The ids of each of ``SAMPLES``."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # calibration leaves its length in the file
    tokenizer.no_padding()
    return [tokenizer.encode(text).ids for text in SAMPLES]


def as_set(stated: Any) -> Any:
    """Ids as a set, since their order means nothing and one id may have no list; anything else as it is."""
    ids = stated if isinstance(stated, list) else [stated]
    return set(ids) if all(type(token) is int for token in ids) else stated
