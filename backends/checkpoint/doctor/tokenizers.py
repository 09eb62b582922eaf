"""Whether a model's tokenizer, chat template and special tokens are the reference's.  JSON only: nothing is imported.

A special token is compared as text, since that is how tokenizer_config.json has it, and as the ids of config.json and
generation_config.json, with which an engine begins and ends answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.checkpoint.doctor.finding import Finding
from backends.checkpoint.gguf import GgufModel
from backends.checkpoint.gguf_header import TOKENS
from backends.common.errors import InputError
from backends.common.json_files import exists, read_bytes, read_object

FILE, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token")
IDS = ("bos_token_id", "eos_token_id")
RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
COPY = "copy the reference's tokenizer files into the model's folder"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Tokens:
    """What a model says of its tokens; None and empty where it does not say.

    ``vocabulary``: id -> token; ``merges``: a digest of BPE's merges; ``rules``: how text is cut, by the names of
    tokenizer.json; ``special``: special tokens as text and ids; ``template``: the chat template.
    """

    where: str
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    merges: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)
    special: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None


def of_folder(folder: Path) -> Tokens:
    """The tokens of a Hugging Face folder; InputError for a damaged file."""
    tokenizer = read_object(folder / FILE, strict=False) if exists(folder / FILE) else {}
    config = read_object(folder / CONFIG, strict=False) if exists(folder / CONFIG) else {}
    special = {name: token_text(config[name]) for name in SPECIAL if config.get(name) is not None}
    for name in ("config.json", GENERATION):
        found = read_object(folder / name, strict=False) if exists(folder / name) else {}
        special |= {f"{name}: {key}": found[key] for key in IDS if found.get(key) is not None}
    stated = tokenizer.get("model")
    model = stated if isinstance(stated, Mapping) else {}
    merges = objects(model.get("merges"))
    joined = [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in merges]
    digest = hashlib.sha256("\n".join(joined).encode()).hexdigest() if merges else ""
    rules = {name: tokenizer.get(name) for name in RULES} if tokenizer else {}
    return Tokens(FILE, vocabulary_of(tokenizer, model), digest, rules, special, template_of(folder, config))


def vocabulary_of(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[int, str]:
    """Id -> token of a tokenizer.json, added tokens included."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        found = {number: token for token, number in vocabulary.items() if isinstance(number, int)}
    else:  # unigram: pairs of token and score
        found = {
            number: str(pair[0]) for number, pair in enumerate(objects(vocabulary)) if isinstance(pair, list) and pair
        }
    added = [token for token in objects(tokenizer.get("added_tokens")) if isinstance(token, Mapping)]
    return found | {token["id"]: str(token.get("content")) for token in added if isinstance(token.get("id"), int)}


def objects(found: Any) -> list[Any]:
    """A list, or an empty one in the place of anything else."""
    return found if isinstance(found, list) else []


def template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template, in a file of its own or in tokenizer_config.json; None if there is none."""
    if exists(folder / TEMPLATE):
        return read_bytes(folder / TEMPLATE).decode(errors="replace").strip()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return json.dumps(template, sort_keys=True)
    return template.strip() if isinstance(template, str) else None


def token_text(token: Any) -> Any:
    """A special token's text, which may stand in an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def of_gguf(model: GgufModel) -> Tokens:
    """The tokens of a GGUF model: ordinary ones where their strings are those of a tokenizer.json, and special ones."""
    tokens, special = model.fields.get(TOKENS) or [], {}
    for key in IDS:
        number = model.fields.get(f"tokenizer.ggml.{key}")
        if isinstance(number, int) and number < len(tokens):
            special[key.removesuffix("_id")] = tokens[number].decode(errors="replace")
    template = model.fields.get("tokenizer.chat_template")
    return Tokens(
        "tokenizer.ggml", model.vocabulary(), special=special,
        template=template.strip() if isinstance(template, str) else None,
    )  # fmt: skip


def check(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """How a model's tokens differ from its reference's; what only one of the two says is no difference."""
    if reference.vocabulary and not mine.vocabulary and mine.where == FILE:
        yield Finding("warning", FILE, "missing, and the reference has one", COPY)
    differing = [
        number
        for number in sorted(mine.vocabulary.keys() & reference.vocabulary.keys())
        if mine.vocabulary[number] != reference.vocabulary[number]
    ]
    if differing:
        one = differing[0]
        what = f"token {one} is {mine.vocabulary[one]!r}, and the reference's is {reference.vocabulary[one]!r}"
        yield Finding("wrong", mine.where, what, COPY, len(differing) - 1)
    if mine.merges and reference.merges and mine.merges != reference.merges:
        yield Finding("wrong", mine.where, "its merges are not the reference's: text becomes other tokens", COPY)
    for name in mine.rules.keys() & reference.rules.keys():
        if mine.rules[name] != reference.rules[name]:
            yield Finding("wrong", mine.where, f"its {name} is not the reference's: text becomes other tokens", COPY)
    for name in sorted(mine.special.keys() & reference.special.keys()):
        if mine.special[name] != reference.special[name]:
            where = name.partition(": ")[0] if ": " in name else CONFIG if mine.where == FILE else mine.where
            what = (
                f"{name.rpartition(': ')[2]} is {mine.special[name]!r}, and the reference's {reference.special[name]!r}"
            )
            yield Finding("wrong", where, f"{what}: answers begin or end otherwise", COPY)
    yield from templates(mine, reference)


def templates(mine: Tokens, reference: Tokens) -> Iterator[Finding]:
    """Another chat template, or none."""
    where = "chat template" if mine.where == FILE else f"{mine.where}.chat_template"
    if reference.template is not None and mine.template is None:
        yield Finding("wrong", where, "no chat template, and the reference has one: chats get another prompt", COPY)
    elif reference.template is not None and mine.template != reference.template:
        what = "not the reference's chat template: chats get another prompt than the reference does"
        yield Finding("warning", where, what, f"{COPY}, or compare with both under one template")


def tokens_of(path: Path, gguf: GgufModel | None) -> Tokens | str:
    """The tokens of a folder or GGUF model, or why they cannot be read."""
    try:
        return of_gguf(gguf) if gguf is not None else of_folder(path)
    except InputError as error:
        return str(error)
