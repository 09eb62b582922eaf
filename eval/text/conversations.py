"""Turn conversations into tokens, by the model's chat template, and decide which tokens are scored.

docs/chat.md describes which files are read and which tokens are scored.  A conversation is rendered
and tokenized once, as a whole, without adding special tokens.  The turns to score are found by the
template's generation mask, or by rendered prefixes.  A token is scored if one of its characters is
in a scored part, as in Transformers' ``return_assistant_tokens_mask``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends.checkpoint.tokenizers import follow_file
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line, shortened
from ...backends.common.process import time_limit
from ..common.progress import Progress
from ..specs.spec_types import DataSpec
from . import corpus, text_tokens, vocabulary
from .slice_names import roles_of
from .text_tokens import RENDER_S, TODAY, Chat, Tokens, tokens_of

SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MACRO = re.compile(r"\{%-?\s*(macro|call|filter)\b.*?\{%-?\s*end\1\b", re.DOTALL)
"""Transformers places generation marks inside one of these blocks too early."""
Parts = list[tuple[int, int]]
"""Ranges [begin, end) of a text's characters."""
NOT_SCORED = -1
"""Instead of a role, for tokens that are not scored."""
LEFT_OUT = (
    "{}: message {}: the chat template leaves its content out; perhaps it wants a list of parts, "
    '[{{"type": "text", "text": ...}}]'
)


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in JSON types, for a chat template; errors call its row ``where``."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    where: str


@dataclass(frozen=True)
class Turn:
    """The scored characters [begin, end) of a rendered conversation that are of one message, and
    its role.
    """

    begin: int
    end: int
    role: str


def read(spec: DataSpec, progress: Progress) -> list[Conversation]:
    """Return the conversations of a data spec; InputError names row and key of the first malformed
    conversation.
    """
    is_table = spec.path is None or corpus.text_file(spec).suffix.lower() == ".parquet"
    talks: list[Conversation] = []
    for where, row in corpus.records(spec, progress):
        column = next(iter(row))
        messages = objects(row[column], f"{where}: {column}", is_table)
        tools = objects(row.get("tools") or [], f"{where}: tools", is_table)
        talks.append(
            Conversation(
                tuple(message_of(*each) for each in messages),
                tuple(each for _, each in tools),
                where,
            )
        )
    if not talks:
        raise InputError(f"dataset {spec.dataset!r}: no conversations in it")
    return talks


def objects(value: Any, where: str, is_table: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in errors, object) for each item of a list or of JSON in a string; InputError for
    anything else.

    ``is_table``: keys whose value is null, which other rows have, are left out at every depth.
    """
    if isinstance(value, str):
        value = json_files.parsed(value.encode(errors="surrogatepass"), where, strict=False)
    for number, item in enumerate(checked(value, list, where, "a list of objects")):
        checked(item, dict, f"{where}[{number}]", "an object")
        yield f"{where}[{number}]", without_nulls(item) if is_table else item


def checked(value: Any, kind: type, where: str, what: str) -> Any:
    """Return the value if it has the right type; InputError names the type, ``what``."""
    if not isinstance(value, kind):
        raise InputError(f"{where}: must be {what}, is {shortened(repr(value), 40)}")
    return value


def without_nulls(value: Any) -> Any:
    """JSON types without the keys of objects whose value is null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def message_of(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """One message with ``role``, and with ``content`` or ``tool_calls``; ShareGPT's form is
    rewritten.
    """
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker, content = (
            message.pop("from"),
            checked(message.pop("value", None), str, f"{where}.value", "text"),
        )
        if (role := SHAREGPT.get(str(speaker))) is None:
            known = ", ".join(SHAREGPT)
            raise InputError(
                f"{where}.from: {shortened(repr(speaker), 40)}: unknown speaker; there are: {known}"
            )
        if "content" in message:
            raise InputError(f"{where}.content: given together with value; remove one of them")
        message = {"role": role, "content": content, **message}
    checked(message.get("role"), str, f"{where}.role", "a name such as user or assistant")
    content = message.get("content")
    if isinstance(content, list):
        for at, part in objects(content, f"{where}.content"):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                what = shortened(repr(part.get("type")), 40)
                raise InputError(
                    f"{at}: a part of type {what}: only text is scored; leave such conversations out"
                )
    elif content is not None or not message.get("tool_calls"):
        checked(content, str, f"{where}.content", "text")
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [tool_call(*call) for call in objects(calls, f"{where}.tool_calls")]
    return message


def tool_call(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object; InputError without a name, or for other
    arguments.
    """
    function = raw.get("function", raw)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_files.parsed(
            (arguments or "{}").encode(errors="surrogatepass"), f"{where}.arguments"
        )
    function = {
        **function,
        "arguments": checked(arguments, dict, f"{where}.arguments", "a JSON object"),
    }
    return {**raw, "function": function} if "function" in raw else function


def tokenize(
    talks: Sequence[Conversation],
    folder: Path,
    spec: DataSpec,
    progress: Progress,
    render_s: float = RENDER_S,
) -> Tokens:
    """The tokens of all conversations, one document each; one without a turn to score has no
    tokens.
    """
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    if not tokenizer.is_fast:
        raise InputError(
            "tokenizer_dir: conversations need a tokenizer that says where its tokens stand in the text"
        )
    contents = [text for talk in talks for each in talk.messages for text in texts_in(each)]
    with text_tokens.tokenizing_limit(spec, contents, render_s):
        notes = follow_file(tokenizer, folder, contents)
    template = Template(tokenizer, spec.chat_template_kwargs, render_s)
    role_names = roles_of(spec)
    ids = []
    sizes = []
    roles = []
    ways = set()
    n_bytes = 0
    n_words = 0
    across = 0
    with progress.phase(
        f"tokenizing {corpus.display_name(spec)}", unit="conversations", total=len(talks)
    ) as phase:
        for talk in talks:
            text, turns, way = scored_turns(template, talk, spec)
            with text_tokens.tokenizing_limit(spec, [text], render_s):
                encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            role_of_token, crossing = roles_in(turns, encoded["offset_mapping"], role_names)
            ids.append(np.asarray(encoded["input_ids"], np.int32))
            sizes.append(text_tokens.byte_sizes(text, encoded["offset_mapping"]))
            roles.append(role_of_token)
            across += crossing
            if text:
                n_bytes += len(text.encode())
                n_words += text_tokens.n_words(text)
                ways.add(way)
            phase.advance()
    chat = Chat(
        np.concatenate(roles), role_names, " and ".join(sorted(ways)), across, template.digest
    )
    return tokens_of(
        tokenizer,
        ids,
        sizes=np.concatenate(sizes),
        n_bytes=n_bytes,
        n_words=n_words,
        chat=chat,
        notes=notes,
    )


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, with the variables of the spec."""

    tokenizer: Any
    variables: Mapping[str, Any]
    render_s: float = RENDER_S

    def source(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the template's source; with tools it may be another template."""
        try:
            return str(self.tokenizer.get_chat_template(tools=list(tools) or None))
        except Exception as error:  # the tokenizer has no template, or several and no default
            raise InputError(f"tokenizer_dir: no chat template: {one_line(error)}") from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the templates without and with tools."""
        return hashlib.sha256("\0".join((self.source([]), self.source([{}]))).encode()).hexdigest()

    def rendered(
        self, messages: Sequence[dict[str, Any]], talk: Conversation, **flags: bool
    ) -> tuple[str, Parts]:
        """Return some messages of a conversation as text, and the parts that are marked as
        generated (if requested).

        ``flags``: of Transformers' ``apply_chat_template``.  InputError with the template's reason
        if it refuses.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # A template that prints today's date gets a fixed one.
        names = {
            **self.tokenizer.special_tokens_map,
            "strftime_now": TODAY.strftime,
            **self.variables,
        }
        source, tools = self.source(talk.tools), list(talk.tools) or None
        try:
            with time_limit("it", self.render_s):
                (text,), parts = render_jinja_template(
                    [list(messages)], tools, chat_template=source, **flags, **names
                )
        except (
            Exception
        ) as error:  # errors of jinja2, of the template's raise_exception and of its expressions
            why = f"the chat template refuses these messages: {shortened(one_line(error), 200)}"
            raise InputError(f"{talk.where}: {why}; leave them out, or change them") from None
        return text, [(begin, end) for each in parts for begin, end in each]

    @cached_property
    def turn_end(self) -> re.Pattern[str]:
        """The end of a turn: its last special token, and the white space after it."""
        special = (
            token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special
        )
        return re.compile(
            f"(?:{'|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '(?!)'})(\\s*)\\Z"
        )


def scored_turns(
    template: Template, talk: Conversation, spec: DataSpec
) -> tuple[str, list[Turn], str]:
    """Return (the rendered conversation, its scored turns, how they were found).

    All three are empty if no turn is scored.
    """
    wanted = [
        number
        for number, message in enumerate(talk.messages)
        if message["role"] in spec.score_roles
    ]
    if not wanted:
        return "", [], ""
    last, source = spec.score_turns == "last", template.source(talk.tools)
    has_marks = GENERATION.search(source) and not any(
        GENERATION.search(macro[0]) for macro in MACRO.finditer(source)
    )
    by_mask = bool(has_marks) and set(spec.score_roles) == {"assistant"} and not last
    wanted = wanted[-1:] if last else wanted
    n_messages = wanted[-1] + 1 if last else len(talk.messages)
    whole, marked = template.rendered(
        talk.messages[:n_messages], talk, return_assistant_tokens_mask=by_mask
    )
    check_written(talk, n_messages, whole)
    if by_mask:
        check_marks(talk, wanted, whole, marked)
        turns = [Turn(begin, end, "assistant") for begin, end in marked]
        return whole, turns, "generation mask"
    turns = [turn_in(whole, template, talk, number) for number in wanted]
    return whole, turns, "rendered prefixes"


def turn_in(whole: str, template: Template, talk: Conversation, number: int) -> Turn:
    """Return the place of a message in the rendered conversation.

    It is found by rendering the messages before it and up to it.

    The assistant's header is in the first rendering (its generation prompt); other roles' headers
    are not known, so that their turns begin with the content.  White space after a turn's last
    special token is not generated.  Raises InputError if the template renders these messages
    differently when more messages follow.
    """
    message, before = talk.messages[number], talk.messages[:number]
    by_assistant = message["role"] == "assistant"
    name = f"{talk.where}: message {number + 1} ({message['role']})"
    if not before and by_assistant:
        raise InputError(
            f"{name}: an assistant who speaks first answers nothing; put a message before it or remove it"
        )
    head = template.rendered(before, talk, add_generation_prompt=by_assistant)[0] if before else ""
    body, _ = template.rendered(talk.messages[: number + 1], talk)
    if not (whole.startswith(body) and body.startswith(head)):
        raise InputError(
            f"{name}: the chat template renders this turn differently when more messages follow or before it is "
            'written (reasoning?), so that its tokens cannot be found: use "score_turns": "last", or '
            'chat_template_kwargs such as {"enable_thinking": false}'
        )
    if not is_written(message, body[len(head) :]):
        raise InputError(LEFT_OUT.format(talk.where, number + 1))
    stop = template.turn_end.search(body, len(head))
    end = len(body) if stop is None else stop.start(1)
    begin = len(head) if by_assistant else content_begin(message, body, len(head))
    if begin < 0:
        raise InputError(
            f"{name}: the chat template changes its content, so that its tokens cannot be found"
        )
    return Turn(min(begin, end), end, message["role"])


def texts_in(message: Mapping[str, Any]) -> list[str]:
    """Return the non-blank texts of a message's content, without white space around them."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [text.strip() for text in texts if text.strip()]


def in_json(text: str) -> str:
    """Return a text as ``tojson`` writes it, without the quotes; some templates render tool
    messages like this.
    """
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_written(message: Mapping[str, Any], rendering: str) -> bool:
    """Return True if the last word of each text of a message is in a rendering; reasoning before it
    may be left out.
    """
    words = [text.split()[-1] for text in texts_in(message)]
    return all(word in rendering or in_json(word) in rendering for word in words)


def content_begin(message: Mapping[str, Any], body: str, least: int) -> int:
    """Return where the content of the last message begins in ``body``, at least ``least``; -1 if it
    is not found.
    """
    at = len(body)
    for text in reversed(texts_in(message)):
        if (at := max(body.rfind(form, least, at) for form in (text, in_json(text)))) < 0:
            break
    return at


def check_written(talk: Conversation, n_messages: int, text: str) -> None:
    """Raise InputError unless ``text`` has the last words of the first messages, and no Python
    list.

    Some templates silently leave out contents; templates for plain text print a list of parts.
    """
    for number, message in enumerate(talk.messages[:n_messages], 1):
        if not is_written(message, text):
            raise InputError(LEFT_OUT.format(talk.where, number))
        if (
            isinstance(message.get("content"), list)
            and message["content"]
            and str(message["content"]) in text
        ):
            raise InputError(
                f"{talk.where}: message {number}: the chat template takes no list of parts as content and prints "
                "its brackets; write the content as text"
            )


def check_marks(talk: Conversation, wanted: Sequence[int], text: str, marked: Parts) -> None:
    """Raise InputError unless each wanted message has a separate marked part, in order, with its
    last words.
    """
    at = -1
    for n_after, number in zip(reversed(range(len(wanted))), wanted, strict=True):
        left = range(at + 1, len(marked) - n_after)
        at = next(
            (
                part
                for part in left
                if is_written(talk.messages[number], text[slice(*marked[part])])
            ),
            -1,
        )
        if at < 0:
            raise InputError(
                f"{talk.where}: message {number + 1}: the chat template does not mark it as generated, but marks other "
                'messages or other characters; use "score_turns": "last", which does without marks'
            )


def roles_in(
    turns: Sequence[Turn], offsets: Sequence[tuple[int, int]], role_names: Sequence[str]
) -> tuple[NDArray[np.int8], int]:
    """Return (int8 [n]: the role of each token with a character in a turn, tokens that extend
    beyond a turn).

    A role is an index into ``role_names``; other tokens are ``NOT_SCORED``.  A token with
    characters of two turns belongs to the first one.  ``offsets``: the tokens' characters.  A token
    without characters (white space that a tokenizer leaves out) counts as the text between its
    neighbours.
    """
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    reached = np.concatenate(([0], np.maximum.accumulate(end)[:-1])) if len(end) else end
    begin = np.where(end > begin, begin, np.minimum(reached, end))
    roles = np.full(len(end), NOT_SCORED, np.int8)
    across = 0
    for turn in turns:
        inside = (begin < turn.end) & (end > turn.begin)
        is_crossing = (begin < turn.begin) | (end > turn.end)
        across += int(np.count_nonzero(inside & is_crossing))
        roles[inside & (roles == NOT_SCORED)] = role_names.index(turn.role)
    return roles, across
