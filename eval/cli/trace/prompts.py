"""A file of prompts -> conversations that are to be answered, and their tokens by a model's chat template.

A ``.jsonl`` file has an object a line: ``prompt`` (text), or ``messages`` (and perhaps ``tools``), as ``"dataset":
"chat"`` reads them, up to what is to be answered.  Of any other file each line that is not blank is a prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.common import json_files
from backends.common.errors import InputError
from backends.common.messages import printable
from eval.common.progress import Progress
from eval.text import conversations, vocabulary
from eval.text.conversations import Conversation, Template


@dataclass(frozen=True)
class Prompt:
    """A conversation up to its answer; ``key``: of its content, and which of several with the same content it is."""

    key: str
    talk: Conversation

    @property
    def turn(self) -> int:
        """How many answers stand in it."""
        return sum(message["role"] == "assistant" for message in self.talk.messages)


def read(file: Path) -> list[Prompt]:
    """The prompts of a file; InputError that names the line of the first that is malformed."""
    name = printable(file)
    try:
        lines = json_files.read_bytes(file).decode().removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: cannot be read: not UTF-8 text: {error.reason} at byte {error.start:,}") from None
    is_json = file.suffix.lower() == ".jsonl"
    if file.suffix.lower() in (".json", ".parquet", ".csv"):
        raise InputError(f"{name}: prompts are read from .jsonl, or from plain text with a prompt a line")
    found, seen = [], Counter[str]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name}: line {number}"
            talk = from_json(line, where) if is_json else Conversation((user(line.strip()),), (), where)
            digest = hashlib.sha256(json.dumps([talk.messages, talk.tools], sort_keys=True).encode()).hexdigest()[:16]
            seen[digest] += 1
            found.append(Prompt(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}", talk))
    if not found:
        raise InputError(f"{name}: no prompts in it")
    return found


def user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def from_json(line: str, where: str) -> Conversation:
    """A line of JSON as a conversation up to its answer."""
    row = json_files.parsed(line.encode(), where)
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise InputError(f"{where}: must be an object with prompt, or with messages")
    given = [user(row["prompt"])] if "prompt" in row else row["messages"]
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise InputError(f"{where}: prompt: must be text, is {conversations.json_type(row['prompt'])}")
    talk = conversations.conversation_of(given, row.get("tools"), where, f"{where}: messages")
    if not talk.messages or talk.messages[-1]["role"] in ("assistant", "system"):
        last = f"ends with the {talk.messages[-1]['role']}" if talk.messages else "is empty"
        raise InputError(f"{where}: messages: {last}; a prompt ends with what is to be answered, of user or tool")
    return talk


def of_folder(
    file: str, folder: str, trusted: bool, variables: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """The prompts of ``file`` by the tokenizer in ``folder``: what a model is shown, and what ends its answers.

    ``ids``: of each prompt, up to the header of the answer; ``template``: its digest; ``vocab_size``: one more than
    the largest id; ``stop``: [id, token].  Imports Transformers, and so is called apart.
    """
    tokenizer = vocabulary.load_tokenizer(Path(folder), trust_remote_code=trusted)
    template, ids = Template(tokenizer, variables), []
    found = read(Path(file))
    with progress.phase(f"tokenizing {Path(file).name}", unit="prompts", total=len(found)) as phase:
        for prompt in found:
            text = template.rendered(prompt.talk.messages, prompt.talk, prompt=True)
            conversations.check_written(prompt.talk, len(prompt.talk.messages), text)
            ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
            phase.advance()
    stop = ends_of(Path(folder), tokenizer)
    names = [[number, str(tokenizer.convert_ids_to_tokens(number))] for number in stop]
    size = 1 + max(tokenizer.get_vocab().values())
    return {"ids": ids, "template": template.digest, "vocab_size": size, "stop": names}


def ends_of(folder: Path, tokenizer: Any) -> Sequence[int]:
    """The ids that end an answer: of the model's generation config, or else its config, and the tokenizer's own.

    vLLM stops at all of these.
    """
    named: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        config = json_files.read_object(folder / name, strict=False) if json_files.is_file(folder / name) else {}
        inside = config.get("text_config")
        given = config.get("eos_token_id", inside.get("eos_token_id") if isinstance(inside, dict) else None)
        if given is not None:
            named = given if isinstance(given, list) else [given]
            break
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [each for each in dict.fromkeys([*named, *own]) if type(each) is int and each >= 0]
