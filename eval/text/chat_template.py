"""Conversations -> tokens, by the model's own chat template, and which of them are scored.

A conversation is rendered by the tokenizer's template and tokenized once, as a whole, without further special tokens.
Scored are the tokens of the turns whose role is in ``score_roles``.  Two ways tell where these turns stand in
the text:

- **generation mask**: if only the assistant is asked for, all its turns count, and the template marks what the model
  generates (``{% generation %}``), these marks are taken, if each turn's last word stands in a part of its own;
- **rendered prefixes**: a turn begins where the messages before it end when they are rendered alone (for the assistant
  with the generation prompt, so that its header is not scored) and ends where the messages up to it end.  Both must be
  beginnings of the whole rendering, or it is an error.  Of other roles, no header can be told, and what is scored
  begins with the content.  White space that follows the turn's last special token, the newline behind ``<|im_end|>``,
  is not generated and not scored.

A token is scored if one of its characters lies in a scored part, as in Transformers' ``return_assistant_tokens_mask``;
those that reach over an edge are counted.  A template that prints today's date is told a fixed one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.common.errors import InputError
from backends.common.messages import one_line, shortened
from eval.common.progress import Progress
from eval.specs import reading
from eval.specs.types import DataSpec
from eval.text import conversations, corpus, hub_datasets, tokens, vocabulary
from eval.text.conversations import Conversation
from eval.text.tokens import TODAY, Chat, Tokens

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MACRO = re.compile(r"\{%-?\s*(macro|call|filter)\b.*?\{%-?\s*end\1\b", re.DOTALL)
"""Transformers places marks in one of these by what stands before all of it, and so too early."""
NO_TOOLS_AND_TOOLS: tuple[list[dict[str, Any]], ...] = ([], [{}])
Parts = list[tuple[int, int]]
"""Ranges [begin, end) of a text's characters."""


def make(spec: Mapping[str, Any], tokenizer: str, file: str, progress: Progress) -> None:
    """Read the conversations of a packed ``spec`` and write their tokens into ``file``; InputError with the reason.

    ``tokenizer``: its folder.  Imports Transformers and ``datasets``, and so is called apart.
    """
    found = reading.unpacked(spec)
    hub_datasets.fetch(found, progress)
    tokens.save(Path(file), tokenize(conversations.read(found, progress), Path(tokenizer), found, progress))


def tokenize(talks: Sequence[Conversation], folder: Path, spec: DataSpec, progress: Progress) -> Tokens:
    """The tokens of all conversations, one document each; one without a turn to score has no tokens."""
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    if not tokenizer.is_fast:
        raise InputError("tokenizer_dir: conversations need a tokenizer that says where its tokens stand in the text")
    template = Template(tokenizer, spec.chat_template_kwargs)
    ids, sizes, scored, n_bytes, n_words, across, ways = [], [], [], 0, 0, 0, set()
    with progress.phase(f"tokenizing {corpus.display_name(spec)}", unit="conversations", total=len(talks)) as phase:
        for talk in talks:
            text, parts, way = scored_parts(template, talk, spec)
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            mask, crossing = tokens_in(parts, found["offset_mapping"])
            ids.append(np.asarray(found["input_ids"], np.int32))
            sizes.append(tokens.byte_sizes(text, found["offset_mapping"]))
            scored.append(mask)
            across += crossing
            n_bytes, n_words = n_bytes + len(text.encode()), n_words + (tokens.n_words(text) if text else 0)
            ways |= {way} if text else set()
            phase.advance()
    every, ordinary = np.concatenate(ids), vocabulary.plain_tokens(tokenizer)
    known = vocabulary.digest(vocabulary.plain_tokens(tokenizer, every.tolist()))
    chat = Chat(np.concatenate(scored), " and ".join(sorted(ways)), across, template.digest)
    return Tokens(
        every, np.zeros(0, np.int32), max(ordinary), known, None,
        np.cumsum([len(each) for each in ids]), np.concatenate(sizes), n_bytes, n_words, chat,
    )  # fmt: skip


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, with the variables of the spec."""

    tokenizer: Any
    variables: Mapping[str, Any]

    def text_of(self, tools: Sequence[dict[str, Any]]) -> str:
        """The template itself, which may be another one where there are tools."""
        try:
            return str(self.tokenizer.get_chat_template(tools=list(tools) or None))
        except Exception as error:  # none, or several and no default
            raise InputError(f"tokenizer_dir: no chat template: {one_line(error)}") from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the templates without and with tools."""
        return hashlib.sha256("\0".join(self.text_of(tools) for tools in NO_TOOLS_AND_TOOLS).encode()).hexdigest()

    @property
    def names(self) -> dict[str, Any]:
        """What the template is told beside the messages."""
        return {"strftime_now": TODAY.strftime, **self.variables}

    def rendered(self, messages: Sequence[dict[str, Any]], talk: Conversation, *, prompt: bool = False) -> str:
        """Some messages of a conversation as text; ``prompt``: with the header of an answer; InputError if refused."""
        return str(
            self.asked(
                talk,
                lambda: self.tokenizer.apply_chat_template(
                    list(messages), tools=list(talk.tools) or None, tokenize=False, add_generation_prompt=prompt,
                    **self.names,
                ),
            )
        )  # fmt: skip

    def marked(self, talk: Conversation) -> tuple[str, Parts]:
        """The whole conversation as text, and the parts that the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {**self.tokenizer.special_tokens_map, **self.names}
        (text,), (parts,) = self.asked(
            talk,
            lambda: render_jinja_template(
                [list(talk.messages)], tools=list(talk.tools) or None, chat_template=self.text_of(talk.tools),
                return_assistant_tokens_mask=True, **names,
            ),
        )  # fmt: skip
        return text, [(begin, end) for begin, end in parts]

    @staticmethod
    def asked(talk: Conversation, render: Callable[[], Any]) -> Any:
        """What a rendering gives; InputError with the template's own reason."""
        try:
            return render()
        except InputError:
            raise
        except Exception as error:  # jinja2's, the template's raise_exception, and whatever its expressions raise
            why = f"the chat template refuses these messages: {shortened(one_line(error), 200)}"
            raise InputError(f"{talk.where}: {why}; leave them out, or change them") from None

    @cached_property
    def special(self) -> re.Pattern[str]:
        """The end of a turn: its last special token, and the white space behind it."""
        named = (each.content for each in self.tokenizer.added_tokens_decoder.values() if each.special)
        return re.compile(f"(?:{'|'.join(map(re.escape, sorted(named, key=len, reverse=True))) or '(?!)'})(\\s*)\\Z")


def scored_parts(template: Template, talk: Conversation, spec: DataSpec) -> tuple[str, Parts, str]:
    """(the rendered conversation, its scored parts, how these were told); empty if no turn has a role to score."""
    wanted = [number for number, message in enumerate(talk.messages) if message["role"] in spec.score_roles]
    if not wanted:
        return "", [], ""
    if is_marked(template, talk, spec):
        text, marked = template.marked(talk)
        check_written(talk, len(talk.messages), text)
        check_marks(talk, wanted, text, marked)
        return text, marked, "generation mask"
    last = spec.score_turns == "last"
    n_messages = wanted[-1] + 1 if last else len(talk.messages)
    whole = template.rendered(talk.messages[:n_messages], talk)
    check_written(talk, n_messages, whole)
    parts = [turn_in(whole, template, talk, number) for number in (wanted[-1:] if last else wanted)]
    return whole, parts, "rendered prefixes"


def is_marked(template: Template, talk: Conversation, spec: DataSpec) -> bool:
    """Whether the template's own marks say what is scored."""
    if set(spec.score_roles) != {"assistant"} or spec.score_turns != "all":
        return False
    text = template.text_of(talk.tools)
    inside = any(GENERATION.search(each[0]) for each in MACRO.finditer(text))
    return GENERATION.search(text) is not None and not inside


def turn_in(whole: str, template: Template, talk: Conversation, number: int) -> tuple[int, int]:
    """Where a message stands in the rendered conversation, from the renderings of what ends before and with it.

    InputError if the template writes them otherwise when more messages follow.
    """
    role, before = talk.messages[number]["role"], talk.messages[:number]
    name = f"{talk.where}: message {number + 1} ({role})"
    if not before and role == "assistant":
        raise InputError(f"{name}: an assistant who speaks first answers nothing; put a message before it or remove it")
    head = template.rendered(before, talk, prompt=role == "assistant") if before else ""
    body = template.rendered(talk.messages[: number + 1], talk)
    if not (whole.startswith(body) and body.startswith(head)):
        raise InputError(
            f"{name}: the chat template writes this turn otherwise when more messages follow or when it is still to be "
            'written (reasoning?), so that its tokens cannot be told: use "score_turns": "last", or '
            'chat_template_kwargs such as {"enable_thinking": false}'
        )
    if not all(stands(word, body[len(head) :]) for word in last_words(talk.messages[number])):
        raise left_out(talk, number)
    found = template.special.search(body, len(head))
    end = len(body) if found is None else found.start(1)
    begin = len(head) if role == "assistant" else content_begin(talk.messages[number], body, len(head))
    if begin < 0:
        raise InputError(f"{name}: the chat template changes its content, so that its tokens cannot be told")
    return min(begin, end), end


def texts_in(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content that are not blank, without white space around them."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [text.strip() for text in texts if text.strip()]


def last_words(message: Mapping[str, Any]) -> list[str]:
    """The last word of each text of a message: a template may leave reasoning out before it."""
    return [text.split()[-1] for text in texts_in(message)]


def in_json(text: str) -> str:
    """A text as ``tojson`` writes it, without the quotes; some templates write what tools say so."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def stands(word: str, text: str) -> bool:
    """Whether a template has written a word into ``text``."""
    return word in text or in_json(word) in text


def content_begin(message: Mapping[str, Any], body: str, least: int) -> int:
    """Where the content of the last message in ``body`` begins, not before ``least``; -1 if it is not written."""
    at = len(body)
    for text in reversed(texts_in(message)):
        at = max(body.rfind(each, least, at) for each in (text, in_json(text)))
        if at < 0:
            break
    return at


def left_out(talk: Conversation, number: int) -> InputError:
    """What is said of a content that a template leaves out."""
    return InputError(
        f"{talk.where}: message {number + 1}: the chat template leaves its content out; perhaps it wants a list of "
        'parts, [{"type": "text", "text": ...}]'
    )


def check_written(talk: Conversation, n_messages: int, text: str) -> None:
    """InputError unless the last words of the first messages stand in ``text``, and no list as Python prints it.

    Some templates leave contents out in silence; those that know only text print a list of parts.
    """
    for number, message in enumerate(talk.messages[:n_messages]):
        if not all(stands(word, text) for word in last_words(message)):
            raise left_out(talk, number)
        if isinstance(message.get("content"), list) and message["content"] and str(message["content"]) in text:
            raise InputError(
                f"{talk.where}: message {number + 1}: the chat template takes no list of parts as content and prints "
                "its brackets; write the content as text"
            )


def check_marks(talk: Conversation, wanted: Sequence[int], text: str, marked: Parts) -> None:
    """InputError unless each wanted message has a marked part of its own, in order, with its last words."""
    at = -1
    for n_after, number in zip(reversed(range(len(wanted))), wanted, strict=True):
        words, left = last_words(talk.messages[number]), range(at + 1, len(marked) - n_after)
        at = next((part for part in left if all(stands(word, text[slice(*marked[part])]) for word in words)), -1)
        if at < 0:
            raise InputError(
                f"{talk.where}: message {number + 1}: the chat template does not mark it as generated, but marks other "
                'messages or other characters; use "score_turns": "last", which does without marks'
            )


def tokens_in(parts: Parts, offsets: Sequence[tuple[int, int]]) -> tuple[NDArray[np.bool_], int]:
    """(bool [n]: the tokens with a character in one of the parts, how many of them reach over the edge of one).

    ``offsets``: the tokens' characters.  A token without any (white space that a tokenizer does not count as its own)
    stands for what lies between its neighbours.
    """
    begin, end = (np.array([each[side] for each in offsets], np.int64).reshape(-1) for side in (0, 1))
    reached = np.concatenate(([0], np.maximum.accumulate(end)[:-1])) if len(end) else end
    begin = np.where(end > begin, begin, np.minimum(reached, end))
    scored, across = np.zeros(len(end), bool), 0
    for first, last in parts:
        inside = (begin < last) & (end > first)
        across += int((inside & ((begin < first) | (end > last))).sum())
        scored |= inside
    return scored, across
